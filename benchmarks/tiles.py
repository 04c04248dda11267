"""Gain of the tile instructions of Intel's CPUs:  python -m benchmarks.tiles

The bare step of `benchmarks.pretraining` with the backend `cpu` and with `cpu+amx`, in processes of their own that
alternate, one thread; a section of `benchmarks/RESULTS.md`. The backend `cpu+amx` is kept as long as it gains a
fifth. It takes ten minutes on a quiet machine with such a CPU.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys

from benchmarks.results import machine, write_section
from mlmclm.cluster.worker_environment import worker_environment

OBJECTIVES, ROUNDS = ("clm", "mlm40"), 3
STEP = """
import json, statistics, sys, tempfile, time
from pathlib import Path
import torch
from benchmarks.pretraining import bare_step
torch.set_num_threads(1)
step, times = bare_step(Path(tempfile.mkdtemp()), sys.argv[1]), []
for number in range(12):
    began = time.perf_counter()
    step(number)
    times.append(time.perf_counter() - began)
print(json.dumps(statistics.median(times[3:])))
"""


def seconds(backend: str, objective: str) -> float:
    """Return the median time of a step, in a fresh process."""
    environment = {**os.environ, **worker_environment(), "MLMCLM_BACKEND": backend}
    done = subprocess.run(
        [sys.executable, "-c", STEP, objective], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return float(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Measure, and write the section of RESULTS.md."""
    lines = [
        f"Command: `python -m benchmarks.tiles`. Machine: {machine()}, one thread used.",
        f"Seconds of the bare step of `benchmarks.pretraining`, medians of {ROUNDS} alternating rounds.",
        "",
        "| objective | without tiles, s | with tiles, s | ratio |",
        "|---|---|---|---|",
    ]
    for objective in OBJECTIVES:
        rounds = [(seconds("cpu", objective), seconds("cpu+amx", objective)) for _ in range(ROUNDS)]
        without, with_tiles = (statistics.median(column) for column in zip(*rounds, strict=True))
        ratio = statistics.median(slow / fast for slow, fast in rounds)
        lines.append(f"| {objective} | {without:.2f} | {with_tiles:.2f} | {ratio:.2f} |")
    write_section("Tile instructions", lines)


if __name__ == "__main__":
    main()
