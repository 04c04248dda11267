"""Score against the share of steps that are causal."""

from __future__ import annotations

from collections.abc import Sequence

from mlmclm.reports.drawing import Figure, FigureGroup, ReportInput
from mlmclm.reports.trends import Key, Quantity, budget_words, model_steps, trend_figures


class ClmShares(FigureGroup):
    """Score against the share of causal steps at each budget: from the masked objective alone to the causal one alone."""

    name = "clm-shares"
    section = "choices"
    title = "Score against the share of CLM"
    note = "Models of one size, budget and masked objective: causal for a share of the steps, then masked."

    def draw(self, study: ReportInput) -> Sequence[Figure]:
        points: dict[Key, list[tuple[float, str]]] = {}
        causal: dict[Key, list[tuple[float, str]]] = {}
        for model in study.listed:
            kinds = [phase.causal for phase in model.phases]
            if not kinds or kinds != sorted(kinds, reverse=True) or len(kinds) > 2:
                continue
            budget = (model.size, budget_words(model))
            if kinds == [True]:
                causal.setdefault(budget, []).append((100.0, model.name))
            elif len(kinds) == 1 or kinds == [True, False]:
                first, last = model.phases[0], model.phases[-1]
                share = 100 * first.steps / model_steps(model) if first.causal else 0.0
                decay = "with a decay between" if first.decayed else ""
                points.setdefault((*budget, last.objective.upper(), decay), []).append((share, model.name))
        series: dict[Key, list[tuple[float, str]]] = {}
        for key, shares in points.items():
            mixed = [point for point in shares if point[0] > 0]
            if mixed:
                # Models with one objective have no decay between objectives, so they are the end points of the series with and without decay.
                single = [] if not key[-1] else points.get((*key[:-1], ""), [])
                series[key] = [*shares, *(point for point in single if point[0] == 0), *causal.get(key[:2], [])]
        return trend_figures(study, self.name, Quantity("clm_percent", "share of CLM, %", "{:.3g}".format), series)
