"""The sweeps on a cluster, as they tell each other through Ray's key-value store, and how many workers this one may have.

Each driver writes what its sweep holds and wants under a key of its own, every few seconds, and computes all shares by
itself (`fair_share`). So no process coordinates them, and a driver that dies only stops writing.
"""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace

from mlmclm.cluster.cluster import held_bundles
from mlmclm.cluster.placement import Cluster
from mlmclm.progress import repeated
from mlmclm.sweeps.fair_share import Claimant, most_workers

NAMESPACE, PREFIX = b"mlmclm", b"sweep:"
SECONDS_BETWEEN_LOOKS = 2.0
SECONDS_UNTIL_GONE = 30.0
"""How long a sweep may write nothing until the others count it as ended."""
SECONDS_BEFORE_A_HANDOVER = 5.0
"""How long a sweep must lack workers until others give up some of theirs: starting a worker takes some seconds."""
SECONDS_A_TURN = 300.0
"""After this time a worker that cannot be divided evenly is another sweep's."""


class OtherSweeps:
    """This sweep among those on the cluster.

    Attributes:
        me: what this sweep holds and wants. Its `wanted` is to be set as that changes.
        most: how many workers it may have now; math.inf if nobody else lacks any.
        count: the number of other sweeps.
    """

    def __init__(self, me: Claimant, view: Callable[[], Cluster]) -> None:
        self.me, self.most, self.count = me, math.inf, 0
        self._view = view
        self._beat = 0
        self._seen: dict[bytes, tuple[int, float]] = {}
        """Key -> the last number that its sweep has written, and when this process first saw it."""
        self._since: float | None = None

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Write about this sweep, and read about the others, from time to time while the block runs."""
        try:
            self._look()
            with repeated(self._look, seconds=SECONDS_BETWEEN_LOOKS, name="mlmclm-other-sweeps"):
                yield
        finally:
            with suppress(Exception):  # the cluster may be gone
                _delete(self._key)

    @property
    def _key(self) -> bytes:
        return PREFIX + self.me.name.encode()

    def want(self, workers: int) -> None:
        """Note how many workers this sweep can use now."""
        self.me = replace(self.me, wanted=workers)

    def _look(self) -> None:
        with suppress(Exception):  # if the cluster doesn't answer, the sweep itself reports it
            others = self._others()
            self.count = len(others)
            if others:  # or else nobody asks
                self.me = replace(self.me, held=held_bundles())
            self._beat += 1
            _write(self._key, json.dumps([self._beat, asdict(self.me)]).encode())
            turn = int(time.time() // SECONDS_A_TURN)
            most = most_workers(self.me.name, self._view().free, [self.me, *others], turn) if others else math.inf
            now = time.monotonic()
            self._since = None if math.isinf(most) else self._since or now
            waited = self._since is not None and now - self._since >= SECONDS_BEFORE_A_HANDOVER
            self.most = most if waited else math.inf

    def _others(self) -> list[Claimant]:
        """Return the other sweeps, without those whose drivers no longer write."""
        found = []
        for key in _keys():
            value = _read(key)
            if key == self._key or value is None:
                continue
            beat, claimant = json.loads(value)
            if self._seen.get(key, (None, 0.0))[0] != beat:
                self._seen[key] = beat, time.monotonic()
            if time.monotonic() - self._seen[key][1] < SECONDS_UNTIL_GONE:
                found.append(Claimant(**claimant))
            else:
                _delete(key)
        return found


def claimant_name() -> str:
    """Return a name for a sweep of this driver."""
    return uuid.uuid4().hex


def _write(key: bytes, value: bytes) -> None:
    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(key, value, namespace=NAMESPACE)


def _read(key: bytes) -> bytes | None:
    from ray.experimental.internal_kv import _internal_kv_get

    found: bytes | None = _internal_kv_get(key, namespace=NAMESPACE)
    return found


def _keys() -> list[bytes]:
    from ray.experimental.internal_kv import _internal_kv_list

    return list(_internal_kv_list(PREFIX, namespace=NAMESPACE))


def _delete(key: bytes) -> None:
    from ray.experimental.internal_kv import _internal_kv_del

    _internal_kv_del(key, namespace=NAMESPACE)
