"""The Ray Tune trainable: a worker that computes one training after another and files the results itself.

The driver imports this module too, so transformers' models are imported in the workers only.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ray import tune
from ray._raylet import setproctitle  # type: ignore[attr-defined]

from mlmclm.backends.choice import backend_of, visible
from mlmclm.cluster.placement import device_of, no_gpu
from mlmclm.errors import EnvironmentFault, MissingBucket, MlmclmError, StorageFault
from mlmclm.finetuning.cell import CELL_THREADS, Cell, shapes_of
from mlmclm.finetuning.kept import KeptEncoder
from mlmclm.models.warm_up import prepare
from mlmclm.registry import Shipment
from mlmclm.storage.addresses import address_of
from mlmclm.sweeps.heartbeats import Heartbeat, beating
from mlmclm.sweeps.ledger import Ledger
from mlmclm.sweeps.trainings import Training

COMPUTED, REUSED, USER_ERROR, ENVIRONMENT_FAULT = "computed", "reused", "user error", "environment fault"
STORAGE_FAULT = "storage fault"
"""Outcome if the results' place has not answered for too long: no cell is at fault, and what is computed is kept."""
TAKEN = "taken"
"""Outcome if another process is computing the cell: the driver waits for it, and this worker moves on."""


class SweepWorker(tune.Trainable):
    """Computes the cells of a training with each call of `take`; Tune's next call of `train` reports on them.

    A trial is a worker: it lasts as long as there are trainings to take. Its config holds `resources` (amounts by Ray's
    names). Cells run on the GPU if it reserves one or a fraction of one, else on the CPU.

    An error that would recur (bad input, a full disk) is the cell's outcome and is not retried. Any other exception
    ends the actor, and Tune starts another one.
    """

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        """Return the resources that a worker reserves."""
        return tune.PlacementGroupFactory([config["resources"]])

    def setup(
        self,
        config: dict[str, Any],
        *,
        registered: Shipment | None = None,
        store: Path,
        seen: Path,
        data_root: Path | None = None,
        sweep: str = "",
    ) -> None:
        """Set up the actor; the arguments after `config` come from `tune.with_parameters`, with absolute paths.

        Args:
            registered: what the driver has registered; it is here too once this has arrived.
            seen: a folder of this sweep in the store, which a worker that shares the store can see.
            sweep: the name under which heartbeats are sent; empty to send none.
        """
        self.load()
        # The number of threads sets the order of sums, so another number would change the scores.
        torch.set_num_threads(CELL_THREADS)
        self._store, self._data_root, self._seen = store, data_root, seen
        self._ledger = Ledger(store)
        self._cache: dict[Any, Any] = {}
        self._weights = ""
        self._device = device_of(config["resources"])
        self._prepared: set[tuple[Path, str]] = set()
        """Models, by folder and precision, whose kernels are compiled."""
        self._report: dict[str, Any] = {}
        self._crash: Exception | None = None
        self._lost = 0.0
        """Seconds for which storage had not answered when the training was taken."""
        self._idle: float | None = None
        """When the training taken last ended, on the monotonic clock; None if it has not."""
        self._heart = ExitStack()
        if sweep:
            self._heart.enter_context(beating(sweep, self.trial_id, self._heartbeat))

    def _heartbeat(self) -> Heartbeat:
        available = self._ledger.availability
        # The driver itself may wait for storage, and give this worker its next training much later.
        idle = 0.0 if self._idle is None else time.monotonic() - self._idle
        return Heartbeat(available.lost - self._lost + idle, available.notice)

    def cleanup(self) -> None:
        """End the heartbeats, with the worker."""
        self._heart.close()

    def load(self) -> None:
        """Import what computes cells, which takes seconds, before any cell's time is counted."""
        import mlmclm.finetuning.run  # noqa: F401

    def take(self, cells: Mapping[str, Cell], failures: Sequence[Mapping[str, str]] = ()) -> None:
        """Compute and file cells that share a training, except those that have a result or that another process computes.

        The driver calls this under the training's name, so the Ray dashboard lists trainings among the tasks. Nothing is
        raised here: the next `step` returns the outcomes or raises the error, which Tune then handles. Earlier failures
        of these cells in this sweep are noted in the results.

        Args:
            cells: the cells, by key. A worker is never given all of a sweep's: 100,000 take it 100 MB and some seconds.
        """
        training = Training(cells)
        name, self._failures = training.name, list(failures)
        self._lost, self._idle = self._ledger.availability.lost, None
        # The cache holds one model only.
        if training.first.weights != self._weights:
            self._cache.clear()
            self._weights = training.first.weights
        # `top` and the dashboard's list of workers show the process title.
        setproctitle(f"ray::cell {name}")
        began = time.perf_counter()
        try:
            self._get_ready(training)
            outcomes = list(self._run(training).values())
            precision = training.first.protocol.precision
            backend = backend_of(self._device).described(precision) if COMPUTED in outcomes else ""
            # A list in the order of the keys, because Tune flattens mappings in results.
            self._report = {"outcome": COMPUTED, "outcomes": outcomes, "backend": backend}
        except (StorageFault, MissingBucket) as error:
            self._report = {"outcome": STORAGE_FAULT, "message": str(error), "exit_code": error.exit_code}
        except MlmclmError as error:
            kind = ENVIRONMENT_FAULT if isinstance(error, EnvironmentFault) else USER_ERROR
            self._report = {"outcome": kind, "message": str(error)}
        except BaseException as error:  # tokenizers' Rust code panics with one that is no Exception
            self._crash = error if isinstance(error, Exception) else RuntimeError(repr(error))
        finally:
            self._idle = time.monotonic()
            setproctitle("ray::SweepWorker")
        self._report["seconds"] = time.perf_counter() - began
        print(f"{name}: {self._report.get('outcome', 'crashed')}", flush=True)

    def step(self) -> dict[str, Any]:
        """Report on the cell taken last; the report is empty if none was."""
        if self._crash is not None:
            raise self._crash
        report, self._report = self._report, {}
        return report

    def _get_ready(self, training: Training) -> None:
        # A node with a folder of the same name on its own disk would compute cells that nobody finds.
        if address_of(self._store) is None and not self._seen.is_dir():
            raise EnvironmentFault(
                f"{platform.node()} doesn't see this sweep in {self._store}: the store must be on a file system that all "
                "nodes of the cluster share. Give such a folder or an address, such as s3://bucket/prefix, with --store."
            )
        # A GPU that torch cannot see would fail every cell here, so this stops the sweep instead of causing retries.
        if not visible(self._device):
            raise EnvironmentFault(no_gpu(platform.node()))
        # Compile kernels before any cell of a model is timed; the driver has done so only for its own machine.
        kind = training.first.model_folder, training.first.protocol.precision
        if kind not in self._prepared:
            prepare(shapes_of([training.first]), print, self._device)
        self._prepared.add(kind)

    def _run(self, training: Training) -> dict[str, str]:
        """Compute and file the cells of a training; return the outcome of each by its key."""
        ledger = self._ledger
        outcomes = dict.fromkeys(training.cells, REUSED)
        with ExitStack() as leases:
            missing = []
            for key, cell in training.cells.items():
                if leases.enter_context(ledger.leases.attempt([ledger.lease(key)])) is not None:
                    outcomes[key] = TAKEN
                elif ledger.find(key) is None and not ledger.file_unfiled([key]):
                    missing.append(cell)
            if not missing:
                return outcomes
            # File each result before the next evaluation, so that none is lost if a later evaluation fails.
            for result in self.compute(missing):
                if self._failures:
                    result["cost"]["retried_after"] = self._failures
                ledger.write(result)
                outcomes[result["key"]] = COMPUTED
        return outcomes

    def compute(self, cells: Sequence[Cell]) -> Iterable[dict[str, Any]]:
        """Compute the results of cells that share a training (see `run_training`), and file their examples."""
        from mlmclm.finetuning.run import run_training

        return run_training(
            cells,
            store=self._store,
            data_root=self._data_root,
            cache=self._cache,
            device=self._device,
            on_examples=self._ledger.write_examples,
        )

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Save nothing, since the ledger has every result."""

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Load nothing: a worker that is started again takes another cell."""

    def __repr__(self) -> str:
        return str(self.trial_name)


class KeepingWorker(SweepWorker):
    """Computes cells again to keep their encoders, for other cells to start from."""

    def _run(self, training: Training) -> dict[str, str]:
        return {key: self._keep(key, cell) for key, cell in training.cells.items()}

    def _keep(self, key: str, cell: Cell) -> str:
        from mlmclm.finetuning.run import keep_encoder

        kept = KeptEncoder(self._store, key)
        if kept.leases.holder(kept.lease) is not None:
            return TAKEN
        if kept.find():
            return REUSED
        options: dict[str, Any] = {"data_root": self._data_root, "cache": self._cache, "device": self._device}
        kept.ensure(partial(keep_encoder, cell, store=self._store, **options))
        return COMPUTED
