"""Sensitivity to the learning rate."""

from __future__ import annotations

from collections.abc import Sequence

from mlmclm.analysis.results import records
from mlmclm.reports.drawing import Figure, FigureGroup, ReportInput, known_scores, subtitle_of, whisker_chart


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
