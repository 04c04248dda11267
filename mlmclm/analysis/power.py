"""The differences that a comparison can find, and how many seeds or pretraining runs a difference needs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal

import numpy as np
from scipy import optimize, special

from mlmclm.analysis.comparison import holm_level, scopes
from mlmclm.analysis.contrasts import Contrast, Effects, mean_difference
from mlmclm.results.intervals import NAN, satterthwaite

POWER = 0.8
"""The probability with which a difference is to be found."""
MOST = 1_000
"""Most seeds, or pretraining runs, that are considered."""


def smallest_difference(error: float, freedom: float, level: float, power: float = POWER) -> float:
    """Return the true difference that a two-sided t test at this level finds with this power.

    Args:
        error: standard error of the difference.
        freedom: its degrees of freedom.

    Returns:
        The difference; NaN if the error is not known, or has so few degrees of freedom that the difference is too large to compute.
    """
    return error * _smallest_shift(freedom, level, power) if not math.isnan(error) else NAN


@lru_cache(1024)
def _smallest_shift(freedom: float, level: float, power: float) -> float:
    """Return `smallest_difference` in standard errors; cached, as it is the same for all pairs of models whose noise is pooled."""
    critical = float(special.stdtrit(freedom, 1 - level / 2))

    def missed(shift: float) -> float:
        return float(special.nctdtr(freedom, shift, critical)) - (1 - power)

    upper = critical + 20
    while missed(upper) > 0:  # with few degrees of freedom the noise itself is hardly known
        upper *= 2
    # The distribution function is NaN far out.
    return float(optimize.brentq(missed, 0.0, upper)) if missed(upper) <= 0 else NAN


def smallest_differences(
    effects: Effects, models: Sequence[str], families: dict[str, str], confidence: float = 0.95
) -> dict[str, float]:
    """Return the smallest true difference found with `POWER`, by task and for the mean over tasks: the median over pairs of models.

    It is for a test at the level of the first step of the correction (`holm_level`), and NaN where the noise is not known.
    """
    smallest = {}
    for kind, scope, tasks in scopes(families):
        if kind == "family":
            continue
        level = holm_level(kind, families, len(models), confidence)
        differences = [
            smallest_difference(difference.error, difference.freedom, level)
            for pair in itertools.combinations(models, 2)
            if all((model, task) in effects for model in pair for task in tasks)
            for difference in [mean_difference(effects, pair, tasks).whole]
        ]
        smallest[scope] = float(np.median(differences)) if differences else NAN
    return smallest


Obstacle = Literal["noise", "test sets", "pretraining", "seeds"]
"""Why no number of seeds suffices: the noise of seeds is not known, the test sets' noise alone is too large, the test sets' and
pretraining runs' noise together is too large, or more than `MOST` seeds are needed."""
Shares = Sequence[tuple[float, float]]
"""Variances with their degrees of freedom."""


def seeds_or_obstacle(value: float, contrast: Contrast, now: int, level: float, power: float = POWER) -> int | Obstacle:
    """Return the seeds that each learning rate needs for a true value to be found, or why no number of seeds suffices.

    The variance of seeds falls with their number. The variances that pretraining runs and test sets add stay the same.

    Args:
        value: the true value of the contrast.
        now: the number of seeds that the contrast is from.
        level: of the two-sided test.
        power: the probability with which the value is to be found.
    """

    def shares(seeds: float) -> Shares:
        variance = math.fsum(size for size, _ in contrast.runs) - contrast.within * (1 - now / seeds)
        constant = [(max(0.0, variance), min(freedom for _, freedom in contrast.runs))] if contrast.runs else []
        return [*_more(contrast.seeds, seeds, now), *constant]

    return _rounds(value, contrast, shares, level, power)


def runs_or_obstacle(value: float, contrast: Contrast, now: float, level: float) -> int | Obstacle:
    """Return how many pretraining runs each model needs to find a true value with `POWER`, or why no number of them suffices.

    Args:
        value, level: as for `seeds_or_obstacle`.
        now: how many runs each model has now; the harmonic mean if models differ in this.
    """
    return _rounds(value, contrast, lambda runs: _more([*contrast.seeds, *contrast.runs], runs, now), level, POWER)


def _rounds(
    value: float, contrast: Contrast, shares: Callable[[float], Shares], level: float, power: float
) -> int | Obstacle:
    """Return how many seeds or runs find a value; `shares` gives the variances, without the test sets', for a number of them."""
    if math.isnan(contrast.whole.error) or not math.fsum(size for size, _ in (*contrast.seeds, *contrast.runs)):
        return "noise"

    def finds(number: float) -> bool:
        return _smallest([*shares(number), *contrast.test_sets], level, power) <= abs(value)

    if _smallest(contrast.test_sets, level, power) > abs(value):
        return "test sets"
    if not finds(math.inf):
        return "pretraining"
    if not finds(MOST):
        return "seeds"
    low, high = 1, MOST  # `low` is too few: one seed, or one run, has no noise
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if finds(middle) else (middle, high)
    return high


def examples_for(value: float, contrast: Contrast, level: float) -> float:
    """Return the factor by which test sets must at least grow for a true value to be found, with any number of seeds and runs.

    The test sets' variance falls with their size. The power is `POWER`, and NaN is returned if the noise is not known.

    Args:
        value, contrast, level: as for `seeds_or_obstacle`.
    """
    if math.isnan(contrast.whole.error):
        return NAN
    return (_smallest(contrast.test_sets, level, POWER) / abs(value)) ** 2


def _more(shares: Shares, number: float, now: float) -> Shares:
    """Return the variances for another number of seeds or runs, given those for `now` of them; they fall with the number."""
    if math.isinf(number):
        return []
    rounds = (number - 1) / max(1, now - 1)
    return [(size * now / number, freedom * rounds) for size, freedom in shares]


def _smallest(shares: Shares, level: float, power: float) -> float:
    if not math.fsum(size for size, _ in shares):
        return 0.0
    total = satterthwaite(0.0, shares)
    return smallest_difference(total.error, total.freedom, level, power)
