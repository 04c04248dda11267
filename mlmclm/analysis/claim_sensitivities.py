"""Tests of claims about the sensitivity of models to the learning rate, over several pairs of models and several tasks.

Models that are equally sensitive have curves over learning rates of one shape, so their runs at a rate may change places: a permutation
test. It takes runs as they are, so it knows noise of any kind, and runs that are far off or fail at high rates do so for all models in
the permutations too. There is no verdict where a rate has one run, which shows neither.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mlmclm.analysis.contrasts import PairOnTask, model_weights
from mlmclm.analysis.model_runs import Runs
from mlmclm.analysis.seed_noise import Fit
from mlmclm.results.measures import Array

DRAWS = 2_000
"""Permutations: p values are multiples of about its inverse."""
FEWEST = 2
"""Runs with a score that a rate needs for a verdict."""


@dataclass(frozen=True)
class RateVariance:
    """The variance of the mean scores between learning rates.

    Attributes:
        rates: the rates with a score.
        value: the variance of the rates' true means, without bias: it can be negative.
        runs: what it is from.
    """

    rates: tuple[float, ...]
    value: float
    runs: Runs

    @property
    def single(self) -> tuple[float, ...]:
        """The rates with a single run, on which no verdict rests."""
        counts = self.runs.present.sum(axis=1).tolist()
        return tuple(rate for rate, count in zip(self.runs.rates, counts, strict=True) if 0 < count < FEWEST)


def rate_variance(runs: Runs, fit: Fit) -> RateVariance | None:
    """Return the variance between learning rates of the runs that learn; None for one rate, or without known noise."""
    counts = runs.learned.sum(axis=1)
    use = counts > 0
    if not fit.known or use.sum() < 2:
        return None
    # The noise of seeds that all rates share moves all means alike.
    noise = float((fit.deviations[1][use] ** 2 / counts[use]).mean()) * (1 - fit.shared)
    rates = tuple(rate for rate, own in zip(runs.rates, use, strict=True) if own)
    return RateVariance(rates, float(fit.means[1][use].var(ddof=1)) - noise, runs.at(rates))


class SensitivityTest(NamedTuple):
    """The sensitivities of both sides, as root mean square over pairs and tasks of the deviation over rates, and the p value."""

    first: float
    second: float
    p: float


def sensitivity_test(
    of: Callable[[str, str], RateVariance | None], parts: Sequence[PairOnTask], draws: int = DRAWS
) -> SensitivityTest:
    """Test whether the first models are as sensitive to the learning rate as the second ones.

    The statistic is the weighted difference of the variances between rates. Each permutation lets the runs of the models at a rate change
    places, the same ones on all tasks, after each model's mean over rates is taken off.

    Args:
        of: gives the variance of a (model, task).
        parts: the pairs, all of which have one, at the same rates on a task.
    """
    total = math.fsum(part.weight for part in parts)
    observed, drawn = 0.0, np.zeros(draws)
    for task, weights in model_weights(parts).items():
        known = [each for model in weights if (each := of(model, task)) is not None]
        own = np.asarray([weights[model] for model in weights])
        found = _permuted([each.runs for each in known], draws)
        observed += float(own @ found[:, 0])
        drawn += own @ found[:, 1:]
    extreme = int((abs(drawn) >= abs(observed) * (1 - 1e-9)).sum())
    squares = (
        math.fsum(part.weight * each.value for part in parts if (each := of(getattr(part, side), part.task))) / total
        for side in ("first", "second")
    )
    first, second = (math.sqrt(max(0.0, each)) for each in squares)
    return SensitivityTest(first, second, (1 + extreme) / (1 + draws))


def _permuted(models: Sequence[Runs], draws: int) -> Array:
    """Return the variances between rates of models on one task, as they are and with runs permuted at each rate, [M, 1 + draws]."""
    means, squares, counts = [], [], []
    levels = [
        np.mean([scores[learned].mean() for scores, learned in zip(own.test, own.learned, strict=True)])
        for own in models
    ]
    total = sum(int(own.learned.sum()) for own in models)
    scale = math.sqrt(total / max(1, total - len(models)))  # the levels that were taken off are estimates
    for rate in range(len(models[0].rates)):
        own = [runs.test[rate, runs.learned[rate]] - level for runs, level in zip(models, levels, strict=True)]
        values, sizes = np.concatenate(own), [len(each) for each in own]
        # A generator of its own for each rate, so that the same runs change places on all tasks.
        order = np.random.default_rng(rate).random((draws, len(values))).argsort(axis=1)
        rows = np.concatenate((values[None], scale * values[order]))
        starts = np.concatenate(([0], np.cumsum(sizes)[:-1]))
        sums, powers = (np.add.reduceat(each, starts, axis=1).T for each in (rows, rows**2))
        count = np.asarray(sizes)[:, None]
        means.append(sums / count)
        squares.append(powers - sums**2 / count)
        counts.append(count)
    number = np.stack(counts)  # [R, M, 1]
    noise = np.sum(squares, axis=0) / np.maximum((number - 1).sum(axis=0), 1) * (1 / number).mean(axis=0)
    return np.asarray(np.var(means, axis=0, ddof=1) - noise)
