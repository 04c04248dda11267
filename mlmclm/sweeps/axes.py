"""The axes of a space: its learning rates and its seeds.

Learning rates are a list, or a list that a sweep extends.

`{values: [1.0e-3, 2.0e-3, 4.0e-3], extend: true}` begins with three rates. While the best rate of a model on a task is
the lowest or the highest, the sweep adds the next one on that side for all models on this task (`analysis.extension`).

Seeds are a list, a number of them, or a list for each random stream. A space may also state the noise of a seed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Generic, Self, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, GetCoreSchemaHandler, WrapValidator

from mlmclm.configuration import Frozen, Role, parse_config
from mlmclm.errors import UserError, unknown
from mlmclm.seeds import STREAMS, Seed, read_seed

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


MOST_SEEDS = 10_000
"""The largest number of seeds that a file may give in place of a list."""


def seed_product(value: Any) -> Any:
    """Return the list of seeds that a file's value stands for; a list is returned unchanged.

    A number, 7, stands for the seeds 0 to 6. Lists of seeds for each stream, `{head: [0], order: [0, 1, 2], dropout: [0]}`,
    stand for all combinations, of which the last stream varies fastest.

    Raises:
        ValueError: the number is not from 1 to `MOST_SEEDS`; a stream is unknown or missing, or isn't a list.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if not 1 <= value <= MOST_SEEDS:
            raise ValueError(
                f"{value}: the number of seeds is from 1 to {MOST_SEEDS:,}; a single seed is a list, [{value}]"
            )
        return list(range(value))
    if not isinstance(value, dict):
        return value
    for name, numbers in value.items():
        if name not in STREAMS:
            raise ValueError(str(unknown("stream", name, STREAMS)).rstrip("."))
        if not isinstance(numbers, list) or not numbers:
            raise ValueError(f"{name} is a list of seeds")
    absent = [name for name in STREAMS if name not in value]
    if absent:
        raise ValueError(f"no seeds for {', '.join(absent)}")
    lists = [value[name] for name in STREAMS]
    return [read_seed(dict(zip(STREAMS, combination, strict=True))) for combination in itertools.product(*lists)]


Stream = TypeVar("Stream")


class OfStreams(Frozen, Generic[Stream]):
    """A value for each random stream of a cell, for JSON Schemas only: `read_seed` reads the files."""

    head: Annotated[Stream, Role.CHOICE]
    """Initial weights of the head."""
    order: Annotated[Stream, Role.CHOICE]
    """Order of the training examples."""
    dropout: Annotated[Stream, Role.CHOICE]
    """Dropout masks."""


Number = Annotated[int, Field(ge=0)]
Numbers = Annotated[tuple[Number, ...], Field(min_length=1, json_schema_extra={"uniqueItems": True})]


class SeedOfEach(OfStreams[Number]):
    """One seed: a number for each random stream."""


class SeedsOfEach(OfStreams[Numbers]):
    """A list of numbers for each random stream, standing for all combinations."""


OneSeed = Number | SeedOfEach
SeedList = Annotated[
    tuple[Annotated[Seed, BeforeValidator(read_seed)], ...],
    Field(min_length=1),
    AfterValidator(without_duplicates),
    BeforeValidator(
        seed_product,
        json_schema_input_type=Annotated[tuple[OneSeed, ...], Field(min_length=1)]
        | Annotated[int, Field(ge=1, le=MOST_SEEDS)]
        | SeedsOfEach,
    ),
]
Points = Annotated[float, Field(gt=0, lt=100)]


class StatedNoise(Frozen):
    """The noise of the scores on a task, in points out of 100, where it is known from elsewhere."""

    seeds: Annotated[Points, Role.CHOICE]
    """Standard deviation of the test score over seeds, at one learning rate."""
    test_set: Annotated[float, Role.CHOICE] = Field(default=0.0, ge=0, lt=100)
    """Standard deviation that the finite test set adds to the difference of two models on it."""
    pretraining: Annotated[float | None, Role.CHOICE] = Field(default=None, ge=0, lt=100)
    """Standard deviation that pretraining runs of one model add to its score; a plan of several runs needs it."""
