"""Protocols as files: how cells are fine-tuned, and over which learning rates and seeds, without saying on which tasks.

A protocol is a YAML file, either one of the packaged ones (`tune_spaces/protocols/NAME.yaml`) or the user's own. A search
space names one, `protocol: study`, or overrides some of its settings, `protocol: {base: study, batch_size: 16}`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from mlmclm.configuration import Frozen, load_config, parse
from mlmclm.errors import UserError, unknown
from mlmclm.finetuning.protocol import Protocol, overridden
from mlmclm.seeds import STREAMS, Seed, read_seed
from mlmclm.sweeps.packaged import names_in, packaged_or_own, spaces_folder
from mlmclm.tasks.declaration import MetricFamily
from mlmclm.tasks.registry import task_names


def without_duplicates(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The values, each of which is listed once.

    Raises:
        ValueError: one is there twice.
    """
    twice = [value for value in dict.fromkeys(values) if values.count(value) > 1]
    if twice:
        raise ValueError(f"{', '.join(map(str, twice))} is listed more than once")
    return values


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


LearningRates = Annotated[
    tuple[Annotated[float, Field(gt=0, lt=1)], ...], Field(min_length=1), AfterValidator(without_duplicates)
]
SeedList = Annotated[
    tuple[Annotated[Seed, BeforeValidator(read_seed)], ...],
    Field(min_length=1),
    AfterValidator(without_duplicates),
    BeforeValidator(seed_product),
]


class TaskProtocols(Frozen):
    """A protocol, and what of it is different for single tasks: `per_task: {conll2003: {epochs: 1, max_steps: null}}`."""

    protocol: Protocol
    per_task: dict[str, dict[str, Any]] = Field(default_factory=dict)
    metrics: MetricFamily = "standard"
    """Which score of a task chooses the learning rate and is reported. Every result holds all of them, so that another choice
    computes nothing again."""

    @model_validator(mode="after")
    def _overrides_fit(self) -> TaskProtocols:
        for task in self.per_task:
            if task not in self._known_tasks():
                raise ValueError(str(unknown("task", task, self._known_tasks(), where="per_task")))
            try:
                self.protocol_for(task)
            except UserError as error:  # pydantic adds the file's name to a ValueError only
                raise ValueError(str(error)) from error
        return self

    def _known_tasks(self) -> tuple[str, ...]:
        """The tasks that `per_task` may name."""
        return tuple(task_names())

    def protocol_for(self, task: str) -> Protocol:
        """The protocol of one task: the common one with the task's overrides.

        Raises:
            UserError: an override names a key that a protocol doesn't have, or a value that it doesn't allow.
        """
        overrides = self.per_task.get(task)
        if not overrides:
            return self.protocol
        return parse(Protocol, overridden(self.protocol.model_dump(), overrides), where=f"per_task.{task}")


class ProtocolFile(TaskProtocols):
    """A protocol with the learning rates and seeds that go with it, where a space gives none."""

    description: str = ""
    learning_rates: LearningRates | None = None
    seeds: SeedList | None = None


def protocol_names() -> list[str]:
    """The names of the packaged protocols, sorted."""
    return names_in(spaces_folder() / "protocols")


def find_protocol(name_or_path: str | Path) -> ProtocolFile:
    """The protocol of a packaged name (`study`) or of a YAML file.

    Raises:
        UserError: no such name (with the nearest one) or file, an unknown key, or a value that is not allowed.
    """
    return load_config(ProtocolFile, packaged_or_own("protocol", name_or_path, spaces_folder() / "protocols"))


def with_protocol(space: Any) -> Any:
    """A space's values with those of the protocol that it names; others as they are.

    The space's own learning rates, seeds and settings come before the protocol's, and so do its settings for a task.

    Raises:
        ValueError: the protocol isn't there or is wrong.
    """
    given = space.get("protocol") if isinstance(space, dict) else None
    if isinstance(given, str):
        name, changes = given, {}
    elif isinstance(given, Mapping) and "base" in given:
        name, changes = given["base"], {key: value for key, value in given.items() if key != "base"}
    else:
        return space
    if not isinstance(name, str):
        raise ValueError(f"protocol.base is the name of a protocol or the path of a file (got {name!r})")
    try:
        base = find_protocol(name)
    except UserError as error:
        raise ValueError(f"protocol: {error}") from error
    own, tasks = space.get("per_task", {}), space.get("tasks") or ()
    if not isinstance(own, dict) or not all(isinstance(item, dict) for item in own.values()):
        per_task = own  # refused later, with its place
    else:
        inherited = {task: item for task, item in base.per_task.items() if task in tasks}
        per_task = inherited | {task: overridden(inherited.get(task, {}), item) for task, item in own.items()}
    axes = {"learning_rates": base.learning_rates, "seeds": base.seeds}
    return {
        **{key: value for key, value in axes.items() if value is not None},
        "metrics": base.metrics,
        **space,
        "protocol": overridden(base.protocol.model_dump(), changes),
        "per_task": per_task,
    }
