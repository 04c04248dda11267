"""Repeated tests of one difference as seeds are added (interim looks), with at most 5 % of errors over all looks together.

A t test after every few seeds errs in 13 to 22 % of studies of equal models. So the error is spent little by little, as O'Brien and
Fleming's bounds do (Lan and DeMets 1983): hardly any of it on few seeds, nearly all of it at the final number. The looks need not be
planned, but the final number of seeds must be. The bounds hold for Student's t, whose variance is estimated anew at each look: they
are calibrated on simulated studies of two equal models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Literal, NamedTuple

import numpy as np
from scipy import special

PATHS = 100_000
"""Number of simulated studies of equal models that the bounds are computed from; so the error over all looks is accurate to 0.001."""
Decision = Literal["better", "not better", "undecided"]


class Look(NamedTuple):
    """A look at the difference of two models.

    Attributes:
        number: the number of seeds, or of pretraining runs where models have several.
        difference: the first model's score minus the second's.
        p: its two-sided p value. It is 1, which decides nothing, where the noise is not known or the lead is on tasks at chance.
    """

    number: int
    difference: float
    p: float


def decided(looks: Sequence[Look], most: int, level: float = 0.05) -> tuple[Decision, float]:
    """Return the decision of the looks so far, and the bound of the p value that decided, or else that of the last look.

    The first look below its bound decides; later ones change nothing.

    Args:
        looks: at least one, with increasing numbers of seeds.
        most: the number at which the comparison ends.
        level: the largest share of comparisons of equal models that may decide for one of them.
    """
    limits = bounds(tuple(look.number for look in looks), most, level)
    for look, limit in zip(looks, limits, strict=True):
        if look.p < limit:
            return ("better" if look.difference > 0 else "not better"), limit
    return ("not better" if looks[-1].number >= most else "undecided"), limits[-1]


def spent(number: int, most: int, level: float) -> float:
    """Return the error that all looks up to a number of seeds may have spent."""
    return float(2 * special.ndtr(special.ndtri(level / 2) / math.sqrt(min(1.0, number / most))))


@cache
def bounds(numbers: tuple[int, ...], most: int, level: float = 0.05) -> tuple[float, ...]:
    """Return the two-sided p value below which each look decides.

    Args:
        numbers: the number of seeds at each look, increasing.
        most: the final number; a look at more seeds may spend all of the error that is left.
    """
    draw = np.random.default_rng(0)
    count, means, squares = 0, np.zeros((2, PATHS)), np.zeros((2, PATHS))
    going, done, limits = np.ones(PATHS, bool), 0.0, list[float]()
    for number in numbers:
        new = number - count
        added = draw.standard_normal((2, PATHS)) / math.sqrt(new)
        squares += (added - means) ** 2 * count * new / number
        squares += draw.chisquare(new - 1, (2, PATHS)) if new > 1 else 0.0
        means += (added - means) * new / number
        count, freedom = number, max(1, 2 * number - 2)
        ratio = np.diff(means, axis=0)[0] / np.sqrt(np.maximum(squares.sum(axis=0), 1e-300) / freedom * 2 / number)
        p = 2 * special.stdtr(freedom, -np.abs(ratio))
        budget, done = spent(number, most, level) - done, spent(number, most, level)
        # The first look's p value is uniform. Later bounds are quantiles of p among the simulated studies that go on.
        limit = float(np.partition(p[going], index)[index]) if (index := int(budget * PATHS)) and limits else budget
        limits.append(limit)
        going &= p >= limit
    return tuple(limits)
