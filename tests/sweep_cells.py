"""Cells that need no data, and workers that compute them instantly, with faults on demand."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from mlmclm.errors import EnvironmentFault, UserError
from mlmclm.finetuning.cell import Cell, cell_key
from mlmclm.finetuning.protocol import Protocol
from mlmclm.sweeps.trainable import Finetune


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not true() and time.monotonic() < deadline:
        time.sleep(0.05)


def make_cell(model: str = "a", task: str = "sst2", learning_rate: float = 1e-3, seed: int = 0) -> Cell:
    return Cell(
        model=model,
        model_folder=Path("/nowhere") / model,
        weights=f"weights of {model}",
        task=task,
        task_data=f"data of {task}",
        protocol=Protocol(max_steps=10),
        learning_rate=learning_rate,
        seed=seed,
    )


def make_cells(count: int, **axes: Any) -> list[Cell]:
    return [make_cell(seed=seed, **axes) for seed in range(count)]


def make_result(cell: Cell, *, status: str = "ok", worker: str = "host/1") -> dict[str, Any]:
    scores = {split: {"accuracy": 0.5 + cell.seed / 100} for split in ("validation", "test")}
    return {
        "schema": 1,
        "key": cell_key(cell),
        "model": cell.model,
        "weights": cell.weights,
        "task": cell.task,
        "family": "sequence-classification",
        "task_data": cell.task_data,
        "protocol": cell.protocol.model_dump(mode="json"),
        "learning_rate": cell.learning_rate,
        "seed": cell.seed,
        "engine": "1",
        "status": status,
        "metric": "accuracy",
        "scores": scores if status == "ok" else None,
        "diverged_step": None if status == "ok" else 3,
        "curve": [[1, 0.7], [5, 0.6], [10, 0.5]],
        "steps": 10,
        "examples": 320,
        "tokens": 9000,
        "parameters": 1000,
        "cost": {
            "seconds": 2.0,
            "start_up": 0.5,
            "train": 1.0,
            "evaluate": 0.5,
            "worker": worker,
            "finished": "2026-01-02T03:04:05+00:00",
        },
    }


def crew(store: Path) -> list[int]:
    """Return the processes that have begun a cell."""
    return [int(path.name) for path in (store / "begun").glob("*")]


def wait_for_crew(store: Path, count: int) -> None:
    """Wait until `count` processes, this one included, have begun a cell."""
    (store / "begun").mkdir(exist_ok=True)
    (store / "begun" / str(os.getpid())).touch()
    deadline = time.monotonic() + 300
    while len(crew(store)) < count and time.monotonic() < deadline:
        time.sleep(0.05)


class WatchedWorker(Finetune):
    """Computes real cells, once there are two workers; `store/watched` has each cell's process and the address of its base
    model."""

    def compute(self, cells: Sequence[Cell], every: int | None = None) -> list[dict[str, Any]]:
        wait_for_crew(self._store, 2)
        results = list(super().compute(cells))
        (base,) = (kept for name, kept in self._cache.items() if name[0] == "model")
        with (self._store / "watched").open("a") as handle:
            handle.write(f"{os.getpid()} {cells[0].model} {id(base)} {next(base.parameters()).data_ptr()}\n")
        return results


class Fails(Finetune):
    """Computes real cells.

    Files named after seeds in `store/faults` say what goes wrong. A file is removed when its fault happens, unless it says
    `always`. `store/starts` counts the computations.
    """

    def compute(self, cells: Sequence[Cell], every: int | None = None) -> list[dict[str, Any]]:
        for cell in cells:
            self.go_wrong(cell)
        return list(super().compute(cells))

    def go_wrong(self, cell: Cell) -> str:
        """Cause the cell's fault; return it if it is not a failure."""
        starts = self._store / "starts" / f"{cell.model}-{cell.task}-{cell.seed}"
        starts.parent.mkdir(exist_ok=True)
        with starts.open("a") as handle:
            handle.write(f"{os.getpid()}\n")
        fault_file = self._store / "faults" / str(cell.seed)
        fault = fault_file.read_text() if fault_file.exists() else ""
        if fault and not fault.startswith("always"):
            fault_file.unlink()
        if "killed" in fault:
            os.kill(os.getpid(), signal.SIGKILL)
        if "stops" in fault:
            os.kill(os.getpid(), signal.SIGSTOP)
        if "raises" in fault:
            raise RuntimeError("something broke")
        if "input" in fault:
            raise UserError("the data set has no such column")
        if "memory" in fault:
            torch.empty(1 << 62, dtype=torch.uint8)
        if "full" in fault:
            raise EnvironmentFault("the disk is full")
        if "waits" in fault:
            (self._store / "waiting").write_text(str(os.getpid()))
            time.sleep(600)
        return fault


