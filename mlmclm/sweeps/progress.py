"""How far a sweep is: a bar on a terminal, plain lines elsewhere (job logs), and the same as live metrics."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from types import TracebackType
from typing import Literal, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from mlmclm.tracking.metrics import counter, gauge, histogram

Style = Literal["auto", "bar", "lines", "none"]
SECONDS_BETWEEN_LINES = 10.0


def rate_label(cells: int, seconds: float) -> str:
    """`12.3 cells/min`, or a dash before the first cell."""
    return f"{60 * cells / seconds:.1f} cells/min" if cells and seconds > 0 else "- cells/min"


def duration_label(seconds: float) -> str:
    """`45 s`, `3 min 20 s`, `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(rate_label(int(task.completed), task.elapsed or 0.0))


class SweepProgress:
    """Counts the cells of one run and shows them; `finished` once a cell, `tick` as often as one likes.

    Args:
        tasks: the task of every cell that is to be computed.
        style: `bar`, `lines`, `none`; `auto` is `bar` on a terminal and `lines` elsewhere.
        metrics: whether to export live metrics too, which needs a Ray session.
    """

    def __init__(
        self, tasks: Iterable[str], *, style: Style = "auto", metrics: bool = True, console: Console | None = None
    ) -> None:
        self._remaining = Counter(tasks)
        self._running: Counter[str] = Counter()
        self._total = sum(self._remaining.values())
        self._done = self._failed = self._diverged = 0
        self._console = console or Console(stderr=True)
        self._style = style if style != "auto" else ("bar" if self._console.is_terminal else "lines")
        self._metrics = metrics
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        self._started = self._last_line = time.monotonic()
        if self._style == "bar":
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("fine-tuning"),
                BarColumn(),
                MofNCompleteColumn(),
                _Rate(),
                TimeRemainingColumn(elapsed_when_finished=True),
                TextColumn("{task.description}"),
                console=self._console,
                # Cells take seconds to hours: the speed is that of the whole run so far.
                speed_estimate_period=7 * 24 * 3600.0,
            )
            self._row = self._bar.add_task("", total=self._total)
            self._bar.start()
        elif self._style == "lines":
            self._print(f"fine-tuning: {self._total} cells")
        if self._metrics:
            for task in self._remaining:
                self._export(task)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._style == "lines":
            self._line()

    def started(self, task: str) -> None:
        """A cell of this task has been given to a worker."""
        self._running[task] += 1
        self._export(task)

    def retried(self, task: str, message: str) -> None:
        """A running cell crashed and will run again."""
        self._running[task] -= 1
        self.note(message)
        if self._metrics:
            counter("mlmclm_cell_retries_total").inc(tags={"task": task})
        self._export(task)

    def finished(self, task: str, status: str, seconds: float | None = None) -> None:
        """A cell that was started is over: `ok`, `diverged`, `reused` or `failed`; `seconds` where it was computed."""
        self._running[task] -= 1
        self._remaining[task] -= 1
        self._done += 1
        self._failed += status == "failed"
        self._diverged += status == "diverged"
        if self._metrics:
            counter("mlmclm_cells_total").inc(tags={"status": status, "task": task})
            if seconds is not None:
                histogram("mlmclm_cell_seconds").observe(seconds, tags={"task": task})
        self._export(task)
        if self._bar is not None:
            self._bar.update(self._row, completed=self._done, description=self._extra())

    def tick(self) -> None:
        """Prints a line when the last one is old enough."""
        if self._style == "lines" and time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._line()

    def note(self, message: str) -> None:
        """Shows a message above the bar, or as a line."""
        if self._style != "none":
            self._print(message)

    def _line(self) -> None:
        seconds = time.monotonic() - self._started
        self._last_line = time.monotonic()
        parts = [f"fine-tuning: {self._done}/{self._total} cells", rate_label(self._done, seconds)]
        if 0 < self._done < self._total:
            parts.append(f"{duration_label(seconds / self._done * (self._total - self._done))} left")
        self._print(", ".join(part for part in (*parts, self._extra()) if part))

    def _extra(self) -> str:
        counts = ((self._diverged, "diverged"), (self._failed, "failed"))
        return ", ".join(f"{count} {word}" for count, word in counts if count)

    def _print(self, message: str) -> None:
        self._console.print(message, markup=False, highlight=False, soft_wrap=True)

    def _export(self, task: str) -> None:
        if self._metrics:
            gauge("mlmclm_cells_remaining").set(self._remaining[task], tags={"task": task})
            gauge("mlmclm_cells_running").set(self._running[task], tags={"task": task})
