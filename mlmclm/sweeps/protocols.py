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
from mlmclm.results.metrics import Rule
from mlmclm.seeds import STREAMS, Seed, read_seed
from mlmclm.sweeps.packaged import names_in, packaged_or_own, spaces_folder
from mlmclm.tasks.declaration import MetricFamily
from mlmclm.tasks.registry import task_names
from mlmclm.tasks.settings import TaskSettings


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


Axes = dict[str, Annotated[tuple[Any, ...], Field(min_length=1), AfterValidator(without_duplicates)]]
"""Values of some of a protocol's settings, all combinations of which are meant."""

FIXED = frozenset((*TaskSettings().encoding(), "special_tokens", "pair_truncation", "length_share"))
"""Settings that are no axes: a task's examples are tokenised once."""


class TaskProtocols(Frozen):
    """A protocol, and what of it is different for single tasks: `per_task: {conll2003: {epochs: 1, max_steps: null}}`.

    `grid: {weight_decay: [1.0e-6, 1.0e-5], epochs: [1, 2, 3]}` tries all combinations of these settings beside the learning
    rates; `task_grids: {qnli: {epochs: [2, 5, 10]}}` has other values, or other settings, for single tasks.
    """

    protocol: Protocol
    per_task: dict[str, dict[str, Any]] = Field(default_factory=dict)
    start_from: dict[str, str] = Field(default_factory=dict)
    """`{rte: mnli}`: RTE's cells begin with the encoder of the model's best MNLI cell (`mlmclm/sweeps/starts.py` has the rule),
    and with a head of their own."""
    grid: Axes = Field(default_factory=dict)
    task_grids: dict[str, Axes] = Field(default_factory=dict)
    metrics: MetricFamily = "standard"
    """Which score of a task chooses the learning rate and is reported. Every result holds all of them, so that another choice
    computes nothing again."""
    rule: Rule = "mean"
    """How the best learning rate is chosen: all seeds take the one with the highest mean, or each takes its own (`per_seed`)."""

    @model_validator(mode="after")
    def _overrides_fit(self) -> TaskProtocols:
        for key, tasks in (("per_task", self.per_task), ("task_grids", self.task_grids)):
            for task in tasks:
                if task not in self._known_tasks():
                    raise ValueError(str(unknown("task", task, self._known_tasks(), where=key)))
        for task, source in self.start_from.items():
            if task not in self._known_tasks():
                raise ValueError(str(unknown("task", task, self._known_tasks(), where="start_from")))
            if source not in self._known_tasks():
                missing = str(unknown("task", source, self._known_tasks(), where=f"start_from.{task}"))
                raise ValueError(
                    f"{missing} Add it to the tasks, or start from the models themselves: start_from: {{}}"
                )
            if source in self.start_from:
                raise ValueError(f"start_from.{task}: {source} starts from {self.start_from[source]} itself")
        for key, axes in (("grid", self.grid), *((f"task_grids.{task}", own) for task, own in self.task_grids.items())):
            for axis in axes:
                if axis not in Protocol.model_fields or axis in FIXED:
                    allowed = [name for name in Protocol.model_fields if name not in FIXED]
                    raise ValueError(str(unknown("axis", axis, allowed, where=key)))
        try:
            _points(self.protocol, self.grid, "grid")
            for task in {**self.per_task, **self.task_grids}:
                for axis in self.axes_of(task):
                    if axis in self.per_task.get(task, {}):
                        raise ValueError(
                            f"per_task.{task}: {axis} is an axis of the grid; give its values in task_grids"
                        )
                self.settings_for(task)
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

    def settings_for(self, task: str) -> dict[str, Protocol]:
        """A task's protocol at each point of its grid, the last axis fastest, by what sets it apart: `weight decay 1e-06,
        epochs 2`. Without a grid there is one, by the empty text.

        Raises:
            UserError: a value isn't allowed.
        """
        where = f"task_grids.{task}" if task in self.task_grids else "grid"
        return _points(self.protocol_for(task), self.axes_of(task), where)

    def axes_of(self, task: str) -> dict[str, tuple[Any, ...]]:
        """The axes of a task's grid with their values."""
        return {**self.grid, **self.task_grids.get(task, {})}


def _points(protocol: Protocol, axes: Mapping[str, tuple[Any, ...]], where: str) -> dict[str, Protocol]:
    points = {}
    for values in itertools.product(*axes.values()):
        point = parse(Protocol, {**protocol.model_dump(), **dict(zip(axes, values, strict=True))}, where=where)
        points[", ".join(f"{axis.replace('_', ' ')} {_text(getattr(point, axis))}" for axis in axes)] = point
    return points


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


class ProtocolFile(TaskProtocols):
    """A protocol with the learning rates and seeds that go with it, where a space gives none."""

    description: str = ""
    learning_rates: LearningRates | None = None
    seeds: SeedList | None = None


def protocol_names() -> list[str]:
    """The names of the packaged protocols, sorted."""
    return names_in(spaces_folder() / "protocols")


def find_protocol(name_or_path: str | Path, *, beside: Path | None = None) -> ProtocolFile:
    """The protocol of a packaged name (`study`) or of a YAML file.

    Args:
        beside: the folder of the search space that names it, where a path is looked up first.

    Raises:
        UserError: no such name (with the nearest one) or file, an unknown key, or a value that is not allowed.
    """
    return load_config(ProtocolFile, packaged_or_own("protocol", name_or_path, spaces_folder() / "protocols", beside))


def with_protocol(space: Any, beside: Path | None = None) -> Any:
    """A space's values with those of the protocol that it names; others as they are.

    The space's own learning rates, seeds and settings come before the protocol's, and so do its settings for a task.

    Args:
        beside: the folder of the space's file.

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
        base = find_protocol(name, beside=beside)
    except UserError as error:
        raise ValueError(f"protocol: {error}") from error
    own, tasks = space.get("per_task", {}), space.get("tasks") or ()
    if not isinstance(own, dict) or not all(isinstance(item, dict) for item in own.values()):
        per_task = own  # refused later, with its place
    else:
        inherited = {task: item for task, item in base.per_task.items() if task in tasks}
        per_task = inherited | {task: overridden(inherited.get(task, {}), item) for task, item in own.items()}
    grids = {} if "grid" in space else {"grid": base.grid, "task_grids": _task_grids(base, space)}
    for axis in grids.get("grid", {}):
        if axis in changes:
            raise ValueError(
                f"protocol.{axis}: it is an axis of the grid of protocol {name!r}; give a grid of your own"
            )
    starts = {task: source for task, source in base.start_from.items() if task in tasks}
    axes = {"learning_rates": base.learning_rates, "seeds": base.seeds}
    return {
        **{key: value for key, value in axes.items() if value is not None},
        "metrics": base.metrics,
        "rule": base.rule,
        "start_from": starts,
        **space,
        **grids,
        "protocol": overridden(base.protocol.model_dump(), changes),
        "per_task": per_task,
    }


def _task_grids(base: ProtocolFile, space: Mapping[str, Any]) -> Any:
    """The protocol's grids of the space's tasks, with the space's own in place of them."""
    own = space.get("task_grids", {})
    if not isinstance(own, dict):
        return own  # refused later, with its place
    return {task: axes for task, axes in base.task_grids.items() if task in (space.get("tasks") or ())} | own
