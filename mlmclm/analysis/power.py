"""The differences that a comparison can find, and how many seeds or pretraining runs a difference needs."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
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
ENOUGH = 1_000
"""Number of pairs of models from which on a part of them is enough for a mean."""
Test = tuple[float, float]
"""The standard error of a difference and its degrees of freedom, on which a two-sided t test is based."""


def smallest_difference(error: float, freedom: float, level: float, power: float = POWER) -> float:
    """Return the true difference that a two-sided t test at this level finds with this power; NaN if its error is not known."""
    return difference_found([(error, freedom)], level, power)


def difference_found(tests: Iterable[Test], level: float, power: float = POWER) -> float:
    """Return the true difference that tests at this level find with this power, on average over them; NaN without any test.

    Tests without a known error don't count.
    """
    counts = Counter(test for test in tests if not math.isnan(test[0]))
    largest = max((error for error, _ in counts), default=NAN)
    if not largest > 0:
        return largest
    found, upper = mean_power(counts, level), largest
    while found(upper) < power:  # with few degrees of freedom the noise itself is hardly known
        upper *= 2
        if math.isinf(upper):
            return NAN
    return float(optimize.brentq(lambda difference: found(difference) - power, 0.0, upper, xtol=1e-9 * largest))


def mean_power(counts: Mapping[Test, int], level: float) -> Callable[[float], float]:
    """Return the function that gives the mean power of tests for a true difference; a test without noise finds every one.

    Args:
        counts: how often each test counts.
    """
    errors, freedom = np.asarray(list(counts)).T
    weights = np.asarray(list(counts.values())) / sum(counts.values())
    critical = special.stdtrit(freedom, 1 - level / 2)

    def found(difference: float) -> float:
        shifts = np.minimum(difference / np.maximum(errors, 1e-300), 1e100)
        missed = special.nctdtr(freedom, shifts, critical)
        # The distribution function is NaN far out, where the noise of the difference is nothing beside that of its error.
        missed = np.where(np.isnan(missed), special.chdtrc(freedom, freedom * (shifts / critical) ** 2), missed)
        return float(weights @ (1 - missed))

    return found


def smallest_differences(
    studies: Sequence[Effects],
    models: Sequence[str],
    families: dict[str, str],
    confidence: float = 0.95,
    *,
    compared: int | None = None,
) -> dict[str, float]:
    """Return the true difference found with `POWER` on average over the pairs of models, by task and for the mean over tasks.

    Several studies may be given: the same with other luck. It is for a test at the level of the first step of the correction
    (`holm_level`), and NaN where the noise is not known.

    Args:
        compared: the number of models in the correction, by default that of `models`.
    """
    smallest = {}
    for kind, scope, tasks in scopes(families):
        if kind != "family":
            level = holm_level(kind, families, compared or len(models), confidence)
            wholes = (contrast.whole for contrast in differences(studies, models, tasks))
            smallest[scope] = difference_found(((whole.error, whole.freedom) for whole in wholes), level)
    return smallest


def differences(studies: Sequence[Effects], models: Sequence[str], tasks: Sequence[str]) -> list[Contrast]:
    """Return the differences of each study's pairs of models that have scores on all of some tasks, in their means over these."""
    return [
        mean_difference(effects, pair, tasks)
        for effects in studies
        for pair in itertools.combinations(models, 2)
        if all((model, task) in effects for model in pair for task in tasks)
    ]


Obstacle = Literal["noise", "test sets", "pretraining", "seeds"]
"""Why no number of seeds suffices: the noise of seeds is not known, the test sets' noise alone is too large, the test sets' and
pretraining runs' noise together is too large, or more than `MOST` seeds are needed."""
Shares = Sequence[tuple[float, float]]
"""Variances with their degrees of freedom."""


def seeds_or_obstacle(
    value: float, contrasts: Sequence[Contrast], now: int, level: float, power: float = POWER
) -> int | Obstacle:
    """Return the seeds that each learning rate needs for a true value to be found, or why no number of seeds suffices.

    The variance of seeds falls with their number. The variances that pretraining runs and test sets add stay the same.

    Args:
        value: the true value of each contrast.
        contrasts: what is compared, such as each pair of models; those whose noise is not known don't count.
        now: the number of seeds that they are from.
        level: of the two-sided test.
        power: the probability with which the value is to be found, on average over the contrasts.
    """

    def shares(contrast: Contrast, seeds: float) -> Shares:
        variance = math.fsum(size for size, _ in contrast.runs) - contrast.within * (1 - now / seeds)
        constant = [(max(0.0, variance), min(freedom for _, freedom in contrast.runs))] if contrast.runs else []
        return [*_more(contrast.seeds, seeds, now), *constant]

    return _rounds(value, contrasts, shares, level, power)


def runs_or_obstacle(value: float, contrasts: Sequence[Contrast], now: float, level: float) -> int | Obstacle:
    """Return how many pretraining runs each model needs to find a true value with `POWER`, or why no number of them suffices.

    Args:
        value, contrasts, level: as for `seeds_or_obstacle`.
        now: how many runs each model has now; the harmonic mean if models differ in this.
    """
    return _rounds(
        value, contrasts, lambda contrast, runs: _more([*contrast.seeds, *contrast.runs], runs, now), level, POWER
    )


def _rounds(
    value: float,
    contrasts: Sequence[Contrast],
    shares: Callable[[Contrast, float], Shares],
    level: float,
    power: float,
) -> int | Obstacle:
    """Return how many seeds or runs find a value; `shares` gives the variances, without the test sets', for a number of them."""
    known = [
        contrast
        for contrast in contrasts
        if not math.isnan(contrast.whole.error) and math.fsum(size for size, _ in (*contrast.seeds, *contrast.runs))
    ]
    if not known:
        return "noise"
    known = known[:: 1 + len(known) // ENOUGH]

    def finds(number: float) -> bool:
        counts = Counter(_test([*shares(contrast, number), *contrast.test_sets]) for contrast in known)
        return mean_power(counts, level)(abs(value)) >= power

    if found_at_best(known, level, power) > abs(value):
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
        value, level: as for `seeds_or_obstacle`.
    """
    return NAN if math.isnan(contrast.whole.error) else (found_at_best([contrast], level) / abs(value)) ** 2


def found_at_best(contrasts: Sequence[Contrast], level: float, power: float = POWER) -> float:
    """Return the smallest true value that any number of seeds and runs finds: the noise is that of the test sets alone."""
    return difference_found((_test(contrast.test_sets) for contrast in contrasts), level, power)


def _more(shares: Shares, number: float, now: float) -> Shares:
    """Return the variances for another number of seeds or runs, given those for `now` of them; they fall with the number."""
    if math.isinf(number):
        return []
    rounds = (number - 1) / max(1, now - 1)
    return [(size * now / number, freedom * rounds) for size, freedom in shares]


def _test(shares: Shares) -> Test:
    if not math.fsum(size for size, _ in shares):
        return 0.0, 1.0
    total = satterthwaite(0.0, shares)
    return total.error, total.freedom