class FakeWorker(Fails):
    """Computes `make_result`; `store/environment` has variables of the worker's environment."""

    def load(self) -> None:
        """Load nothing: only real cells need transformers, whose import takes longer than a whole sweep of these."""

    def compute(self, cells: Sequence[Cell], every: int | None = None) -> list[dict[str, Any]]:
        return [self._compute(cell) for cell in cells]

    def _compute(self, cell: Cell) -> dict[str, Any]:
        fault = self.go_wrong(cell)
        names = ("OMP_NUM_THREADS", "MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_")
        (self._store / "environment").write_text(" ".join(os.environ.get(name, "-") for name in names))
        return make_result(cell, status="diverged" if "diverges" in fault else "ok", worker=f"host/{os.getpid()}")


class Seen(FakeWorker):
    """Computes `make_result` once `store/seen` lists this process's title."""

    def compute(self, cells: Sequence[Cell], every: int | None = None) -> list[dict[str, Any]]:
        title = "".join(psutil.Process().cmdline())
        while title not in (self._store / "seen").read_text().splitlines():
            time.sleep(0.05)
        return super().compute(cells)


class SlowToStart(FakeWorker):
    """Computes `make_result` in a tenth of a second; all workers but the first take a second longer to start.

    The first waits at its tenth cell until another has computed five: otherwise it could compute all cells by itself
    on a loaded machine.
    """

    def setup(self, config: dict[str, Any], **options: Any) -> None:
        super().setup(config, **options)
        self._taken, self._first = 0, True
        try:
            (config["sweep"].store / "first").touch(exist_ok=False)
        except FileExistsError:
            self._first = False
            time.sleep(1)

    def compute(self, cells: Sequence[Cell], every: int | None = None) -> list[dict[str, Any]]:
        self._taken += 1
        deadline = time.monotonic() + 300
        if not self._first and self._taken == 6:
            (self._store / "late").touch()
        while self._first and self._taken == 10 and not (self._store / "late").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.1)
        return super().compute(cells)


class InACrew(FakeWorker):
    """Computes `make_result` and waits until as many workers as `store/wanted` says have begun a cell."""

    def compute(self, cells: Sequence[Cell], every: int | None = None) -> list[dict[str, Any]]:
        results = super().compute(cells)
        wait_for_crew(self._store, int((self._store / "wanted").read_text()))
        return results


class NeverStarts(Finetune):
    """Cannot be set up."""

    def setup(self, config: dict[str, Any], **options: Any) -> None:
        raise RuntimeError("no such library")


class UntilTold(FakeWorker):
    """Computes `make_result` in a fifth of a second until `store/told` exists, and then instantly."""

    def compute(self, cells: Sequence[Cell], every: int | None = None) -> list[dict[str, Any]]:
        (self._store / "workers").mkdir(exist_ok=True)
        (self._store / "workers" / str(os.getpid())).touch()
        if not (self._store / "told").exists():
            time.sleep(0.2)
        return [make_result(cell, worker=f"host/{os.getpid()}") for cell in cells]


class Retrieves(FakeWorker):
    """Computes scores with a name that MLflow does not allow."""

    def compute(self, cells: Sequence[Cell], every: int | None = None) -> list[dict[str, Any]]:
        scores = {split: {"ndcg@10": 0.5} for split in ("validation", "test")}
        return [{**make_result(cell), "metric": "ndcg@10", "scores": scores} for cell in cells]
