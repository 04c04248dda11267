"""Every model's mean over tasks, the first figure of the report."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mlmclm.analysis.results import records
from mlmclm.reports.drawing import Figure, FigureGroup, ReportInput, known_rows, parts_of, whisker_chart


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
