"""Ranks of models by their means over tasks, with the range of ranks that each may have."""

from __future__ import annotations

from collections.abc import Sequence

from mlmclm.analysis.results import records
from mlmclm.reports.charts import Axis, Chart, Whisker
from mlmclm.reports.drawing import Figure, FigureGroup, ReportInput, lines, parts_of, row_height


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
