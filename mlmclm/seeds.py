"""The seed of a fine-tuning cell: one number for its three streams of chance, or a number for each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from mlmclm.errors import unknown


@dataclass(frozen=True, order=True)
class Seeds:
    """A number for each stream, so that one can vary while the others hold."""

    head: int
    """The head's initial weights."""
    order: int
    """Which examples a step sees."""
    dropout: int
    """What dropout hides, in models and heads that have it."""

    def __str__(self) -> str:
        return f"h{self.head}-o{self.order}-d{self.dropout}"

    @staticmethod
    def of(seed: Seed) -> Seeds:
        """The numbers of the streams; one number is that of all three."""
        return seed if isinstance(seed, Seeds) else Seeds(seed, seed, seed)

    def simplest(self) -> Seed:
        """One number where all three are the same: the same cell, however it was asked for."""
        return self.head if self.head == self.order == self.dropout else self


Seed = int | Seeds

STREAMS = tuple(field.name for field in fields(Seeds))


def read_seed(value: Any) -> Seed:
    """The seed that a file or a result holds: a whole number from 0 on, or a mapping with one for each stream.

    Raises:
        ValueError: it is something else.
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
    """What a result and a cell's key hold; `read_seed` reads it."""
    simplest = Seeds.of(seed).simplest()
    return asdict(simplest) if isinstance(simplest, Seeds) else simplest


def seed_labels(seeds: Iterable[Seed]) -> list[str]:
    """The seeds for people, each stream by itself where that matters to any of them: `0`, or `h0-o0-d0`."""
    every = list(seeds)
    if all(isinstance(seed, int) for seed in every):
        return [str(seed) for seed in every]
    return [str(Seeds.of(seed)) for seed in every]


def _number(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(
            "a seed is a whole number from 0 on, or a mapping with one for each of head, order and dropout"
        )
    return value
