"""A search space: the learning rates, seeds and tasks that a sweep covers, and the protocol for fine-tuning a cell.

A space is a YAML file, either one of the packaged ones (`tune_spaces/NAME.yaml`) or the user's own. So is a protocol
(`tune_spaces/protocols/NAME.yaml`): how cells are fine-tuned, and over which learning rates and seeds, but not on which tasks.
A space names one (`protocol: study`), and may override some of its settings (`protocol: {base: study, batch_size: 16}`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from mlmclm.configuration import Enters, Frozen, Role, described_as, load_config, parse_config, read_yaml
from mlmclm.errors import UserError, unknown
from mlmclm.finetuning.protocol import Protocol, overridden
from mlmclm.results.metrics import Rule
from mlmclm.seeds import Seed
from mlmclm.storage.packaged import PROTOCOLS, SPACES, packaged_or_path
from mlmclm.sweeps.axes import LearningRates, SeedList, StatedNoise, without_duplicates
from mlmclm.sweeps.cell_failures import Retries
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


Overrides = Mapping[str, Mapping[str, Any]]
"""Task or model -> settings in place of the protocol's."""


class NamedProtocol(Protocol):
    """A packaged protocol or a protocol file, with some of its settings changed."""

    base: Annotated[str, Role.DISPLAY]
    """Name of the protocol, or path of its file."""


def _as_accepted(schema: dict[str, Any]) -> None:
    """Make learning rates and seeds optional in a space's JSON Schema where a named protocol may provide them."""
    schema["required"] = ["tasks", "protocol"]
    named = {"properties": {"protocol": {"anyOf": [{"type": "string"}, {"required": ["base"]}]}}}
    schema["anyOf"] = [{"required": ["learning_rates", "seeds"]}, named]


class Space(TaskProtocols):
    """The axes of a sweep. Its cells are models x `tasks` x `learning_rates` x `seeds`, at each point of a task's `grid`.

    Settings come from `protocol`, unless `per_task` or `per_model` changes them for the cell's task or model. If both
    do, the model's value takes precedence.
    """

    model_config = ConfigDict(json_schema_extra=_as_accepted)

    description: Annotated[str, Role.DISPLAY] = ""
    tasks: Annotated[tuple[str, ...], Field(min_length=1), AfterValidator(without_duplicates), Role.CHOICE]
    """Names of tasks (`mlmclm tasks` lists them)."""
    learning_rates: Annotated[LearningRates, Role.CHOICE]
    """Peak learning rates to try, the same for all models and tasks.

    With `{values: [1.0e-3, 2.0e-3, 4.0e-3], extend: true}`, while the best rate of any model on a task is the lowest or the
    highest, the sweep adds the next rate on that side for all models on this task, by the step of the list. It adds at most 3 at
    each end, or as many as the number `extend`. Without `values`, the list is that of the named protocol."""
    seeds: Annotated[SeedList, Role.CHOICE]
    """Seeds: one number for a cell's three random streams, or a mapping with a number for each.

    A mapping with a list for each stream stands for all combinations: `{head: [0], order: [0, 1, 2], dropout: [0]}`.

    A single number, `7`, means the seeds 0 to 6. `--dry-run` shows how many seeds it takes to find a difference."""
    noise: Annotated[dict[str, StatedNoise], Role.CHOICE] = Field(default_factory=dict)
    """Task -> noise of its scores, in points: `{rte: {seeds: 2.7, test_set: 1.1}}`. `--dry-run` uses it in place of
    the noise of results."""
    protocol: Annotated[Protocol, described_as(str | NamedProtocol | Protocol), Role.WEIGHTS, Enters.INDIRECTLY]
    """How cells are fine-tuned, in one of three forms: a mapping of settings; the name of a packaged protocol or the path
    of a protocol file (relative to the space's file, else to the working directory); or a mapping with such a name as
    `base` and the settings to change. A named protocol's learning rates and seeds are used if the space has none."""
    per_model: Annotated[dict[str, Changes], Role.WEIGHTS, Enters.INDIRECTLY] = Field(default_factory=dict)
    """Model -> settings in place of the protocol's and of the task's own: `{big: {batch_size: 8}}`."""
    cpus_per_cell: Annotated[float, Role.WORK] = Field(default=1, gt=0)
    """CPUs of the cluster that a running cell reserves."""
    gpus_per_cell: Annotated[float | None, Role.WORK] = Field(default=None, ge=0)
    """GPUs that a running cell reserves.

    A fraction lets several cells share a GPU: four with 0.25. They then share its memory too, and no cell's part is limited. With 0,
    cells run on CPUs. By default a cell has a GPU if the recipe's `device` says so; with `auto`, if the cluster has any or
    can get any."""
    max_concurrent: Annotated[int | None, Role.WORK] = Field(default=None, ge=1)
    """The most cells that run at once."""
    retries: Annotated[Retries, Role.WORK] = Retries()
    """How often a cell is run again after each class of failure."""
    time_limit: Annotated[float | None, Role.WORK] = Field(default=None, gt=0)
    """Seconds after which a cell is ended and counts as failed."""

    @model_validator(mode="before")
    @classmethod
    def _named_protocol(cls, values: Any, info: ValidationInfo) -> Any:
        return with_protocol(values, (info.context or {}).get("folder"))

    @field_validator("gpus_per_cell", mode="before")
    @classmethod
    def _whole_or_fraction(cls, value: Any) -> Any:
        if isinstance(value, str) or (isinstance(value, float) and value > 1 and value != int(value)):
            raise ValueError(f"a fraction of a GPU, such as 0.25, or a whole number of GPUs (got {value!r})")
        return value

    @model_validator(mode="after")
    def _tasks_are_there(self) -> Space:
        for task in self.noise:
            if task not in self.tasks:
                raise ValueError(str(unknown("task", task, self.tasks, where="noise")))
        return self

    @model_validator(mode="after")
    def _model_overrides_fit(self) -> Space:
        for model, changes in self.per_model.items():
            for axis in (axis for task in self.tasks for axis in self.axes_of(task) if axis in changes):
                raise ValueError(f"per_model.{model}: {axis} is an axis of the grid")
            try:
                space = self.for_model(model)
                for task in self.tasks:
                    space.settings_for(task)
            except UserError as error:
                raise ValueError(f"per_model.{model}: {str(error).removeprefix(f'per_model.{model}: ')}") from error
        return self

    def _known_tasks(self) -> tuple[str, ...]:
        return self.tasks

    @property
    def cells_a_model(self) -> int:
        """Number of cells per model."""
        return sum(map(self.cells_of, self.tasks))

    def cells_of(self, task: str) -> int:
        """Return the number of cells per model on a task."""
        return len(self.settings_for(task)) * len(self.learning_rates) * len(self.seeds)

    def cells_added_at_most(self, task: str) -> int:
        """Return the most cells per model that results may add on a task, at further learning rates."""
        widest = len(self.settings_for(task)) * len(self.learning_rates.widest) * len(self.seeds)
        return widest - self.cells_of(task)

    def for_model(self, model: str) -> Space:
        """Return the space for one model, with the model's overrides applied to all tasks.

        Raises:
            UserError: an override has a key that a protocol doesn't have, or a value that isn't allowed.
        """
        changes = self.per_model.get(model, {})
        protocol = overridden(self.protocol.model_dump(), changes)
        update = {
            "protocol": parse_config(Protocol, protocol, where=f"per_model.{model}"),
            "per_task": {task: overridden(settings, changes) for task, settings in self.per_task.items()},
            "per_model": {},
        }
        return self.model_copy(update=update) if changes else self

    def check_models(self, models: Iterable[str]) -> None:
        """Refuse overrides for models that a sweep doesn't have.

        Raises:
            UserError: there are such overrides; the message has the nearest name.
        """
        allowed = list(models)
        for model in self.per_model:
            if model not in allowed:
                raise unknown("model", model, allowed, where="per_model")

    def common_settings(self) -> dict[str, Any]:
        """Return the settings that all tasks share, except the grid's axes."""
        return {name: value for name, value in self.protocol.identity().items() if name not in self.grid}

    def axes(self) -> dict[str, list[Any]]:
        """Return the grid's axes and values, for display: `weight_decay`, or `qnli: epochs` for an axis of one task."""
        per_task = {
            f"{task}: {axis}": list(values) for task, axes in self.task_grids.items() for axis, values in axes.items()
        }
        return {axis: list(values) for axis, values in self.grid.items()} | per_task

    def of_models(self) -> dict[str, Any]:
        """Return the overrides for models, for display: `big: batch_size`."""
        return {f"{model}: {name}": value for model, values in self.per_model.items() for name, value in values.items()}

    def at_context(self, context: int) -> Space:
        """Return the space for models of this context length in tokens; lengths given as shares of it become numbers.

        Raises:
            UserError: the settings don't fit that length.
        """
        per_task = dict(self.per_task)
        for task, changes in self.per_task.items():
            if "length_share" in changes:
                protocol = self.protocol_for(task).at_context(context)
                resolved = {"length_share": None, "max_length": protocol.max_length, "stride": protocol.stride}
                per_task[task] = {**changes, **resolved}
        return self.model_copy(update={"protocol": self.protocol.at_context(context), "per_task": per_task})


