"""Simulated studies of one model on one task, with its fitted noise (`seed_noise`)."""

from __future__ import annotations

import math

import numpy as np

from mlmclm.analysis.seed_noise import Fit
from mlmclm.results.measures import Array


def likely(fit: Fit) -> Array:
    """Return mean scores of the rates whose variance is what is left, corrected for the seeds' noise, [2, R] (Louis 1984).

    The best of several means is higher than the best rate's, and the means themselves differ more than the rates do.
    """
    return fit.shrunk(np.sqrt(fit.kept())).means


def simulate(fit: Fit, means: Array, studies: int, generator: np.random.Generator) -> tuple[Array, Array]:
    """Draw validation and test scores of studies whose runs all learn, [studies, R, S], around mean scores, [2, R]."""
    rates, seeds = fit.present.shape
    shape = (studies, rates, seeds)
    own = math.sqrt(1 - fit.shared) * generator.standard_normal((2, *shape))
    validation, independent = own + math.sqrt(fit.shared) * generator.standard_normal((2, studies, 1, seeds))
    noise = np.stack((validation, fit.correlation * validation + math.sqrt(1 - fit.correlation**2) * independent))
    scores = means[:, None, :, None] + noise * fit.deviations[:, None, :, None]
    return scores[0], scores[1]
