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
        failing, diverging: the probability that a run fails, and that it diverges, [T, R]; None if none does.
    """

    means: Array
    failing: Array | None = None
    diverging: Array | None = None

    def expected(self, fit: Fit) -> Array:
        """Return the expected test scores, failed runs included, [T, R]."""
        if self.failing is None:
            return self.means[1]
        return np.asarray((1 - self.failing) * self.means[1] + self.failing * fit.floor[1])


def fitted(fit: Fit) -> Truths:
    """Return the fit as the one truth."""
    failing, diverging = (
        None if shares is None else shares.expected()[None] for shares in (fit.failing, fit.diverging)
    )
    return Truths(fit.means[:, None], failing, diverging)


def plausible(fit: Fit, number: int, generator: np.random.Generator) -> Truths:
    """Draw truths from what the runs leave open.

    **Means** of rates are normal around their mean with the variance that they have corrected for the seeds' noise, so given the runs
    they are normal around the shrunk means (Morris 1983). **Shares** of failed and of diverged runs have their posterior
    distributions.
    """
    rates = len(fit.present)
    means = np.repeat(fit.means[:, None], number, axis=1)
    if fit.scored.sum() > 1:
        kept, noise = fit.kept()
        first, second = generator.standard_normal((2, number, rates))
        both = np.stack((first, fit.correlation * first + math.sqrt(1 - fit.correlation**2) * second))
        means = fit.shrunk(kept).means[:, None] + np.sqrt(kept * noise)[:, None] * both
    diverging, failing = (
        None if shares is None else shares.draw(number, generator) for shares in (fit.diverging, fit.failing)
    )
    return Truths(means, failing, diverging)


class Simulated(NamedTuple):
    """Studies of one model and task, some for each truth.

    Attributes:
        validation, test: scores, [T, studies, R, S].
        present: which runs have a score, [R, S] or [T, studies, R, S].
        lost: which runs count as lost, the same; None if none does.
        failed: which runs failed, [T, studies, R, S]; None if none does.
    """

    validation: Array
    test: Array
    present: Array
    lost: Array | None
    failed: Array | None = None


def simulate(fit: Fit, truths: Truths, studies: int, generator: np.random.Generator) -> Simulated:
    """Draw studies of one model and task, some for each truth."""
    rates, seeds = fit.present.shape
    shape = (truths.means.shape[1], studies, rates, seeds)
    own = math.sqrt(1 - fit.shared) * generator.standard_normal((2, *shape))
    validation, independent = own + math.sqrt(fit.shared) * generator.standard_normal((2, *shape[:2], 1, seeds))
    noise = np.stack((validation, fit.correlation * validation + math.sqrt(1 - fit.correlation**2) * independent))
    scores = truths.means[:, :, None, :, None] + noise * fit.deviations[:, None, None, :, None]
    failed, level = None, truths.means[0][:, None]  # mean score of each rate, [T, studies, R]
    if truths.failing is not None:
        failed = generator.random(shape) < truths.failing[:, None, :, None]
        scores = np.where(failed, fit.floor[:, None, None, None, None], scores)
        level = level - failed.mean(axis=-1) * (level - fit.floor[0])
    if truths.diverging is None and (failed is None or fit.withheld is None):
        return Simulated(scores[0], scores[1], fit.present, either(fit.diverged, fit.withheld), failed)
    # Nobody knows what a rate without a score would score, so its runs diverge in every study.
    unknown = ~fit.scored[:, None]
    ran = np.asarray(either(fit.present, fit.diverged)) & ~unknown
    diverged, withheld = np.zeros(shape, bool), None
    if truths.diverging is not None:
        diverged = generator.random(shape) < truths.diverging[:, None, :, None]
    if fit.withheld is not None:
        cut = fit.withheld & ~unknown
        if fit.diverged is not None:
            # Rates that have lost a run by chance lack others for that reason, and would have them in another study.
            unlucky = cut & fit.diverged.any(axis=1, keepdims=True)
            ran, cut = ran | unlucky, cut & ~unlucky
        # The others would have theirs where they are better than all rates that have every seed and lost none.
        whole = ran.any(axis=1) & ~cut.any(axis=1) & ~np.any(diverged & ran, axis=-1)
        goes_on = (level > np.where(whole, level, -math.inf).max(axis=-1, keepdims=True))[..., None]
        ran = ran | (cut & goes_on)
        withheld = fit.withheld & ~ran
    diverged &= ran
    # A study without any score is none: it keeps the runs of this one.
    empty = ~(ran & ~diverged).any(axis=(-2, -1), keepdims=True)
    diverged = np.where(empty, ran & ~fit.present, diverged)
    present = ran & ~diverged
    if fit.diverged is not None:
        diverged = diverged | (fit.diverged & unknown)
    lost = either(diverged, withheld)
    return Simulated(scores[0], scores[1], present, lost, failed)
