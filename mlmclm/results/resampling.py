"""Intervals of scores by resampling of their examples."""

from __future__ import annotations

import numpy as np
from scipy import stats

from mlmclm.results.intervals import NAN, TIE
from mlmclm.results.measures import Array, Measure

RESAMPLES = 9_999
BATCH_VALUES = 1 << 21
"""Number of resampling weights computed at once: 16 MiB."""


def resampled_interval(score: Measure, rows: int) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of a score of at least two examples; always the same for the same score.

    It is NaN if its ends are equal: examples that are all alike don't show how large their noise is.

    It is too short for few examples: it covers the mean of 3, 5, 10 and 30 normal values in .75, .85, .90 and .93 of 2,000 simulations.

    Args:
        rows: the number of examples.
    """
    interval = stats.bootstrap(
        (np.arange(rows),),
        lambda chosen, axis: score(_counts(chosen.astype(np.int64), rows)),
        vectorized=True,
        n_resamples=RESAMPLES,
        batch=max(1, BATCH_VALUES // rows),
        method="percentile",
        # A fixed seed, so that repeating the computation reproduces the interval.
        rng=np.random.default_rng(0),
    ).confidence_interval
    return (NAN, NAN) if interval.high - interval.low <= TIE else (float(interval.low), float(interval.high))


def _counts(chosen: Array, rows: int) -> Array:
    """Count how often each of `rows` examples is chosen: int [R, any] -> float [R, rows]."""
    # An offset per resample turns R separate counts into a single bincount.
    places = chosen + rows * np.arange(len(chosen))[:, None]
    return np.bincount(places.ravel(), minlength=len(chosen) * rows).reshape(len(chosen), rows).astype(np.float64)
