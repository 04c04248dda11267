"""Learning rates of a space: a list, or a list that a sweep extends.

`{values: [1.0e-3, 2.0e-3, 4.0e-3], extend: true}` begins with three rates. While the best rate of a model on a task is
the lowest or the highest, the sweep adds the next one on that side for all models on this task (`analysis.extension`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, GetCoreSchemaHandler, WrapValidator

from mlmclm.configuration import Frozen, Role, parse_config
from mlmclm.errors import UserError

MOST_ADDED, MOST_STATED = 3, 10
"""The most rates that `extend: true` adds at each end of the list, and the most that a file may state instead."""


def without_duplicates(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the values unchanged.

    Raises:
        ValueError: a value is listed more than once.
    """
    twice = [value for value in dict.fromkeys(values) if values.count(value) > 1]
    if twice:
        raise ValueError(f"{', '.join(map(str, twice))} is listed more than once")
    return values


Rate = Annotated[float, Field(gt=0, lt=1)]


Rates = Annotated[
    tuple[Rate, ...],
    Field(min_length=1, json_schema_extra={"uniqueItems": True}),
    AfterValidator(without_duplicates),
]


class ExtendedRates(Frozen):
    """Learning rates to which a sweep adds others while the best one of a model on a task is the lowest or the highest."""

    values: Annotated[Rates | None, Role.CHOICE] = None
    """The rates to begin with; by default those of the named protocol."""
    extend: Annotated[bool | Annotated[int, Field(ge=0, le=MOST_STATED)], Role.CHOICE]
    """Whether to add rates; a number is the most at each end, in place of 3."""


def next_rates(rates: Sequence[float], number: int, *, higher: bool) -> tuple[float, ...]:
    """Return up to `number` rates that continue the list beyond its highest or lowest one, the nearest first.

    If the list repeats itself in each decade (1e-5, 2e-5, 5e-5, 1e-4, ...) or at another constant factor, that pattern is
    continued. Otherwise the ratio of the two rates nearest to that end is. Rates have six significant digits, as in reports, and are below 1.
    """
    ordered = sorted(rates, reverse=not higher)
    if len(ordered) < 2:  # a single rate has no step
        return ()
    periods = [period for period in range(1, len(ordered)) if _repeats(ordered, period)]
    period = min(periods, key=lambda length: (not _is_decade(ordered, length), length), default=1)
    factor, first = ordered[-1] / ordered[-1 - period], len(ordered)
    while len(ordered) < first + number:
        rate = float(f"{ordered[-period] * factor:.6g}")
        if not 0 < rate < 1:
            break
        ordered.append(rate)
    return tuple(ordered[first:])


def _repeats(rates: Sequence[float], period: int) -> bool:
    """Return whether all rates that are `period` places apart have the same ratio; a single pair must be a decade apart."""
    ratios = [later / rate for rate, later in zip(rates, rates[period:], strict=False)]
    enough = len(ratios) > 1 or _is_decade(rates, period)
    return enough and all(math.isclose(ratio, ratios[0], rel_tol=1e-6) for ratio in ratios)


def _is_decade(rates: Sequence[float], period: int) -> bool:
    return math.isclose(abs(math.log10(rates[period] / rates[0])), 1)


class RateGrid(tuple[float, ...]):
    """The learning rates of a space, in their order.

    Attributes:
        most: the most rates that a sweep adds on a task at each end; 0 if it adds none.
    """

    most: int

    def __new__(cls, values: Iterable[float] = (), most: int = 0) -> Self:
        """Make the grid."""
        grid = super().__new__(cls, values)
        grid.most = most
        return grid

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return handler.generate_schema(Rates)

    @property
    def lower(self) -> tuple[float, ...]:
        """The rates that may be added below the lowest, in this order."""
        return next_rates(self, self.most, higher=False)

    @property
    def higher(self) -> tuple[float, ...]:
        """The rates that may be added above the highest, in this order."""
        return next_rates(self, self.most, higher=True)

    @property
    def widest(self) -> RateGrid:
        """The grid with all rates that may be added."""
        return RateGrid((*self, *self.lower, *self.higher))


def read_rates(value: Any, handler: Callable[[Any], tuple[float, ...]]) -> RateGrid:
    """Read learning rates in either of their forms.

    Args:
        handler: checks a list of rates.

    Raises:
        ValueError: a rate or `extend` is wrong.
    """
    most = value.most if isinstance(value, RateGrid) else 0
    if isinstance(value, Mapping):
        try:
            extended = parse_config(ExtendedRates, dict(value), where="rates")
        except UserError as error:
            raise ValueError(str(error).rstrip(".")) from error
        most = MOST_ADDED if extended.extend is True else int(extended.extend)
        value = extended.values
        if value is None:
            raise ValueError("values: list the rates to begin with; the protocol brings none")
    rates = handler(value)
    if most and len(rates) == 1:
        raise ValueError("extend: one rate has no step by which others could be added; list at least two")
    return RateGrid(rates, most)


LearningRates = Annotated[RateGrid, WrapValidator(read_rates, json_schema_input_type=Rates | ExtendedRates)]
