"""How busy a sweep keeps its workers:  python -m benchmarks.busy

A real grid (two models, four tasks, two rates, twelve seeds: 192 cells; models and data are the tests' own) on two workers of
one core each, and on eight of a quarter. The table has the time in training and evaluation over wall time x workers,
from the moment when every worker has ended its first cell to the end of the sweep's last cell.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import yaml

from benchmarks.faults import make_place
from benchmarks.results import machine, write_section

WORKERS = {2: 1.0, 8: 0.25}
"""Number of workers, and the CPUs that each reserves."""
STEPS, HIDDEN = 100, 128


def busy(store: Path) -> tuple[int, float, float, float]:
    """Return the number of workers, the seconds after warm-up, the mean seconds of a cell, and the busy share of the time."""
    cells = []
    ends: dict[str, list[float]] = defaultdict(list)
    for path in (store / "cells").glob("*/*.json"):
        cost = json.loads(path.read_text())["cost"]
        # The result's own time has whole seconds only.
        end = path.stat().st_mtime
        cells.append((end, cost["train"] + cost["evaluate"]))
        ends[cost["worker"]].append(end)
    warm, last = max(map(min, ends.values())), max(end for end, _ in cells)
    # A cell that was running when the last worker became warm counts from then on.
    spent = sum(min(seconds, max(0.0, end - warm)) for end, seconds in cells)
    mean = sum(seconds for _, seconds in cells) / len(cells)
    return len(ends), last - warm, mean, spent / ((last - warm) * len(ends))


def main() -> None:
    """Measure, and write the section of RESULTS.md."""
    rows = []
    for workers, cpus in WORKERS.items():
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            protocol = {"max_steps": STEPS, "max_length": 64, "stride": 16, "batch_size": 16}
            file = make_place(
                folder, hidden=HIDDEN, learning_rates=[5e-4, 1e-3], seeds=list(range(12)), protocol=protocol,
                cpus_per_cell=cpus, max_concurrent=workers,
            )  # fmt: skip
            command = [sys.executable, "-m", "mlmclm", "sweep", str(file), "--store", str(folder / "store")]
            command += ["--data", str(folder / "data")]
            subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, env=dict(os.environ))
            count, seconds, mean, share = busy(folder / "store")
            cells = yaml.safe_load((folder / "space.yaml").read_text())
            total = 2 * len(cells["tasks"]) * len(cells["learning_rates"]) * len(cells["seeds"])
            rows.append(f"| {count} x {cpus:g} CPU | {total} | {mean:.1f} | {seconds:.0f} | {share:.1%} |")
    lines = [
        f"Command: `python -m benchmarks.busy`. Machine: {machine()}.",
        "Time in training and evaluation over wall time x workers, from when each worker has ended a cell to the very end.",
        "",
        "| workers | cells | seconds a cell | wall time, s | busy |",
        "|---|---|---|---|---|",
        *rows,
    ]
    write_section("Busy workers", lines)


if __name__ == "__main__":
    main()
