"""The learning rates that are not clearly different from the best."""

from __future__ import annotations

from collections.abc import Sequence

from mlmclm.analysis.results import records
from mlmclm.numbers import rate_text
from mlmclm.reports import text
from mlmclm.reports.charts import Axis, Chart, Dot, Stripe
from mlmclm.reports.drawing import (
    Figure,
    FigureGroup,
    ReportInput,
    known_rows,
    lines,
    rate_axis,
    row_height,
    subtitle_of,
)

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