def find_space(
    given: str | Path | Mapping[str, Any],
    tasks: Sequence[str] | None = None,
    *,
    beside: Path | None = None,
    seeds: Sequence[Seed] | None = None,
    per_task: Overrides | None = None,
    per_model: Overrides | None = None,
) -> Space:
    """Return the space of a packaged name (`quickstart`), of a YAML file, or of the values that such a file has.

    Args:
        tasks: tasks to use in place of the space's own; settings for other tasks are then dropped.
        beside: the folder of the study file that names the space; paths are looked up there first.
        seeds: seeds to use in place of the space's own.
        per_task: the study file's overrides, which take precedence over the space's.
        per_model: the same for models.

    Raises:
        UserError: there is no such name or file, a key is unknown, or a value is not allowed.
    """
    if isinstance(given, Mapping):
        where, folder, values = "space", beside, dict(given)
    else:
        path = packaged_or_path("search space", given, SPACES, beside)
        where, folder, values = str(path), path.parent, read_yaml(path)
    context = {"folder": folder}
    if seeds is not None:
        values["seeds"] = seeds
    space = parse_config(Space, values, where=where, context=context)
    if tasks is None and not per_task and not per_model:
        return space
    # Parsed again, because what a named protocol contributes depends on the tasks.
    if tasks is not None:
        values["tasks"] = list(tasks)
        for key in ("per_task", "task_grids", "start_from", "noise"):
            if values.get(key):  # an empty one stays, because it replaces the protocol's
                values[key] = {task: changes for task, changes in values[key].items() if task in tasks}
    for key, overrides in (("per_task", per_task or {}), ("per_model", per_model or {})):
        base = values.get(key) or {}
        values[key] = base | {
            name: overridden(base[name], changes) if name in base else changes for name, changes in overrides.items()
        }
    where = f"{where}, with what the study or sweep changes" if per_task or per_model else where
    return parse_config(Space, values, where=where, context=context)
