"""The record of a service: which processes are its own, and which only have an id that one of its had."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mlmclm.errors import UserError
from mlmclm.service import run_service
from mlmclm.service.run_service import end, service_status
from mlmclm.service.state import Member, ServiceState, read_state, start_of, write_service_state
from mlmclm.storage.files import machine

Start = Callable[..., subprocess.Popen[bytes]]
SLEEP = "import time; time.sleep(600)"
PARENT = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', '{SLEEP}']).pid, flush=True); {SLEEP}"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); {SLEEP}"


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts Python code in a process, which ends with the test."""
    processes = []

    def call(code: str) -> subprocess.Popen[bytes]:
        processes.append(subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE))
        return processes[-1]

    yield call
    for process in processes:
        process.kill()
        process.communicate()


def member(name: str, pid: int) -> Member:
    started = start_of(pid)
    assert started is not None
    return Member(name, pid, started)


def service(*members: Member, leftovers: tuple[str, ...] = ()) -> ServiceState:
    return ServiceState(machine(), platform.node(), 1.0, True, {"mlflow": "http://127.0.0.1:1"}, members, leftovers)


def test_a_record_is_read_as_it_was_written_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    assert read_state(tmp_path) is None
    written = service(Member("mlmclm", 1, 2), leftovers=("/tmp/x",))
    write_service_state(tmp_path, written)
    assert read_state(tmp_path) == written
    path = tmp_path / "service" / "state.json"
    for text in ("{", "[]", '{"members": [], "leftovers": []}'):
        path.write_text(text)
        with pytest.raises(UserError, match=r"service/state\.json: not"):
            read_state(tmp_path)


def test_a_process_is_the_one_that_started_then_and_a_zombie_is_none(start: Start) -> None:
    process = start("pass")
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert start_of(process.pid) is None, "it has ended, though nobody has collected it"
    first, second = start(SLEEP), start(SLEEP)
    ours = member("MLflow", first.pid)
    reused = replace(member("Ray", second.pid), started=ours.started - 1)
    assert service(ours, reused).alive() == [ours]


def test_after_another_boot_nothing_is_alive_and_another_machine_s_service_is_left_to_it(tmp_path: Path) -> None:
    mine = member("mlmclm", os.getpid())
    assert replace(service(mine), machine="another boot").alive() == []
    write_service_state(tmp_path, replace(service(mine), machine="another", host="elsewhere"))
    for verb in (service_status, end):
        with pytest.raises(UserError, match=r"started on elsewhere.*run the command there"):
            verb(tmp_path)


def test_down_ends_the_service_s_processes_with_their_children_and_no_other(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_service, "SECONDS_A_SIGNAL", 0.5)
    parent, deaf, other = start(PARENT), start(DEAF), start(SLEEP)
    assert parent.stdout is not None and deaf.stdout is not None
    child = int(parent.stdout.readline())
    deaf.stdout.readline()
    ours, theirs = tmp_path / "mlmclm-ray-1", tmp_path / "precious"
    ours.mkdir(), theirs.mkdir()
    members = [member("mlmclm", parent.pid), member("MLflow", deaf.pid)]
    reused = replace(member("Ray", other.pid), started=1)
    write_service_state(tmp_path, service(*members, reused, leftovers=(str(ours), str(theirs))))
    assert end(tmp_path) == ["MLflow", "mlmclm"]
    assert (start_of(parent.pid), start_of(child), start_of(deaf.pid)) == (None, None, None)
    assert other.poll() is None, "it only has the id that a process of the service had"
    assert (ours.exists(), theirs.exists()) == (False, True)
    assert read_state(tmp_path) is None and end(tmp_path) == []


def test_what_is_left_of_a_service_is_named(tmp_path: Path, start: Start) -> None:
    gone = Member("mlmclm", os.getpid(), 1)
    write_service_state(tmp_path, service(gone))
    assert service_status(tmp_path) is None, "a crash that left nothing is no obstacle"
    write_service_state(tmp_path, service(gone, member("MLflow", start(SLEEP).pid)))
    found = service_status(tmp_path)
    assert found is not None
    assert found.faults == ["The process that started it has ended, and something still runs (MLflow)."]
