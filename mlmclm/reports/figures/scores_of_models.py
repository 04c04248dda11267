"""Every model's scores: means, ranks, families of tasks, all tasks, and gains over the baseline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mlmclm.analysis.comparison import against
from mlmclm.analysis.results import records
from mlmclm.reports import text
from mlmclm.reports.charts import Axis, Chart, HeatCell, Style, Whisker
from mlmclm.reports.drawing import (
    HUES,
    Figure,
    FigureGroup,
    ReportInput,
    known_rows,
    lines,
    parts_of,
    row_height,
    subtitle_of,
    whisker_chart,
)


class OverallMeans(FigureGroup):
    """Every model's mean over tasks with its interval, in the order of the tables."""

    name = "overall"
    section = "top"

    def draw(self, study: ReportInput) -> Sequence[Figure]:
        means = {row["model"]: row for row in records(study.analysis.overall) if row["kind"] == "all"}
        rows = known_rows([means[model] for model in study.looks if model in means], "mean")
        if not rows:
            return []
        ends = {row["model"]: {"value": row["mean"], "low": row["low"], "high": row["high"]} for row in rows}
        chance = rows[0]["chance"]
        label = "mean over tasks" if len(study.tasks) > 1 else f"score on {study.tasks[0].name}"
        chart = whisker_chart(ends, study.looks, f"{label}, points", chance=chance, labels=study.labels)
        alt = f"Dot chart: {label} of each model with its interval; the same numbers are in the table below."
        data = [
            parts_of(row, "model", "mean", "low", "high") | ({} if math.isnan(chance) else {"chance": chance})
            for row in rows
        ]
        return [Figure("overall", label[0].upper() + label[1:], chart, alt, data=tuple(data))]


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


class Ranks(FigureGroup):
    """Every model's rank by its mean over tasks, with the range of ranks that it may have (`analysis.model_ranks`)."""

    name = "ranks"
    section = "answer"
    title = "Ranks"
    note = (
        "By the mean score. Bars go from 1 and the models shown to be better to the last place less those shown to be worse, by the "
        "report's comparisons, and hold together."
    )

    def draw(self, study: ReportInput) -> Sequence[Figure]:
        rows = [row for row in records(study.analysis.ranks) if row["model"] in study.looks]
        if len(rows) < 3:
            return []
        names = Axis.names([row["model"] for row in rows])
        chart = Chart(Axis.numbers([1, len(rows)], "rank, 1 is best"), names, row_height(len(rows)) * len(rows))
        for place, row in enumerate(rows):
            words = lines(
                row["model"], f"rank {row['rank']}, from {row['rank_low']} to {row['rank_high']} of {len(rows)}"
            )
            chart.series(study.looks[row["model"]])
            chart.add(Whisker(row["rank"], row["rank_low"], row["rank_high"], place, words))
        alt = "Dot chart: rank of each model with the ranks that it may have; the numbers are in ranks.csv."
        data = tuple(parts_of(row, "model", "tasks", "mean", "rank", "rank_low", "rank_high") for row in rows)
        return [Figure("ranks", "Ranks", chart, alt, "", data=data)]


ROW_PIXELS = 22


class ScoreHeatMap(FigureGroup):
    """Every model's score on every task and on the mean: the stronger the colour, the closer to the best of the column."""

    name = "heat-map"
    section = "scores"
    by_model = False

    def draw(self, study: ReportInput) -> Sequence[Figure]:
        columns = [(title, rows) for _, title, _, rows in study.scopes()]
        models = [model.name for model in study.listed if any(model.name in rows for _, rows in columns)]
        if len(models) < 2 or len(study.tasks) < 2:
            return []
        chart = Chart(Axis.columns([title for title, _ in columns]), Axis.names(models), ROW_PIXELS * len(models))
        chart.series(Style(HUES[0]))
        data = []
        for column, (title, rows) in enumerate(columns):
            values = [row["value"] for row in rows.values()]
            low, high = min(values), max(values)
            for place, model in enumerate(models):
                if model in rows:
                    value, *ends = (rows[model][end] for end in ("value", "low", "high"))
                    share = (value - low) / (high - low) if high > low else 0.0
                    words = lines(model, title, text.estimate(value, *ends))
                    chart.add(HeatCell(column, place, share, words, f"{100 * value:.1f}"))
                    data.append(
                        {"model": model, "task": title, "score": value, "share": share if high > low else math.nan}
                    )
        alt = "Heat map: the score of each model on each task; the same numbers are in the table."
        title = "Scores: the stronger the colour, the closer to the best model of the column"
        return [Figure("heat-map", title, chart, alt, data=tuple(data))]


class BaselineGains(FigureGroup):
    """Each model's gain over the baseline, one panel for the mean over tasks and one per task."""

    name = "gains"
    section = "baseline"

    def draw(self, study: ReportInput) -> Sequence[Figure]:
        if study.analysis.baseline is None:
            return []
        figures = []
        rows = against(study.analysis.comparisons, study.analysis.baseline)
        panels = [("all", "all tasks", "Mean over tasks", "")] if len(study.tasks) > 1 else []
        panels += [("task", task.name, task.name, subtitle_of(task)) for task in study.tasks]
        for number, (kind, scope, title, subtitle) in enumerate(panels):
            gaps = {row["model_b"]: row for row in rows if row["kind"] == kind and row["scope"] == scope}
            scored = [model for model in study.looks if model in gaps and not math.isnan(gaps[model]["difference"])]
            if not scored:
                continue
            # The comparison is "baseline minus model"; flip it to the model's gain.
            ends = {"value": "difference", "low": "high", "high": "low"}
            gains = {model: {end: -gaps[model][part] for end, part in ends.items()} for model in scored}
            chart = whisker_chart(gains, study.looks, "points over the baseline", sign=True)
            alt = f"Dot chart: gain over the baseline, {title}; the same numbers are in the table below."
            data = tuple({"model": model, "scope": scope, **row} for model, row in gains.items())
            figures.append(Figure(f"gain-{number}", title, chart, alt, subtitle, data=data))
        return figures
