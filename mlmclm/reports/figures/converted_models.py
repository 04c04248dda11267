"""Models whose objectives changed from causal to masked, or the other way round, against native ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mlmclm.analysis.comparison import against
from mlmclm.analysis.results import Record
from mlmclm.reports.drawing import Figure, FigureGroup, ReportInput, whisker_chart
from mlmclm.reports.study_facts import DECODER, ENCODER, MADE, ModelFacts
from mlmclm.reports.trends import budget_words

NATIVE = {MADE[2]: ENCODER, MADE[3]: DECODER}
"""For each way to make a converted model, the way to make its native counterpart."""
NEAR = 1.1
"""Factor by which the lengths of pretraining of a converted model and of its native counterpart differ at most."""


class ConvertedModels(FigureGroup):
    """The gain of each converted model over its native counterpart, on the mean over tasks and on each task.

    Ettin (arXiv 2507.11412) compares encoders made from decoders with encoders, and the reverse.
    """

    name = "converted"
    section = "choices"
    title = "Native against converted"
    note = (
        "The score of a model that was first causal and then masked, or the reverse, minus that of a native one: of the same size, with the "
        "last kind of objective only, and pretrained for as long, within a tenth. Pointing at a model names its native one."
    )

    def draw(self, study: ReportInput) -> Sequence[Figure]:
        natives = {model.name: native_of(model, study.listed) for model in study.listed}
        gains = {
            (row["kind"], row["scope"], model): row
            for model, native in natives.items()
            if native is not None
            for row in against(study.analysis.comparisons, model)
            if row["model_b"] == native.name and not math.isnan(row["difference"])
        }
        figures = []
        for number, (scope, title, subtitle, _) in enumerate(study.scopes()):
            rows: dict[str, Record] = {
                model: {"value": row["difference"], "low": row["low"], "high": row["high"]}
                for (kind, name, model), row in gains.items()
                if (kind == "all" if scope == "mean" else (kind, name) == ("task", scope))
            }
            if not rows:
                continue
            named = {model: native for model in rows if (native := natives[model]) is not None}
            words = {model: f"native: {native.name}, {budget_words(native)}" for model, native in named.items()}
            chart = whisker_chart(rows, study.looks, "points over the native model", sign=True, beneath=words)
            alt = f"Dot chart: {title}, gain of converted models over native ones; the comparisons are in comparisons.csv."
            data = tuple(
                {"scope": title, "model": model, "native": named[model].name, "difference": row["value"]}
                | {"low": row["low"], "high": row["high"]}
                for model, row in rows.items()
            )
            figures.append(Figure(f"{self.name}-{number}", title, chart, alt, subtitle, data=data))
        return figures


def native_of(model: ModelFacts, models: Sequence[ModelFacts]) -> ModelFacts | None:
    """Return the native counterpart of a converted model: the native model of its size with the most similar length of pretraining.

    Ties are broken by the same last objective, then by the same mask ratio. Scores play no part in this choice, so that the
    comparison is fair.
    """

    def order(native: ModelFacts) -> tuple[float, bool, bool, str]:
        ends = [(end.objective, end.hidden_share) for side in (model, native) for end in side.phases[-1:]]
        objectives, shares = ({end[index] for end in ends} for index in (0, 1))
        return _apart(model, native), len(objectives) > 1, len(shares) > 1, native.name

    way = NATIVE.get(model.made)
    natives = [native for native in models if way and native.made == way and native.size == model.size]
    return min((native for native in natives if _apart(model, native) <= NEAR), key=order, default=None)


def _apart(model: ModelFacts, other: ModelFacts) -> float:
    """Return the factor by which two lengths of pretraining differ: in tokens, or in steps where these are not known."""
    by_tokens = model.tokens and other.tokens
    length, other_length = (side.tokens if by_tokens else side.steps for side in (model, other))
    return max(length, other_length) / min(length, other_length) if length and other_length else math.inf
