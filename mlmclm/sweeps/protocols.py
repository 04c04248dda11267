"""Protocol files: how cells are fine-tuned, and over which learning rates and seeds, but not on which tasks.

A protocol is a YAML file, either one of the packaged ones (`tune_spaces/protocols/NAME.yaml`) or the user's own. A search
space names one (`protocol: study`), and may override some of its settings (`protocol: {base: study, batch_size: 16}`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from mlmclm.configuration import Enters, Frozen, Role, described_as, load_config, parse_config
from mlmclm.errors import UserError, unknown
from mlmclm.finetuning.protocol import Protocol, overridden
from mlmclm.results.metrics import Rule
from mlmclm.storage.packaged import PROTOCOLS, packaged_or_path
from mlmclm.sweeps.learning_rates import LearningRates, without_duplicates
from mlmclm.sweeps.seed_list import SeedList
from mlmclm.tasks.declaration import MetricFamily
from mlmclm.tasks.declared_tasks import task_names

FIXED = Protocol.fields_with(Role.TOKENS)
"""Settings that cannot be axes, because a task's examples are tokenised only once."""
AXES = [name for name in Protocol.model_fields if name not in (*FIXED, *Protocol.fields_with(Role.WORK))]

Axes = Annotated[
    dict[str, Annotated[tuple[Any, ...], Field(min_length=1), AfterValidator(without_duplicates)]],
    Field(json_schema_extra={"propertyNames": {"enum": AXES}}),
]
"""Values to try for some of a protocol's settings, in all combinations."""
Changes = Annotated[dict[str, Any], described_as(Protocol)]
"""New values for some of a protocol's settings."""


class TaskProtocols(Frozen):
    """A protocol with its overrides for single tasks: `per_task: {conll2003: {epochs: 1, max_steps: null}}`.

    `grid: {weight_decay: [1.0e-6, 1.0e-5], epochs: [1, 2, 3]}` tries all combinations of these settings at each
    learning rate. `task_grids: {qnli: {epochs: [2, 5, 10]}}` gives single tasks other values, or further settings.
    """

    protocol: Annotated[Protocol, Role.WEIGHTS, Enters.INDIRECTLY]
    """How cells are fine-tuned."""
    per_task: Annotated[dict[str, Changes], Role.WEIGHTS, Enters.INDIRECTLY] = Field(default_factory=dict)
    """Task -> settings in place of the protocol's."""
    start_from: Annotated[dict[str, str], Role.WEIGHTS, Enters.INDIRECTLY] = Field(default_factory=dict)
    """Task -> the task whose best cell it starts from.

    With `{rte: mnli}`, RTE's cells begin with the encoder of the model's best MNLI cell (`mlmclm/sweeps/starts.py` has
    the rule) and with a new head.
    """
    grid: Annotated[Axes, Role.CHOICE] = Field(default_factory=dict)
    """Other settings to try, each with its values."""
    task_grids: Annotated[dict[str, Axes], Role.CHOICE] = Field(default_factory=dict)
    """Task -> other values for the grid's settings, or further settings."""
    metrics: Annotated[MetricFamily, Role.EVALUATION, Enters.INDIRECTLY] = "standard"
    """Which score of a task chooses the learning rate and is reported.

    Every result holds all scores, so no cell is computed again when this changes, unless `evaluate_every` lets the score
    choose the weights.
    """
    rule: Annotated[Rule, Role.CHOICE] = "mean"
    """How the best learning rate is chosen: the highest mean over seeds (`mean`), each seed's own (`per_seed`), or the highest
    mean test score (`on_test`)."""

    @model_validator(mode="after")
    def _overrides_fit(self) -> TaskProtocols:
        # Tasks are looked up only if some are named here, because tasks of other packages may be broken.
        tasks = self._known_tasks() if self.per_task or self.task_grids or self.start_from else ()
        for key in ("per_task", "task_grids", "start_from"):
            for task in getattr(self, key):
                if task not in tasks:
                    raise ValueError(str(unknown("task", task, tasks, where=key)))
        for task, source in self.start_from.items():
            if source not in tasks:
                missing = unknown("task", source, tasks, where=f"start_from.{task}")
                raise ValueError(
                    f"{missing} Add it to the tasks, or start from the models themselves: start_from: {{}}"
                )
            if source in self.start_from:
                raise ValueError(f"start_from.{task}: {source} itself starts from {self.start_from[source]}")
        for key, axes in (("grid", self.grid), *((f"task_grids.{t}", grid) for t, grid in self.task_grids.items())):
            for axis in axes:
                if axis not in AXES:
                    raise ValueError(str(unknown("axis", axis, AXES, where=key)))
        # Every protocol is built here once, so that a bad value is refused when the file is read.
        try:
            _points(self.protocol, self.grid, "grid")
            for task in {**self.per_task, **self.task_grids}:
                for axis in (axis for axis in self.axes_of(task) if axis in self.per_task.get(task, {})):
                    raise ValueError(f"per_task.{task}: {axis} is an axis of the grid; give its values in task_grids")
                self.settings_for(task)
        except UserError as error:  # only a ValueError gets the file's name from pydantic
            raise ValueError(str(error)) from error
        return self

    def _known_tasks(self) -> tuple[str, ...]:
        """Return the tasks that `per_task` may name."""
        return tuple(task_names())

    def protocol_for(self, task: str) -> Protocol:
        """Return the protocol of one task: the common one with the task's overrides.

        Raises:
            UserError: an override has a key that a protocol doesn't have, or a value that isn't allowed.
        """
        overrides = self.per_task.get(task)
        if not overrides:
            return self.protocol
        return parse_config(Protocol, overridden(self.protocol.model_dump(), overrides), where=f"per_task.{task}")

    def settings_for(self, task: str) -> dict[str, Protocol]:
        """Return a task's protocol at each point of its grid, by the point's name: `weight decay 1e-06, epochs 2`.

        The last axis varies fastest. Without a grid there is one protocol, whose name is the empty string.

        Raises:
            UserError: a value isn't allowed.
        """
        where = f"task_grids.{task}" if task in self.task_grids else "grid"
        return _points(self.protocol_for(task), self.axes_of(task), where)

    def axes_of(self, task: str) -> dict[str, tuple[Any, ...]]:
        """Return the axes of a task's grid with their values."""
        return {**self.grid, **self.task_grids.get(task, {})}


