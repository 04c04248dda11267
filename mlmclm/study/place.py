"""Where a study works."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlmclm.study.study_file import StudyFile


@dataclass(frozen=True)
class Place:
    """Where a study works: the store it keeps everything in, and the folder that stands in for the hub."""

    store: Path
    data_root: Path | None = None
    task_dirs: tuple[Path, ...] = ()
    """Folders of the user's own declarations of tasks."""

    def study_folder(self, study: StudyFile) -> Path:
        """The study's own folder: report, tables, links to models."""
        return self.store / "studies" / study.name
