"""Task data that an installed package makes, in place of reading them from the Hub or a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from mlmclm.plugins import GENERATORS, plugin


class Generator(Protocol):
    """Makes the data of the tasks whose `source` is the name of its entry point (`mlmclm.plugins`)."""

    def find(self, task: str, store: Path) -> Path | None:
        """Return the task's folder if it is in the store already; writes nothing."""

    def build(self, task: str, store: Path, progress: Callable[[str, int, int | None], None] | None) -> Path:
        """Return the task's folder, a table for each split, after making it if need be."""


def find_generator(source: str) -> Generator | None:
    """The generator that makes a source's data; None where the source is read."""
    return plugin(GENERATORS, source)
