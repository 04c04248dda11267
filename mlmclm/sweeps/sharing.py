"""Calibration of a shared GPU: how many cells should train on it at once.

The same cell is trained by one process, by two at once, and so on, without its learning rate changing any weight much.
Another process is worth its memory as long as all of them together take clearly more steps a second than before. A CPU
needs no calibration: a cell trains on one thread, so one cell a core keeps all cores busy.
"""

from __future__ import annotations

import math
import os
import pickle
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlmclm.cluster.placement import check_place, no_gpu
from mlmclm.errors import EnvironmentFault, MlmclmError
from mlmclm.finetuning.cell import CELL_THREADS, Cell
from mlmclm.progress import say
from mlmclm.storage.files import read_json, stable_hash, write_json

MOST_CELLS = 16
"""The most cells that may share a GPU."""
LEAST_GAIN = 1.1
"""Another cell must raise the total steps per second by this factor."""
SECONDS, WARM_UP_STEPS = 3.0, 5
"""Seconds for which each number of cells is measured, and the steps that each process takes before that."""
RATE = 1e-9
"""Learning rate of the measurement: no cell may diverge."""
STEPS = 1_000_000


def heaviest(cells: Iterable[Cell]) -> Cell:
    """Return the cell that needs the most memory by its weights and the tokens of a batch: if it fits, all do."""

    def weight(cell: Cell) -> int:
        files = Path(cell.model_folder).glob("*.safetensors")
        return sum(file.stat().st_size for file in files) * cell.protocol.batch_size * cell.protocol.max_length

    # Prefer a cell that doesn't start from another cell's weights, since those may be missing.
    cells = list(cells)
    return max([cell for cell in cells if cell.start is None] or cells, key=weight)


def most_useful(rate_of: Callable[[int], float | None]) -> int:
    """Return the number of cells beyond which another one gains too little, at least 1.

    Args:
        rate_of: returns the steps a second of a number of cells together, or None if they can't run at once; called with
            1, 2, 3 and so on.
    """
    before = rate_of(1)
    for count in range(2, MOST_CELLS + 1):
        rate = rate_of(count)
        if before is None or rate is None or rate < LEAST_GAIN * before:
            return count - 1
        before = rate
    return MOST_CELLS


def cells_beside_each_other(cell: Cell, *, store: Path, data_root: Path | None, device: str) -> int:
    """Return how many cells like this one should share this process's device; measured once, then kept in the store.

    Args:
        device: the device's title (`Reference.title`).

    Raises:
        EnvironmentFault: not even one can be trained; nothing is kept then.
    """
    key = stable_hash([cell.weights, cell.task_data, cell.protocol.identity(), device, "shared"])
    kept = store / "calibrations" / f"{key}.json"
    if kept.is_file():
        return int(read_json(kept)["cells"])
    rates: list[float | None] = []
    with _processes(cell, store, data_root) as together:

        def rate_of(count: int) -> float | None:
            rates.append(together())
            if rates == [None]:
                raise EnvironmentFault(
                    f"{cell.model} on {cell.task}: a process that trained it alone, to measure how many cells can share a GPU, has exited; "
                    "see its output above. Set gpus_per_cell to a number to go on without the measurement."
                )
            return rates[-1]

        found = most_useful(rate_of)
    write_json(kept, {"model": cell.model, "device": device, "cells": found, "steps_a_second": rates})
    return found


def share_of_gpu(cells: Iterable[Cell], *, store: Path, data_root: Path | None) -> float:
    """Return the share of a GPU that each of these cells should reserve, as measured on a GPU of the Ray cluster.

    Raises:
        UserError: no node has a GPU.
        EnvironmentFault: torch sees no GPU where Ray has one, or the cell cannot be trained.
    """
    import ray

    from mlmclm.cluster.cluster import cluster_view, wait_for_a_place

    view, gpu = cluster_view(), {"GPU": 1.0}
    check_place("A cell", gpu, view(), remedy="Set gpus_per_cell: 0 to use CPUs, or add nodes.")
    wait_for_a_place("fine-tuning", gpu, view)
    say("fine-tuning: finding out how many cells should share a GPU")
    task = ray.remote(num_gpus=1, max_retries=0)(share_here)
    try:
        share: float = ray.get(task.remote([heaviest(cells)], store=store, data_root=data_root))
        return share
    except ray.exceptions.RayTaskError as error:
        raise (error.cause if isinstance(error.cause, MlmclmError) else error) from None


def share_here(cells: Iterable[Cell], *, store: Path, data_root: Path | None) -> float:
    """Return the share of this process's GPU that each of these cells should reserve.

    Raises:
        EnvironmentFault: torch sees no GPU, or the cell cannot be trained.
    """
    from mlmclm.backends.choice import backend_of, visible

    if not visible("cuda"):
        raise EnvironmentFault(no_gpu(platform.node()))
    device = backend_of("cuda").title()
    count = cells_beside_each_other(heaviest(cells), store=store, data_root=data_root, device=device)
    # Ray counts in ten-thousandths, and shares that were rounded up would not fit.
    return math.floor(10_000 / count) / 10_000


@contextmanager
def _processes(cell: Cell, store: Path, data_root: Path | None) -> Iterator[Callable[[], float | None]]:
    """Yield a function that starts another process and returns the steps a second of all, or None if one has ended."""
    running: list[Any] = []  # of subprocess.Popen, all with pipes
    # Without evaluations: at this rate none is better than the first, and `patience` would end the training.
    without = {"epochs": None, "evaluate_every": None, "patience": None}
    protocol = cell.protocol.model_copy(update={"max_steps": STEPS, **without})
    job = pickle.dumps((replace(cell, protocol=protocol, learning_rate=RATE), store, data_root))

    def together() -> float | None:
        process: Any = subprocess.Popen([sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        running.append(process)
        process.stdin.write(job)
        try:
            process.stdin.flush()
            if not process.stdout.readline():
                return None
            for each in running:
                each.stdin.write(b"go\n")
                each.stdin.flush()
            answers = [each.stdout.readline() for each in running]
        except BrokenPipeError:
            return None
        return None if b"" in answers else sum(map(float, answers))

    try:
        yield together
    finally:
        for process in running:
            process.kill()
            process.communicate()


def main() -> None:
    """Train a cell from standard input; answer each further line with the steps a second."""
    source, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not get between the answers
    cell, store, data_root = pickle.load(source)
    import torch

    from mlmclm.finetuning.run import run_cell

    torch.set_num_threads(CELL_THREADS)
    began, steps = time.perf_counter(), 0

    def on_step(step: int, of: int, loss: float) -> None:
        nonlocal began, steps
        steps += 1
        if step < WARM_UP_STEPS or (step > WARM_UP_STEPS and time.perf_counter() < began + SECONDS):
            return
        answers.write(b"%f\n" % (steps / (time.perf_counter() - began)))
        answers.flush()
        if not source.readline():
            sys.exit()
        began, steps = time.perf_counter(), 0

    run_cell(cell, store=store, data_root=data_root, on_step=on_step)


if __name__ == "__main__":
    main()
