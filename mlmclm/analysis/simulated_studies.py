"""Simulated studies of one model on one task, with its fitted noise (`seed_noise`), under truths that are plausible given its runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mlmclm.analysis.model_runs import either
from mlmclm.analysis.seed_noise import Fit
from mlmclm.results.measures import Array


@dataclass(frozen=True)
class Truths:
    """Possible truths about one model on one task.

    Attributes:
        means: mean scores of the runs that learn, [2, T, R].
        failing: the probability that a run fails, [T, R].
        diverging: the probability that a run diverges, [T, R]; None if none does.
    """

    means: Array
    failing: Array
    diverging: Array | None = None

    def expected(self, fit: Fit) -> Array:
        """Return the expected test scores, failed runs included, [T, R]."""
        return np.asarray((1 - self.failing) * self.means[1] + self.failing * fit.floor[1])


def fitted(fit: Fit) -> Truths:
    """Return the fit as the one truth."""
    diverging = None
    if fit.diverging is not None and fit.diverging.any():
        diverging = fit.shares_of_divergence(fit.lost)[0][None]
    return Truths(fit.means[:, None], fit.failing[None], diverging)


def plausible(fit: Fit, number: int, generator: np.random.Generator) -> Truths:
    """Draw truths from what the runs leave open.

    **Means** of rates are normal around their mean with the variance that they have net of the seeds' noise, so given the runs
    they are normal around the shrunk means (Morris 1983). **Shares** of failed runs, over all rates and at each, and of diverged
    ones at each, have their posterior distributions, which are beta distributions.
    """
    rates = len(fit.failing)
    means = np.repeat(fit.means[:, None], number, axis=1)
    if fit.scored.sum() > 1:
        kept, noise = fit.kept()
        first, second = generator.standard_normal((2, number, rates))
        both = np.stack((first, fit.correlation * first + math.sqrt(1 - fit.correlation**2) * second))
        means = fit.shrunk(kept).means[:, None] + np.sqrt(kept * noise)[:, None] * both
    diverging = _diverging(fit, number, generator)
    if not fit.failing.any():
        return Truths(means, np.zeros((number, rates)), diverging)
    runs = fit.counted
    failed, whole = float(fit.failures.sum()), float(runs.sum())
    overall = generator.beta(failed + fit.usual[0] + 1e-9, whole - failed + fit.usual[1] + 1e-9, (number, 1))
    shares = generator.beta(
        fit.failures + fit.pooling * overall + fit.alike[0] + 1e-9,
        runs - fit.failures + fit.pooling * (1 - overall) + fit.alike[1] + 1e-9,
    )
    return Truths(means, shares, diverging)


def _diverging(fit: Fit, number: int, generator: np.random.Generator) -> Array | None:
    """Draw the probabilities that a run diverges, [number, R]; None if none does.

    What all models show of a rate counts as `Fit.agreement` runs at it: many if they lose alike shares, few if not.
    """
    if fit.diverging is None or not fit.diverging.any():
        return None
    lost, learned = fit.lost, fit.present.sum(axis=1)
    before, after = fit.agreement * fit.diverging, fit.agreement * (1 - fit.diverging)
    drawn = generator.beta(lost + before + 1e-9, learned + after + 1e-9, (number, len(lost)))
    return np.where(fit.diverging > 0, drawn, 0.0)


class Simulated(NamedTuple):
    """Studies of one model and task, some for each truth.

    Attributes:
        validation, test: scores, [T, studies, R, S].
        present: which runs have a score, [R, S] or [T, studies, R, S].
        lost: which runs count as lost, the same; None if none does.
        failed, diverged: which runs failed, and which diverged, [T, studies, R, S]; None if none does.
    """

    validation: Array
    test: Array
    present: Array
    lost: Array | None
    failed: Array | None = None
    diverged: Array | None = None


def simulate(fit: Fit, truths: Truths, studies: int, generator: np.random.Generator) -> Simulated:
    """Draw studies of one model and task, some for each truth."""
    rates, seeds = fit.present.shape
    shape = (len(truths.failing), studies, rates, seeds)
    own = math.sqrt(1 - fit.shared) * generator.standard_normal((2, *shape))
    validation, independent = own + math.sqrt(fit.shared) * generator.standard_normal((2, *shape[:2], 1, seeds))
    noise = np.stack((validation, fit.correlation * validation + math.sqrt(1 - fit.correlation**2) * independent))
    scores = truths.means[:, :, None, :, None] + noise * fit.deviations[:, None, None, :, None]
    failed = None
    if truths.failing.any():
        failed = generator.random(shape) < truths.failing[:, None, :, None]
        scores = np.where(failed, fit.floor[:, None, None, None, None], scores)
    if truths.diverging is None or not truths.diverging.any():
        return Simulated(scores[0], scores[1], fit.present, either(fit.diverged, fit.withheld), failed)
    # Nobody knows what a rate scores at which all runs diverged, so they diverge in every study.
    hopeless = ~fit.scored[:, None]
    ran = np.asarray(either(fit.present, fit.diverged)) & ~hopeless
    withheld = fit.withheld
    if withheld is not None and fit.diverged is not None:
        # A race cuts rates that have lost a run by chance, and would have gone on with them in another study.
        unlucky = withheld & fit.diverged.any(axis=1, keepdims=True) & ~hopeless
        ran, withheld = ran | unlucky, withheld & ~unlucky
    diverged = ran & (generator.random(shape) < truths.diverging[:, None, :, None])
    # A study without any score is none: it keeps the runs of this one.
    empty = ~(ran & ~diverged).any(axis=(-2, -1), keepdims=True)
    diverged = np.where(empty, ran & ~fit.present, diverged)
    present = ran & ~diverged
    if fit.diverged is not None:
        diverged = diverged | (fit.diverged & hopeless)
    return Simulated(scores[0], scores[1], present, either(diverged, withheld), failed, diverged)
