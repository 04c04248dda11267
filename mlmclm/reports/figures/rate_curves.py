"""Test score against learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mlmclm.analysis.results import Record, records
from mlmclm.numbers import rate_text
from mlmclm.reports import text
from mlmclm.reports.charts import Axis, Band, Chart, Cross, Dot, Line, Point, Style
from mlmclm.reports.drawing import (
    Figure,
    FigureGroup,
    ReportInput,
    back_to_front,
    known_rows,
    lines,
    mark_chance,
    parts_of,
    rate_axis,
    subtitle_of,
    with_chance,
)


class RateCurves(FigureGroup):
    """Test score against learning rate, one panel per task.

    A line is the mean over seeds, a band its interval, a ring a chosen rate, a cross a rate at which all seeds diverged,
    and a dotted line the chance level.
    """

    name = "rates"
    section = "rates"

    def draw(self, study: ReportInput) -> Sequence[Figure]:
        figures = []
        curves, picked = records(study.analysis.curves), records(study.analysis.chosen)
        for number, task in enumerate(study.tasks):
            rows = [row for row in curves if row["task"] == task.name]
            if not rows:
                continue
            scored = known_rows(rows, "test_mean")
            seen = [100 * row[part] for row in scored for part in ("test_mean", "test_low", "test_high")]
            metric, level = text.metric(task.metric), study.analysis.chances.get(task.name)
            chance = math.nan if level is None else level.score
            axis = Axis.numbers(with_chance(seen, chance), f"{metric}, points")
            chart = Chart(rate_axis(sorted({row["learning_rate"] for row in rows})), axis, 210)
            mark_chance(chart, chance)
            floor = min((row["test_mean"] for row in scored), default=0.0)
            chosen = {(row["model"], row["learning_rate"]) for row in picked if row["task"] == task.name}
            for model, look in back_to_front(study.looks):
                model_rows = [row for row in rows if row["model"] == model]
                _curve(chart, model, look, model_rows, floor, {rate for name, rate in chosen if name == model})
            data = [
                parts_of(row, "model", "task", "learning_rate", "test_mean", "test_low", "test_high", "n", "diverged")
                | {"chosen": (row["model"], row["learning_rate"]) in chosen}
                for row in rows
            ]
            alt = f"Line chart: {task.name}, test {metric} against learning rate for each model; the same numbers are in the table below."
            figures.append(Figure(f"rates-{number}", task.name, chart, alt, subtitle_of(task), data=tuple(data)))
        return figures


def points_of(rows: Sequence[Record], column: str) -> list[Point]:
    """Return scores, in points, by learning rate."""
    return [(row["learning_rate"], 100 * row[column]) for row in rows]


def _curve(chart: Chart, model: str, look: Style, rows: Sequence[Record], floor: float, chosen: set[float]) -> None:
    scored, band = known_rows(rows, "test_mean"), known_rows(rows, "test_low")
    chart.series(look)
    if len(band) > 1:
        chart.add(Band(points_of(band, "test_high"), points_of(band, "test_low")))
    chart.add(Line(points_of(scored, "test_mean")))
    for row, (rate, score) in zip(scored, points_of(scored, "test_mean"), strict=True):
        seeds = text.plural(row["n"], "seed") + (f", {row['diverged']} diverged" if row["diverged"] else "")
        estimate = text.estimate(row["test_mean"], row["test_low"], row["test_high"])
        chart.add(Dot(rate, score, lines(model, f"learning rate {rate_text(rate)}", estimate, seeds)))
        if rate in chosen:
            chart.add(Dot(rate, score, "", radius=6.5, kind="ring"))
    for row in rows:
        if math.isnan(row["test_mean"]) and row["diverged"]:
            # A diverged rate has no score, so its cross is drawn at the level of the lowest mean of the panel.
            words = lines(model, f"learning rate {rate_text(row['learning_rate'])}", "all seeds diverged")
            chart.add(Cross(row["learning_rate"], 100 * floor, words))
