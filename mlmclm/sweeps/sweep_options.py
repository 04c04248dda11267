"""Options of a sweep, which change no result, and its outcome."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlmclm.arguments import SECONDS_FOR_NODES
from mlmclm.backends.device_kinds import Choice
from mlmclm.cluster.placement import Cluster, Resources, cell_bundle
from mlmclm.errors import EnvironmentFault, UserError
from mlmclm.finetuning.cell import Cell
from mlmclm.sweeps.cell_failures import Retries, describe_error
from mlmclm.sweeps.cells import cell_name
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
    worker: type[Any] | None = None
    results_store: ResultsStore | None = None

    def bundle(self, cluster: Cluster) -> Resources:
        """Return the resources that a cell reserves on a cluster."""
        return cell_bundle(self.cpus_per_cell, self.gpus_per_cell, self.device, cluster)


@dataclass(frozen=True)
class SweepOutcome:
    """Results of a sweep, and the cells that have none.

    `results` are in the order of the cells, without gaps for those that have no result. `computed` counts the cells
    that were computed now, `reused` those that already had a result. `failed` lists the cells that raised, with their
    errors. `not_run` lists those that were never tried, because a fault of the machine would have hit them all. `grids`
    has the ResultGrid of each Ray Tune experiment of this run.
    """

    results: list[dict[str, Any]]
    computed: int = 0
    reused: int = 0
    failed: list[tuple[Cell, Exception]] = field(default_factory=list)
    not_run: list[Cell] = field(default_factory=list)
    grids: list[Any] = field(default_factory=list)

    def check(self) -> None:
        """Raise one error for all failed cells.

        Raises:
            UserError: every failed cell failed because of the user's input.
            EnvironmentFault: some cells failed for another reason.
        """
        total = len(self.failed) + len(self.results) + len(self.not_run)
        if self.not_run and not self.failed:
            raise EnvironmentFault(f"{len(self.not_run)} of {total} cells were not tried; the same command runs them.")
        if not self.failed:
            return
        names = [cell_name(cell) for cell, _ in self.failed]
        listed = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        first = self.failed[0][1]
        kept = f"{len(self.results)} results are kept; the same command runs the missing cells only."
        skipped = f" {len(self.not_run)} cells were not tried." if self.not_run else ""
        kind = UserError if all(isinstance(error, UserError) for _, error in self.failed) else EnvironmentFault
        raise kind(
            f"{len(names)} of {total} cells failed: {listed}.{skipped} {kept}\nFirst error: {describe_error(first)}"
        ) from first
