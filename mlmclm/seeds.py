"""The seed of a fine-tuning cell: one number for its three random streams, or one for each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from mlmclm.errors import unknown


@dataclass(frozen=True, order=True)
class Seeds:
    """A seed for each random stream, so that one can vary while the others are fixed."""

    head: int
    """Initial weights of the head."""
    order: int
    """Order of the training examples."""
    dropout: int
    """Dropout masks, in models and heads with dropout."""

    def __str__(self) -> str:
        return f"h{self.head}-o{self.order}-d{self.dropout}"

    @staticmethod
    def of(seed: Seed) -> Seeds:
        """Return the seeds of the streams; a single number is the seed of all three."""
        return seed if isinstance(seed, Seeds) else Seeds(seed, seed, seed)

    def simplest(self) -> Seed:
        """Return one number if all three seeds are equal, so that a cell has one form however it was requested."""
        return self.head if self.head == self.order == self.dropout else self


Seed = int | Seeds

STREAMS = tuple(field.name for field in fields(Seeds))


def read_seed(value: Any) -> Seed:
    """Read the seed in a file or a result: a non-negative integer, or a mapping with one for each stream.

    Raises:
        ValueError: the value is something else.
    """
    if isinstance(value, Seeds):
        return value.simplest()
    if isinstance(value, Mapping):
        for name in value:
            if name not in STREAMS:
                raise ValueError(str(unknown("stream", name, STREAMS)).rstrip("."))
        absent = [name for name in STREAMS if name not in value]
        if absent:
            raise ValueError(f"no seed for {', '.join(absent)}")
        return Seeds(**{name: _number(value[name]) for name in STREAMS}).simplest()
    return _number(value)


def seed_value(seed: Seed) -> int | dict[str, int]:
    """Return the form of a seed in a result and a cell's key; `read_seed` reads it."""
    simplest = Seeds.of(seed).simplest()
    return asdict(simplest) if isinstance(simplest, Seeds) else simplest


def seed_labels(seeds: Iterable[Seed]) -> list[str]:
    """Format the seeds for people: `0`, or `h0-o0-d0` for all if any of them has different seeds per stream."""
    listed = list(seeds)
    if all(isinstance(seed, int) for seed in listed):
        return [str(seed) for seed in listed]
    return [str(Seeds.of(seed)) for seed in listed]


def _number(value: Any) -> int:
    # bool is a subclass of int.
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(
            "a seed is a whole number from 0 on, or a mapping with one for each of head, order and dropout"
        )
    return value
