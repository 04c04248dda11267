"""The differences that a comparison of two models can find, and how many seeds a difference needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

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


Obstacle = Literal["noise", "test sets", "seeds"]
"""Why no number of seeds tells two models apart: the noise of seeds is not known, the test sets' noise alone is too large, or that
of seeds needs more than `MOST_SEEDS`."""


@dataclass(frozen=True)
class _Variance:
    """The variances of a difference of means over tasks, with their degrees of freedom.

    Attributes:
        moving: those that fall with the number of seeds.
        fixed: those of the test sets.
        seeds: the number of seeds that these are from.
    """

    moving: tuple[tuple[float, float], ...]
    fixed: tuple[tuple[float, float], ...]
    seeds: int

    def smallest(self, seeds: float, level: float, power: float) -> float:
        """Return the smallest difference that is found with this many seeds, which may be infinitely many."""
        if math.isinf(seeds):
            shares = [*self.fixed]
        else:
            rounds = (seeds - 1) / max(1, self.seeds - 1)
            shares = [*((size * self.seeds / seeds, freedom * rounds) for size, freedom in self.moving), *self.fixed]
        if not math.fsum(size for size, _ in shares):
            return 0.0
        whole = satterthwaite(0.0, shares)
        return smallest_difference(whole.error, whole.freedom, level, power)


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
        None if there is an `obstacle`.
    """
    found = seeds_or_obstacle(difference, pairs, seeds, level, power)
    return found if isinstance(found, int) else None


def seeds_or_obstacle(
    difference: float, pairs: Sequence[tuple[Effect, Effect]], seeds: int, level: float, power: float = POWER
) -> int | Obstacle:
    """Return the seeds that each learning rate needs, as `seeds_for` does, or why no number of seeds would do."""
    variance = _variance(pairs, seeds)
    if variance is None:
        return "noise"

    def found(number: float) -> bool:
        return variance.smallest(number, level, power) <= abs(difference)

    if not found(math.inf):
        return "test sets"
    if not found(MOST_SEEDS):
        return "seeds"
    low, high = 1, MOST_SEEDS  # `low` is too few: one seed has no noise
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if found(middle) else (middle, high)
    return high


def examples_for(
    difference: float, pairs: Sequence[tuple[Effect, Effect]], seeds: int, level: float, power: float = POWER
) -> float:
    """Return how many times as many test examples a difference needs at the least, with any number of seeds; NaN if not known.

    The test sets' variance falls with their size.

    Args:
        difference, pairs, seeds, level, power: as for `seeds_for`.
    """
    variance = _variance(pairs, seeds)
    return NAN if variance is None else (variance.smallest(math.inf, level, power) / abs(difference)) ** 2


def _variance(pairs: Sequence[tuple[Effect, Effect]], seeds: int) -> _Variance | None:
    """Return the variance of the difference of two means over tasks; None if it is not known."""
    moving: list[tuple[float, float]] = []  # variances with their degrees of freedom
    fixed: list[tuple[float, float]] = []
    for first, second in pairs:
        if math.isnan(first.minus(second).error):
            return None
        moving += [(variance / len(pairs) ** 2, freedom) for variance, freedom in first.seeds_minus(second)]
        fixed += [(variance / len(pairs) ** 2, freedom) for variance, freedom in first.test_set_minus(second)]
    if not math.fsum(size for size, _ in moving):
        return None
    return _Variance(tuple(moving), tuple(fixed), seeds)
