"""Standard deviation over seeds against learning rate."""

from __future__ import annotations

from collections.abc import Sequence

from mlmclm.analysis.results import records
from mlmclm.numbers import rate_text
from mlmclm.reports.charts import Axis, Chart, Dot, Line
from mlmclm.reports.drawing import (
    Figure,
    FigureGroup,
    ReportInput,
    back_to_front,
    known_rows,
    lines,
    parts_of,
    rate_axis,
    subtitle_of,
)


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
