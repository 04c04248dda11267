"""Statistics of claims about the sensitivity of models to the learning rate, over several pairs of models and several tasks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mlmclm.analysis.contrasts import PairOnTask, model_weights
from mlmclm.analysis.model_runs import Runs
from mlmclm.analysis.seed_noise import Fit, freedom_of
from mlmclm.results.measures import Array

DRAWS = 10_000
"""Simulated studies of the test of sensitivities: p values are multiples of about its inverse."""


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
    counts = runs.learned.sum(axis=1)
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
