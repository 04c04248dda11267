"""The crossing of two curves of scores: the budget from which on another objective is ahead, with its interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from mlmclm.numbers import count


@dataclass(frozen=True)
class Crossing:
    """The budget at which a difference of two models' scores changes its sign.

    Attributes:
        value: interpolated between the budgets, on a logarithmic scale.
        low, high: the first and the last budget at which the interval of the difference contains 0; 0 and infinity if it still
            contains 0 at the lowest or highest budget.
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        low = "below all" if self.low == 0 else count(self.low)
        high = "beyond all" if math.isinf(self.high) else count(self.high)
        return f"{count(self.value)} [{low}, {high}]"


def crossing(differences: Sequence[tuple[float, float, float, float]]) -> Crossing | None:
    """Return where a difference crosses 0; None if it doesn't, or does so more than once.

    The interval of the crossing contains every budget at which the interpolated interval of the difference contains 0.

    Args:
        differences: for each budget, a tuple of the budget, the difference, and the ends of its interval.
    """
    finite = [row for row in sorted(differences) if all(map(math.isfinite, row))]
    middle = _zeros([(x, value) for x, value, _, _ in finite])
    if len(middle) != 1:
        return None
    falls = finite[0][1] > finite[-1][1]
    # If the difference falls, the lower end of its interval reaches 0 first.
    first, last = (
        [(row[0], row[2 if falls else 3]) for row in finite],
        [(row[0], row[3 if falls else 2]) for row in finite],
    )
    before = [x for x in _zeros(first) if x <= middle[0]]
    after = [x for x in _zeros(last) if x >= middle[0]]
    return Crossing(middle[0], before[-1] if before else 0.0, after[0] if after else math.inf)


def _zeros(points: Sequence[tuple[float, float]]) -> list[float]:
    """Return where a line through the points is 0, with the first coordinate on a logarithmic scale."""
    between = [
        math.exp(math.log(x) + (math.log(next_x) - math.log(x)) * y / (y - next_y))
        for (x, y), (next_x, next_y) in pairwise(points)
        if y * next_y < 0
    ]
    return sorted([*between, *(x for x, y in points if y == 0)])
