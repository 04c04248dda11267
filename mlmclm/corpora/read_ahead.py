"""Preparation of coming steps' data while the present step is trained on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

Data = TypeVar("Data")
STEPS_AHEAD = 8
"""Number of coming steps whose tokens are read ahead from an address: an S3 store answers in some 50 ms, and a step can take as little."""


class ReadAhead(Generic[Data]):
    """Returns what `read` returns for each step; with `ahead`, a thread reads the next steps before they are asked for.

    The order of the data doesn't change, since a step's data are a function of its number. A context manager.
    """

    def __init__(self, read: Callable[[int], Data], *, last: int, ahead: int) -> None:
        """Read steps below `last`; the thread reads up to `ahead` steps after the one that is asked for. With 0 there is no thread."""
        self._read, self._last, self._ahead = read, last, ahead
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mlmclm-read-ahead") if ahead else None
        self._coming: dict[int, Future[Data]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def __call__(self, step: int) -> Data:
        """Return the data of a step; raises what `read` does."""
        if self._thread is None:
            return self._read(step)
        for coming in range(step, min(step + self._ahead + 1, self._last)):
            if coming not in self._coming:
                self._coming[coming] = self._thread.submit(self._read, coming)
        return self._coming.pop(step).result()
