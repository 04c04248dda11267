"""How far a sweep is: the bar that a person follows, and the same as live metrics."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from mlmclm.progress import Bar, say
from mlmclm.tracking.metrics import counter, gauge, histogram


class SweepProgress:
    """Counts the cells of one run; shows them (`visible`) and exports them as metrics, which needs a Ray session.

    Args:
        tasks: the task of every cell that is to be computed.
        reused: cells whose results are there: part of the total that is shown.
        visible: whether to show anything.
    """

    def __init__(self, tasks: Iterable[str], *, reused: int = 0, visible: bool = True) -> None:
        self._remaining = Counter(tasks)
        self._running: Counter[str] = Counter()
        self._reused = reused
        self._done = self._failed = self._diverged = self._elsewhere = 0
        self._bar = Bar("fine-tuning", reused + self._remaining.total(), unit="cells") if visible else None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        if self._bar is not None:
            self._stack.enter_context(self._bar)
            self._bar.start_at(self._reused)
        for task in self._remaining:
            self._export(task)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def started(self, task: str) -> None:
        """A cell of this task has been given to a worker."""
        self._running[task] += 1
        self._export(task)

    def retried(self, task: str, message: str) -> None:
        """A running cell crashed and will run again."""
        self._running[task] -= 1
        counter("mlmclm_cell_retries_total").inc(tags={"task": task})
        self._export(task)
        self.note(message)

    def given_back(self, task: str) -> None:
        """A cell that was started is computed by another process."""
        self._running[task] -= 1
        self._export(task)

    def finished(self, task: str, status: str, seconds: float | None = None) -> None:
        """A cell that was started is over: `ok`, `diverged`, `reused` or `failed`; `seconds` where it was computed."""
        self._running[task] -= 1
        self._remaining[task] -= 1
        self._done += 1
        self._failed += status == "failed"
        self._elsewhere += status == "reused"
        self._diverged += status == "diverged"
        counter("mlmclm_cells_total").inc(tags={"status": status, "task": task})
        if seconds is not None:
            histogram("mlmclm_cell_seconds").observe(seconds, tags={"task": task})
        self._export(task)
        self.tick()

    def tick(self) -> None:
        """Shows the present state."""
        if self._bar is not None:
            self._bar.update(self._reused + self._done, note=self._note())

    def note(self, message: str) -> None:
        """Shows a message beside the bar."""
        if self._bar is not None:
            say(message)

    def _note(self) -> str:
        seconds = time.monotonic() - self._started
        counts = (
            (self._diverged, "diverged"),
            (self._failed, "failed"),
            (self._elsewhere, "computed by other processes"),
        )
        rate = [f"{60 * self._done / seconds:.1f} cells/min"] if self._done and seconds > 0 else []
        return ", ".join(rate + [f"{count} {word}" for count, word in counts if count])

    def _export(self, task: str) -> None:
        gauge("mlmclm_cells_remaining").set(self._remaining[task], tags={"task": task})
        gauge("mlmclm_cells_running").set(self._running[task], tags={"task": task})
