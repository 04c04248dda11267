"""Variances of single learning rates, which are based on few seeds, pooled with those of similar runs.

A few seeds say little about a variance. So the variances of a task are pooled over its models and learning rates, unless a test shows
that models, or rates, differ: Bartlett's (1937), whose statistics are added over the tasks of the study. Where both differ, a variance is
a factor of the model times one of the rate. A single variance that an F test shows to be larger than the pooled one is not pooled: its
rate may be the best, and would make the others seem noisier.

Both tests assume normal noise. With heavy tails, variances vary more by chance, and the tests would leave the largest ones to themselves,
so that the others become too small. So they are corrected by how much more the variances vary than normal noise and factors of models and
rates explain (`Unequal.excess`; Box 1953), and the pooled variances have so many times fewer degrees of freedom.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import special

from mlmclm.results.measures import Array

UNEQUAL = 0.05
"""P value of the test below which the variances of models, or of rates, count as unequal."""
NOISIER = 0.995
"""Level of the F test from which on a single variance is not pooled; it is high, as leaving out variances by chance makes the others too small."""
HEAVY = 0.01
"""P value of the test below which variances vary more than those of normal noise."""
ROUNDS = 20
"""Number of iterations that find the factors of models and rates."""


class Variances(NamedTuple):
    """Variances of the models of a task at each rate and their degrees of freedom, each [M, R]; those without any are NaN."""

    values: Array
    freedom: Array


class Unequal(NamedTuple):
    """Whether the variances of a study's models, and of its learning rates, are unequal, and how many times more they vary than with normal noise."""

    models: bool
    rates: bool
    excess: float = 1.0

    @property
    def both(self) -> bool:
        """Whether the variances of models and of rates are unequal."""
        return self.models and self.rates


def unequal(tasks: Sequence[Variances]) -> Unequal:
    """Test whether the variances of the models, and of the rates, on some tasks are unequal."""
    verdicts, excess = [], _excess(tasks)
    for axis in (1, 0):
        parts = [
            bartlett((task.freedom * np.nan_to_num(task.values)).sum(axis), task.freedom.sum(axis)) for task in tasks
        ]
        statistic, degrees = (sum(values) for values in zip(*parts, strict=True)) if parts else (0.0, 0)
        verdicts.append(bool(degrees and special.chdtrc(degrees, statistic / excess) < UNEQUAL))
    models, rates = verdicts
    return Unequal(models, rates, excess)


def _excess(tasks: Sequence[Variances]) -> float:
    """Return how many times more the variances vary than those of normal noise; 1 if they are not shown to.

    It is judged by their cube roots around factors of models and rates, which show about its square root.
    """
    total, degrees = 0.0, 0
    for task in tasks:
        use = task.freedom > 0
        ratios = task.values[use] / _fitted(task.values, task.freedom, Unequal(True, True)).values[use]
        # The cube root of a chi-square variate is nearly normal, with these moments (Wilson and Hilferty 1931).
        spread = 2 / (9 * task.freedom[use])
        total += float(((np.cbrt(ratios) - 1 + spread) ** 2 / spread).sum())
        degrees += int(use.sum() - use.any(axis=0).sum() - use.any(axis=1).sum() + use.any())
    return (total / degrees) ** 2 if degrees > 0 and special.chdtrc(degrees, total) < HEAVY else 1.0


def bartlett(squares: Array, freedom: Array) -> tuple[float, int]:
    """Return Bartlett's statistic of groups, and its degrees of freedom.

    Args:
        squares: sums of squares, [groups]; a group of equal values is left out.
        freedom: their degrees of freedom.
    """
    use = (freedom > 0) & (squares > 0)
    degrees, sums = freedom[use], squares[use]
    if len(degrees) < 2:
        return 0.0, 0
    total = degrees.sum()
    excess = total * np.log(sums.sum() / total) - (degrees * np.log(sums / degrees)).sum()
    return float(excess / (1 + ((1 / degrees).sum() - 1 / total) / (3 * (len(degrees) - 1)))), len(degrees) - 1


def pooled(task: Variances, unlike: Unequal) -> Variances:
    """Return the pooled variances of a task and the degrees of freedom that each is based on."""
    fitted = _fitted(task.values, task.freedom, unlike)
    rest = fitted.freedom - task.freedom
    with np.errstate(invalid="ignore", divide="ignore"):
        others = (fitted.freedom * fitted.values - task.freedom * np.nan_to_num(task.values)) / rest
        if unlike.both:  # a single variance is a small part of what its factors are based on
            others, rest = fitted.values, fitted.freedom
        ratio = task.values / np.maximum(others, 0.0)
        degrees = task.freedom / unlike.excess, np.maximum(rest, 1) / unlike.excess
        alone = (rest > 0) & (ratio > special.fdtri(*degrees, NOISIER))
    common = _fitted(task.values, np.where(alone, 0.0, task.freedom), unlike)
    return Variances(
        np.where(alone, task.values, common.values), np.where(alone, task.freedom, common.freedom / unlike.excess)
    )


def _fitted(values: Array, freedom: Array, unlike: Unequal) -> Variances:
    """Return the variances, level (per model, if unequal) x ratio (per rate, if unequal), and their degrees of freedom."""
    squares = freedom * np.nan_to_num(values)
    total = float(freedom.sum())
    by_model, by_rate = (freedom.sum(axis=axis, keepdims=True) for axis in (1, 0))
    level, ratios = np.full((len(values), 1), squares.sum() / max(total, 1.0)), np.ones((1, values.shape[1]))
    for _ in range(ROUNDS if unlike.both else 1):
        if unlike.models:
            level = np.where(
                by_model > 0, (squares / ratios).sum(axis=1, keepdims=True) / np.maximum(by_model, 1), level
            )
        if unlike.rates:
            raw = (squares / np.where(level > 0, level, 1.0)).sum(axis=0, keepdims=True) / np.maximum(by_rate, 1)
            ratios = np.where(raw > 0, raw, 1.0)
    of_level = np.where(by_model > 0, by_model, total) if unlike.models else np.full((1, 1), total)
    combined = np.where(by_rate > 0, by_rate * of_level / np.maximum(by_rate + of_level, 1), of_level)
    # A rate of single runs has no ratio of its own, so it has the degrees of freedom of the level.
    of_rate = np.where(by_rate > 0, by_rate, of_level)
    based_on = (combined if unlike.models else of_rate) if unlike.rates else of_level
    return Variances(level * ratios, based_on + np.zeros(values.shape))
