"""Room for a sweep's workers on its cluster: how many there may be, and whether there is any node for them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from mlmclm.cluster.placement import Cluster, Resources, amounts, describe, most_places
from mlmclm.errors import EnvironmentFault
from mlmclm.progress import say
from mlmclm.sweeps.other_sweeps import OtherSweeps


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
    """Room on a cluster that nodes join and leave, and that other sweeps use too.

    Args:
        others: the other sweeps on it.
        bundle: the resources of a worker.
        patience: seconds for which the cluster may have no node for a worker, while none computes.
    """

    def __init__(
        self, others: OtherSweeps, view: Callable[[], Cluster], bundle: Resources, patience: float = math.inf
    ) -> None:
        self._others, self._view, self._bundle, self._patience = others, view, bundle, patience
        self._homeless: float | None = None

    @property
    def most(self) -> float:  # type: ignore[override]
        """The most workers that the sweep may have now."""
        return self._others.most

    def most_on(self, node: str) -> float:
        """Return the most workers that the sweep may have now on a node; see `Room.most_on`."""
        return self._others.most_on(node)

    def look(self, wanted: int, busy: int) -> str:
        """Look at the cluster; see `Room.look`.

        Raises:
            EnvironmentFault: there has been no node for a worker for longer than the patience.
        """
        self._others.wanted = wanted
        if wanted and not busy:
            cluster = self._view()
            if most_places(cluster, self._bundle) < 1:
                self._others.wanted = 0  # or they would keep room that no worker of this sweep can use
                return self._no_node(cluster)
        if self._homeless is not None:
            self._homeless = None
            say("the cluster has nodes for the sweep again")
        if self._others.count == 0:
            return ""
        if self.most < 1 and not busy:
            return f"waiting for its turn: the cluster is used by {_sweeps(self._others.count)}"
        return f"shares the cluster with {_sweeps(self._others.count)}"

    def _no_node(self, cluster: Cluster) -> str:
        now = time.monotonic()
        missing = f"no node has {amounts(self._bundle)} for a cell: {describe(cluster)}"
        if self._homeless is None:
            self._homeless = now
            say(f"waiting for nodes, for up to {self._patience:g} s (--wait-for-nodes): {missing}")
        if now - self._homeless > self._patience:
            raise EnvironmentFault(
                f"Waited {self._patience:g} s (--wait-for-nodes), and {missing}. All results are kept: run the same command "
                "again when the nodes are back."
            )
        return f"waiting for nodes since {now - self._homeless:.0f} s"


def _sweeps(count: int) -> str:
    return f"{count} other sweep{'s' if count > 1 else ''}"
