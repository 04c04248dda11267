"""Progress display for people: a bar with the time left in a terminal or a notebook, and a line every few seconds elsewhere."""

from __future__ import annotations

import atexit
import io
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import cache
from types import TracebackType
from typing import ClassVar, Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from mlmclm.errors import printable

console = Console(stderr=True, highlight=False, markup=False, emoji=False)
"""Standard error, for everything but results, which go to standard output.

Markup is off, as paths and names may contain brackets.
"""

SECONDS_OF_SILENCE = 3.0
SECONDS_BETWEEN_LINES = 5.0
SECONDS_BETWEEN_QUIET_LINES = 30.0
"""Maximum seconds between lines that only say that work is going on; the first of these lines come sooner."""


class Bar:
    """A piece of work with a known or unknown total; use it as a context manager.

    In a terminal or a notebook the bar is drawn in place. Otherwise (a job's log, a file) it prints lines: at most one every
    `SECONDS_BETWEEN_LINES`, one after that time if nothing has happened yet, and one at the end. Bars that are open at
    the same time, also in different threads, are drawn below each other. Work that ends without an error counts as
    complete.

    The time left is estimated from the rate since the first piece was finished, since the time before that is start-up.

    Args:
        title: what the work is.
        total: the amount of work, if known.
        unit: what is counted.
        above: what is drawn above all bars while this one is open.
        brief: seconds; work that ends within these prints no line.
    """

    _drawn: ClassVar[Progress | None] = None
    """The display of all open bars in a terminal or a notebook; None while there are none."""
    _open: ClassVar[int] = 0
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self,
        title: str,
        total: int | None = None,
        *,
        unit: str = "",
        above: RenderableType | None = None,
        brief: float = 0.0,
    ) -> None:
        self.title, self.total, self.unit, self.above, self.brief = title, total, unit, above, brief
        self.done = 0
        self.complete = True
        """True if work that ends without an error counts as complete."""
        self._already = 0
        self._first: tuple[int, float] | None = None
        """The amount done when the first piece was finished, and the time of that."""
        self._note = self._said = ""
        self._rate: float | None = None
        self._over = threading.Event()
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        spoken()
        self._started = self._printed = self._updated = time.monotonic()
        if console.is_terminal or console.is_jupyter:
            with Bar._lock:
                if Bar._drawn is None:
                    Bar._drawn = _display()
                    Bar._drawn.start()
                    atexit.register(console.show_cursor)  # an interrupted driver ends with bars still open in threads
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
        if kind is None and self.total is not None and self.complete:
            self.done = self.total
        if self._progress is not None and self._task is not None:
            if kind is None and self.complete:
                ended = max(self.done, 1)
                self._progress.update(self._task, completed=ended, total=ended, count=self._count())
            with Bar._lock:
                Bar._open -= 1
                if Bar._open == 0:
                    self._progress.stop()
                    atexit.unregister(console.show_cursor)
                    Bar._drawn = None
        elif kind is None and (self._said or time.monotonic() - self._started >= self.brief):
            self._line()

    @property
    def over(self) -> bool:
        """True once the work has ended, successfully or not."""
        return self._over.is_set()

    def start_at(self, done: int) -> None:
        """Set the amount of work that was finished before; it counts as done but not in the rate."""
        self._already = done
        self.update(done)

    def update(self, done: int, total: int | None = None, note: str = "", *, rate: float | None = None) -> None:
        """Show that `done` of `total` is finished.

        Args:
            total: the new total, if it has changed.
            note: shown after the count.
            rate: pieces per second, for the estimate of the time left; by default the mean since the first piece.
        """
        self.done, self._note, self._rate = done, note, rate
        self.total = self.total if total is None else total
        self._updated = time.monotonic()
        if self._first is None and done > self._already:
            self._first = done, self._updated
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done, total=self.total, count=self._count(), note=note)
        elif self._updated - self._printed >= SECONDS_BETWEEN_LINES:
            self._line()

    def rate(self) -> float | None:
        """Return the pieces finished per second since the first one; None while it is unknown."""
        if self._rate is not None:
            return self._rate
        if self._first is None or self._updated <= self._first[1]:
            return None
        return (self.done - self._first[0]) / (self._updated - self._first[1])

    def seconds_left(self) -> float | None:
        """Return the estimated seconds until all is done; None while they are unknown."""
        if self.total is None or self._over.is_set():
            return None
        rate = self.rate()
        if not rate or rate < 0:
            return None
        # Counts down between updates.
        left = (self.total - self.done) / rate - (time.monotonic() - self._updated)
        return left if left >= 0 else None

    def _say_that_work_goes_on(self) -> None:
        seconds = SECONDS_BETWEEN_LINES
        while not self._over.wait(max(0.0, self._printed + seconds - time.monotonic())):
            if time.monotonic() - self._printed < seconds:  # the work has said something itself
                seconds = SECONDS_BETWEEN_LINES
            else:
                self._line()
                seconds = min(2 * seconds, SECONDS_BETWEEN_QUIET_LINES)

    def _count(self) -> str:
        if not self.done and self.total is None:  # nothing is counted yet, or ever
            return ""
        of = f"/{self.total:,}" if self.total is not None else ""
        # If there is a total, the time left is shown in place of the rate.
        rate = self.rate() if self.total is None and self.unit else None
        return f"{self.done:,}{of} {self.unit}".rstrip() + (f", {rate:,.0f}/s" if rate and rate >= 1 else "")

    def _line(self) -> None:
        self._printed = time.monotonic()
        seconds, left = self._printed - self._started, self.seconds_left()
        time_left = f"{left:.0f} s left" if left is not None and self.done < (self.total or 0) else ""
        line = f"{self.title}: {', '.join(filter(None, (self._count(), f'{seconds:.0f} s', time_left, self._note)))}"
        # A line without news would only fill the log.
        if line != self._said:
            self._said = line
            console.print(line, soft_wrap=True)


