"""The declarations of all tasks.

Tasks are declared by the YAML files in `mlmclm/tasks/declarations/`, in the packages that installed distributions name
under the entry point group `mlmclm.tasks`, and in the user's folders (`--task-dir`). Others are registered in this process.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
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


@dataclass(frozen=True)
class Declared:
    """Tasks by name with their files, and the broken files."""

    tasks: Mapping[str, tuple[Task, Path]]
    broken: tuple[Broken, ...] = ()


def _read(files: Iterable[Path], declared: Declared) -> Declared:
    """Add the tasks of these files to those declared before."""
    tasks, broken = dict(declared.tasks), list(declared.broken)
    for file in sorted(files):
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
    return Declared(tasks, tuple(broken))


@lru_cache(maxsize=1)
def _installed() -> Declared:
    """Return the tasks of this package and of other installed packages.

    The code of the other packages is not run: `find_spec` imports only the parents of a package.
    """
    declared = ours = _read(FOLDER.glob("*.yaml"), Declared({}))
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
            declared = _read(folder.glob("*.yaml"), declared)
    for bad in declared.broken:
        if bad.names & ours.tasks.keys():
            report_left_out(bad.reason)
    return Declared(declared.tasks, tuple(replace(bad, names=bad.names - ours.tasks.keys()) for bad in declared.broken))


def _declared(folders: Sequence[Path]) -> Declared:
    declared = _installed()
    for task in TASKS.values():
        if task.name in declared.tasks:
            raise UserError(
                f"the task {task.name!r} that is registered is already declared by {declared.tasks[task.name][1]}."
            )
        declared = Declared({**declared.tasks, task.name: (task, Path("registered", task.name))}, declared.broken)
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"--task-dir {folder}: no such folder.")
        files = list(folder.glob("*.yaml"))
        if not files:
            raise UserError(f"--task-dir {folder}: there is no declaration of a task (*.yaml) in it.")
        declared = _read(files, declared)
    return declared


def find_tasks(folders: Sequence[Path] = ()) -> dict[str, Task]:
    """Return all tasks by name, sorted, without those of `broken_files`.

    `folders` are the user's, with one YAML file per task. Raises UserError if a folder is missing or has no declarations.
    """
    tasks = _declared(folders).tasks
    return {name: tasks[name][0] for name in sorted(tasks)}


def broken_files(folders: Sequence[Path] = ()) -> tuple[Broken, ...]:
    """Return the files that are malformed or declare a name that is already used (`find_tasks`)."""
    return _declared(folders).broken


def task_names() -> list[str]:
    """Return the names of all installed tasks, sorted."""
    return list(find_tasks())


def user_files(names: Iterable[str], folders: Sequence[Path]) -> dict[str, Path]:
    """Return the files of those tasks that the user's folders declare, by the task's name."""
    declared = _declared(folders).tasks
    return {name: declared[name][1] for name in names if name in declared and declared[name][1].parent in folders}


def get_task(name: str, folders: Sequence[Path] = ()) -> Task:
    """Return the declaration with this name (`find_tasks`); raise UserError if there is none or its file is broken."""
    declared = _declared(folders)
    reasons = [entry.reason for entry in declared.broken if name in entry.names]
    if reasons:
        raise UserError("\n".join(reasons))
    if name not in declared.tasks:
        broken = ", ".join(str(entry.file) for entry in declared.broken)
        hint = f" Files that cannot be used (`mlmclm tasks --task-dir FOLDER` says why): {broken}." if broken else ""
        advice = "" if folders else " A task of your own is found in the folder of its declaration: --task-dir FOLDER."
        raise UserError(f"{unknown('task', name, sorted(declared.tasks))}{hint}{advice}")
    return declared.tasks[name][0]
