"""Estimate of the time that a sweep's missing cells will take, with an interval.

A cell's time is its work (`trial.work_of`: tokens passed forward once) times the seconds that its model needs for a unit
of work. These seconds come from the model's results, if the store has enough of them from this device. Otherwise a few
steps of training are timed, once for each model and device.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch

from mlmclm.backends.choice import backend_of, best_device
from mlmclm.cluster.placement import Cluster, cell_bundle, places_now
from mlmclm.errors import UserError
from mlmclm.finetuning.cell import CELL_THREADS, Cell, cell_key, shapes_of
from mlmclm.finetuning.run import run_cell
from mlmclm.models.warm_up import compile_kernels
from mlmclm.progress import say, say_once
from mlmclm.results.intervals import all_equal, student
from mlmclm.storage.files import read_json, stable_hash, write_json
from mlmclm.sweeps.results_store import ResultsStore
from mlmclm.sweeps.space import Space
from mlmclm.sweeps.trial import trainings_of, work_of
from mlmclm.system import usable_cpus
from mlmclm.tasks.prepare_task import find_or_prepare

FEWEST_RESULTS = 4
"""Fewest results of a model from which its speed is computed; with fewer, its speed is measured."""
STEPS, WARM_UP_STEPS = 14, 4
"""Steps of training that a measurement takes, and how many of the first are discarded."""


@dataclass(frozen=True)
class Range:
    """An estimate with its 95 % interval."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> Range:
        """Return the range scaled by a factor."""
        return Range(self.value * factor, self.low * factor, self.high * factor)


@dataclass(frozen=True)
class SweepEstimate:
    """Estimate for the missing cells of a sweep, from measurements on `device`."""

    trainings: int
    seconds: Range
    """Wall time if as many cells as `workers` are computed at once."""
    workers: int
    device: str


def places_here(space: Space) -> int:
    """Return how many of the space's cells this machine computes at once."""
    node = {"CPU": float(usable_cpus()), "GPU": float(torch.cuda.device_count())}
    machine = Cluster(nodes=(node,), free=node)
    places = places_now(machine, cell_bundle(space.cpus_per_cell, space.gpus_per_cell, "auto", machine))
    return max(1, min(places, space.max_concurrent or places))


def estimate_time(
    cells: Sequence[Cell], missing: Sequence[Cell], *, store: Path, data_root: Path | None, workers: int
) -> SweepEstimate:
    """Estimate the time of a sweep's missing cells; models that have too few results on this device are measured.

    The cells must come from `trial.with_trainings`, which sets their work.

    Raises:
        UserError: a model or its data cannot be read.
    """
    backend = backend_of(best_device())
    results_store, work = ResultsStore(store), defaultdict[str, float](float)
    trainings = trainings_of({cell_key(cell): cell for cell in missing})
    for training in trainings:
        work[training.first.weights] += training.work
    speeds = {
        weights: _speed(
            [cell for cell in cells if cell.weights == weights], results_store, backend.title(), store, data_root
        )
        for weights in work
    }
    seconds = [speeds[weights].times(amount / workers) for weights, amount in work.items()]
    # The errors of the models' speeds are independent.
    total = math.fsum(model.value for model in seconds)
    below, above = (
        math.sqrt(math.fsum((model.value - bound) ** 2 for model, bound in zip(seconds, bounds, strict=True)))
        for bounds in ([model.low for model in seconds], [model.high for model in seconds])
    )
    return SweepEstimate(
        trainings=len(trainings),
        seconds=Range(total, total - below, total + above),
        workers=workers,
        device=backend.title(),
    )


def _speed(
    cells: Sequence[Cell], results_store: ResultsStore, device: str, store: Path, data_root: Path | None
) -> Range:
    """Return the seconds that a model needs for a unit of work on this device."""
    samples, results = [], results_store.find_all(map(cell_key, cells))
    for cell in cells:
        result = results.get(cell_key(cell))
        if result is not None and result["status"] == "ok" and result["cost"].get("device") == device:
            share = cell.work[0] / result["cost"].get("cells_of_training", 1) + cell.work[1]
            samples.append(result["cost"]["seconds"] / share)
    if len(samples) < FEWEST_RESULTS:
        # Prefer a cell that doesn't start from another cell's weights, since those may be missing.
        samples = _measured(next((cell for cell in cells if cell.start is None), cells[0]), device, store, data_root)
    if all_equal(samples):
        return Range(samples[0], samples[0], samples[0])
    mean = student(samples)
    return Range(mean.value, max(0.0, mean.low), mean.high)


def _measured(cell: Cell, device: str, store: Path, data_root: Path | None) -> list[float]:
    """Return the seconds per unit of work of some steps of training, measured now or earlier."""
    protocol = cell.protocol.model_copy(update={"max_steps": STEPS, "epochs": None})
    key = stable_hash([cell.weights, cell.task_data, protocol.identity(), device])
    path = store / "calibrations" / f"{key}.json"
    if path.is_file():
        return [float(value) for value in read_json(path)["seconds"]]
    say(f"measuring {cell.model} on {device}")
    compile_kernels(shapes_of([cell]), say_once)
    ends: list[float] = []

    def on_step(step: int, steps: int, loss: float) -> None:
        ends.append(time.perf_counter())
        if step == steps:
            raise _Measured

    threads = torch.get_num_threads()
    torch.set_num_threads(CELL_THREADS)
    try:
        run_cell(replace(cell, protocol=protocol), store=store, data_root=data_root, on_step=on_step)
    except _Measured:
        pass
    finally:
        torch.set_num_threads(threads)
    if len(ends) < STEPS:
        raise UserError(f"{cell.model} on {cell.task} diverges within {STEPS} steps; its time cannot be measured.")
    task = find_or_prepare(cell.declared, cell.task_data, cell.model_folder, protocol, store, data_root)
    work_per_step = work_of(task, protocol)[0] / STEPS
    seconds = [(late - early) / work_per_step for early, late in pairwise(ends[WARM_UP_STEPS - 1 :])]
    write_json(path, {"model": cell.model, "device": device, "seconds": seconds})
    return seconds


class _Measured(Exception):
    """Ends a training once enough of it has been measured."""
