"""Seeds of a space: a list, a list for each random stream, or as many for each task as a difference takes to be found.

`{power: 0.8, difference: 0.5}` begins with three seeds on all tasks. Their results, or the noise that the space states, say how
many seeds each task needs for a difference of 0.5 points between two models to be found with a probability of 80 %
(`analysis.planned_power`), and the sweep adds them. Seeds are taken from one list in its order, so cells are shared with other
sweeps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Generic, Self, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, GetCoreSchemaHandler, WrapValidator, model_validator

from mlmclm.configuration import Frozen, Role, parse
from mlmclm.errors import UserError, unknown
from mlmclm.seeds import STREAMS, Seed, read_seed
from mlmclm.sweeps.learning_rates import without_duplicates

LEAST_SEEDS, MOST_SEEDS, MOST_STATED = 3, 20, 1_000
"""The fewest and the most seeds of a task by default, and the most that a file may state."""


def seed_product(streams: Any) -> Any:
    """Expand lists of seeds for each stream, `{head: [0], order: [0, 1, 2], dropout: [0]}`, into all combinations.

    The last stream varies fastest. Anything that isn't a mapping is returned unchanged.

    Raises:
        ValueError: a stream is unknown or missing, or isn't a list.
    """
    if not isinstance(streams, dict):
        return streams
    for name, numbers in streams.items():
        if name not in STREAMS:
            raise ValueError(str(unknown("stream", name, STREAMS)).rstrip("."))
        if not isinstance(numbers, list) or not numbers:
            raise ValueError(f"{name} is a list of seeds")
    absent = [name for name in STREAMS if name not in streams]
    if absent:
        raise ValueError(f"no seeds for {', '.join(absent)}")
    lists = [streams[name] for name in STREAMS]
    return [read_seed(dict(zip(STREAMS, each, strict=True))) for each in itertools.product(*lists)]


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
ListedSeeds = Annotated[
    tuple[Annotated[Seed, BeforeValidator(read_seed)], ...],
    Field(min_length=1),
    AfterValidator(without_duplicates),
    BeforeValidator(
        seed_product,
        json_schema_input_type=Annotated[tuple[OneSeed, ...], Field(min_length=1)] | SeedsOfEach,
    ),
]
Points = Annotated[float, Field(gt=0, lt=100)]


class SeedsByPower(Frozen):
    """As many seeds for each task as a difference between two models takes to be found."""

    difference: Annotated[Points, Role.CHOICE]
    """The difference on a single task, in points out of 100."""
    power: Annotated[float, Role.CHOICE] = Field(default=0.8, ge=0.5, lt=1)
    """The probability with which it is to be found."""
    per_task: Annotated[dict[str, Points], Role.CHOICE] = Field(default_factory=dict)
    """Task -> its own difference."""
    least: Annotated[int, Role.CHOICE] = Field(default=LEAST_SEEDS, ge=2, le=MOST_STATED)
    """The seeds that every task has; where no noise is stated, their results say how many more it needs."""
    most: Annotated[int, Role.CHOICE] = Field(default=MOST_SEEDS, ge=2, le=MOST_STATED)
    """The most seeds of a task; a difference that takes more is not found with that power, and it is said so."""
    values: Annotated[ListedSeeds | None, Role.CHOICE] = None
    """The seeds in the order in which they are taken; by default 0, 1, 2 and so on."""

    @model_validator(mode="after")
    def _enough(self) -> SeedsByPower:
        if self.least > self.most:
            raise ValueError(f"least: {self.least} is more than most, which is {self.most}")
        if self.values is not None:
            for name in ("least", *self.model_fields_set.intersection({"most"})):
                if (number := getattr(self, name)) > len(self.values):
                    raise ValueError(f"{name}: {number} is more than the {len(self.values)} seeds of values")
        return self

    @property
    def every(self) -> tuple[Seed, ...]:
        """All seeds that a task may have, in their order."""
        return tuple(range(self.most)) if self.values is None else self.values[: self.most]

    def bounded(self, number: int | None) -> int:
        """Return a number of seeds within the bounds; the most if no number will do."""
        most = len(self.every)
        return most if number is None else min(most, max(self.least, number))

    def difference_on(self, task: str) -> float:
        """Return the difference to find on a task, as a fraction of 1."""
        return self.per_task.get(task, self.difference) / 100


class SeedGrid(tuple[Seed, ...]):
    """The seeds of a space, in their order: those that every task has.

    Attributes:
        power: what decides how many more a task has; None if all tasks have these.
        numbers: the number of seeds of each task for which it is decided.
    """

    power: SeedsByPower | None
    numbers: Mapping[str, int]

    def __new__(
        cls, values: Iterable[Seed] = (), power: SeedsByPower | None = None, numbers: Mapping[str, int] | None = None
    ) -> Self:
        """Make the grid."""
        made = super().__new__(cls, values)
        made.power, made.numbers = power, numbers or {}
        return made

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return handler.generate_schema(ListedSeeds)

    def of(self, task: str) -> tuple[Seed, ...]:
        """Return the seeds of a task: as far as its number is not decided, those that every task has."""
        return self if self.power is None else self.power.every[: self.numbers.get(task, len(self))]

    def most_of(self, task: str) -> int:
        """Return the most seeds that a task may have."""
        return len(self) if self.power is None else self.numbers.get(task, len(self.power.every))

    def undecided(self, tasks: Iterable[str]) -> tuple[str, ...]:
        """Return the tasks whose number of seeds is still to be decided."""
        return () if self.power is None else tuple(task for task in tasks if task not in self.numbers)

    def allotted(self, numbers: Mapping[str, int]) -> SeedGrid:
        """Return the grid with the numbers of seeds of some tasks."""
        return SeedGrid(self, self.power, numbers)


def read_seeds(value: Any, handler: Callable[[Any], tuple[Seed, ...]]) -> SeedGrid:
    """Read seeds in any of their forms.

    Args:
        handler: checks a list of seeds.

    Raises:
        ValueError: a seed, the power or the difference is wrong.
    """
    power = value.power if isinstance(value, SeedGrid) else None
    if isinstance(value, Mapping) and value.keys() & SeedsByPower.model_fields.keys():
        try:
            power = parse(SeedsByPower, dict(value), where="by power")
        except UserError as error:
            raise ValueError(str(error).rstrip(".")) from error
        value = power.every[: power.least]
    return SeedGrid(handler(value), power)


SeedList = Annotated[
    SeedGrid,
    WrapValidator(
        read_seeds,
        json_schema_input_type=Annotated[tuple[OneSeed, ...], Field(min_length=1)] | SeedsOfEach | SeedsByPower,
    ),
]


class StatedNoise(Frozen):
    """The noise of the scores on a task, in points out of 100, where it is known from elsewhere."""

    seeds: Annotated[Points, Role.CHOICE]
    """Standard deviation of the test score over seeds, at one learning rate."""
    test_set: Annotated[float, Role.CHOICE] = Field(default=0.0, ge=0, lt=100)
    """Standard deviation that the finite test set adds to the difference of two models on it."""
    pretraining: Annotated[float | None, Role.CHOICE] = Field(default=None, ge=0, lt=100)
    """Standard deviation that pretraining runs of one model add to its score; a plan of several runs needs it."""
