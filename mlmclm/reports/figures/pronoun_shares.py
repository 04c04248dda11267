"""The pronouns that models choose in Winogender's sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mlmclm.reports.charts import Axis, Chart, Stripe, Style
from mlmclm.reports.drawing import BASELINE, HUES, Figure, FigureGroup, ReportInput, row_height
from mlmclm.reports.paired_models import PRONOUNS, Score


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
