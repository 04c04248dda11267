"""Heartbeats of a sweep's workers, through Ray: they tell a worker that hangs from one that waits for storage.

In both cases no result is filed and no lease renewed. But heartbeats don't depend on storage: they stop only if the
worker's process stands still. They also say for how long the worker has waited. Its driver may not notice that, because
storage can be out of reach of a single node, or can be read but not written to.
"""

from __future__ import annotations

import itertools
import json
import math
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import NamedTuple

from mlmclm.cluster import key_values
from mlmclm.progress import repeated

SECONDS_BETWEEN_BEATS = 2.0
SECONDS_UNTIL_DEAF = 30.0
"""Longest time between two looks at the heartbeats, or for one, after which silence is counted anew: the whole cluster
may have been stopped meanwhile, and the first look afterwards can be faster than the workers."""


class Heartbeat(NamedTuple):
    """A sign of life of a worker.

    Attributes:
        lost: seconds since the worker took its training that do not count for its time limit: storage has not answered,
            or the training has ended.
        notice: the status line's words about the outage that it waits for; empty without one.
        mark: differs from that of any other heartbeat.
    """

    lost: float = 0.0
    notice: str = ""
    mark: str = ""


@contextmanager
def beating(sweep: str, worker: str, now: Callable[[], Heartbeat]) -> Iterator[None]:
    """Send heartbeats of a worker while the block runs; at its end the last one is deleted.

    Args:
        now: returns the present one; its mark is set here.
    """
    key = _prefix(sweep) + worker.encode()
    process, numbers = uuid.uuid4().hex, itertools.count()

    def beat() -> None:
        with suppress(Exception):  # a cluster that doesn't answer does not answer the driver either
            note = now()._replace(mark=f"{process}-{next(numbers)}")
            key_values.put(key, json.dumps(note).encode())

    beat()
    try:
        with repeated(beat, seconds=SECONDS_BETWEEN_BEATS, name="mlmclm-heartbeat"):
            yield
    finally:
        # The driver reads all of them each second, also in a sweep whose workers come and go for days.
        with suppress(Exception):
            key_values.delete(key)


class Heartbeats:
    """The heartbeats of a sweep's workers, as its driver has seen them.

    Args:
        read: returns the latest heartbeat of each worker, as it was sent.

    Attributes:
        deaf: when heartbeats could not be heard for the last time, on the monotonic clock.
    """

    def __init__(self, read: Callable[[], Mapping[str, bytes]] = dict) -> None:
        self._read = read
        self.deaf = self._looked = time.monotonic()
        self._seen: dict[str, tuple[Heartbeat, float]] = {}

    def look(self) -> None:
        """Look for new heartbeats; note if the cluster does not answer, or if this has not been done for long."""
        before, found = self._looked, dict[str, Heartbeat]()
        try:
            found = {worker: Heartbeat(*json.loads(note)) for worker, note in self._read().items()}
        except Exception:
            before = -math.inf
        now = self._looked = time.monotonic()
        if now - before > SECONDS_UNTIL_DEAF:
            self.deaf = now
        for worker, heartbeat in found.items():
            if worker not in self._seen or self._seen[worker][0] != heartbeat:
                self._seen[worker] = heartbeat, now

    def latest(self, worker: str) -> tuple[Heartbeat, float]:
        """Return a worker's latest heartbeat, and when it was first seen here, on the monotonic clock.

        A worker of which none has been seen counts as alive.
        """
        return self._seen.get(worker) or (Heartbeat(), time.monotonic())


@contextmanager
def heard(sweep: str) -> Iterator[Heartbeats]:
    """Yield the heartbeats of a sweep; at the end of the block they are deleted."""
    prefix = _prefix(sweep)

    def read() -> dict[str, bytes]:
        return {key.removeprefix(prefix).decode(): note for key, note in key_values.get_all(prefix).items()}

    try:
        yield Heartbeats(read)
    finally:
        forget(sweep)


def forget(sweep: str) -> None:
    """Delete the heartbeats of a sweep that has ended."""
    with suppress(Exception):  # the cluster may be gone
        key_values.delete(_prefix(sweep))


def _prefix(sweep: str) -> bytes:
    return f"heartbeat:{sweep}:".encode()
