"""A lease has one holder, whatever becomes of it: in threads, in processes, and on machines that share no locks."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from mlmclm.errors import EnvironmentFault
from mlmclm.storage.leases import Leases

HOLD = """
import sys, time
from pathlib import Path
from mlmclm.storage.leases import Leases
with Leases(Path(sys.argv[1])).attempt(["a"]) as other:
    print(other, flush=True)
    time.sleep(600)
"""


@contextmanager
def holding(store: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process of this machine, which has lease `a`."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(store)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "None\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def left(store: Path) -> list[str]:
    return [path.name for path in (store / "claims").iterdir()]


def test_of_several_that_attempt_a_claim_one_gets_it_and_the_others_are_told_who(tmp_path: Path) -> None:
    with Leases(tmp_path).attempt(["a", "b"]) as other:
        assert other is None
        with Leases(tmp_path).attempt(["c", "b"]) as other:
            assert other is not None
            assert f"process {os.getpid()} on " in other
            assert sorted(left(tmp_path)) == ["a", "b"], "all or none"
        with Leases(tmp_path).attempt(["c"]) as other:
            assert other is None
    assert left(tmp_path) == []
    assert Leases(tmp_path).holder("a") is None


def test_the_claim_of_a_killed_process_is_taken_over_at_once(tmp_path: Path) -> None:
    leases = Leases(tmp_path)  # with the full lease: a dead process of this machine is seen without it
    with holding(tmp_path) as process:
        assert leases.holder("a") == f"process {process.pid} on {os.uname().nodename}"
        process.send_signal(signal.SIGSTOP)
        assert leases.holder("a") is not None, "stopped is not dead"
        process.kill()
        process.wait()
        assert left(tmp_path) == ["a"]
        with leases.attempt(["a"]) as other:
            assert other is None


def test_another_machines_claim_ends_when_it_is_no_longer_renewed(tmp_path: Path) -> None:
    seconds = 0.4
    here = Leases(tmp_path, seconds=seconds, machine="here")
    lease = tmp_path / "claims" / "a"
    lease.parent.mkdir()
    # A file that nobody has locked: so another machine's lease looks where locks don't reach.
    lease.write_text('{"machine": "there", "host": "node7", "process": 12}')
    for number in range(6):
        os.utime(lease, (number, number))  # its renewals; the machines' clocks may differ by years
        assert here.holder("a") == "process 12 on node7"
        time.sleep(seconds / 3)
    said: list[str] = []
    with Leases(tmp_path, seconds=seconds, machine="elsewhere").wait(lambda: ["a"], said.append):
        assert "there" not in lease.read_text()
    assert said == ["process 12 on node7"]


def test_a_pause_between_two_looks_is_no_proof_of_death(tmp_path: Path) -> None:
    """The process that looks, or the file server, may have been stopped meanwhile, and the renewals with it."""
    leases = Leases(tmp_path, seconds=0.2, machine="here")
    (tmp_path / "claims").mkdir()
    (tmp_path / "claims" / "a").write_text('{"machine": "there", "host": "node7", "process": 12}')
    assert leases.holder("a") is not None
    time.sleep(0.5)
    assert leases.holder("a") is not None
    for _ in range(4):
        time.sleep(0.1)
        found = leases.holder("a")
    assert found is None


def test_a_claim_is_renewed_while_it_is_held(tmp_path: Path) -> None:
    with Leases(tmp_path, seconds=0.4).attempt(["a"]):
        path = tmp_path / "claims" / "a"
        os.utime(path, (1, 1))
        while path.stat().st_mtime == 1:
            time.sleep(0.01)


def test_a_holder_whose_claim_was_taken_over_leaves_the_new_one_alone(tmp_path: Path) -> None:
    with ExitStack() as later:
        with Leases(tmp_path).attempt(["a"]):
            (tmp_path / "claims" / "a").unlink()
            assert later.enter_context(Leases(tmp_path).attempt(["a"])) is None
        assert left(tmp_path) == ["a"]
    assert left(tmp_path) == []


def test_a_claim_that_cannot_be_renewed_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process at its limit of threads."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="new thread"), Leases(tmp_path).attempt(["a"]):
        pass
    assert left(tmp_path) == []


def test_a_store_that_cannot_be_written_to_is_a_fault_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "claims").write_text("in the way")
    with pytest.raises(EnvironmentFault, match="claims"), Leases(tmp_path).attempt(["a"]):
        pass


def test_a_file_system_without_hard_links_is_a_fault_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(EnvironmentFault, match=r"no hard links.*another with --store"), Leases(tmp_path).attempt(["x"]):
        pass
    assert list(Leases(tmp_path).folder.iterdir()) == []
