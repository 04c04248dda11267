"""The sweeps on a cluster, as they tell each other through Ray's key-value store, and how many workers this one may have.

Each driver writes what its sweep holds and wants under a key of its own, every few seconds, and computes all shares by
itself (`fair_share`). So no process coordinates them, and a driver that dies only stops writing.
"""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace

from mlmclm.cluster import key_values
from mlmclm.cluster.cluster import free_by_node, held_by_node
from mlmclm.progress import repeated
from mlmclm.sweeps.fair_share import Claimant, own_share
from mlmclm.sweeps.heartbeats import forget

PREFIX = b"sweep:"
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
        wanted: how many workers this sweep can use now; set by its owner, and by nothing here.
        most: how many workers it may have now; math.inf if nobody else lacks any.
        count: the number of other sweeps.
    """

    def __init__(self, me: Claimant) -> None:
        # The thread that looks must not write what the owner writes, or it would undo a change made while it looked.
        self.wanted, self.count = me.wanted, 0
        self.share: Mapping[str, int] | None = None
        self._me = me
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
                key_values.delete(self._key)

    @property
    def most(self) -> float:
        """The most workers that this sweep may have now."""
        return math.inf if self.share is None else sum(self.share.values())

    def most_on(self, node: str) -> float:
        """Return the most workers that it may have now on a node, by the node's id."""
        return math.inf if self.share is None else self.share.get(node, 0)

    @property
    def name(self) -> str:
        """This sweep's name on the cluster."""
        return self._me.name

    @property
    def _key(self) -> bytes:
        return PREFIX + self.name.encode()

    def _look(self) -> None:
        with suppress(Exception):  # if the cluster doesn't answer, the sweep itself reports it
            others = self._others()
            self.count = len(others)
            held = held_by_node() if others else {}  # nobody asks for it otherwise
            me = replace(self._me, wanted=self.wanted, held=held)
            self._beat += 1
            key_values.put(self._key, json.dumps([self._beat, asdict(me)]).encode())
            turn = int(time.time() // SECONDS_A_TURN)
            share = own_share(self.name, free_by_node(), [me, *others], turn) if others else None
            now = time.monotonic()
            self._since = None if share is None else self._since or now
            waited = self._since is not None and now - self._since >= SECONDS_BEFORE_A_HANDOVER
            self.share = share if waited else None

    def _others(self) -> list[Claimant]:
        """Return the other sweeps, without those whose drivers no longer write."""
        found = []
        for key, value in key_values.get_all(PREFIX).items():
            if key == self._key:
                continue
            try:
                beat, claimant = json.loads(value)
                other = Claimant(**claimant)
            except (ValueError, TypeError):  # another version's note: it takes no part in the shares
                continue
            if self._seen.get(key, (None, 0.0))[0] != beat:
                self._seen[key] = beat, time.monotonic()
            if time.monotonic() - self._seen[key][1] < SECONDS_UNTIL_GONE:
                found.append(other)
            else:
                key_values.delete(key)
                forget(claimant["name"])
        return found


def claimant_name() -> str:
    """Return a name for a sweep of this driver."""
    return uuid.uuid4().hex
