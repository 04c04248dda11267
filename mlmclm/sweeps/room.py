"""Room for a sweep's workers on its cluster, which nodes join and leave, and which other sweeps use too.

Each driver writes what its sweep holds and wants under a key of its own in Ray's key-value store, every few seconds, and
computes all shares by itself (`fair_share`). So no process coordinates them, and a driver that dies only stops writing.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace

from mlmclm.cluster import key_values
from mlmclm.cluster.cluster import free_by_node, held_by_node
from mlmclm.cluster.placement import Cluster, amounts, describe, most_places
from mlmclm.errors import EnvironmentFault
from mlmclm.numbers import plural
from mlmclm.progress import repeated, say
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


class Room:
    """Room without limits."""

    most: float = math.inf
    """The most workers that the sweep may have now."""

    def most_on(self, node: str) -> float:
        """Return the most workers that the sweep may have now on a node, by the node's id."""
        return math.inf

    def look(self, wanted: int, busy: int) -> str:
        """Look at the cluster; return what the sweep waits for or shares, in words, or an empty string.

        Args:
            wanted: number of workers that would have something to do.
            busy: number of workers that compute.
        """
        return ""


class ClusterRoom(Room):
    """The room that a sweep has on a cluster beside others.

    Args:
        me: this sweep; `wanted` and `held` are what it begins with.
        view: looks at the cluster.
        patience: seconds for which the cluster may have no node for a worker, while none computes.

    Attributes:
        wanted: how many workers this sweep can use now.
        count: the number of other sweeps.
        share: how many workers it may have now on each node, by the node's id; None if nobody else lacks any.
    """

    def __init__(self, me: Claimant, view: Callable[[], Cluster], patience: float = math.inf) -> None:
        # The thread of `followed` must not write what `look` writes, or it would undo a change made while it looked.
        self.wanted, self.count = me.wanted, 0
        self.share: Mapping[str, int] | None = None
        self._me, self._view, self._patience = me, view, patience
        self._beat = 0
        self._seen: dict[bytes, tuple[int, float]] = {}
        """Key -> the last number that its sweep has written, and when this process first saw it."""
        self._lacking: float | None = None
        """Since when some sweep lacks workers of its share."""
        self._homeless: float | None = None
        """Since when there is no node for a worker."""

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Write about this sweep, and read about the others, from time to time while the block runs."""
        try:
            self._exchange()
            with repeated(self._exchange, seconds=SECONDS_BETWEEN_LOOKS, name="mlmclm-other-sweeps"):
                yield
        finally:
            with suppress(Exception):  # the cluster may be gone
                key_values.delete(self._key)

    @property
    def most(self) -> float:  # type: ignore[override]
        """The most workers that this sweep may have now."""
        return math.inf if self.share is None else sum(self.share.values())

    def most_on(self, node: str) -> float:
        """Return the most workers that it may have now on a node; see `Room.most_on`."""
        return math.inf if self.share is None else self.share.get(node, 0)

    def look(self, wanted: int, busy: int) -> str:
        """Look at the cluster; see `Room.look`.

        Raises:
            EnvironmentFault: there has been no node for a worker for longer than the patience.
        """
        self.wanted = wanted
        if wanted and not busy:
            cluster = self._view()
            if most_places(cluster, self._me.bundle) < 1:
                self.wanted = 0  # or it would keep room that none of its workers can use
                return self._no_node(cluster)
        if self._homeless is not None:
            self._homeless = None
            say("the cluster has nodes for the sweep again")
        if self.count == 0:
            return ""
        others = plural(self.count, "other sweep")
        if self.most < 1 and not busy:
            return f"waiting for its turn: the cluster is used by {others}"
        return f"shares the cluster with {others}"

    def _no_node(self, cluster: Cluster) -> str:
        now = time.monotonic()
        missing = f"no node has {amounts(self._me.bundle)} for a cell: {describe(cluster)}"
        if self._homeless is None:
            self._homeless = now
            say(f"waiting for nodes, for up to {self._patience:g} s (--wait-for-nodes): {missing}")
        if now - self._homeless > self._patience:
            raise EnvironmentFault(
                f"Waited {self._patience:g} s (--wait-for-nodes), and {missing}. All results are kept: run the same command "
                "again when the nodes are back."
            )
        return f"waiting for nodes since {now - self._homeless:.0f} s"

    @property
    def _key(self) -> bytes:
        return PREFIX + self._me.name.encode()

    def _exchange(self) -> None:
        with suppress(Exception):  # if the cluster doesn't answer, the sweep itself reports it
            others = self._others()
            self.count = len(others)
            held = held_by_node() if others else {}  # nobody asks for it otherwise
            me = replace(self._me, wanted=self.wanted, held=held)
            self._beat += 1
            key_values.put(self._key, json.dumps([self._beat, asdict(me)]).encode())
            turn = int(time.time() // SECONDS_A_TURN)
            share = own_share(me.name, free_by_node(), [me, *others], turn) if others else None
            now = time.monotonic()
            self._lacking = None if share is None else self._lacking or now
            waited = self._lacking is not None and now - self._lacking >= SECONDS_BEFORE_A_HANDOVER
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
                forget(other.name)
        return found
