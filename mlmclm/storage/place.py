"""The folders that a study works in, and the studies that come with the package."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

from mlmclm.arguments import StudyFolders
from mlmclm.errors import UserError, meant
from mlmclm.storage.packaged import packaged_names

STORE, DATA, TASK_DIR = "MLMCLM_STORE", "MLMCLM_DATA", "MLMCLM_TASK_DIR"
"""Environment variables that take the place of arguments and options that are not given."""
DEFAULT_STORE = Path("store")
STUDIES = "studies"
"""Folder of a store with one folder for each study."""
LOCK = ".lock"
"""File in a study's folder; a process that works on the study locks it."""


@dataclass(frozen=True)
class Place:
    """The folders of a study: the store, which keeps everything, and `data_root`, whose data sets replace those of the Hub."""

    store: Path
    data_root: Path | None = None
    task_dirs: tuple[Path, ...] = ()
    """Folders with the user's own task declarations."""

    def study_folder(self, name: str) -> Path:
        """Return the folder of a study, which holds its report, its tables and links to the files of its models."""
        return self.store / STUDIES / name


def open_store(given: str | Path) -> Path:
    """Return a store's folder; for a store at an address, fetch the files of its studies first.

    Raises:
        UserError: the address cannot be used, or there is no such bucket.
        EnvironmentFault: the object store cannot be reached.
    """
    if "://" not in str(given):
        return Path(given)
    # Every command imports this module, and the clients of object stores take longer to import than the rest of it.
    from mlmclm.storage.addresses import bring_files, local_store

    folder = local_store(given)
    bring_files(folder / STUDIES)
    return folder


def open_place(**folders: Unpack[StudyFolders]) -> Place:
    """Return the resolved folders, and write `wait_for_storage` to the store if it is given.

    Raises:
        UserError: the data folder doesn't exist, or `wait_for_storage` is given for a store that is a folder.
        EnvironmentFault: the object store of a store at an address cannot be reached.
    """
    store = open_store(folders.get("store") or os.environ.get(STORE) or DEFAULT_STORE).resolve()
    data = _data(folders)
    if data is not None and not data.is_dir():
        raise UserError(f"--data {data}: no such folder.")
    if (seconds := folders.get("wait_for_storage")) is not None:
        from mlmclm.storage.results_place import wait_for_storage

        wait_for_storage(store, seconds)
    return Place(store, data.resolve() if data is not None else None, tuple(map(Path.resolve, _tasks(folders))))


def command_of(verb: str, *words: str, **folders: Unpack[StudyFolders]) -> str:
    """Return the command that computes a study again, as the report shows it."""
    data = _data(folders)
    more = [] if data is None else ["--data", str(data)]
    more += [word for folder in _tasks(folders) for word in ("--task-dir", str(folder))]
    return shlex.join(["mlmclm", verb, *words, *more])


def _data(folders: StudyFolders) -> Path | None:
    data = folders.get("data") or os.environ.get(DATA)
    return Path(data) if data else None


def _tasks(folders: StudyFolders) -> list[Path]:
    task_dirs = folders.get("task_dirs")
    if task_dirs is None:
        task_dirs = [folder for folder in os.environ.get(TASK_DIR, "").split(os.pathsep) if folder]
    return [Path(folder) for folder in task_dirs]


EXAMPLES, REPLICATIONS = (Path(__file__).parents[1] / name for name in ("examples", "replications"))
"""Folders of the packaged studies: in a checkout links to its top-level folders, in a wheel the files themselves."""


def packaged_studies() -> dict[str, Path]:
    """Return the files of the packaged studies and replications by name."""
    return {name: folder / f"{name}.yaml" for folder in (EXAMPLES, REPLICATIONS) for name in packaged_names(folder)}


def file_of(path: Path) -> Path:
    """Return the path of a study or sweep file; the bare name of a packaged study (`quickstart`) stands for its file.

    Raises:
        UserError: a bare name is neither that of a packaged study nor that of a file in the working directory.
    """
    name, packaged = str(path), packaged_studies()
    if path.suffix or len(path.parts) != 1 or path.is_file():
        return path
    if name not in packaged:
        raise UserError(
            f"{name}: no such file, and no packaged study.{meant(name, packaged)} Packaged studies: {', '.join(packaged)}."
        )
    return packaged[name]
