"""The declarations of all tasks.

Tasks are declared by the YAML files in `mlmclm/tasks/declarations/`, in the packages that installed distributions name
under the entry point group `mlmclm.tasks`, and in the user's folders (`--task-dir`). Others are registered in this process.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from mlmclm.configuration import parse_config, read_yaml
from mlmclm.errors import UserError, unknown
from mlmclm.registry import KINDS, Registry, describe_entry_point, report_left_out
from mlmclm.tasks.declaration import Task

FOLDER = Path(__file__).parent / "declarations"
TASKS: Registry[Task] = KINDS["task"]
"""The tasks that are registered in this process. The registry's entry points name packages of declarations."""


@dataclass(frozen=True)
class Broken:
    """A file that does not declare a valid task. It does not prevent the use of other files' tasks."""

    file: Path
    names: frozenset[str]
    """Names of the tasks that the file would declare; for a malformed file, the file's own name."""
    reason: str
    """Error message."""


Declared = dict[str, tuple[Task, Path]]
"""Tasks by name, with their files."""


def _read(folder: Path, tasks: Declared, broken: list[Broken]) -> None:
    """Add the tasks that a folder declares, and its broken files."""
    for file in sorted(folder.glob("*.yaml")):
        names = {file.stem}
        try:
            content = read_yaml(file)
            if isinstance(content, dict) and isinstance(content.get("name"), str):
                names = {content["name"]}
            task = parse_config(Task, content, where=str(file))
            if task.name in tasks:
                raise UserError(f"{file}: the task {task.name!r} is already declared by {tasks[task.name][1]}.")
            tasks[task.name] = (task, file)
        except UserError as error:
            broken.append(Broken(file, frozenset(names), str(error)))


@lru_cache(maxsize=1)
def _installed() -> tuple[Declared, list[Broken]]:
    """Return the tasks of this package and of other installed packages.

    The code of the other packages is not run: `find_spec` imports only the parents of a package.
    """
    tasks: Declared = {}
    broken: list[Broken] = []
    _read(FOLDER, tasks, broken)
    ours = frozenset(tasks)
    for point in TASKS.points():
        try:
            spec = importlib.util.find_spec(point.value)
        except (Exception, SystemExit):  # whatever the package's parents raise
            spec = None
        folders = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
        if not folders:
            report_left_out(
                f"{describe_entry_point(point)}: {point.value!r} is not a package that is installed; it must name the package whose folder holds "
                "the YAML files."
            )
        for folder in folders:
            _read(folder, tasks, broken)
    for bad in broken:
        if bad.names & ours:
            report_left_out(bad.reason)
    return tasks, [replace(bad, names=bad.names - ours) for bad in broken]


def _declared(folders: Sequence[Path]) -> tuple[Declared, list[Broken]]:
    installed, faulty = _installed()
    tasks, broken = dict(installed), list(faulty)
    for task in TASKS.values():
        if task.name in tasks:
            raise UserError(f"the task {task.name!r} that is registered is already declared by {tasks[task.name][1]}.")
        tasks[task.name] = task, Path("registered", task.name)
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"--task-dir {folder}: no such folder.")
        if not any(folder.glob("*.yaml")):
            raise UserError(f"--task-dir {folder}: there is no declaration of a task (*.yaml) in it.")
        _read(folder, tasks, broken)
    return tasks, broken


def find_tasks(folders: Sequence[Path] = ()) -> dict[str, Task]:
    """Return all tasks by name, sorted, without those of `broken_files`.

    `folders` are the user's, with one YAML file per task. Raises UserError if a folder is missing or has no declarations.
    """
    tasks, _ = _declared(folders)
    return {name: tasks[name][0] for name in sorted(tasks)}


def broken_files(folders: Sequence[Path] = ()) -> list[Broken]:
    """Return the files that are malformed or declare a name that is already used (`find_tasks`)."""
    return _declared(folders)[1]


def task_names() -> list[str]:
    """Return the names of all installed tasks, sorted."""
    return list(find_tasks())


def user_files(names: Iterable[str], folders: Sequence[Path]) -> dict[str, Path]:
    """Return the files of those tasks that the user's folders declare, by the task's name."""
    tasks, _ = _declared(folders)
    return {name: tasks[name][1] for name in names if name in tasks and tasks[name][1].parent in folders}


def get_task(name: str, folders: Sequence[Path] = ()) -> Task:
    """Return the declaration with this name (`find_tasks`); raise UserError if there is none or its file is broken."""
    tasks, broken = _declared(folders)
    reasons = [entry.reason for entry in broken if name in entry.names]
    if reasons:
        raise UserError("\n".join(reasons))
    if name not in tasks:
        files = ", ".join(str(entry.file) for entry in broken)
        hint = f" Files that cannot be used (`mlmclm tasks --task-dir FOLDER` says why): {files}." if files else ""
        advice = "" if folders else " A task of your own is found in the folder of its declaration: --task-dir FOLDER."
        raise UserError(f"{unknown('task', name, sorted(tasks))}{hint}{advice}")
    return tasks[name][0]
