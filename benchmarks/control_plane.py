"""Cost of a sweep beside its cells:  python -m benchmarks.control_plane [--cells N] [--workers N] [--seconds S] [--runs FILE] [--beside N]

Cells of the published grid (42 models, the space `paper`: 15,120), or of more models, on workers of a Ray session. They are not
computed: each writes a result and examples of real size. Ray Tune, results store, tracking in MLflow (also the runs that it lacks
in the end) and a second run of the finished sweep are measured; a section of `benchmarks/RESULTS.md`.

With `--runs`, only the sweep itself is run, in which each cell takes S seconds, and a line of JSON is added to the file: the CPU
time of the driver and of Ray's daemons from when all workers compute until one runs out of cells. With `--beside`, the driver
watches as many unfinished calls and placement groups as if N further workers computed all the time. Each trial then has one
cell.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil

from benchmarks.results import machine, write_section
from mlmclm.cluster.ray_cluster import ray_session
from mlmclm.finetuning.cell import Cell, cell_key
from mlmclm.results.examples import to_parquet
from mlmclm.storage.files import only_one
from mlmclm.storage.place import LOCK, Place
from mlmclm.studies.study_file import SweepFile
from mlmclm.studies.study_tracking import tracked
from mlmclm.sweeps import sweep_trials
from mlmclm.sweeps.cells import SweepModel, expand
from mlmclm.sweeps.manifest import write_manifest
from mlmclm.sweeps.run_sweep import run_sweep
from mlmclm.sweeps.space import Space, find_space
from mlmclm.sweeps.starts import Planned
from mlmclm.sweeps.sweep_options import SweepOptions
from mlmclm.sweeps.trainable import Finetune
from mlmclm.sweeps.trial import Training
from mlmclm.tracking.address import own_database
from mlmclm.tracking.records import RunRecord
from mlmclm.tracking.views import group_record, model_record, sweep_record

CELLS_OF_A_MODEL, EXAMPLES, CURVE = 360, 872, 50
"""The space's cells for each model; test examples (SST-2's) and points of the loss curve of a result."""


def result_of(cell: Cell) -> dict[str, Any]:
    """Return a result of real size."""
    chance = np.random.default_rng(int(cell_key(cell)[:8], 16))
    metric = cell.declared.metric
    scores = {split: {metric: float(chance.uniform(0.6, 0.9)), "accuracy": 0.5} for split in ("validation", "test")}
    return {
        "schema": 1, "key": cell_key(cell), "model": cell.model, "weights": cell.weights, "task": cell.task,
        "family": cell.declared.family, "task_data": cell.task_data, "protocol": cell.protocol.model_dump(mode="json"),
        "learning_rate": cell.learning_rate, "seed": cell.seed, "engine": "1", "status": "ok", "metric": metric,
        "scores": scores, "diverged_step": None, "steps": 1000, "examples": 32000, "tokens": 9_000_000,
        "curve": [[20 * (n + 1), float(chance.uniform(0.1, 0.7))] for n in range(CURVE)], "parameters": 210_000_000,
        "cost": {"seconds": 60.0, "start_up": 0.5, "train": 50.0, "evaluate": 9.5, "worker": f"node/{os.getpid()}",
                 "finished": "2026-01-02T03:04:05+00:00"},
    }  # fmt: skip


class FilesOnly(Finetune):
    """A trial that files results without computing them."""

    def _get_ready(self, training: Training, seen: Path | None) -> None:
        """Compile nothing."""

    def compute(self, cells: Sequence[Cell], every: int | None = None) -> list[dict[str, Any]]:
        gold = np.random.default_rng(0).integers(0, 2, EXAMPLES)
        columns = {"gold": gold, "prediction": gold, "correct": gold == gold}
        results = [result_of(cell) for cell in cells]
        for result in results:
            self._results_store.write_examples(result, to_parquet(result, columns, ("no", "yes")))
        return results


class Simulated(FilesOnly):
    """A trial that looks to the driver like `Finetune`, with its reports and results, but takes `seconds` for each cell."""

    crew, seconds = 1, 0.0
    """Actors that begin together, and seconds that a cell takes."""

    def load(self) -> None:
        """Import nothing."""

    def compute(self, cells: Sequence[Cell], every: int | None = None) -> list[dict[str, Any]]:
        """Wait for the other actors before the first cell."""
        begun = self._store / "begun"
        begun.mkdir(exist_ok=True)
        marker = begun / str(os.getpid())
        if not marker.exists():
            marker.touch()
            while len(list(begun.iterdir())) < self.crew:
                time.sleep(0.5)
        time.sleep(self.seconds * len(cells))
        return [result_of(cell) for cell in cells]


def cells_of(count: int, folder: Path) -> tuple[SweepFile, list[Cell]]:
    """Return the first cells of the published grid, or of one with more models, and the sweep that they belong to."""
    space = find_space("paper").at_context(2048)
    models = [
        SweepModel(f"210m-clm-{n + 1}k", folder / str(n), f"{n:064x}") for n in range(-(-count // CELLS_OF_A_MODEL))
    ]
    grid = expand(space, models, {task: f"{number:064x}" for number, task in enumerate(space.tasks)})
    file = SweepFile(name="scale", models={model.name: str(model.folder) for model in models}, space="paper")
    return file, list(islice(grid, count))


def runs_of(database: Path) -> dict[str, bool]:
    """Return the cells with a finished run in MLflow, each with whether the run's parent is in the same experiment."""
    query = """
        SELECT cell.value, parent.experiment_id = runs.experiment_id FROM runs
        JOIN tags AS cell ON cell.run_uuid = runs.run_uuid AND cell.key = 'mlmclm.cell'
        LEFT JOIN tags AS above ON above.run_uuid = runs.run_uuid AND above.key = 'mlflow.parentRunId'
        LEFT JOIN runs AS parent ON parent.run_uuid = above.value
        WHERE runs.status = 'FINISHED' AND runs.lifecycle_stage = 'active'
    """
    with closing(sqlite3.connect(database)) as connection:
        return {str(key): bool(same) for key, same in connection.execute(query)}


