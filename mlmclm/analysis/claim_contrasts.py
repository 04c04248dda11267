"""Statistics of claims over several pairs of models and several tasks: one difference, with one interval and p value.

A pair counts on a task with a weight; all pairs of a task share its weight equally, and all tasks count the same. A model can be
in several pairs, so the estimates are of weighted sums over models, in which each model's noise counts once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from mlmclm.analysis.comparison import Effects
from mlmclm.analysis.effects import NO_EFFECT, Effect, fold_variance
from mlmclm.analysis.power import seeds_for, smallest_difference
from mlmclm.analysis.seed_noise import Fit, Runs, freedom_of
from mlmclm.results.intervals import NAN, Estimate, combine, estimate, satterthwaite
from mlmclm.results.measures import Array

DRAWS = 10_000
"""Simulated studies of the test of sensitivities: p values are multiples of about its inverse."""


class PairOnTask(NamedTuple):
    """Two models on a task, and what the first minus the second counts."""

    first: str
    second: str
    task: str
    weight: float


@dataclass(frozen=True)
class Contrast:
    """A weighted sum of scores over models and tasks.

    Attributes:
        whole: the sum, with the noise of seeds, of the choice of learning rates and of the test sets.
        tasks: its part on each task times the number of tasks, so that their mean is the sum.
    """

    whole: Estimate
    tasks: tuple[Effect, ...]

    @property
    def pooled(self) -> bool:
        """Whether the noise is that of pretraining (`replicates`), of which more seeds take nothing away."""
        return any(each.pooled for each in self.tasks)

    def smallest(self, level: float) -> float:
        """Return the smallest true value that a test at this level finds with the usual power; NaN if the noise is not known."""
        if math.isnan(self.whole.error) or not self.whole.error:
            return NAN
        return smallest_difference(self.whole.error, self.whole.freedom, level)

    def rounds_for(self, value: float, now: int, level: float) -> int | None:
        """Return how many seeds, or with pooled noise replicates, find a true value with the usual power; None as `seeds_for`.

        Args:
            now: how many there are.
        """
        return seeds_for(value, [(each, _nothing(each)) for each in self.tasks], now, level)


def model_weights(parts: Sequence[PairOnTask]) -> dict[str, dict[str, float]]:
    """Return by task what each model counts in a weighted sum of differences: the sum over its pairs."""
    weights: dict[str, dict[str, float]] = {}
    for first, second, task, weight in parts:
        own = weights.setdefault(task, {})
        for model, sign in ((first, 1), (second, -1)):
            own[model] = own.get(model, 0.0) + sign * weight
    return weights


def contrast_of(effects: Effects, parts: Sequence[PairOnTask], confidence: float = 0.95) -> Contrast:
    """Estimate the weighted sum of differences of scores.

    Args:
        effects: the models' scores, or those over their replicates.
    """
    sums = [_sum(effects, task, own, confidence) for task, own in model_weights(parts).items()]
    whole = combine([each for each, _ in sums], [1.0] * len(sums), confidence=confidence)
    return Contrast(whole, tuple(_scaled(each, len(sums)) for _, each in sums))


def _sum(effects: Effects, task: str, weights: Mapping[str, float], confidence: float) -> tuple[Estimate, Effect]:
    """Return a weighted sum of models' scores on a task, and the same with the noise of seeds apart from the test set's."""
    own = [(weight, effects.get((model, task), NO_EFFECT)) for model, weight in weights.items() if weight]
    value = math.fsum(weight * each.seeds.value for weight, each in own)
    if not own or any(math.isnan(each.seeds.error) for _, each in own):
        single = any(each.seeds.freedom == 0 for _, each in own)
        nothing = Estimate(value if own else NAN, NAN, 0.0 if single else NAN, NAN, NAN, NAN)
        return nothing, replace(NO_EFFECT, seeds=nothing)
    shares = [((weight * each.seeds.error) ** 2, each.seeds.freedom) for weight, each in own if not each.pooled]
    # Pooled errors of the models of a task are one estimate, so they have its degrees of freedom together.
    pooled = [((weight * each.seeds.error) ** 2, each.seeds.freedom) for weight, each in own if each.pooled]
    if pooled:
        shares.append((math.fsum(size for size, _ in pooled), min(freedom for _, freedom in pooled)))
    known = [(weight, each.folds) for weight, each in own if each.folds is not None]
    folds: Array | None = None
    if len(known) == len(own) and len({len(each) for _, each in known}) == 1:
        folds = np.asarray(sum(weight * each for weight, each in known))
    test_set = [] if folds is None else [fold_variance(folds)]
    if not math.fsum(size for size, _ in [*shares, *test_set]):
        nothing = estimate(value, NAN, NAN)
        return nothing, replace(NO_EFFECT, seeds=nothing)
    seeds = satterthwaite(value, shares) if math.fsum(size for size, _ in shares) else estimate(value, 0.0, math.inf)
    whole = satterthwaite(value, [*shares, *test_set], confidence=confidence)
    return whole, replace(NO_EFFECT, seeds=seeds, folds=folds, pooled=bool(pooled))


def _scaled(each: Effect, factor: float) -> Effect:
    seeds = replace(each.seeds, value=factor * each.seeds.value, error=factor * each.seeds.error)
    return replace(each, seeds=seeds, folds=None if each.folds is None else factor * each.folds)


def _nothing(like: Effect) -> Effect:
    """Return a score of 0 without noise, for the other side of a difference."""
    folds = None if like.folds is None else np.zeros(len(like.folds))
    return replace(NO_EFFECT, seeds=Estimate(0.0, 0.0, math.inf, 0.0, 0.0, NAN), folds=folds)


@dataclass(frozen=True)
class RateVariance:
    """The variance of the mean scores between learning rates.

    Attributes:
        rates: the rates with a score.
        value: the variance of the rates' true means, without bias: it can be negative.
        noise: what seeds add to the variance of the means.
        freedom: degrees of freedom of `noise`.
    """

    rates: tuple[float, ...]
    value: float
    noise: float
    freedom: float


def rate_variance(runs: Runs, fit: Fit) -> RateVariance | None:
    """Return the variance between learning rates of the runs that learn; None for one rate, or without known noise."""
    counts = (runs.present & ~runs.failed).sum(axis=1)
    use = counts > 0
    if not fit.known or use.sum() < 2:
        return None
    variances = fit.deviations[1][use] ** 2
    # The noise of seeds that all rates share moves all means alike.
    noise = float((variances / counts[use]).mean()) * (1 - fit.shared)
    freedom = freedom_of(fit, np.where(use, 1 / np.maximum(counts, 1), 0.0))
    rates = tuple(rate for rate, own in zip(runs.rates, use, strict=True) if own)
    return RateVariance(rates, float(fit.means[1][use].var(ddof=1)) - noise, noise, freedom)


class SensitivityTest(NamedTuple):
    """The sensitivities of both sides, as root mean square over pairs and tasks of the deviation over rates, and the p value."""

    first: float
    second: float
    p: float


def sensitivity_test(
    of: Callable[[str, str], RateVariance | None], parts: Sequence[PairOnTask], draws: int = DRAWS
) -> SensitivityTest:
    """Test whether the first models are as sensitive to the learning rate as the second ones.

    The statistic is the weighted difference of the variances between rates, divided by its standard error. Its distribution is
    simulated for models that are equally sensitive on each task, each with its own noise.

    Args:
        of: gives the variance of a (model, task).
        parts: the pairs, all of which have one.
    """
    weights = {(model, task): own for task, models in model_weights(parts).items() for model, own in models.items()}
    known = {cell: found for cell in weights if (found := of(*cell)) is not None}
    cells, total = list(known), math.fsum(part.weight for part in parts)
    weight = np.asarray([weights[cell] for cell in cells])
    value = np.asarray([known[cell].value for cell in cells])
    noise = np.asarray([known[cell].noise for cell in cells])
    between = np.asarray([len(known[cell].rates) - 1 for cell in cells], dtype=np.float64)
    freedom = np.asarray([known[cell].freedom for cell in cells])

    def statistic(value: Array, noise: Array) -> Array:
        size = 2 * noise**2 / between + 4 * noise * np.maximum(value, 0) / between + 2 * noise**2 / freedom
        return np.asarray((weight * value).sum(axis=-1) / np.sqrt((weight**2 * size).sum(axis=-1)))

    tasks = [task for _, task in cells]
    level = {
        task: max(0.0, float(np.mean([one for one, own in zip(value, tasks, strict=True) if own == task])))
        for task in tasks
    }
    common = np.asarray([level[task] for task in tasks])
    generator = np.random.default_rng(0)
    shape = (draws, len(cells))
    spread = noise / between * generator.noncentral_chisquare(between, between * common / noise, shape)
    drawn = noise * generator.chisquare(freedom, shape) / freedom
    extreme = int((abs(statistic(spread - drawn, drawn)) >= abs(statistic(value, noise))).sum())
    squares = (
        math.fsum(part.weight * known[model, part.task].value for part, model in zip(parts, side, strict=True)) / total
        for side in ([part.first for part in parts], [part.second for part in parts])
    )
    first, second = (math.sqrt(max(0.0, each)) for each in squares)
    return SensitivityTest(first, second, (1 + extreme) / (1 + draws))
