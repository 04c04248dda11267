"""A Ray session of tests to which nodes can be added, all of them on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray
from ray.cluster_utils import Cluster as Raylets

from mlmclm.cluster.ray_cluster import ray_session


@contextmanager
def head_with_nodes(folder: Path, *, num_cpus: int) -> Iterator[Raylets]:
    """Start a session on a head with this number of CPUs; the value adds and removes nodes."""
    with ray_session(folder, num_cpus=num_cpus):
        raylets = Raylets(initialize_head=False, shutdown_at_exit=False)
        raylets.head_node = ray._private.worker._global_node
        yield raylets