def daemons() -> dict[str, float]:
    """Return the CPU seconds of Ray's head service and of its node daemon, which this process has started."""
    family = psutil.Process().children(recursive=True)
    return {child.name(): sum(child.cpu_times()[:2]) for child in family if child.name() in ("gcs_server", "raylet")}


def unshared_mib(process: psutil.Process) -> float:
    """Return a process's memory that it shares with no other, in MiB."""
    return float(process.memory_full_info().uss) / 2**20


@contextmanager
def looked_at(beside: int) -> Iterator[None]:
    """Inside the block, let Tune's loop wait for `beside` calls that don't end, and the session have as many placement groups."""
    import ray
    from ray.air.execution._internal.event_manager import RayEventManager
    from ray.util.placement_group import placement_group

    @ray.remote(num_cpus=0, max_concurrency=10_000)
    class Waits:
        async def wait(self) -> None:
            await asyncio.sleep(1e6)

    waits: Any = Waits.remote()  # type: ignore[attr-defined]  # the decorator, which mypy does not read, adds it
    calls = {waits.wait.remote() for _ in range(beside)}
    groups = [placement_group([{"CPU": 0.5 / beside}]) for _ in range(beside)]
    ray.get([group.ready() for group in groups])
    tracked, first = RayEventManager.get_futures, list[Any]()

    def with_calls(self: Any) -> Any:
        if not first:  # Tune has two, and waits for what both track
            first.append(self)
        return tracked(self) | (calls if self is first[0] else set())

    with (
        mock.patch.object(RayEventManager, "get_futures", with_calls),
        mock.patch.object(sweep_trials, "seeds_together", lambda *_: 1),
    ):
        yield


def steady(count: int, workers: int, seconds: float, beside: int = 0) -> dict[str, Any]:
    """Run a sweep; return its costs from when all workers compute until one runs out of cells."""
    marks: list[dict[str, float]] = []
    memory: list[float] = []
    first, last = workers, count - workers

    def note(_: object) -> None:
        done.append(None)
        if len(done) in (first, last):
            marks.append({"seconds": time.perf_counter(), "driver": time.process_time(), **daemons()})
        if len(done) == last:
            family = psutil.Process().children(recursive=True)
            names = {child: "".join(child.cmdline()[:1]) for child in family}
            actors = [child for child in family if names[child].startswith("ray::") and "Agent" not in names[child]]
            memory.extend(map(unshared_mib, actors[:8]))

    done: list[None] = []
    worker = type("Worker", (Simulated,), {"crew": workers, "seconds": seconds, "__module__": "__main__"})
    with tempfile.TemporaryDirectory() as temporary:
        store = Path(temporary) / "store"
        _, cells = cells_of(count, store)
        options = SweepOptions(store=store, gpus_per_cell=0, worker=worker, on_result=note)
        with ray_session(store, num_cpus=workers + bool(beside)), looked_at(beside) if beside else nullcontext():
            began = unshared_mib(psutil.Process())
            run_sweep(cells, options).check()
            grown = unshared_mib(psutil.Process()) - began
    spent = {name: marks[1][name] - value for name, value in marks[0].items()}
    return {
        "cells": count, "workers": workers, "beside": beside, "cell_seconds": seconds, "counted": last - first, **spent,
        "driver_mib": grown, "worker_mib": sum(memory) / max(1, len(memory)), "machine": machine(),
    }  # fmt: skip