@contextmanager
def bars() -> Iterator[Callable[..., None]]:
    """Yield a function that takes (what, done, total, unit) and shows one bar per `what`."""
    with ExitStack() as stack:
        current: list[Bar] = []

        def show(what: str, done: int, total: int | None, unit: str = "") -> None:
            if not current or current[0].title != what:
                # A new `what` ends the bar of the previous one.
                stack.pop_all().close()
                current[:] = [stack.enter_context(Bar(what, total, unit=unit))]
            current[0].update(done, total)

        yield show


@contextmanager
def repeated(look: Callable[[], None], *, seconds: float, name: str) -> Iterator[None]:
    """Call a function periodically for the duration of the block, in a thread with this name."""
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(seconds):
            look()

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class _Left(ProgressColumn):
    """The time left, as estimated by the bar."""

    def render(self, task: Task) -> Text:
        seconds = task.fields["bar"].seconds_left()
        return Text("" if seconds is None else f"{timedelta(seconds=round(seconds))} left")


class _Display(Progress):
    """All open bars, and above them what they show in addition."""

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yield the parts of the display, from top to bottom."""
        yield from (bar.above for task in self.tasks if (bar := task.fields["bar"]).above is not None and not bar.over)
        yield self.make_tasks_table(self.tasks)


class _InNotebook(_Display):
    """The open bars as one output of the cell that runs, replaced every second.

    Rich would need ipywidgets for this.
    """

    def start(self) -> None:
        """Show the output."""
        from IPython.display import display

        self._replaced = ExitStack()
        self._output = display(self._text(), raw=True, display_id=True)
        self._replaced.enter_context(repeated(self._replace, seconds=1.0, name="notebook progress"))

    def stop(self) -> None:
        """Show the last state, which stays."""
        self._replaced.close()
        self._replace()

    def _replace(self) -> None:
        self._output.update(self._text(), raw=True)

    def _text(self) -> dict[str, str]:
        plain = Console(file=io.StringIO(), width=120, force_jupyter=False, force_terminal=False)
        with plain.capture() as captured:
            plain.print(self.get_renderable())
        return {"text/plain": captured.get().rstrip()}


def _display() -> Progress:
    return (_InNotebook if console.is_jupyter else _Display)(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[count]}", markup=False),
        TimeElapsedColumn(),
        _Left(),
        TextColumn("{task.fields[note]}", markup=False),
        console=console,
        refresh_per_second=2,  # a table above the bars takes milliseconds of a core that should be computing
    )


_spoken = threading.Event()


def spoken() -> None:
    """Record for `starting` that the command has printed something; results on standard output count too."""
    _spoken.set()


def say(text: str) -> None:
    """Print a line for the person at the terminal."""
    spoken()
    console.print(printable(text), soft_wrap=True)


@contextmanager
def starting(text: str) -> Iterator[None]:
    """Print `text` if nothing else is printed in the first `SECONDS_OF_SILENCE` of the block: libraries load slowly."""
    _spoken.clear()

    def wait() -> None:
        if not _spoken.wait(SECONDS_OF_SILENCE):
            say(text)

    threading.Thread(target=wait, daemon=True).start()
    try:
        yield
    finally:
        spoken()


@cache
def say_once(text: str) -> None:
    """Print a line only the first time that this process asks for it."""
    say(text)
