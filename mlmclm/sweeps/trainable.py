"""The Ray Tune trainable: an actor that computes one whole cell per trial and files the result itself."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from ray import tune
from ray._raylet import setproctitle  # type: ignore[attr-defined]

from mlmclm.backends.choice import backend_of
from mlmclm.errors import EnvironmentFault, MlmclmError
from mlmclm.finetuning.cell import CELL_THREADS, Cell, cell_key
from mlmclm.finetuning.run import keep_encoder, run_cell, shapes_of
from mlmclm.models.warm_up import prepare
from mlmclm.service.placement import Device, no_gpu
from mlmclm.sweeps.cells import cell_name
from mlmclm.sweeps.ledger import Ledger
from mlmclm.sweeps.starts import KeptWeights

COMPUTED, REUSED, USER_ERROR, ENVIRONMENT_FAULT = "computed", "reused", "user error", "environment fault"
TAKEN = "taken"
"""Outcome if another process is computing the cell: the driver waits for it, and this worker moves on."""


class SweepWorker(tune.Trainable):
    """Computes one cell per trial; reused from trial to trial with its cache of weights and tokenised data.

    A trial's config holds `cell`, the cell's key, and `resources`, amounts by Ray's names. The cell runs on the GPU if
    it reserves one or a fraction of one, else on the CPU. A trial is a single step.

    An error that would recur (bad input, a full disk) is the trial's outcome and is not retried. Any other exception
    ends the actor, and Tune retries the cell in a new one.
    """

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        """Return the resources that a trial reserves."""
        return tune.PlacementGroupFactory([config["resources"]])

    def setup(
        self,
        config: dict[str, Any],
        cells: Mapping[str, Cell] | None = None,
        store: Path | None = None,
        data_root: Path | None = None,
    ) -> None:
        """Set up an actor for its first trial; the arguments after `config` come from `tune.with_parameters`.

        Args:
            cells: the cells of all trials, by key.
            store, data_root: absolute paths.
        """
        if cells is None or store is None:
            raise TypeError("cells and store are needed: pass them by tune.with_parameters")
        # The number of threads sets the order of sums, so another number would change the scores.
        torch.set_num_threads(CELL_THREADS)
        self._cells, self._store, self._data_root = cells, store, data_root
        self._cache: dict[Any, Any] = {}
        self._weights = ""
        self._device: Device = "cuda" if config["resources"].get("GPU") else "cpu"
        self._prepared = False
        self.reset_config(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Switch to the next trial; when the model changes, drop the cache, so that it holds only one."""
        self._cell = self._cells[new_config["cell"]]
        if self._cell.weights != self._weights:
            self._cache.clear()
            self._weights = self._cell.weights
        return True  # tells Tune that it can reuse this actor

    def step(self) -> dict[str, Any]:
        """Compute and file the cell unless its result exists or another process computes it; report which it was."""
        name = cell_name(self._cell)
        # `top` and the dashboard's list of workers show the process title.
        setproctitle(f"ray::cell {name}")
        try:
            self._check_device()
            self._prepare()
            outcome = self._run()
        except MlmclmError as error:
            kind = ENVIRONMENT_FAULT if isinstance(error, EnvironmentFault) else USER_ERROR
            return {"outcome": kind, "message": str(error), "done": True}
        finally:
            setproctitle("ray::SweepWorker")
        print(f"{name}: {outcome}", flush=True)
        return {"outcome": outcome, "backend": backend_of(self._device).name, "done": True}

    def _check_device(self) -> None:
        # A GPU that torch cannot see would fail every cell here, so this stops the sweep instead of causing retries.
        if self._device == "cuda" and not torch.cuda.is_available():
            raise EnvironmentFault(no_gpu(platform.node()))

    def _prepare(self) -> None:
        # Compile kernels before any cell is timed; the driver has done so only for its own machine.
        if self._device == "cpu" and not self._prepared:
            prepare(shapes_of(self._cells.values()), print)
        self._prepared = True

    def _run(self) -> str:
        ledger = Ledger(self._store)
        with ledger.claims.attempt([ledger.claim(cell_key(self._cell))]) as other:
            if other is not None:
                return TAKEN
            _, computed = ledger.complete(self._cell, self.compute)
        return COMPUTED if computed else REUSED

    def compute(self, cell: Cell) -> dict[str, Any]:
        """Compute the cell's result (see `run_cell`), and file its examples."""
        return run_cell(
            cell,
            store=self._store,
            data_root=self._data_root,
            cache=self._cache,
            device=self._device,
            on_examples=Ledger(self._store).write_examples,
        )

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Save nothing, since a trial is a single step."""

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Load nothing, since a retried trial starts from the beginning."""

    def __repr__(self) -> str:
        return "SweepWorker"


class KeepingWorker(SweepWorker):
    """Computes cells again to keep their encoders, for other cells to start from."""

    def _run(self) -> str:
        kept, key = KeptWeights(self._store), cell_key(self._cell)
        with kept.claims.attempt([kept.claim(key)]) as other:
            if other is not None:
                return TAKEN
            if kept.find(key) is not None:
                return REUSED
            keep_encoder(
                self._cell, store=self._store, data_root=self._data_root, cache=self._cache, device=self._device
            )
        return COMPUTED
