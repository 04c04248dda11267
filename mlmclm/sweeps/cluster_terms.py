"""The terms on which a sweep uses a cluster that nodes join and leave."""

from __future__ import annotations

from dataclasses import dataclass

SECONDS_FOR_NODES = 3600.0
"""How long a sweep waits for nodes by default: booting a machine takes minutes, getting a reclaimed one back longer."""


@dataclass(frozen=True)
class ClusterTerms:
    """Terms of a sweep.

    Attributes:
        wait_for_nodes: seconds for which the cluster may have no node for a worker.
    """

    wait_for_nodes: float = SECONDS_FOR_NODES
