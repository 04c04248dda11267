"""Scores by family of tasks and objective."""

from __future__ import annotations

from collections.abc import Sequence

from mlmclm.reports import text
from mlmclm.reports.charts import Axis, Chart, Whisker
from mlmclm.reports.drawing import Figure, FigureGroup, ReportInput, lines

LANE_PIXELS, ROW_PIXELS = 11, 12
"""Height of a model within the row of its objective, and of the gap between rows."""


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
            most = max(map(len, rows.values()))
            height = LANE_PIXELS * most + ROW_PIXELS
            ends = [100 * end for row in scores.values() for end in row.values()]
            chart = Chart(Axis.numbers(ends, "score, points"), Axis.names(list(rows)), height * len(rows))
            data = []
            for place, (objective, models) in enumerate(rows.items()):
                for lane, model in enumerate(models):
                    value, low, high = (scores[model][end] for end in ("value", "low", "high"))
                    at = place + (lane - (len(models) - 1) / 2) * LANE_PIXELS / height
                    chart.series(study.looks[model])
                    words = lines(model, objective, text.estimate(value, low, high))
                    chart.add(Whisker(100 * value, 100 * low, 100 * high, at, words, radius=3.5))
                    data.append(
                        {
                            "family": family,
                            "objective": objective,
                            "model": model,
                            "score": value,
                            "low": low,
                            "high": high,
                        }
                    )
            title = text.family(family)
            alt = f"Dot chart: {title}, score of each model by its objective; the scores are in the tables."
            figures.append(Figure(f"family-{number}", title, chart, alt, data=tuple(data)))
        return figures
