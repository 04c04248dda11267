"""Progress that a person can follow: a bar with rate and time left in a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import atexit
import threading
import time
from functools import cache
from types import TracebackType
from typing import ClassVar, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

console = Console(stderr=True, highlight=False)
"""Where everything goes that isn't a result; results go to standard output."""

SECONDS_BETWEEN_LINES = 5.0


class Bar:
    """One piece of work with a known or unknown total; use as a context manager.

    In a terminal it is drawn in place; otherwise (a job's log, a file) a line is printed at most every
    `SECONDS_BETWEEN_LINES`, and one at the end. Bars that are open at once, in several threads too, are drawn below each
    other.
    """

    _drawn: ClassVar[Progress | None] = None
    """What all open bars of a terminal are drawn by; it is there as long as one of them is."""
    _open: ClassVar[int] = 0
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, title: str, total: int | None = None, *, unit: str = "") -> None:
        self.title, self.total, self.unit = title, total, unit
        self.done = 0
        self._first = 0
        self._note = ""
        self._rate: float | None = None
        self._started = self._printed = time.monotonic()
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._started = self._printed = time.monotonic()
        if console.is_terminal:
            with Bar._lock:
                if Bar._drawn is None:
                    Bar._drawn = _display()
                    Bar._drawn.start()
                    atexit.register(console.show_cursor)  # an interrupted driver ends with bars open in threads
                Bar._open += 1
                self._progress = Bar._drawn
            self._task = self._progress.add_task(self.title, total=self.total, count="", note="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            with Bar._lock:
                Bar._open -= 1
                if Bar._open == 0:
                    self._progress.stop()
                    atexit.unregister(console.show_cursor)
                    Bar._drawn = None
        elif kind is None:
            self._line()

    def start_at(self, done: int) -> None:
        """Work that was finished before: it counts as done but not in the rate."""
        self._first = done
        self.update(done)

    def update(self, done: int, total: int | None = None, note: str = "", *, rate: float | None = None) -> None:
        """Shows that `done` of `total` is finished.

        Args:
            rate: how many a second, by which the time left is told; by default their mean since the beginning, in which is also
                what comes before the first of them.
        """
        self.done, self._note, self._rate = done, note, rate
        self.total = total if total is not None else self.total
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done, total=self.total, count=self._count(), note=note)
        elif time.monotonic() - self._printed >= SECONDS_BETWEEN_LINES:
            self._line()

    def _count(self) -> str:
        of = f"/{self.total:,}" if self.total is not None else ""
        return f"{self.done:,}{of} {self.unit}".rstrip()

    def _line(self) -> None:
        self._printed = time.monotonic()
        seconds = self._printed - self._started
        rate = self._rate or ((self.done - self._first) / seconds if seconds > 0 else 0.0)
        left = ""
        if self.total and rate > 0 and self.done < self.total:
            left = f", {(self.total - self.done) / rate:.0f} s left"
        note = f", {self._note}" if self._note else ""
        console.print(f"{self.title}: {self._count()}, {seconds:.0f} s{left}{note}", soft_wrap=True)


def _display() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[count]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
    )


def say(text: str) -> None:
    """One line for the person at the terminal."""
    console.print(text, soft_wrap=True)


@cache
def say_once(text: str) -> None:
    """A line that this process says once, however often it is asked to."""
    say(text)
