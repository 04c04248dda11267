"""Simulated studies of one model on one task, with its fitted noise (`seed_noise`), under truths that are plausible given its runs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mlmclm.analysis.seed_noise import Fit
from mlmclm.results.measures import Array


@dataclass(frozen=True)
class Truths:
    """Possible truths about one model on one task.

    Attributes:
        means: mean scores of the runs that learn, [2, T, R].
        failing: the probability that a run fails, [T, R].
    """

    means: Array
    failing: Array

    def expected(self, fit: Fit) -> Array:
        """Return the expected test scores, failed runs included, [T, R]."""
        return np.asarray((1 - self.failing) * self.means[1] + self.failing * fit.floor[1])


def fitted(fit: Fit) -> Truths:
    """Return the fit as the one truth."""
    return Truths(fit.means[:, None], fit.failing[None])


def plausible(fit: Fit, number: int, generator: np.random.Generator) -> Truths:
    """Draw truths from what the runs leave open.

    **Means** of rates are normal around their mean with the variance that they have net of the seeds' noise, so given the runs
    they are normal around the shrunk means (Morris 1983). **Shares** of failed runs, over all rates and at each, have their
    posterior distributions, which are beta distributions.
    """
    rates = len(fit.failing)
    means = np.repeat(fit.means[:, None], number, axis=1)
    if rates > 1:
        kept, noise = fit.kept()
        first, second = generator.standard_normal((2, number, rates))
        both = np.stack((first, fit.correlation * first + math.sqrt(1 - fit.correlation**2) * second))
        means = fit.shrunk(kept).means[:, None] + np.sqrt(kept * noise)[:, None] * both
    if not fit.failing.any():
        return Truths(means, np.zeros((number, rates)))
    runs = fit.present.sum(axis=1)
    failed, whole = float(fit.failures.sum()), float(runs.sum())
    overall = generator.beta(failed + 0.5, whole - failed + 0.5, (number, 1))
    shares = generator.beta(
        fit.failures + fit.pooling * overall + 1e-9, runs - fit.failures + fit.pooling * (1 - overall) + 1e-9
    )
    return Truths(means, shares)


def simulate(fit: Fit, truths: Truths, studies: int, generator: np.random.Generator) -> tuple[Array, Array]:
    """Draw studies of one model and task, some for each truth: validation and test scores, each [T, studies, R, S]."""
    rates, seeds = fit.present.shape
    shape = (len(truths.failing), studies, rates, seeds)
    own = math.sqrt(1 - fit.shared) * generator.standard_normal((2, *shape))
    validation, independent = own + math.sqrt(fit.shared) * generator.standard_normal((2, *shape[:2], 1, seeds))
    noise = np.stack((validation, fit.correlation * validation + math.sqrt(1 - fit.correlation**2) * independent))
    scores = truths.means[:, :, None, :, None] + noise * fit.deviations[:, None, None, :, None]
    if truths.failing.any():
        failed = generator.random(shape) < truths.failing[:, None, :, None]
        scores = np.where(failed, fit.floor[:, None, None, None, None], scores)
    return scores[0], scores[1]
