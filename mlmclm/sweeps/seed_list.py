"""Seeds of a space: a list, a number of them, or a list for each random stream; and the noise that a space states."""

from __future__ import annotations

import itertools
from typing import Annotated, Any, Generic, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field

from mlmclm.configuration import Frozen, Role
from mlmclm.errors import unknown
from mlmclm.seeds import STREAMS, Seed, read_seed
from mlmclm.sweeps.learning_rates import without_duplicates

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
