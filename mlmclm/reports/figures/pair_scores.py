"""Paired models on all tasks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mlmclm.reports.charts import Axis, Chart, Style, Whisker
from mlmclm.reports.drawing import HUES, Figure, FigureGroup, ReportInput


class PairScores(FigureGroup):
    """Each size's models by how they were made, on all tasks whose scores are in points, one row each."""

    name = "pairs"
    section = "pairs"

    def draw(self, study: ReportInput) -> Sequence[Figure]:
        drawn = []
        for number, pair in enumerate(study.paired):
            rows = [row for row in pair.rows if all(score.share for score in row.scores.values())]
            if not rows:
                continue
            legend = tuple(zip(pair.models, map(Style, HUES), strict=False))
            ends = [
                100 * end for row in rows for cell in row.scores.values() for end in (cell.value, cell.low, cell.high)
            ]
            names = Axis.names([row.task for row in rows])
            chart = Chart(Axis.numbers(ends, "score, points"), names, (14 + 12 * len(legend)) * len(rows))
            data = []
            for place, (way, style) in enumerate(legend):
                chart.series(style)
                for line, row in enumerate(rows):
                    score = row.scores.get(way)
                    if score is not None and not math.isnan(score.value):
                        # The models of a task, one for each way, are below each other around the middle of its row.
                        at = line + (place - (len(legend) - 1) / 2) * 12 / (14 + 12 * len(legend))
                        words = f"{pair.models[way]}\n{way}\n{row.task} ({row.kind}): {score} {score.interval}".rstrip()
                        chart.add(Whisker(100 * score.value, 100 * score.low, 100 * score.high, at, words, radius=3.5))
                        data.append(
                            {"size": pair.size, "task": row.task, "kind": row.kind, "made": way}
                            | {"model": pair.models[way], "score": score.value, "low": score.low, "high": score.high}
                        )
            alt = "Dot chart: scores by task of the models of one size, by how they were made; the numbers are in the table."
            drawn.append(
                Figure(f"pairs{number}", f"Pairs of size {pair.size}", chart, alt, legend=legend, data=tuple(data))
            )
        return drawn
