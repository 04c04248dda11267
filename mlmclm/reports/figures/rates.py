"""Scores against learning rates, and how much rates and seeds matter."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mlmclm.analysis.results import Record, records
from mlmclm.numbers import rate_text
from mlmclm.reports import text
from mlmclm.reports.charts import Axis, Band, Chart, Cross, Dot, Line, Point, Stripe, Style
from mlmclm.reports.drawing import (
    Figure,
    FigureGroup,
    ReportInput,
    back_to_front,
    known_rows,
    known_scores,
    lines,
    mark_chance,
    parts_of,
    rate_axis,
    row_height,
    subtitle_of,
    whisker_chart,
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


BAR_SHARE = 0.5
"""Height of a bar as a share of its row."""
REACH = 1.08
"""Factor by which a bar reaches beyond its outermost rates, so that one rate can be seen."""


class LevelRates(FigureGroup):
    """The band of learning rates that are not clearly different from the best, with the chosen ones, one panel per task."""

    name = "level-rates"
    section = "stability"
    title = "Rates level with the best"
    note = (
        "A bar spans the listed rates that are not clearly different from the best of them, and a dot is a chosen rate. A short bar needs a careful "
        "choice."
    )

    def draw(self, study: ReportInput) -> Sequence[Figure]:
        figures = []
        bands, picked = known_rows(records(study.analysis.stability), "level_low"), records(study.analysis.chosen)
        rates = study.analysis.grid.learning_rates
        for number, task in enumerate(study.tasks):
            by_model = {row["model"]: row for row in bands if row["task"] == task.name}
            rows = [by_model[model] for model in study.looks if model in by_model]
            if not rows:
                continue
            height = row_height(len(rows))
            tried = sorted({*rates, *(row[end] for row in rows for end in ("level_low", "level_high"))})
            chart = Chart(rate_axis(tried), Axis.names([row["model"] for row in rows]), height * len(rows))
            data = []
            for place, row in enumerate(rows):
                model, low, high = row["model"], row["level_low"], row["level_high"]
                chosen = sorted(
                    {cell["learning_rate"] for cell in picked if (cell["model"], cell["task"]) == (model, task.name)}
                )
                band = f"{rate_text(low)} to {rate_text(high)}: {text.percent(row['share_level'])} of the rates"
                words = lines(model, f"chosen: {', '.join(map(rate_text, chosen))}", f"level with the best: {band}")
                chart.series(study.looks[model])
                chart.add(Stripe(low / REACH, high * REACH, place, height * BAR_SHARE, words, kind="pale"))
                chart.add(*(Dot(rate, place, words, radius=4) for rate in chosen))
                data.append(
                    {"model": model, "task": task.name, "level_low": low, "level_high": high}
                    | {"share_level": row["share_level"], "chosen": " ".join(map(rate_text, chosen))}
                )
            alt = f"Bars: {task.name}, the learning rates of each model that are level with its best; the numbers are in the table."
            figures.append(Figure(f"level-{number}", task.name, chart, alt, subtitle_of(task), data=tuple(data)))
        return figures


class RateSensitivity(FigureGroup):
    """The standard deviation over learning rates corrected for seed noise, with its interval, one panel per task."""

    name = "sensitivity"
    section = "stability"
    title = "Sensitivity to the learning rate"
    note = "Standard deviation of the rates' true mean scores. Where the interval reaches 0, the rate is not shown to matter."

    def draw(self, study: ReportInput) -> Sequence[Figure]:
        figures, stability = [], records(study.analysis.stability)
        for number, task in enumerate(study.tasks):
            rows = {row["model"]: row for row in stability if row["task"] == task.name}
            ends = known_scores({model: rows.get(model) for model in study.looks}, "sd_rates", "sd_rates_")
            if not ends:
                continue
            chart = whisker_chart(ends, study.looks, "sd over rates, points", zero=True)
            alt = (
                f"Dot chart: {task.name}, sensitivity of each model to the learning rate; the numbers are in the table."
            )
            data = tuple(
                {"model": model, "task": task.name, "sd_rates": row["value"], "low": row["low"], "high": row["high"]}
                for model, row in ends.items()
            )
            figures.append(Figure(f"sensitivity-{number}", task.name, chart, alt, subtitle_of(task), data=data))
        return figures


class SeedDeviations(FigureGroup):
    """The standard deviation over seeds of the test score against learning rate, one panel per task."""

    name = "deviations"
    section = "stability"
    title = "Noise of a seed"

    def draw(self, study: ReportInput) -> Sequence[Figure]:
        figures = []
        curves = records(study.analysis.curves)
        for number, task in enumerate(study.tasks):
            rows = known_rows([row for row in curves if row["task"] == task.name], "test_sd")
            if not rows:
                continue
            axis = Axis.numbers([100 * row["test_sd"] for row in rows], "sd over seeds, points", zero=True)
            chart = Chart(rate_axis(sorted({row["learning_rate"] for row in rows})), axis, 170)
            for model, look in back_to_front(study.looks):
                line = [(row["learning_rate"], 100 * row["test_sd"], row["n"]) for row in rows if row["model"] == model]
                chart.series(look)
                chart.add(Line([(rate, deviation) for rate, deviation, _ in line]))
                for rate, deviation, seeds in line:
                    words = f"deviation {deviation:.2f} over {seeds} seeds"
                    chart.add(Dot(rate, deviation, lines(model, f"learning rate {rate_text(rate)}", words)))
            data = tuple(parts_of(row, "model", "task", "learning_rate", "test_sd", "n") for row in rows)
            alt = f"Line chart: {task.name}, standard deviation over seeds against learning rate for each model; the same numbers are in the table below."
            figures.append(Figure(f"deviation-{number}", task.name, chart, alt, subtitle_of(task), data=data))
        return figures
