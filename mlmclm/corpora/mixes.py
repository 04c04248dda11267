"""Mixes: the shares of several sources in the training blocks, and the order in which the sources take turns.

The order is a pure function of the sample's number, like that of blocks within a source (`order`). Of the first n
blocks, a source with the share w has between n w - 1 and n w + 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, PlainSerializer

LONGEST_PERIOD = 100_000
"""Maximum number of blocks after which the turns of the sources repeat; this allows weights with five digits."""


def _parsed(value: Any) -> Any:
    """Return a mix as pairs in the order of the names, without sources of weight 0.

    Weights become the smallest whole numbers in the same ratios, so that equal mixes are equal; 0.1 counts as one tenth
    exactly.

    Raises:
        ValueError: a weight is negative or not a number, all are 0, or their ratios are too fine.
    """
    if value is None:
        return None
    weights = dict.fromkeys([value], 1) if isinstance(value, str) else value
    weights = dict(weights) if isinstance(weights, tuple) else weights
    if not isinstance(weights, Mapping):
        raise ValueError(f"expected the name of a source, or names with their weights, got {value!r}")
    for name, weight in weights.items():
        if not isinstance(name, str):
            raise ValueError(f"the source {name!r} is not a string; put its name in quotes")
        number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not number or not 0 <= weight < math.inf:
            raise ValueError(f"{name}: the weight {weight!r} is not a number of 0 or more")
    exact = {name: Fraction(repr(weight)) for name, weight in sorted(weights.items()) if weight}
    if not exact:
        raise ValueError("its weights add up to 0; give at least one source a weight above 0")
    common = math.lcm(*(weight.denominator for weight in exact.values()))
    integers = {name: int(weight * common) for name, weight in exact.items()}
    divisor = math.gcd(*integers.values())
    if sum(integers.values()) // divisor > LONGEST_PERIOD:
        raise ValueError(
            f"its weights cannot be written as whole numbers that sum to at most {LONGEST_PERIOD:,}; round them"
        )
    return tuple((name, weight // divisor) for name, weight in integers.items())


Mix = Annotated[
    tuple[tuple[str, int], ...],
    BeforeValidator(_parsed, json_schema_input_type=str | dict[str, float]),
    PlainSerializer(dict, return_type=dict[str, int]),
]
"""Sources with their weights, in the order of their names; the weights have no common divisor."""


def shares(mix: Mix) -> dict[str, float]:
    """Return each source's share of the blocks, from 0 to 1."""
    total = sum(weight for _, weight in mix)
    return {name: weight / total for name, weight in mix}


def mix_text(mix: Mix) -> str:
    """Format a mix for display, such as `70 % web, 30 % books`, the largest share first."""
    ordered = sorted(shares(mix).items(), key=lambda item: -item[1])
    return ", ".join(f"{100 * share:.4g} % {name}" for name, share in ordered)


class Turns:
    """The source of every sample of a mix, as the source's number in the mix; repeats after the sum of the weights.

    A source's j-th block (from 0) comes no earlier than sample floor(j / w) and before sample ceil((j + 1) / w). Of
    the sources that may come, the one that must come soonest does. Such turns exist for all shares w that add up to 1
    (Baruah et al., "Proportionate progress", 1996).
    """

    def __init__(self, mix: Mix) -> None:
        self.weights = np.array([weight for _, weight in mix], dtype=np.int64)
        self.period = period = int(self.weights.sum())
        self._sources, self._before = np.empty((2, period), dtype=np.int64)
        taken = [0] * len(self.weights)
        weights = self.weights.tolist()
        for turn in range(period):
            _, chosen = min(
                (-(-(taken[source] + 1) * period // weight), source)
                for source, weight in enumerate(weights)
                if taken[source] * period // weight <= turn
            )
            self._sources[turn], self._before[turn] = chosen, taken[chosen]
            taken[chosen] += 1

    def at(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return each sample's (int64 [n]) source, by its number, and how many blocks of that source come before it: [n] each."""
        periods, turns = np.divmod(samples, self.period)
        sources = self._sources[turns]
        return sources, periods * self.weights[sources] + self._before[turns]

    def counts(self, samples: int) -> NDArray[np.int64]:
        """Return how many of the first samples come from each source: int64 [sources]."""
        periods, rest = divmod(samples, self.period)
        return periods * self.weights + np.bincount(self._sources[:rest], minlength=len(self.weights))


turns_of = lru_cache(Turns)
"""The turns of a mix, computed once."""


def counts(mix: Mix, samples: int) -> dict[str, int]:
    """Return how many of a mix's first samples come from each source."""
    return dict(zip((name for name, _ in mix), turns_of(mix).counts(samples).tolist(), strict=True))


@dataclass(frozen=True)
class MixedSamples:
    """Samples of a mix, such as those of a step."""

    numbers: range
    """Numbers in the endless sequence of the mix."""
    mix: Mix
    before: tuple[tuple[str, int], ...] = ()
    """Blocks of each source that were seen in earlier mixes; each source continues after them."""

    def __len__(self) -> int:
        return len(self.numbers)

    def of_sources(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return each sample's source, by its number in the mix, and its number among all samples of the source: [n]."""
        sources, numbers = turns_of(self.mix).at(np.arange(self.numbers.start, self.numbers.stop, dtype=np.int64))
        before = dict(self.before)
        return sources, numbers + np.array([before.get(name, 0) for name, _ in self.mix], dtype=np.int64)[sources]
