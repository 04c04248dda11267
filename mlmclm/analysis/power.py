"""The differences that a comparison of two models can find, and how many seeds a difference needs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from scipy import optimize, special

from mlmclm.analysis.effects import Effect
from mlmclm.results.intervals import NAN, satterthwaite

POWER = 0.8
"""The probability with which a difference is to be found."""
MOST_SEEDS = 1_000


def smallest_difference(error: float, freedom: float, level: float, power: float = POWER) -> float:
    """Return the true difference that a two-sided t test at this level finds with this power.

    Args:
        error: standard error of the difference.
        freedom: its degrees of freedom.

    Returns:
        NaN if the error is not known, or rests on so few degrees of freedom that no difference can be said to be found.
    """
    if math.isnan(error):
        return NAN
    critical = float(special.stdtrit(freedom, 1 - level / 2))

    def missed(shift: float) -> float:
        return float(special.nctdtr(freedom, shift, critical)) - (1 - power)

    most = critical + 20
    while missed(most) > 0:  # with few degrees of freedom the noise itself is hardly known
        most *= 2
    # The distribution function is NaN far out.
    return error * float(optimize.brentq(missed, 0.0, most)) if missed(most) <= 0 else NAN


def seeds_for(
    difference: float, pairs: Sequence[tuple[Effect, Effect]], seeds: int, level: float, power: float = POWER
) -> int | None:
    """Return the seeds that each learning rate needs for a difference of means over tasks to be found with this power.

    The variance of seeds falls with their number, and that of the finite test sets stays.

    Args:
        difference: the true difference.
        pairs: the two models' effects on each task.
        seeds: the number of seeds that these are from.
        level: of the two-sided test.

    Returns:
        None if the noise is not known, or if more seeds (up to `MOST_SEEDS`) would not do because the test sets are too small.
    """
    moving: list[tuple[float, float]] = []  # variances with their degrees of freedom
    fixed: list[tuple[float, float]] = []
    for first, second in pairs:
        if math.isnan(first.minus(second).error):
            return None
        moving += [(part.error**2 / len(pairs) ** 2, part.freedom) for part in (first.seeds, second.seeds)]
        fixed += [(variance / len(pairs) ** 2, freedom) for variance, freedom in first.test_set_minus(second)]
    if not math.fsum(size for size, _ in moving):
        return None

    def found(number: int) -> bool:
        rounds = (number - 1) / max(1, seeds - 1)
        shares = [(size * seeds / number, freedom * rounds) for size, freedom in moving]
        whole = satterthwaite(0.0, [*shares, *fixed])
        return smallest_difference(whole.error, whole.freedom, level, power) <= abs(difference)

    if not found(MOST_SEEDS):
        return None
    low, high = 1, MOST_SEEDS  # `low` is too few: one seed has no noise
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if found(middle) else (middle, high)
    return high