def announced(file: SweepFile, space: Space) -> tuple[RunRecord, ...]:
    """Return the runs that a study has in MLflow before its first cell: of the sweep, its models, and their tasks."""
    about, models, tasks = {"objective": ""}, tuple(file.models), space.tasks
    rates, seeds = space.learning_rates, space.seeds
    return (
        sweep_record(file.name, models=models, tasks=tasks, learning_rates=rates, seeds=seeds, status="RUNNING"),
        *(model_record(file.name, model, about=about, status="RUNNING") for model in models),
        *(group_record(file.name, model, task, about=about, status="RUNNING") for model in models for task in tasks),
    )


def main() -> None:
    """Measure, and write the section of RESULTS.md."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cells", type=int, default=15_120)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--beside", type=int, default=0)
    flags = parser.parse_args()
    count, workers = flags.cells, flags.workers
    if flags.runs is not None:
        with flags.runs.open("a") as file:
            file.write(json.dumps(run := steady(count, workers, flags.seconds, flags.beside)) + "\n")
        print(run)
        return
    with tempfile.TemporaryDirectory() as temporary:
        store = Path(temporary) / "store"
        file, cells = cells_of(count, store)
        options = SweepOptions(store=store, gpus_per_cell=0, worker=FilesOnly)
        seen: list[float] = []
        with ray_session(store, num_cpus=workers):
            began, cpu = time.perf_counter(), time.process_time()
            place = Place(store)
            folder = place.study_folder(file.name)
            with only_one(folder / LOCK, file.name), tracked(file, place) as told:
                told.tell(records=announced(file, find_space("paper")))
                write_manifest(folder, file.name, Planned(cells))
                timed = replace(options, on_result=lambda _: seen.append(time.perf_counter()))
                outcome = run_sweep(cells, timed)
                swept, cpu = time.perf_counter() - began, time.process_time() - cpu
            closed = time.perf_counter() - began
            # The only child so far that has ended and isn't tiny.
            mirror = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
        outcome.check()
        runs = runs_of(own_database(store))
        megabytes = own_database(store).stat().st_size / 1e6
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        again = time.perf_counter()
        assert run_sweep(cells, options).computed == 0
        again = time.perf_counter() - again
    tenth = len(seen) // 10
    rates = [tenth / (part[-1] - part[0]) for part in (seen[:tenth], seen[-tenth:])]
    shares = Counter(result["cost"]["worker"] for result in outcome.results)
    lines = [
        f"Command: `python -m benchmarks.control_plane --cells {count} --workers {workers}`. Machine: {machine()}.",
        "Cells of the published grid that file results of real size and compute nothing.",
        "",
        "| what | |",
        "|---|---|",
        f"| cells | {len(seen):,} |",
        f"| sweep, s | {swept:.0f} |",
        f"| from the last cell until MLflow has what it gets, s | {began + closed - seen[-1]:.0f} |",
        f"| runs that MLflow lacks | {len(cells) - len(runs):,} |",
        f"| its runs that are below their (model, task) in the same experiment | {sum(runs.values()):,} |",
        f"| its database, MB | {megabytes:.0f} |",
        f"| the driver's CPU, ms a cell | {1000 * cpu / len(seen):.1f} |",
        f"| memory of the driver and of the process that writes to MLflow, GiB | {memory:.2f}, {mirror:.2f} |",
        f"| cells a second, first and last tenth | {rates[0]:.0f}, {rates[1]:.0f} |",
        f"| cells of each worker, fewest and most | {min(shares.values()):,}, {max(shares.values()):,} |",
        f"| again, all done, s | {again:.1f} |",
    ]
    write_section(
        "Control plane"
        if count == 15_120 and workers == 2
        else f"Control plane, {count:,} cells and {workers} workers",
        lines,
    )


if __name__ == "__main__":
    main()
