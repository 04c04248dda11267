"""Tests of claims about the sensitivity of models to the learning rate, over several pairs of models and several tasks.

Equally sensitive models may have curves of different shapes. So studies are simulated in which each model keeps the shape of its curve
and all models are equally sensitive. At each rate, the deviations from the curves are drawn from those of all models' observed runs that
learned. So runs that are far off at high rates are so in the simulated studies too. If a rate has one run, there is no verdict:
one run shows neither noise nor a failure.
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
"""Number of simulated studies; a p value is a multiple of about 1 / DRAWS."""
FEWEST = 2
"""Runs with a score that a rate needs for a verdict."""


@dataclass(frozen=True)
class RateVariance:
    """The variance of the mean scores between learning rates.

    Attributes:
        rates: the rates with a score.
        value: the variance of the rates' true means, without bias: it can be negative.
        runs: the runs that it is estimated from.
    """

    rates: tuple[float, ...]
    value: float
    runs: Runs

    @property
    def single(self) -> tuple[float, ...]:
        """The rates with a single run, which is too few for a verdict."""
        counts = self.runs.present.sum(axis=1).tolist()
        return tuple(rate for rate, count in zip(self.runs.rates, counts, strict=True) if 0 < count < FEWEST)


def rate_variance(runs: Runs, fit: Fit) -> RateVariance | None:
    """Return the variance between learning rates of the runs that learn; None for one rate, or without known noise."""
    use = np.asarray(runs.learned.any(axis=1))
    if not fit.known or use.sum() < 2:
        return None
    spread, noise = fit.between(use)
    rates = tuple(rate for rate, used in zip(runs.rates, use, strict=True) if used)
    return RateVariance(rates, spread - noise, runs.at(rates))


class SensitivityTest(NamedTuple):
    """The sensitivity of each side, which is the root mean square over pairs and tasks of the deviation over rates, and the p value."""

    first: float
    second: float
    p: float


def sensitivity_test(
    of: Callable[[str, str], RateVariance | None], parts: Sequence[PairOnTask], draws: int = DRAWS
) -> SensitivityTest:
    """Test whether the first models are as sensitive to the learning rate as the second ones.

    The statistic is the weighted difference of the variances between rates, divided by its standard error. All tasks use the same
    random draws, so that a seed's effects on tasks that share a training stay correlated.

    Args:
        of: returns the variance of a (model, task).
        parts: the pairs; both models of each have a variance, at the same rates on a task.
    """
    total = math.fsum(part.weight for part in parts)
    lead, size = np.zeros((2, 1 + draws))
    for task, weights in model_weights(parts).items():
        variances = [variance for model in weights if (variance := of(model, task)) is not None]
        factors = np.asarray([weights[model] for model in weights])
        values, errors = _simulated([variance.runs for variance in variances], draws)
        lead += factors @ values
        size += factors**2 @ errors
    statistic = abs(lead) / np.sqrt(size)
    extreme = int((statistic[1:] >= statistic[0] * (1 - 1e-9)).sum())
    squares = (
        math.fsum(part.weight * var.value for part in parts if (var := of(getattr(part, side), part.task))) / total
        for side in ("first", "second")
    )
    first, second = (math.sqrt(max(0.0, square)) for square in squares)
    return SensitivityTest(first, second, (1 + extreme) / (1 + draws))


def _simulated(models: Sequence[Runs], draws: int) -> tuple[Array, Array]:
    """Return the models' variances between rates on one task, observed and then in simulated studies in which they are equal, [M, 1 + draws],
    and the variances of these estimates."""
    counts = np.stack([runs.learned.sum(axis=1) for runs in models])  # [M, R]
    scores = np.stack([np.where(runs.learned, runs.test, 0.0).sum(axis=1) for runs in models])
    means = scores / counts
    residuals = [
        [runs.test[rate, runs.learned[rate]] - mean[rate] for rate in range(len(mean))]
        for runs, mean in zip(models, means, strict=True)
    ]
    squares = np.asarray([[float((values**2).sum()) for values in by_rate] for by_rate in residuals])
    observed = _variance_between(means[..., None], squares[..., None], counts)
    # Residuals around the mean of n runs vary less than the runs, and that of a single run is 0.
    scaled = [
        np.concatenate(
            [
                by_rate[rate] * math.sqrt(n[rate] / (n[rate] - 1))
                for by_rate, n in zip(residuals, counts, strict=True)
                if n[rate] > 1
            ]
            or [[]]
        )
        for rate in range(counts.shape[1])
    ]
    common, spread = max(0.0, float(observed[0].mean())), means.var(axis=1, ddof=1, keepdims=True)
    curves = (means - means.mean(axis=1, keepdims=True)) * np.sqrt(common / np.where(spread > 0, spread, 1.0))
    drawn, within = np.zeros((2, *counts.shape, draws))
    for rate, at_rate in enumerate(scaled):
        pool = at_rate if len(at_rate) else np.concatenate(scaled)
        generator = np.random.default_rng(rate)
        for model, number in enumerate(counts[:, rate].tolist()):
            values = pool[(generator.random((number, draws)) * len(pool)).astype(int)]
            drawn[model, rate] = curves[model, rate] + values.mean(axis=0)
            within[model, rate] = ((values - values.mean(axis=0)) ** 2).sum(axis=0)
    value, error = (
        np.concatenate(pair, axis=1) for pair in zip(observed, _variance_between(drawn, within, counts), strict=True)
    )
    return value, error


def _variance_between(means: Array, squares: Array, counts: Array) -> tuple[Array, Array]:
    """Return the variances of the rates' true means, without bias, and the variances of these estimates, [M, studies].

    Args:
        means, squares: mean scores of the runs at each rate, and sums of squares around these means, [M, R, studies].
        counts: numbers of runs, [M, R].
    """
    freedom, between = np.maximum((counts - 1).sum(axis=1), 1)[:, None], counts.shape[1] - 1
    noise = squares.sum(axis=1) / freedom * (1 / counts).mean(axis=1)[:, None]
    value = means.var(axis=1, ddof=1) - noise
    error = 2 * noise**2 / between + 4 * noise * np.maximum(value, 0.0) / between + 2 * noise**2 / freedom
    return np.asarray(value), np.asarray(error) + 1e-300