def _points(protocol: Protocol, axes: Mapping[str, tuple[Any, ...]], where: str) -> dict[str, Protocol]:
    points = {}
    for values in itertools.product(*axes.values()):
        point = parse_config(Protocol, {**protocol.model_dump(), **dict(zip(axes, values, strict=True))}, where=where)
        points[", ".join(_named(point, axis) for axis in axes)] = point
    return points


def searched(protocol: Protocol, setting: str) -> dict[str, Any]:
    """Return the axes of a grid with their values at one point; `setting` is the point's name, as in `settings_for`."""
    axes = AXES if setting else []
    return {axis: getattr(protocol, axis) for axis in axes if f", {_named(protocol, axis)}, " in f", {setting}, "}


def _named(protocol: Protocol, axis: str) -> str:
    value = getattr(protocol, axis)
    text = f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
    return f"{axis.replace('_', ' ')} {text}"


class ProtocolFile(TaskProtocols):
    """A protocol file, which may also give learning rates and seeds to spaces that have none."""

    description: Annotated[str, Role.DISPLAY] = ""
    learning_rates: Annotated[LearningRates | None, Role.CHOICE] = None
    """Peak learning rates to try, or a mapping of them with `extend`."""
    seeds: Annotated[SeedList | None, Role.CHOICE] = None
    """A list of seeds, their number, or a list for each random stream, of which all combinations are used."""


def find_protocol(name_or_path: str | Path, *, beside: Path | None = None) -> ProtocolFile:
    """Return the protocol of a packaged name (`study`) or of a YAML file.

    Args:
        beside: the folder of the search space that names the protocol; paths are looked up there first.

    Raises:
        UserError: there is no such name or file, a key is unknown, or a value is not allowed.
    """
    return load_config(ProtocolFile, packaged_or_path("protocol", name_or_path, PROTOCOLS, beside))


def with_protocol(space: Any, beside: Path | None = None) -> Any:
    """Merge the protocol that a space names into the space's values; return a space that names none unchanged.

    The space's own learning rates, seeds and settings, including those for single tasks, take precedence. A path is
    looked up in the folder `beside` first.

    Raises:
        ValueError: the protocol is missing or invalid.
    """
    named = space.get("protocol") if isinstance(space, dict) else None
    if isinstance(named, str):
        name, changes = named, {}
    elif isinstance(named, Mapping) and "base" in named:
        name, changes = named["base"], {key: value for key, value in named.items() if key != "base"}
    else:
        return space
    if not isinstance(name, str):
        raise ValueError(f"protocol.base is the name of a protocol or the path of a file (got {name!r})")
    try:
        base = find_protocol(name, beside=beside)
    except UserError as error:
        raise ValueError(f"protocol: {error}") from error
    overrides, tasks = space.get("per_task", {}), space.get("tasks") or ()
    if not isinstance(overrides, dict) or not all(isinstance(settings, dict) for settings in overrides.values()):
        per_task = overrides  # validation will refuse it and say where it is
    else:
        # Overrides for tasks that the space doesn't have would be refused as unknown tasks.
        inherited = {task: old for task, old in base.per_task.items() if task in tasks}
        per_task = inherited | {task: overridden(inherited.get(task, {}), new) for task, new in overrides.items()}
    grids: dict[str, Any] = {}
    if "grid" not in space:
        task_grids = space.get("task_grids", {})
        if isinstance(task_grids, dict):  # else validation will refuse it
            task_grids = {task: axes for task, axes in base.task_grids.items() if task in tasks} | task_grids
        grids = {"grid": base.grid, "task_grids": task_grids}
        for axis in base.grid:
            if axis in changes:
                raise ValueError(
                    f"protocol.{axis}: it is an axis of the grid of protocol {name!r}; give a grid of your own"
                )
    axes = {"learning_rates": base.learning_rates, "seeds": base.seeds}
    rates = space.get("learning_rates")
    if isinstance(rates, Mapping) and "extend" in rates and base.learning_rates is not None:
        space = {**space, "learning_rates": {"values": base.learning_rates, **rates}}
    # Later entries win: first the protocol's values, then the space's own, then those merged from both.
    return {
        **{key: value for key, value in axes.items() if value is not None},
        "metrics": base.metrics,
        "rule": base.rule,
        "start_from": {task: source for task, source in base.start_from.items() if task in tasks},
        **space,
        **grids,
        "protocol": overridden(base.protocol.model_dump(), changes),
        "per_task": per_task,
    }
