"""The parallel map."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from mlmclm.corpora.process_map import ordered_map
from mlmclm.errors import EnvironmentFault


def test_results_come_in_the_order_of_the_items_whatever_the_workers() -> None:
    items = list(range(50))
    expected = [math.factorial(item) for item in items]
    for workers in (1, 2, 3):
        assert list(ordered_map(math.factorial, items, workers=workers)) == expected


def test_one_item_is_computed_in_this_process_and_several_in_others() -> None:
    assert list(ordered_map(_process_of, [0], workers=2)) == [os.getpid()]
    assert os.getpid() not in ordered_map(_process_of, [0, 1], workers=2)
    assert list(ordered_map(_process_of, [], workers=2)) == []


def _process_of(item: int) -> int:
    return os.getpid()


def test_few_items_are_read_ahead() -> None:
    taken = []

    def items() -> object:
        for number in range(1000):
            taken.append(number)
            yield number

    results = ordered_map(math.factorial, items(), workers=2)  # type: ignore[arg-type]
    next(results)
    assert len(taken) <= 9
    results.close()  # type: ignore[attr-defined]


def test_an_exception_in_a_worker_is_raised_here() -> None:
    with pytest.raises(ValueError, match="factorial"):
        list(ordered_map(math.factorial, [1, -1], workers=2))


def test_a_killed_worker_is_an_environment_fault() -> None:
    with pytest.raises(EnvironmentFault, match="ended early"):
        list(ordered_map(os._exit, [3, 3], workers=2))


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import time\nfrom mlmclm.corpora.process_map import ordered_map\n"
        "for _ in ordered_map(time.sleep, [0.0] * 10_000_000, workers=2):\n    print('going', flush=True)\n"
    )  # No `if __name__` guard: workers must not run the caller's main module.
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"going\n"
    workers = psutil.Process(parent.pid).children()
    assert len(workers) == 2
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while any(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers):
        assert time.monotonic() < deadline, "workers outlive their parent"
        time.sleep(0.05)
