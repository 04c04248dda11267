"""Score against the length of continued pretraining."""

from __future__ import annotations

from collections.abc import Sequence

from mlmclm.numbers import count, plural
from mlmclm.reports.drawing import Figure, FigureGroup, ReportInput
from mlmclm.reports.trends import Key, Quantity, trend_figures


class ContinuedPretraining(FigureGroup):
    """Score against the tokens, or steps, after the weights that a model continues from, by how these weights were pretrained."""

    name = "continued"
    section = "choices"
    title = "Continued pretraining"
    note = "Models that go on from weights that were finished: given ones, or those at the end of a decay. At 0 is the model with these weights."

    def draw(self, study: ReportInput) -> Sequence[Figure]:
        by_name = {model.name: model for model in study.facts.models}
        continued = [(model, model.continued) for model in study.listed if model.continued is not None]
        by_tokens = all(model.tokens and since.base in by_name for model, since in continued)
        series: dict[Key, list[tuple[float, str]]] = {}
        for model, since in continued:
            before = by_name[since.base].tokens if since.base in by_name else None
            x = (model.tokens or 0) - (before or 0) if by_tokens else since.steps
            budget = plural((model.steps or 0) - since.steps, "step")
            key = (model.size, f"{since.objective} from {since.start}", f"after {budget}")
            series.setdefault(key, [(0.0, since.base)]).append((float(x), model.name))
        title = f"{'tokens' if by_tokens else 'steps'} of continued pretraining"
        return trend_figures(study, self.name, Quantity("since", title, count), series)
