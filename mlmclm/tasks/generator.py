"""Generators of task data, a source beside the Hub and folders."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable

from mlmclm.registry import KINDS, Registry


@runtime_checkable
class Generator(Protocol):
    """Generator of data for the tasks whose `source` is its name (`mlmclm.registry`)."""

    def find(self, task: str, store: Path) -> Path | None:
        """Return the task's folder if the store has it, else None. Must not write anything."""

    def build(self, task: str, store: Path) -> Path:
        """Return the task's folder, with a table for each split; make it first if necessary."""


GENERATORS: Registry[Generator] = KINDS["generator"]
"""The generators by the `source` of their tasks. Any other source is the Hub or a folder."""
