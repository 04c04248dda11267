"""A search space: the learning rates, seeds and tasks that a sweep covers, and the protocol for fine-tuning a cell.

A space is a YAML file, either one of the packaged ones (`tune_spaces/NAME.yaml`) or the user's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from mlmclm.configuration import load_config, parse, read_yaml
from mlmclm.sweeps.packaged import names_in, packaged_or_own, spaces_folder
from mlmclm.sweeps.protocols import LearningRates, SeedList, TaskProtocols, with_protocol, without_duplicates
from mlmclm.sweeps.retries import Retries


class Space(TaskProtocols):
    """The axes of a sweep. Its cells are models x `tasks` x `learning_rates` x `seeds`, at each point of a task's `grid`.

    A seed is one number for a cell's three random streams, or a mapping with a number for each. `seeds` is a list of
    seeds, or a mapping with a list for each stream, which stands for all combinations:
    `{head: [0], order: [0, 1, 2], dropout: [0]}`.

    `protocol` takes one of three forms: a mapping of settings; the name of a packaged protocol or the path of a
    protocol file (relative to the space's file, else to the working directory); or a mapping with such a name as `base`
    and the settings to change. A named protocol brings its learning rates and seeds if the space has none. `per_task`
    overrides keys of `protocol` for single tasks, for instance `conll2003: {epochs: 1, max_steps: null}`.

    `cpus_per_cell` and `gpus_per_cell` are what one running cell reserves of the cluster. A fraction of a GPU lets
    several cells share it; they then share its memory too, without any guard. With 0, cells run on CPUs. Without
    `gpus_per_cell`, a cell has a GPU if the recipe's `device` says so: by default if the cluster has any or can get
    any. `max_concurrent` is the most cells that run at once. A cell that takes longer than `time_limit` seconds is ended
    and counts as failed. `retries` says how often a cell is run again after each class of failure.
    """

    description: str = ""
    tasks: Annotated[tuple[str, ...], Field(min_length=1), AfterValidator(without_duplicates)]
    learning_rates: LearningRates
    seeds: SeedList
    cpus_per_cell: float = Field(default=1, gt=0)
    gpus_per_cell: float | None = Field(default=None, ge=0)
    max_concurrent: int | None = Field(default=None, ge=1)
    retries: Retries = Retries()
    time_limit: float | None = Field(default=None, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _named_protocol(cls, values: Any, info: ValidationInfo) -> Any:
        return with_protocol(values, (info.context or {}).get("folder"))

    @field_validator("gpus_per_cell")
    @classmethod
    def _whole_or_fraction(cls, value: float | None) -> float | None:
        if value is not None and value > 1 and value != int(value):
            raise ValueError("is a fraction below 1 or a whole number of GPUs")
        return value

    def _known_tasks(self) -> tuple[str, ...]:
        return self.tasks

    @property
    def cells_a_model(self) -> int:
        """Number of cells per model."""
        return sum(map(self.cells_of, self.tasks))

    def cells_of(self, task: str) -> int:
        """Return the number of cells per model on a task."""
        return len(self.settings_for(task)) * len(self.learning_rates) * len(self.seeds)

    def common_settings(self) -> dict[str, Any]:
        """Return the settings that all tasks share, except the grid's axes."""
        return {name: value for name, value in self.protocol.identity().items() if name not in self.grid}

    def axes(self) -> dict[str, list[Any]]:
        """Return the grid's axes and values, for display: `weight_decay`, or `qnli: epochs` for one task's own."""
        own = {
            f"{task}: {axis}": list(values) for task, axes in self.task_grids.items() for axis, values in axes.items()
        }
        return {axis: list(values) for axis, values in self.grid.items()} | own

    def at_context(self, context: int) -> Space:
        """Return the space for models of this context length in tokens; lengths given as shares of it become numbers.

        Raises:
            UserError: the settings don't fit that length.
        """
        shares = {task: self.protocol_for(task) for task, changes in self.per_task.items() if "length_share" in changes}
        lengths = {
            task: {"length_share": None, "max_length": settled.max_length, "stride": settled.stride}
            for task, protocol in shares.items()
            for settled in [protocol.at_context(context)]
        }
        per_task = {task: {**changes, **lengths.get(task, {})} for task, changes in self.per_task.items()}
        return self.model_copy(update={"protocol": self.protocol.at_context(context), "per_task": per_task})


def space_names() -> list[str]:
    """Return the names of the packaged spaces, sorted."""
    return names_in(spaces_folder())


def find_space(name_or_path: str | Path, tasks: Sequence[str] | None = None, *, beside: Path | None = None) -> Space:
    """Return the space of a packaged name (`quickstart`) or of a YAML file.

    Args:
        tasks: tasks to use in place of the space's own; settings for other tasks are then dropped.
        beside: the folder of the study file that names it; paths are looked up there first.

    Raises:
        UserError: there is no such name (the message has the nearest one) or file, a key is unknown, or a value is not
            allowed.
    """
    path = packaged_or_own("search space", name_or_path, spaces_folder(), beside)
    context = {"folder": path.parent}
    space = load_config(Space, path, context=context)
    if tasks is None:
        return space
    # Parsed again from the file, because what a named protocol contributes depends on the tasks.
    values = read_yaml(path)
    own = {
        key: {task: changes for task, changes in values[key].items() if task in tasks}
        for key in ("per_task", "task_grids", "start_from")
        if values.get(key)
    }
    return parse(Space, values | {"tasks": list(tasks)} | own, where=str(path), context=context)
