"""A search space: which learning rates, seeds and tasks a sweep covers, and by which protocol a cell is fine-tuned.

A space is a YAML file, either one of the packaged ones (`tune_spaces/NAME.yaml`) or the user's own.
"""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator, model_validator

from mlmclm.configuration import Frozen, load_config, parse
from mlmclm.errors import UserError, unknown
from mlmclm.finetuning.protocol import Protocol
from mlmclm.seeds import STREAMS, Seed, read_seed

PACKAGED = "mlmclm.tune_spaces"
"""Where the wheel puts the checkout's top-level folder `tune_spaces/`."""

LearningRate = Annotated[float, Field(gt=0, lt=1)]
SpaceSeed = Annotated[Seed, BeforeValidator(read_seed)]


def seed_product(streams: Any) -> Any:
    """The combinations of a mapping of lists, `{head: [0], order: [0, 1, 2], dropout: [0]}`, the last stream fastest;
    anything else as it is.

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


class Space(Frozen):
    """The axes of a sweep. Its cells are models x `tasks` x `learning_rates` x `seeds`.

    A seed is one number for a cell's three streams of chance, or a mapping with one for each. `seeds` is a list of them, or
    a list for each stream, whose combinations are meant: `{head: [0], order: [0, 1, 2], dropout: [0]}`.
    `per_task` overrides keys of `protocol` for single tasks, for instance `conll2003: {epochs: 1, max_steps: null}`.
    `cpus_per_cell` and `gpus_per_cell` are what one running cell reserves of the cluster; a fraction of a GPU lets
    several cells share it (its memory is then shared too, unguarded). `max_concurrent` bounds the number of cells at
    once.
    """

    description: str = ""
    tasks: tuple[str, ...] = Field(min_length=1)
    learning_rates: tuple[LearningRate, ...] = Field(min_length=1)
    seeds: tuple[SpaceSeed, ...] = Field(min_length=1)
    protocol: Protocol
    per_task: dict[str, dict[str, Any]] = Field(default_factory=dict)
    cpus_per_cell: float = Field(default=1, gt=0)
    gpus_per_cell: float = Field(default=0, ge=0)
    max_concurrent: int | None = Field(default=None, ge=1)

    @field_validator("seeds", mode="before")
    @classmethod
    def _combinations(cls, value: Any) -> Any:
        return seed_product(value)

    @field_validator("tasks", "learning_rates", "seeds")
    @classmethod
    def _no_duplicates(cls, values: tuple[Any, ...]) -> tuple[Any, ...]:
        twice = [value for value in dict.fromkeys(values) if values.count(value) > 1]
        if twice:
            raise ValueError(f"{', '.join(map(str, twice))} is listed more than once")
        return values

    @field_validator("gpus_per_cell")
    @classmethod
    def _whole_or_fraction(cls, value: float) -> float:
        if value > 1 and value != int(value):
            raise ValueError("is a fraction below 1 or a whole number of GPUs")
        return value

    @model_validator(mode="after")
    def _overrides_fit(self) -> Space:
        for task in self.per_task:
            if task not in self.tasks:
                raise ValueError(str(unknown("task", task, self.tasks, where="per_task")))
            try:
                self.protocol_for(task)
            except UserError as error:  # pydantic adds the file's name to a ValueError only
                raise ValueError(str(error)) from error
        return self

    def protocol_for(self, task: str) -> Protocol:
        """The protocol of one task: the common one with the task's overrides.

        Raises:
            UserError: an override names a key that a protocol doesn't have, or a value that it doesn't allow.
        """
        overrides = self.per_task.get(task)
        if not overrides:
            return self.protocol
        return parse(Protocol, {**self.protocol.model_dump(), **overrides}, where=f"per_task.{task}")


def spaces_folder() -> Path:
    """The folder of the packaged spaces: inside the installed package, or `tune_spaces/` of the checkout."""
    found = importlib.util.find_spec(PACKAGED)
    for location in (found.submodule_search_locations or []) if found else []:
        if Path(location).is_dir():
            return Path(location)
    checkout = Path(__file__).resolve().parents[2] / "tune_spaces"
    if checkout.is_dir():
        return checkout
    raise UserError("The packaged search spaces are not installed: give the path of a YAML file instead.")


def space_names() -> list[str]:
    """The names of the packaged spaces, sorted."""
    return sorted(path.stem for path in spaces_folder().glob("*.yaml"))


def find_space(name_or_path: str | Path) -> Space:
    """The space of a packaged name (`quickstart`) or of a YAML file.

    Whatever ends in .yaml or .yml, or has a folder in it, is a path.

    Raises:
        UserError: no such name (with the nearest one) or file, an unknown key, or a value that is not allowed.
    """
    text = str(name_or_path)
    if text.endswith((".yaml", ".yml")) or len(Path(text).parts) > 1:
        return load_config(Space, Path(text))
    if text not in space_names():
        raise unknown("search space", text, space_names())
    return load_config(Space, spaces_folder() / f"{text}.yaml")
