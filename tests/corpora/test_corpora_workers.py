"""The parallel map."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import parent_process
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlmclm.corpora import process_map
from mlmclm.corpora.process_map import ordered_map
from mlmclm.errors import EnvironmentFault


@pytest.fixture(autouse=True)
def heeds_ctrl_c() -> Iterator[None]:
    """A shell's background job, which pytest may be, ignores SIGINT, and so would the processes that it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def two_processes(one_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processors, however many this machine has."""
    monkeypatch.setattr(process_map, "usable_cpus", lambda: 2)


def test_results_come_in_order_and_several_items_are_computed_in_other_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    items = list(range(50))
    assert list(ordered_map(math.factorial, items)) == [math.factorial(item) for item in items]
    assert list(ordered_map(_process_of, [0])) == [os.getpid()]
    assert os.getpid() not in ordered_map(_process_of, [0, 1])
    assert list(ordered_map(_process_of, [])) == []
    monkeypatch.setattr(process_map, "usable_cpus", lambda: 1)
    assert set(ordered_map(_process_of, items)) == {os.getpid()}


def _process_of(item: int) -> int:
    return os.getpid()


def test_few_items_are_read_ahead() -> None:
    taken = []

    def items() -> object:
        for number in range(1000):
            taken.append(number)
            yield number

    results = ordered_map(math.factorial, items())  # type: ignore[arg-type]
    next(results)
    assert len(taken) <= 9
    results.close()  # type: ignore[attr-defined]


class Loaded:
    """A function that a worker makes anew, by calling `make` when the function is loaded there."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def __reduce__(self) -> Any:
        return self.make, ()


def _fail() -> Any:
    assert parent_process() is None, "no such vocabulary"


@pytest.mark.parametrize(
    ("function", "items", "error", "message"),
    [
        (math.factorial, [1, -1], ValueError, "factorial"),
        (os._exit, [3, 3], EnvironmentFault, "ended early"),
        (Loaded(_fail), [1, 2], AssertionError, "no such vocabulary"),
    ],
)
def test_an_error_in_a_worker_is_raised_here_and_a_killed_worker_is_an_environment_fault(
    function: Any, items: list[int], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        list(ordered_map(function, items))


def _threads() -> Any:
    print("a library's message")
    return {1: os.environ.get("OMP_NUM_THREADS"), 2: os.environ.get("TOKENIZERS_PARALLELISM")}.get


def test_a_worker_has_one_thread_before_a_function_is_loaded_and_prints_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert list(ordered_map(Loaded(_threads), [1, 2])) == ["1", "false"]
    assert capfd.readouterr().out == ""


def test_threads_that_start_workers_at_once_leave_the_main_module_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    main, start = sys.modules["__main__"], SpawnProcess._Popen

    def slow(process: Any) -> Any:
        time.sleep(0.3)
        return start(process)

    monkeypatch.setattr(SpawnProcess, "_Popen", staticmethod(slow))
    threads = [threading.Thread(target=lambda: list(ordered_map(math.factorial, [1, 2]))) for _ in range(2)]
    for thread in threads:
        thread.start()
        time.sleep(0.1)  # without a lock, the second one would find the module hidden, and restore it so at last
    for thread in threads:
        thread.join()
    assert sys.modules["__main__"] is main


def test_ctrl_c_while_a_worker_starts_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    start = SpawnProcess._Popen

    def interrupted(process: Any) -> Any:
        started = start(process)
        signal.raise_signal(signal.SIGINT)
        return started

    monkeypatch.setattr(SpawnProcess, "_Popen", staticmethod(interrupted))
    with pytest.raises(KeyboardInterrupt):
        list(ordered_map(math.factorial, [1, 2]))
    assert not [child for child in psutil.Process().children() if "spawn_main" in " ".join(child.cmdline())]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_script_needs_no_guard_and_its_workers_end_with_it(number: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import time\nfrom mlmclm.corpora.process_map import ordered_map\n"
        "for _ in ordered_map(time.sleep, [0.0] * 10_000_000):\n    print('going', flush=True)\n"
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
    deadline = time.monotonic() + 300
    while any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children):
        assert time.monotonic() < deadline, "workers outlive their parent"
        time.sleep(0.05)
