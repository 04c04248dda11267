"""Progress that a person can follow: a bar with rate and time left in a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import atexit
import threading
import time
from datetime import timedelta
from functools import cache
from types import TracebackType
from typing import ClassVar, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

console = Console(stderr=True, highlight=False, markup=False, emoji=False)
"""Where everything goes that isn't a result; results go to standard output. Brackets in paths and names are no markup."""

SECONDS_BETWEEN_LINES = 5.0
SECONDS_BETWEEN_QUIET_LINES = 30.0
"""Between lines that only say that work goes on."""


class Bar:
    """One piece of work with a known or unknown total; use as a context manager.

    In a terminal it is drawn in place; otherwise (a job's log, a file) a line is printed at most every
    `SECONDS_BETWEEN_LINES`, one after that time where nothing has happened yet, and one at the end. Bars that are open at
    once, in several threads too, are drawn below each other. Work that ends without an error is all done.

    The time left is told by the rate since the first piece was finished: what comes before it is start-up.
    """

    _drawn: ClassVar[Progress | None] = None
    """What all open bars of a terminal are drawn by; it is there as long as one of them is."""
    _open: ClassVar[int] = 0
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, title: str, total: int | None = None, *, unit: str = "") -> None:
        self.title, self.total, self.unit = title, total, unit
        self.done = 0
        self._already = 0
        self._first: tuple[int, float] | None = None
        """How much was done when the first piece was, and when that was."""
        self._note = self._said = ""
        self._rate: float | None = None
        self._started = self._printed = self._updated = time.monotonic()
        self._over = threading.Event()
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._started = self._printed = self._updated = time.monotonic()
        if console.is_terminal:
            with Bar._lock:
                if Bar._drawn is None:
                    Bar._drawn = _display()
                    Bar._drawn.start()
                    atexit.register(console.show_cursor)  # an interrupted driver ends with bars open in threads
                Bar._open += 1
                self._progress = Bar._drawn
            self._task = self._progress.add_task(self.title, total=self.total, count="", note="", bar=self)
        else:
            threading.Thread(target=self._say_that_work_goes_on, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if kind is None and self.total is not None:
            self.done = self.total
        if self._progress is not None and self._task is not None:
            if kind is None:
                ended = max(self.done, 1)
                self._progress.update(self._task, completed=ended, total=ended, count=self._count())
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
        self._already = done
        self.update(done)

    def update(self, done: int, total: int | None = None, note: str = "", *, rate: float | None = None) -> None:
        """Shows that `done` of `total` is finished.

        Args:
            rate: how many a second, by which the time left is told; by default their mean since the first.
        """
        self.done, self._note, self._rate = done, note, rate
        self.total = total if total is not None else self.total
        self._updated = time.monotonic()
        if self._first is None and done > self._already:
            self._first = done, self._updated
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done, total=self.total, count=self._count(), note=note)
        elif self._updated - self._printed >= SECONDS_BETWEEN_LINES:
            self._line()

    def seconds_left(self) -> float | None:
        """Until all is done; None while that cannot be told."""
        if self.total is None or self._over.is_set():
            return None
        rate = self._rate
        if rate is None and self._first is not None and self._updated > self._first[1]:
            rate = (self.done - self._first[0]) / (self._updated - self._first[1])
        if not rate or rate < 0:
            return None
        left = (self.total - self.done) / rate - (time.monotonic() - self._updated)
        return left if left >= 0 else None

    def _say_that_work_goes_on(self) -> None:
        seconds = SECONDS_BETWEEN_LINES
        while not self._over.wait(seconds):
            if time.monotonic() - self._printed >= seconds:
                self._line()
            seconds = SECONDS_BETWEEN_QUIET_LINES

    def _count(self) -> str:
        of = f"/{self.total:,}" if self.total is not None else ""
        return f"{self.done:,}{of} {self.unit}".rstrip()

    def _line(self) -> None:
        self._printed = time.monotonic()
        seconds, left = self._printed - self._started, self.seconds_left()
        time_left = f", {left:.0f} s left" if left is not None and self.done < (self.total or 0) else ""
        note = f", {self._note}" if self._note else ""
        line = f"{self.title}: {self._count()}, {seconds:.0f} s{time_left}{note}"
        if line != self._said:
            self._said = line
            console.print(line, soft_wrap=True)


class _Left(ProgressColumn):
    """The time left, as the bar tells it."""

    def render(self, task: Task) -> Text:
        seconds = task.fields["bar"].seconds_left()
        return Text("" if seconds is None else f"{timedelta(seconds=round(seconds))} left")


def _display() -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[count]}", markup=False),
        TimeElapsedColumn(),
        _Left(),
        TextColumn("{task.fields[note]}", markup=False),
        console=console,
    )


def say(text: str) -> None:
    """One line for the person at the terminal."""
    console.print(text, soft_wrap=True)


@cache
def say_once(text: str) -> None:
    """A line that this process says once, however often it is asked to."""
    say(text)
