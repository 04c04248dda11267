"""CPU seconds of the quickstart in an empty store, by its parts:  python -m benchmarks.first_minutes [--beside OTHER/.venv/bin/mlmclm]

The processes of Ray, MLflow and the sweep are counted too. Their times are read twice a second, so the time of a process between the last
reading and its end is missed: 0.2 % of what the kernel counts for a cgroup. A second command, such as an earlier version's,
runs after the first.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Annotated

import psutil
import typer

from benchmarks.results import machine, write_section

PARTS = {"text, tokenizer, tasks": "", "pretraining": "Ray: starting", "fine-tuning and report": "fine-tuning: "}
"""Name of a part -> beginning of the line that the command prints when the part starts."""
ADOPT_ORPHANS = 36
"""Linux's PR_SET_CHILD_SUBREAPER: Ray's daemons leave their parents, and become this process's children."""
SECONDS_BETWEEN_LOOKS = 0.5


def measure(command: str) -> dict[str, float]:
    """Run the quickstart; return the CPU seconds of each part."""
    spent = dict.fromkeys(PARTS, 0.0)
    last: dict[tuple[int, float], float] = {}
    part = next(iter(PARTS))
    with tempfile.TemporaryDirectory(prefix="mlmclm-benchmark-") as store:
        words = [command, "study", "quickstart", "--store", store]
        with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as study:

            def follow() -> None:
                nonlocal part
                for line in study.stderr or ():
                    part = next((name for name, begin in PARTS.items() if begin and line.startswith(begin)), part)

            threading.Thread(target=follow, daemon=True).start()
            while study.poll() is None:
                for process in psutil.Process().children(recursive=True):
                    try:
                        times, key = process.cpu_times(), (process.pid, process.create_time())
                    except psutil.NoSuchProcess:
                        continue
                    total = times.user + times.system
                    spent[part] += total - last.get(key, 0.0)
                    last[key] = total
                time.sleep(SECONDS_BETWEEN_LOOKS)
    assert study.returncode == 0, f"{command} ended with exit code {study.returncode}"
    return spent


def main(beside: Annotated[str | None, typer.Option(help="Another mlmclm command to measure too.")] = None) -> None:
    """Measure, and write the section of RESULTS.md."""
    ctypes.CDLL(None).prctl(ADOPT_ORPHANS, 1)
    seconds = {"this": measure(str(Path(sys.executable).with_name("mlmclm")))}
    if beside is not None:
        seconds["beside"] = measure(beside)
    lines = [
        f"Command: `python -m benchmarks.first_minutes{' --beside OTHER' if beside else ''}`. Machine: {machine()}.",
        "CPU seconds of `mlmclm study quickstart` in an empty store, with all processes that it starts.",
        "",
        "| part | " + " | ".join(seconds) + " |",
        "|---|" + "---|" * len(seconds),
        *(f"| {part} | " + " | ".join(f"{spent[part]:.0f}" for spent in seconds.values()) + " |" for part in PARTS),
        "| all | " + " | ".join(f"{sum(spent.values()):.0f}" for spent in seconds.values()) + " |",
    ]
    write_section("The first minutes", lines)


if __name__ == "__main__":
    typer.run(main)
