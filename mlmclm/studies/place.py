"""The folders that a study works in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlmclm.studies.study_file import StudyFile
    from mlmclm.studies.sweep_file import SweepFile


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
