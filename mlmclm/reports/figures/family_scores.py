"""Scores by family of tasks and objective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlmclm.reports import text
from mlmclm.reports.charts import Axis, Chart, Whisker
from mlmclm.reports.drawing import Figure, FigureGroup, ReportInput, lines

LANE_PIXELS, GAP = 11, 1
"""Height in pixels of a lane, which has one model; number of empty lanes between the rows of two objectives."""


class FamilyScores(FigureGroup):
    """Every model's mean over a family of tasks, one panel per family, in the row of its objective."""

    name = "families"
    section = "answer"
    title = "By family and objective"

    def draw(self, study: ReportInput) -> Sequence[Figure]:
        objectives = {model.name: model.objective for model in study.listed}
        if len(set(objectives.values()) - {"", "untrained"}) < 2:
            return []
        figures = []
        for number, (family, scores) in enumerate(study.families().items()):
            rows: dict[str, list[str]] = {}
            for model in scores:
                rows.setdefault(objectives[model] or "others", []).append(model)
            ends = [100 * end for row in scores.values() for end in row.values()]
            axis, firsts = _rows(rows)
            chart = Chart(Axis.numbers(ends, "score, points"), axis, round(LANE_PIXELS * axis.low))
            data = []
            for objective, models in rows.items():
                for at, model in enumerate(models, firsts[objective]):
                    value, low, high = (scores[model][end] for end in ("value", "low", "high"))
                    chart.series(study.looks[model])
                    words = lines(model, objective, text.estimate(value, low, high))
                    chart.add(Whisker(100 * value, 100 * low, 100 * high, at, words, radius=3.5))
                    names = {"family": family, "objective": objective, "model": model}
                    data.append(names | {"score": value, "low": low, "high": high})
            title = text.family(family)
            alt = f"Dot chart: {title}, score of each model by its objective; the scores are in the tables."
            figures.append(Figure(f"family-{number}", title, chart, alt, data=tuple(data)))
        return figures


def _rows(models: Mapping[str, Sequence[str]]) -> tuple[Axis, dict[str, int]]:
    """Return an axis of lanes from top to bottom, labelled with each objective at the middle of its lanes, and the first lane of each objective."""
    ticks, firsts, start = list[tuple[float, str]](), dict[str, int](), 0
    for objective, names in models.items():
        firsts[objective] = start + GAP
        ticks.append((start + GAP + (len(names) - 1) / 2, objective))
        start += GAP + len(names)
    return Axis(start, 0, ticks, rows=True), firsts
