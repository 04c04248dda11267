"""Simulated studies of one model on one task, with its fitted noise (`seed_noise`), under truths that are plausible given its runs."""

from __future__ import annotations

import math

import numpy as np

from mlmclm.analysis.seed_noise import Fit
from mlmclm.results.measures import Array


def plausible(fit: Fit, number: int, generator: np.random.Generator) -> Array:
    """Draw mean scores of the rates that the runs leave open, [2, number, R].

    Means of rates are normal around their mean with the variance that they have net of the seeds' noise, so given the runs
    they are normal around the shrunk means (Morris 1983).
    """
    kept, noise = fit.kept()
    first, second = generator.standard_normal((2, number, len(fit.present)))
    both = np.stack((first, fit.correlation * first + math.sqrt(1 - fit.correlation**2) * second))
    return np.asarray(fit.shrunk(kept).means[:, None] + np.sqrt(kept * noise)[:, None] * both)


def simulate(fit: Fit, means: Array, studies: int, generator: np.random.Generator) -> tuple[Array, Array]:
    """Draw validation and test scores of studies whose runs all learn, some for each truth, [T, studies, R, S].

    Args:
        means: those of validation and test scores at each rate, [2, T, R].
    """
    rates, seeds = fit.present.shape
    shape = (means.shape[1], studies, rates, seeds)
    own = math.sqrt(1 - fit.shared) * generator.standard_normal((2, *shape))
    validation, independent = own + math.sqrt(fit.shared) * generator.standard_normal((2, *shape[:2], 1, seeds))
    noise = np.stack((validation, fit.correlation * validation + math.sqrt(1 - fit.correlation**2) * independent))
    scores = means[:, :, None, :, None] + noise * fit.deviations[:, None, None, :, None]
    return scores[0], scores[1]
