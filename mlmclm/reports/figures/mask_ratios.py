"""Score against mask ratio."""

from __future__ import annotations

from collections.abc import Sequence

from mlmclm.reports.drawing import Figure, FigureGroup, ReportInput
from mlmclm.reports.trends import Key, Quantity, budget_words, trend_figures


class MaskRatios(FigureGroup):
    """Score against the mask ratio, for models with one masked objective and nothing before it."""

    name = "mask-ratios"
    section = "choices"
    title = "Score against mask ratio"
    note = "Models of one size, objective and budget that differ in the share of hidden tokens only."

    def draw(self, study: ReportInput) -> Sequence[Figure]:
        series: dict[Key, list[tuple[float, str]]] = {}
        for model in study.listed:
            if len(model.phases) == 1 and model.phases[0].hidden_share is not None:
                key = (model.size, model.phases[0].kind.upper(), budget_words(model))
                series.setdefault(key, []).append((100 * model.phases[0].hidden_share, model.name))
        return trend_figures(study, self.name, Quantity("mask_percent", "mask ratio, %", "{:g}".format), series)
