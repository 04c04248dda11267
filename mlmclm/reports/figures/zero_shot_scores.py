"""Models on tasks that they answer without training: paired models, and pronouns."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mlmclm.reports.charts import Axis, Chart, Stripe, Style, Whisker
from mlmclm.reports.drawing import BASELINE, HUES, Figure, FigureGroup, ReportInput, row_height
from mlmclm.reports.paired_models import PRONOUNS, Score


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


class PronounShares(FigureGroup):
    """The shares of the pronouns that each model chooses in Winogender's sentences, as stacked bars."""

    name = "pronouns"
    section = "zero-shot"

    def draw(self, study: ReportInput) -> Sequence[Figure]:
        results = [result for result in study.facts.zero_shot if all(name in result.metrics for name in PRONOUNS)]
        if not results:
            return []
        legend = tuple(zip(PRONOUNS, map(Style, (HUES[0], BASELINE, HUES[1])), strict=True))
        shares = Axis(0, 100, [(tick, str(tick)) for tick in range(0, 101, 20)], "share of answers, %")
        height = row_height(len(results))
        chart = Chart(shares, Axis.names([result.model for result in results]), height * len(results))
        starts, data = [0.0] * len(results), []
        for name, style in legend:
            chart.series(style)
            for row, result in enumerate(results):
                share = 100 * Score.of(name, result.entry(name)).value
                if not math.isnan(share):
                    words = f"{result.model}\n{name}: {share:.1f} %"
                    chart.add(Stripe(starts[row], starts[row] + share, row, height * 0.7, words))
                    starts[row] += share
                    data.append({"model": result.model, "pronoun": name, "share": share / 100})
        alt = "Stacked bars: the share of masculine, neutral and feminine pronouns that each model takes."
        title = "Which pronoun do the models take?"
        return [Figure("pronouns", title, chart, alt, legend=legend, data=tuple(data))]
