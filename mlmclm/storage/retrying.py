"""Storage that does not answer: requests are repeated with growing pauses, and outages are reported in one place.

An outage costs time and nothing else. `Availability` repeats a request until storage answers or the retry
timeout ends, reports that storage is waited for, and counts the seconds that were lost. Leases and time limits leave them out.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TypeVar

from mlmclm.errors import MissingBucket, StorageFault
from mlmclm.progress import say

Answer = TypeVar("Answer")

SECONDS_UNTIL_FORGOTTEN = 300.0
"""A failure that is older than this, without any request since, does not count as part of an outage."""


class NoAnswer(StorageFault):
    """Storage did not answer, or answered that it cannot at the moment: the same request can succeed later."""


@dataclass(frozen=True)
class RetryPolicy:
    """How long an outage of storage is waited for, and how often requests are repeated meanwhile.

    Attributes:
        seconds: the longest outage that is waited for.
        first: longest pause after the first failure, in seconds; each further failure doubles it.
        most: longest pause of all, in seconds.
        silent: seconds of an outage before it is reported.
        repeat: seconds after which it is reported again.
    """

    seconds: float = 3600.0
    first: float = 0.2
    most: float = 30.0
    silent: float = 5.0
    repeat: float = 600.0

    def pause(self, failures: int, chance: float) -> float:
        """Return the seconds to wait after so many failures in a row.

        Args:
            chance: a random number from 0 to 1, so that many waiting processes do not ask all at once.
        """
        return min(self.most, self.first * 2.0 ** min(failures - 1, 30)) * (0.5 + chance / 2)


class Availability:
    """Whether a piece of storage (`name`) answers, as this process sees it; thread-safe."""

    def __init__(self, name: str, retry: RetryPolicy | None = None) -> None:
        self.name = name
        self.retry = retry or RetryPolicy()
        self.on_change: Callable[[], None] = lambda: None
        """Called when an outage begins to be waited for, and when it ends, by the thread that notices."""
        self._lock = threading.Lock()
        self._began: float | None = None
        """When the request was made that began the present outage, on the monotonic clock."""
        self._failure = 0.0
        """When the last request failed."""
        self._waiting = 0
        """Requests that have failed and will be repeated."""
        self._since = ""
        self._start = 0.0
        """When the outage that was reported last began."""
        self._said: float | None = None
        self._lost = 0.0
        self._stuck: float | None = None
        """When a request was made that failed, if no request has been answered since or some request still waits."""

    def keep_asking(self, request: Callable[[], Answer], *, waits: float = math.inf) -> Answer:
        """Return what a request returns, which is repeated while storage does not answer.

        Args:
            request: raises `NoAnswer` if it should be repeated. Any other error is an answer and is passed on.
            waits: seconds for which this request may be repeated, if they are fewer than `retry` allows.

        Raises:
            NoAnswer: the outage has lasted longer than `retry` allows, or `waits` is over.
        """
        failures, first = 0, time.monotonic()
        try:
            while True:
                asked = time.monotonic()
                try:
                    answer = request()
                except NoAnswer as fault:
                    failures += 1
                    lasted = self._failed(asked, first, str(fault), waiting=failures == 1)
                    if time.monotonic() - first >= waits:
                        raise
                    if lasted >= self.retry.seconds:
                        raise NoAnswer(f"{fault} It was waited for {_duration(lasted)}.") from fault
                except (FileNotFoundError, FileExistsError, StorageFault, MissingBucket):
                    self._answered(waited=failures > 0)
                    raise
                else:
                    self._answered(waited=failures > 0)
                    return answer
                left = min(self.retry.seconds - lasted, waits - (time.monotonic() - first))
                time.sleep(max(0.0, min(self.retry.pause(failures, random.random()), left)))
        finally:
            if failures:
                with self._lock:
                    self._waiting -= 1

    @property
    def lost(self) -> float:
        """Seconds for which storage has not answered some request so far, in all outages."""
        with self._lock:
            return self._lost + (0.0 if self._stuck is None else time.monotonic() - self._stuck)

    @property
    def notice(self) -> str:
        """The status line's message about the present outage; empty if there is none, or while it has not been reported yet."""
        with self._lock:
            return f"waiting for storage since {self._since}" if self._said is not None else ""

    def _failed(self, asked: float, first: float, reason: str, *, waiting: bool) -> float:
        """Note a failure of a request; return for how many seconds storage has not answered it, or any request.

        Args:
            asked: when the request was made.
            first: when it was made for the first time. Storage may answer other requests meanwhile, for instance
                if it can be read but is full.
            waiting: whether it has failed for the first time.
        """
        with self._lock:
            self._waiting += waiting
            if self._began is not None and asked > self._failure + SECONDS_UNTIL_FORGOTTEN:
                self._began = self._said = None
            if self._began is None:
                self._began = asked
            if self._stuck is None:
                self._stuck = asked
            now = self._failure = time.monotonic()
            lasted = now - min(self._began, first)
            due = lasted >= self.retry.silent and (self._said is None or now - self._said >= self.retry.repeat)
            if due and self._said is None:
                self._start, self._since = now - lasted, f"{datetime.now() - timedelta(seconds=lasted):%H:%M:%S}"
            if due:
                self._said = now
        if due:
            say(
                f"{self.name}: waiting for storage since {self._since}, at most {_duration(self.retry.seconds)}; what "
                f"is computed is kept meanwhile. Last reason: {reason}"
            )
            self.on_change()
        return lasted

    def _answered(self, *, waited: bool) -> None:
        """Note an answer; an outage that was reported lasts until no other request waits any more."""
        with self._lock:
            now, said = time.monotonic(), None
            self._began = None
            if self._waiting == int(waited):
                said, self._said = self._said, None
                if self._stuck is not None:
                    self._lost += now - self._stuck
                    self._stuck = None
            lasted = now - self._start
        if said is not None:
            say(f"{self.name}: storage answers again, after {_duration(lasted)}")
            self.on_change()


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
