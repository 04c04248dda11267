"""Scores against choices in pretraining: mask ratio, share of CLM, budget, size, continuation and conversion."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from mlmclm.analysis.comparison import against
from mlmclm.analysis.results import Record
from mlmclm.numbers import count, plural
from mlmclm.reports.drawing import Figure, FigureGroup, ReportInput, whisker_chart
from mlmclm.reports.paired_models import most_trained
from mlmclm.reports.study_facts import DECODER, ENCODER, MADE, ModelFacts
from mlmclm.reports.trends import Key, Quantity, budget_words, model_steps, plan_words, trend_figures


class Budgets(FigureGroup):
    """Score against the tokens seen, or against the steps where the tokens are not known."""

    name = "budgets"
    section = "choices"
    title = "Score against budget"
    note = (
        "Models of one size and plan that differ in how long they were pretrained. The checkpoints of a run, whose rate has not decayed yet, "
        "are a line of their own, which ends in the finished model."
    )

    def draw(self, study: ReportInput) -> Sequence[Figure]:
        models = [model for model in study.listed if model.phases]
        by_tokens = all(model.tokens for model in models)
        finished = {model.name: model for model in models}
        runs = {model.finished for model in models if model.finished}
        series: dict[Key, list[tuple[float, str]]] = {}
        for model in models:
            x = float(model.tokens or 0) if by_tokens else float(model_steps(model))
            if not model.finished:
                series.setdefault((model.size, plan_words(model), ""), []).append((x, model.name))
            if model.finished or model.name in runs:
                end = finished.get(model.finished or model.name)
                key = (
                    (plan_words(end), f"run of {plural(model_steps(end), 'step')}") if end else (model.finished, "run")
                )
                series.setdefault((model.size, *key), []).append((x, model.name))
        title = "tokens" if by_tokens else "steps"
        figures = trend_figures(study, self.name, Quantity(title, title, count, log=True), series)
        # The first panel is the mean over tasks, unless there is one task, whose panel has a subtitle of its own.
        return (
            [replace(figures[0], subtitle=figures[0].subtitle or _crossings(study, series, title)), *figures[1:]]
            if figures
            else []
        )


def _crossings(study: ReportInput, series: Mapping[Key, Sequence[tuple[float, str]]], unit: str) -> str:
    """Say at which budget CLM and each masked objective cross on the mean over tasks, by size."""
    causal = {model.name: [phase.causal for phase in model.phases] for model in study.listed}
    sentences = []
    for (size, plan, run), points in series.items():
        if not all(causal[model] == [False] for _, model in points):
            continue
        for (size_b, objective, run_b), points_b in series.items():
            model_at = {x: model for x, model in points_b if (size_b, run_b) == (size, run) and causal[model] == [True]}
            rows = []
            for x, model in points:
                gaps = against(study.analysis.comparisons, model_at[x]) if x in model_at else []
                overall = (row for row in gaps if row["kind"] == "all" and row["model_b"] == model)
                rows += [(x, row["difference"], row["low"], row["high"]) for row in overall]
            budget = crossing(rows)
            if budget is not None:
                within = f" within a {run}" if run else ""
                sentences.append(f"{size}: {objective} and {plan} cross at {budget} {unit}{within}.")
    return " ".join(sentences)


@dataclass(frozen=True)
class Crossing:
    """The budget at which a difference of two models' scores changes its sign.

    Attributes:
        value: interpolated between the budgets, on a logarithmic scale.
        low, high: the first and the last budget at which the interval of the difference contains 0; 0 and infinity if it still
            contains 0 at the lowest or highest budget.
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        low = "below all" if self.low == 0 else count(self.low)
        high = "beyond all" if math.isinf(self.high) else count(self.high)
        return f"{count(self.value)} [{low}, {high}]"


def crossing(differences: Sequence[tuple[float, float, float, float]]) -> Crossing | None:
    """Return where a difference crosses 0; None if it doesn't, or does so more than once.

    The interval of the crossing contains every budget at which the interpolated interval of the difference contains 0.

    Args:
        differences: for each budget, a tuple of the budget, the difference, and the ends of its interval.
    """
    finite = [row for row in sorted(differences) if all(map(math.isfinite, row))]
    middle = _zeros([(x, value) for x, value, _, _ in finite])
    if len(middle) != 1:
        return None
    falls = finite[0][1] > finite[-1][1]
    # If the difference falls, the lower end of its interval reaches 0 first.
    first, last = (
        [(row[0], row[2 if falls else 3]) for row in finite],
        [(row[0], row[3 if falls else 2]) for row in finite],
    )
    before = [x for x in _zeros(first) if x <= middle[0]]
    after = [x for x in _zeros(last) if x >= middle[0]]
    return Crossing(middle[0], before[-1] if before else 0.0, after[0] if after else math.inf)


def _zeros(points: Sequence[tuple[float, float]]) -> list[float]:
    """Return where a line through the points is 0, with the first coordinate on a logarithmic scale."""
    between = [
        math.exp(math.log(x) + (math.log(next_x) - math.log(x)) * y / (y - next_y))
        for (x, y), (next_x, next_y) in pairwise(points)
        if y * next_y < 0
    ]
    return sorted([*between, *(x for x, y in points if y == 0)])


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


class DecoderSizes(FigureGroup):
    """Score against the number of parameters, by how models were made, as in Ettin (arXiv 2507.11412)."""

    name = "sizes"
    section = "choices"
    title = "Encoder and decoder by size"
    note = "Of the models of a size that were made alike, the one that has seen the most tokens."

    def draw(self, study: ReportInput) -> Sequence[Figure]:
        series: dict[Key, list[tuple[float, str]]] = {(way,): [] for way in MADE}
        for size in dict.fromkeys(model.size for model in study.listed if model.size):
            ways = most_trained([model for model in study.listed if model.size == size and model.parameters])
            if ENCODER in ways and DECODER in ways:
                for way, model in ways.items():
                    series[(way,)].append((float(model.parameters or 0), model.name))
        return trend_figures(study, self.name, Quantity("parameters", "parameters", count, log=True), series)


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
