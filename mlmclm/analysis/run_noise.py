"""The noise of pretraining runs: the variance of a model's mean over its runs, on one task or over several.

A pretraining run moves its scores on all tasks together. So the variance of a mean over tasks is that of the runs' own means over
these tasks, pooled over the models, each around its own mean. If all models have equally many runs, it is the mean square between
runs of an analysis of variance of tasks and of runs, which are nested in models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mlmclm.results.intervals import NAN
from mlmclm.results.measures import Array


@dataclass(frozen=True)
class RunNoise:
    """The noise of pretraining runs on a task, and how much of it is in a model's mean.

    Attributes:
        root: one column, [Q], of a matrix G with a column for each task, so that G'G is the covariance over tasks of a run's scores.
        freedom: degrees of freedom of the variance.
        number: the runs that the model's mean is over.
        within: the variance that fine-tuning seeds add to this mean, and its degrees of freedom; NaN if it is not known.
        typical: the variance that fine-tuning seeds add to one run's score, on average over the models with several runs.
    """

    root: Array
    freedom: float
    number: int
    within: tuple[float, float]
    typical: float = 0.0

    @property
    def seeds(self) -> float:
        """The part of the variance that fine-tuning seeds are known to add to the mean."""
        return 0.0 if math.isnan(self.within[0]) else self.within[0]


def root_of(scores: Array, models: Array) -> tuple[Array, float]:
    """Return `RunNoise.root` and its degrees of freedom, given the runs of all models on a task.

    Args:
        scores: of the runs, [R], in the same order on each task; NaN for a run without a score, which is left out.
        models: the model that each is a run of, as a number, [R].
    """
    scored = np.isfinite(scores)
    counts = np.bincount(models[scored], minlength=len(models))
    means = np.bincount(models[scored], weights=scores[scored], minlength=len(models)) / np.maximum(counts, 1)
    freedom = float(scored.sum() - (counts > 0).sum())
    return np.where(scored, scores - means[models], 0.0) / math.sqrt(freedom or NAN), freedom


class SumNoise(NamedTuple):
    """The noise of a weighted sum of a model's scores on several tasks.

    Attributes:
        variance, freedom: the variance of the sum, NaN if it is not known, and its degrees of freedom.
        pooled: whether the variance is based on the runs of all models, and not only on what this model's seeds are known to add.
    """

    variance: float
    freedom: float
    pooled: bool


def noise_of_sum(parts: Sequence[tuple[float, RunNoise]]) -> SumNoise:
    """Return the noise of a weighted sum of a model's means over its runs.

    Few runs can agree by accident, so the variance is never below what their seeds are known to add. That it is no larger is shown by
    these few runs only, so it has no more degrees of freedom than they have. A model with one run may be noisier than those whose
    variance it borrows, so its variance is at least the sum of what pretraining adds to theirs and of what its own seeds add.

    Args:
        parts: the weight of each task, and the noise on it.
    """
    root = np.asarray(sum(weight * noise.root for weight, noise in parts))
    between = float((root**2).sum()) / min(noise.number for _, noise in parts)
    shares = [(weight**2 * noise.within[0], noise.within[1]) for weight, noise in parts]
    within = math.fsum(size for size, _ in shares)
    freedom = min(noise.freedom for _, noise in parts)
    seeds = within**2 / math.fsum(size**2 / degrees for size, degrees in shares) if within > 0 else NAN
    typical = math.fsum(weight**2 * noise.typical for weight, noise in parts)
    single = min(noise.number for _, noise in parts) == 1
    pretraining = max(0.0, between - typical) if single else 0.0
    if between < pretraining + within:
        degrees = freedom if math.isnan(seeds) else min(freedom, seeds)
        return SumNoise(pretraining + within, degrees, pretraining > 0)
    return SumNoise(between or NAN, freedom, True)
