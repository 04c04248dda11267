"""Generators: installed packages that make task data, in place of the Hub or a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from mlmclm.corpora.documents import StoredText
from mlmclm.corpora.process_map import Progress
from mlmclm.plugins import GENERATORS, plugin
from mlmclm.storage.artifact import FolderArtifact, Origin
from mlmclm.storage.pieces import parsed


class GeneratedTask(FolderArtifact):
    """The data of a task that a generator has made, in the store."""

    kind = part = "tasks"
    again = "`mlmclm study` or `mlmclm sweep` sets it aside and makes it again"

    def origin(self) -> Origin:
        """Read what it was made from, as the generator's `meta.json` says it; `{"pydocs": ...}` names a kept text."""
        meta = parsed((self.folder / "meta.json").read_bytes, sealed=False)
        if isinstance(meta, str):
            return Origin()
        facts = {name: value for name, value in meta.items() if name != "rows"}
        return Origin(facts, needs=tuple(StoredText(self.store, f"{name}-{value}") for name, value in facts.items()))


class Generator(Protocol):
    """Generator of data for the tasks whose `source` is the name of its entry point (`mlmclm.plugins`)."""

    def find(self, task: str, store: Path) -> Path | None:
        """Return the task's folder if the store has it, else None. Must not write anything."""

    def build(self, task: str, store: Path, progress: Progress | None) -> Path:
        """Return the task's folder, with a table for each split; make it first if necessary."""


def find_generator(source: str) -> Generator | None:
    """Return the generator of a source's data; None if the source is the Hub or a folder."""
    return plugin(GENERATORS, source)
