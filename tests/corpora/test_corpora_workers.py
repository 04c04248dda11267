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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_script_needs_no_guard_and_its_workers_end_with_it(number: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import time\nfrom mlmclm.corpora.process_map import ordered_map\n"
        "for _ in ordered_map(time.sleep, [0.0] * 10_000_000, workers=2):\n    print('going', flush=True)\n"
    )  # No `if __name__` guard: workers must not run the caller's main module.
    parent = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    assert parent.stdout is not None and parent.stderr is not None
    assert parent.stdout.readline() == b"going\n"
    children = psutil.Process(parent.pid).children()
    assert len(children) == 3, "two workers, and the tracker of what the processes share"
    if number == signal.SIGKILL:
        parent.kill()
    else:
        os.killpg(parent.pid, number)  # as a terminal does for Ctrl-C
        assert parent.stderr.read().count(b"Traceback") == 1, "the script's own"
    parent.wait()
    parent.stdout.close()
    parent.stderr.close()
    deadline = time.monotonic() + 10
    while any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children):
        assert time.monotonic() < deadline, "workers outlive their parent"
        time.sleep(0.05)
