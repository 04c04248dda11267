"""Options of a sweep: how its cells are computed, which changes no result."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlmclm.arguments import SECONDS_FOR_NODES
from mlmclm.backends.device_kinds import Choice
from mlmclm.cluster.placement import Cluster, Resources, cell_bundle
from mlmclm.sweeps.cell_failures import Retries
from mlmclm.sweeps.results_store import ResultsStore


@dataclass(frozen=True)
class SweepOptions:
    """Options of a sweep.

    Attributes:
        store: the store; if there are several machines, they share it.
        data_root: folder of local data sets, or None.
        name: the name of the Tune experiment.
        cpus_per_cell, gpus_per_cell, max_concurrent, retries, time_limit: as in `Space`.
        device: decides on GPUs if `gpus_per_cell` is None (`placement.choose_device`).
        wait_for_nodes: seconds for which the cluster may have no node for a worker.
        session: opens a Ray session, and is used only if a result is missing; it must leave Ray initialised.
        on_result: called in this thread with each result once it is known; results of earlier runs come first, in the
            order of the cells.
        progress: whether to show progress: a bar on a terminal, else lines.
        worker: a subclass of `Finetune` to use instead of it.
        results_store: where the results are; by default in the store.
    """

    store: Path
    data_root: Path | None = None
    name: str = "sweep"
    cpus_per_cell: float = 1
    gpus_per_cell: float | None = None
    device: Choice = "auto"
    max_concurrent: int | None = None
    retries: Retries = field(default_factory=Retries)
    time_limit: float | None = None
    wait_for_nodes: float = SECONDS_FOR_NODES
    session: Callable[[], AbstractContextManager[Any]] = nullcontext
    on_result: Callable[[dict[str, Any]], None] | None = None
    progress: bool = True
    worker: type[Any] | None = None
    results_store: ResultsStore | None = None

    def bundle(self, cluster: Cluster) -> Resources:
        """Return the resources that a cell reserves on a cluster."""
        return cell_bundle(self.cpus_per_cell, self.gpus_per_cell, self.device, cluster)
