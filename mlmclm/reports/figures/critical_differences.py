"""Mean ranks over tasks with the critical difference."""

from __future__ import annotations

from collections.abc import Sequence

from mlmclm.analysis.results import records
from mlmclm.reports import text
from mlmclm.reports.charts import Axis, Chart, Whisker
from mlmclm.reports.drawing import Figure, FigureGroup, ReportInput, known_rows, lines, parts_of, row_height


class CriticalDifferences(FigureGroup):
    """Every model's mean rank over tasks, with half of Nemenyi's critical difference to either side (Demšar 2006).

    Two models are told apart where their bars don't overlap.
    """

    name = "ranks"
    section = "answer"
    title = "Mean ranks over tasks"
    note = (
        "Bars reach half of Nemenyi's critical difference to either side: models whose bars overlap are not told apart by their ranks. "
        "Ranks change with the models in the study."
    )

    def draw(self, study: ReportInput) -> Sequence[Figure]:
        rows = [
            row
            for row in known_rows(records(study.analysis.across), "critical_difference")
            if row["model"] in study.looks
        ]
        if not rows:
            return []
        rows.sort(key=lambda row: (row["mean_rank"], row["model"]))
        half, p = rows[0]["critical_difference"] / 2, rows[0]["p_ranks"]
        ends = [row["mean_rank"] + side for row in rows for side in (-half, half)]
        names = Axis.names([row["model"] for row in rows])
        chart = Chart(Axis.numbers(ends, "mean rank, 1 is best"), names, row_height(len(rows)) * len(rows))
        for place, row in enumerate(rows):
            rank = row["mean_rank"]
            chart.series(study.looks[row["model"]])
            chart.add(
                Whisker(
                    rank, rank - half, rank + half, place, lines(row["model"], f"mean rank {rank:.2f} of {len(rows)}")
                )
            )
        subtitle = (
            f"Critical difference {2 * half:.2f} over {rows[0]['tasks']} tasks; Friedman's p {text.probability(p)}."
        )
        alt = (
            "Dot chart: mean rank of each model over tasks with the critical difference; the numbers are in across.csv."
        )
        data = tuple(parts_of(row, "model", "tasks", "mean_rank", "critical_difference", "p_ranks") for row in rows)
        return [Figure("ranks", "Mean ranks", chart, alt, subtitle, data=data)]
