"""The folders that a study works in."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mlmclm.errors import UserError

if TYPE_CHECKING:
    from mlmclm.studies.study_file import StudyFile
    from mlmclm.studies.sweep_file import SweepFile

STORE, DATA, TASK_DIR = "MLMCLM_STORE", "MLMCLM_DATA", "MLMCLM_TASK_DIR"
"""Environment variables that take the place of arguments and options that are not given."""
DEFAULT_STORE = Path("store")


@dataclass(frozen=True)
class Place:
    """The folders of a study: the store, which keeps everything, and `data_root`, which stands in for the hub."""

    store: Path
    data_root: Path | None = None
    task_dirs: tuple[Path, ...] = ()
    """Folders with the user's own task declarations."""

    def study_folder(self, study: StudyFile | SweepFile) -> Path:
        """Return the folder of a study or sweep, which holds its report, its tables and links to the files of its models."""
        return self.store / "studies" / study.name


@dataclass(frozen=True)
class UserFolders:
    """The folders as a user gives them; what is not given is taken from the environment.

    Args:
        store: folder that keeps everything; by default MLMCLM_STORE, else `store` in the working directory.
        data: folder of local data sets that stand in for the Hugging Face Hub; by default MLMCLM_DATA, if it is set.
        task_dirs: folders of the user's own tasks; by default those of MLMCLM_TASK_DIR.
        ledger: where results are kept in place of the store, a folder or `s3://bucket/prefix`; the store remembers it.
        wait_for_storage: seconds for which an outage of the results' object store is waited for; the store remembers it.
    """

    store: str | Path | None = None
    data: str | Path | None = None
    task_dirs: Sequence[str | Path] | None = None
    ledger: str | None = None
    wait_for_storage: float | None = None

    def place(self) -> Place:
        """Return the resolved folders, and note in the store where its results are if that is given.

        Raises:
            UserError: the data folder doesn't exist, or the results cannot be there.
            EnvironmentFault: the object store of the results cannot be reached.
        """
        store = Path(self.store or os.environ.get(STORE) or DEFAULT_STORE).resolve()
        data = self._data
        if data is not None and not data.is_dir():
            raise UserError(f"--data {data}: no such folder.")
        if self.ledger is not None or self.wait_for_storage is not None:
            from mlmclm.sweeps.ledger_place import place_ledger

            if self.ledger is not None and self.ledger.startswith("memory://"):
                raise UserError(
                    f"--ledger {self.ledger}: no other process would see these results. Give a folder, or s3://, gs:// or abfs://."
                )
            place_ledger(store, self.ledger, wait=self.wait_for_storage)
        return Place(store, data.resolve() if data is not None else None, tuple(map(Path.resolve, self._tasks)))

    def command(self, verb: str, *words: str) -> str:
        """Return the command that computes a study or sweep again, as the report shows it."""
        data = [f"--data {self._data}"] if self._data is not None else []
        return " ".join([f"mlmclm {verb}", *words, *data, *(f"--task-dir {folder}" for folder in self._tasks)])

    @property
    def _data(self) -> Path | None:
        given = self.data or os.environ.get(DATA)
        return Path(given) if given else None

    @property
    def _tasks(self) -> list[Path]:
        given = self.task_dirs
        if given is None:
            given = [folder for folder in os.environ.get(TASK_DIR, "").split(os.pathsep) if folder]
        return [Path(folder) for folder in given]
