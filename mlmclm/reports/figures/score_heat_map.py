"""Every model's score on every task as a heat map."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mlmclm.reports import text
from mlmclm.reports.charts import Axis, Chart, HeatCell, Style
from mlmclm.reports.drawing import HUES, Figure, FigureGroup, ReportInput, lines

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
