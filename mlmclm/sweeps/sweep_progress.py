"""Progress of a sweep, as a table and a bar for people and as live metrics."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mlmclm.cluster.live_metrics import show
from mlmclm.finetuning.cell import Cell
from mlmclm.progress import Bar, console, say
from mlmclm.sweeps.table import SweepTable

SECONDS_BETWEEN_UPDATES = 0.5
"""Shortest interval between updates of the bar and the exported counts: a driver of many workers has thousands of events a second."""


class SweepProgress:
    """Counts the cells of one run, shows the counts, and exports them as metrics, which needs a Ray session.

    Args:
        reused: number of cells that have a result already; the shown total includes them.
        table: the table of all cells, with the present results.
        notice: returns what hinders the whole sweep at present; empty for nothing.
    """

    def __init__(
        self,
        cells: Iterable[Cell],
        *,
        table: SweepTable,
        reused: int = 0,
        notice: Callable[[], str] = lambda: "",
    ) -> None:
        self._notice = notice
        self._remaining = Counter(cell.task for cell in cells)
        self._table = table
        self._running: Counter[str] = Counter()
        self._reused = reused
        self._ended: Counter[str] = Counter()
        """Cells that are over, by status."""
        total = reused + self._remaining.total()
        self.situation = ""
        """Why the sweep waits or shares, in words; empty if it does neither."""
        self.waiting = ""
        """Hindrance of some trials at present, although nothing hinders the whole sweep; empty for none."""
        self._bar = Bar("fine-tuning", total, unit="cells", above=table)
        self._updated = -SECONDS_BETWEEN_UPDATES

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the bar and export the counts while the block runs."""
        with self._bar:
            self._bar.start_at(self._reused)
            self.update()
            try:
                yield
            finally:
                self.update()
                # After a fault some cells were never tried, and the bar must not end as if all were done.
                self._bar.complete = self._done >= (self._bar.total or 0)

    def started(self, cell: Cell, worker: str = "") -> None:
        """Note that a cell is being computed; `worker` says where, if that is known."""
        self._running[cell.task] += 1
        self._table.started(cell, worker)

    def retried(self, cell: Cell, message: str) -> None:
        """Note that a running cell crashed and will run again."""
        show("mlmclm_cell_retries_total", 1, task=cell.task)
        self.given_back(cell)
        say(message)

    def given_back(self, cell: Cell) -> None:
        """Note that a started cell no longer runs here and has no result yet."""
        self._running[cell.task] -= 1
        self._table.stopped(cell)

    def result(self, result: Mapping[str, Any]) -> None:
        """Add a result for one of its cells; in a log, print a line if it is the last one of its model and task."""
        line = self._table.add(result)
        if line is not None and not console.is_terminal:
            say(line)

    def finished(self, cell: Cell, status: str, seconds: float | None = None) -> None:
        """Note that a started cell is over (`ok`, `diverged`, `reused` or `failed`); `seconds` is its time if computed here."""
        task = cell.task
        self._table.stopped(cell, failed=status == "failed")
        self._running[task] -= 1
        self._remaining[task] -= 1
        self._ended[status] += 1
        show("mlmclm_cells_total", 1, status=status, task=task)
        if seconds is not None:
            show("mlmclm_cell_seconds", seconds, task=task)
        self.tick()

    def tick(self) -> None:
        """Update the bar and the exported counts from time to time."""
        if time.monotonic() >= self._updated + SECONDS_BETWEEN_UPDATES:
            self.update()

    def update(self) -> None:
        """Update the bar and the exported counts now."""
        self._updated = time.monotonic()
        self._bar.update(self._done, note=self._note(self._bar.rate()))
        for task in self._remaining:
            show("mlmclm_cells_remaining", self._remaining[task], task=task)
            show("mlmclm_cells_running", self._running[task], task=task)

    @property
    def _done(self) -> int:
        """Number of cells of the shown total that are over."""
        return self._reused + self._ended.total()

    def _note(self, rate: float | None) -> str:
        words = {"diverged": "diverged", "failed": "failed", "reused": "computed by other processes"}
        hourly = 3600 * (rate or 0.0)
        speed = [f"{hourly:,.0f} cells an hour" if hourly >= 10 else f"{hourly:.2g} cells an hour"] if rate else []
        ended = [f"{self._ended[status]} {words[status]}" for status in words if self._ended[status]]
        notice = [text for text in (self._notice() or self.waiting, self.situation) if text]
        # A terminal shows the running cells above the bar. Without them a log would say "0/4 cells" for minutes.
        begun = self._ended.total() or self._running.total()
        running = self._table.running() if begun or notice else "workers are starting"
        return ", ".join(notice + speed + ended + ([] if console.is_terminal else [running]))
