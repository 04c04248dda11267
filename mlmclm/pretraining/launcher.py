"""Interface between a stage's workers and their launcher."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol


class Launcher(Protocol):
    """The launcher as a worker sees it, such as `launches.ray_worker`; methods marked collective are called on all workers."""

    def agreed(self, value: Any) -> Any:
        """Return rank 0's value; collective."""
        ...

    def apart(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run a function in a process of its own on this machine, and return when that process has ended."""
        ...

    def report(self, step: int) -> None:
        """Report a step whose state other workers write; collective: those workers call `keep` at the same step."""
        ...

    def keep(self, step: int, write: Callable[[Path], None]) -> None:
        """Report a state and have this worker's part of it written in the background; collective: workers without a part call `report`.

        Args:
            write: called in a thread of its own with the checkpoint's folder, which does not exist yet.
        """
        ...

    def show(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        """Show a live metric's value in the dashboards: a gauge's latest value, or a counter's increment if its name ends in `_total`."""
        ...
