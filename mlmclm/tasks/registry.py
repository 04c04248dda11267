"""The tasks that there are: every YAML file in `mlmclm/tasks/declarations/`, in the folders that installed packages name
under the entry point group `mlmclm.tasks`, and in the user's own folders (`--task-dir`)."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from mlmclm.configuration import load_config
from mlmclm.errors import UserError, for_each, unknown
from mlmclm.tasks.declaration import Task

FOLDER = Path(__file__).parent / "declarations"
ENTRY_POINTS = "mlmclm.tasks"
"""`my_tasks = "my_package.tasks"` in this group: the YAML files in the folder of that package. None of its code is run but
that of the packages around it."""


def read_declarations(files: Iterable[Path]) -> dict[str, Task]:
    """Tasks by name.

    Raises:
        UserError: a file is malformed, or two declare the same name.
    """
    return {name: task for name, (task, _) in _read(files, {}).items()}


def _read(files: Iterable[Path], known: dict[str, tuple[Task, Path]]) -> dict[str, tuple[Task, Path]]:
    """Tasks and their files by name: those known and those of more files."""
    found = dict(known)

    def add(file: Path) -> None:
        task = load_config(Task, file)
        if task.name in found:
            raise UserError(f"{file}: the task {task.name!r} is already declared by {found[task.name][1]}.")
        found[task.name] = (task, file)

    for_each(sorted(files), add)
    return found


@lru_cache(maxsize=1)
def _installed() -> dict[str, tuple[Task, Path]]:
    """The packaged tasks and those of other installed packages."""
    found = _read(FOLDER.glob("*.yaml"), {})
    for point in sorted(importlib.metadata.entry_points(group=ENTRY_POINTS), key=lambda point: point.name):
        try:
            spec = importlib.util.find_spec(point.value)
        except ImportError:
            spec = None
        folders = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
        if not folders:
            raise UserError(
                f"entry point {point.name!r} of the group {ENTRY_POINTS}: {point.value!r} is not a package that is "
                "installed; it must name the package whose folder holds the YAML files."
            )
        for folder in folders:
            found = _read(folder.glob("*.yaml"), found)
    return found


def find_tasks(folders: Sequence[Path] = ()) -> dict[str, Task]:
    """All tasks by name, sorted.

    Args:
        folders: the user's own, each with one YAML file a task.

    Raises:
        UserError: a folder is missing or without declarations, a file is malformed, or a name is declared twice.
    """
    found = _installed()
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"--task-dir {folder}: no such folder.")
        files = list(folder.glob("*.yaml"))
        if not files:
            raise UserError(f"--task-dir {folder}: there is no declaration of a task (*.yaml) in it.")
        found = _read(files, found)
    return {name: found[name][0] for name in sorted(found)}


def task_names() -> list[str]:
    """The names of all installed tasks, sorted."""
    return list(find_tasks())


def get_task(name: str, folders: Sequence[Path] = ()) -> Task:
    """The declaration of this name.

    Args:
        folders: as in `find_tasks`.

    Raises:
        UserError: there is none; the message has the nearest and all allowed.
    """
    tasks = find_tasks(folders)
    if name not in tasks:
        raise unknown("task", name, tasks)
    return tasks[name]
