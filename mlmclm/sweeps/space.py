"""A search space: the learning rates, seeds and tasks that a sweep covers, and the protocol for fine-tuning a cell.

A space is a YAML file, either one of the packaged ones (`tune_spaces/NAME.yaml`) or the user's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from mlmclm.configuration import Enters, Role, described_as, parse_config, read_yaml
from mlmclm.errors import UserError, unknown
from mlmclm.finetuning.protocol import Protocol, overridden
from mlmclm.seeds import Seed
from mlmclm.storage.packaged import SPACES, packaged_or_path
from mlmclm.sweeps.cell_failures import Retries
from mlmclm.sweeps.learning_rates import LearningRates, without_duplicates
from mlmclm.sweeps.protocols import Changes, TaskProtocols, with_protocol
from mlmclm.sweeps.seed_list import SeedList, StatedNoise

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
