"""The tasks that there are: every YAML file in `mlmclm/tasks/declarations/`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from mlmclm.configuration import load_config
from mlmclm.errors import UserError, unknown
from mlmclm.tasks.declaration import Task

FOLDER = Path(__file__).parent / "declarations"


def read_declarations(files: Iterable[Path]) -> dict[str, Task]:
    """Tasks by name.

    Raises:
        UserError: a file is malformed, or two declare the same name.
    """
    tasks: dict[str, Task] = {}
    origin: dict[str, Path] = {}
    for file in sorted(files):
        task = load_config(Task, file)
        if task.name in tasks:
            raise UserError(f"{file}: the task {task.name!r} is already declared by {origin[task.name]}.")
        tasks[task.name], origin[task.name] = task, file
    return tasks


@lru_cache(maxsize=1)
def _packaged() -> dict[str, Task]:
    return read_declarations(FOLDER.glob("*.yaml"))


def task_names() -> list[str]:
    """All names, sorted."""
    return sorted(_packaged())


def get_task(name: str) -> Task:
    """The declaration of this name.

    Raises:
        UserError: there is none; the message has the nearest and all allowed.
    """
    task = _packaged().get(name)
    if task is None:
        raise unknown("task", name, task_names())
    return task
