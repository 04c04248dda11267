"""The local Ray session: on loopback, with a token, without leftovers, and gone with its driver."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import ray

from mlmclm.cluster.cluster_guard import end_processes, guarded
from mlmclm.cluster.private_cluster import SECONDS_A_START, START_LIMITS, reason_of
from mlmclm.cluster.ray_cluster import ray_session
from mlmclm.cluster.worker_environment import runtime_environment, worker_environment
from mlmclm.errors import EnvironmentFault
from mlmclm.storage.temporary import swept_folder

DRIVER = """
import sys, time
from pathlib import Path
from mlmclm.cluster.ray_cluster import ray_session

with ray_session(Path(sys.argv[1]), num_cpus=1):
    time.sleep(600)
"""


def is_alive(process: psutil.Process) -> bool:
    """Orphans that have ended are zombies where the machine's first process doesn't collect them."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_a_local_session_listens_on_loopback_with_a_token_and_leaves_nothing(tmp_path: Path) -> None:
    others = psutil.Process().children()  # of other tests: from Python 3.14 on, multiprocessing's tracker of resources
    with ray_session(tmp_path, num_cpus=1, dashboard=True) as session:
        assert session.local
        assert ray.cluster_resources()["CPU"] == 1
        assert session.folder is not None
        found = ray._private.utils.read_ray_address(str(session.folder / "r"))
        assert found == session.address, "by which its jobs find it among other clusters"
        token = tmp_path / "ray" / "auth_token"
        assert session.token_file is None or (session.token_file == token and token.stat().st_mode & 0o077 == 0)
        root = Path(ray._private.worker._global_node.get_temp_dir_path())
        private = root.parent
        discovery = private.with_suffix(".json")
        assert discovery.is_file()
        assert private.stat().st_mode & 0o077 == 0, "Ray makes its own root folder one that everyone may write to"
        daemons = [each for each in psutil.Process().children(recursive=True) if each not in others]
        listening = {
            address.laddr.ip
            for daemon in daemons
            for address in daemon.net_connections("inet")
            if address.status == psutil.CONN_LISTEN
        }
        assert listening and all(ip.removeprefix("::ffff:").startswith("127.") or ip == "::1" for ip in listening)
        with ray_session(tmp_path) as inner:
            assert (inner.address, inner.local) == (session.address, False)
        assert ray.is_initialized(), "the inner block left the session open"
        (port,) = session.folder.glob("r/session_2*/dashboard_agent_listen_port_*")
        assert int(port.read_text()) not in (-1, 52365), "a second cluster's jobs need a port of its own"
        deadline = time.monotonic() + 300
        while not list(session.folder.glob("t/pymp-*")):
            assert time.monotonic() < deadline, "the dashboard has no fork server, whose folder could be left"
            time.sleep(0.2)
    assert not ray.is_initialized()
    assert not private.exists() and not discovery.exists()
    assert not (Path.home() / ".ray").exists()
    psutil.wait_procs(daemons, timeout=1500)
    assert [daemon for daemon in daemons if is_alive(daemon)] == []


def test_a_driver_killed_while_ray_starts_leaves_no_process_and_no_folder(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path)], stdout=subprocess.DEVNULL, env=environment)
    deadline = time.monotonic() + 300
    # The agents are the raylet's children. While they start, they don't look yet whether it is still there.
    while not any(
        word.endswith("/agent.py")
        for child in psutil.Process(driver.pid).children(recursive=True)
        for word in command_of(child)
    ):
        assert driver.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    family = psutil.Process(driver.pid).children(recursive=True)
    (guard,) = (command for child in family if "mlmclm.cluster.cluster_guard" in (command := command_of(child)))
    folder = Path(guard[-1])
    assert folder.is_dir() and len(family) > 3
    driver.kill()
    driver.wait()
    deadline = time.monotonic() + 300
    while (alive := [child for child in family if is_alive(child)]) and time.monotonic() < deadline:
        time.sleep(0.2)
    for process in alive:
        process.kill()
    assert alive == [] and not folder.exists() and not folder.with_suffix(".json").exists()


def command_of(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def test_a_guard_that_is_told_of_the_cluster_s_end_leaves_the_folder_to_the_driver(tmp_path: Path) -> None:
    with guarded(tmp_path):
        pass
    assert tmp_path.is_dir()


def test_only_what_writes_in_a_cluster_s_folder_is_ended_with_it(tmp_path: Path) -> None:
    folder, sleep = tmp_path / "mlmclm-ray-1", [sys.executable, "-c", "import time; time.sleep(600)"]
    folder.mkdir()
    log = folder / "daemon.out"
    with log.open("w") as output:
        writer = subprocess.Popen(sleep, stdout=output)
    with log.open() as text:
        reader = subprocess.Popen(sleep, stdin=text)
    with (tmp_path / "mlmclm-ray-12").open("w") as output:
        other = subprocess.Popen(sleep, stdout=output)
    try:
        end_processes(folder)
        assert (writer.poll() is None, reader.poll(), other.poll()) == (False, None, None)
    finally:
        for process in (writer, reader, other):
            process.kill()
            process.wait()


def test_the_last_lines_of_ray_s_message_are_shown() -> None:
    message = (
        "Failed to start.\n\nSee the documentation.\nThe last 2 lines of x.log:\n  binding port 8265\nOSError: in use\n"
    )
    assert reason_of(RuntimeError(message)) == (
        "RuntimeError: The last 2 lines of x.log: binding port 8265 OSError: in use"
    )


def test_a_start_that_hangs_is_ended_and_its_logs_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemons: list[subprocess.Popen[bytes]] = []
    over: list[threading.Thread] = []
    roots: list[Path] = []

    class Hung(threading.Timer):
        def start(self) -> None:
            """Its time is over when there is a daemon, however long that takes."""
            assert self.interval == SECONDS_A_START
            over.append(threading.Thread(target=self.function, args=self.args))

    def hang(**arguments: object) -> None:
        """A daemon is known by what it writes in the cluster's folder."""
        roots.append(Path(str(arguments["_temp_dir"])))
        log = roots[-1] / "session_2026-01-01" / "logs" / "raylet.err"
        log.parent.mkdir(parents=True)
        code = "import time; print('the disk is upside down', flush=True); time.sleep(600)"
        daemons.append(subprocess.Popen([sys.executable, "-c", code], stdout=log.open("wb")))
        while not log.read_bytes():
            time.sleep(0.05)
        over[-1].start()
        daemons[-1].wait()
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", hang)
    monkeypatch.setattr(threading, "Timer", Hung)
    kept = tmp_path / "ray" / "failed_start"
    message = f"cannot be started on this machine: .*timed out during startup.*\nRay's logs are in {kept}"
    with pytest.raises(EnvironmentFault, match=message), ray_session(tmp_path):
        raise AssertionError("started")
    assert "upside down" in (kept / "raylet.err").read_text()
    assert len(daemons) == 1 and daemons[0].poll() is not None and not roots[0].exists()


def test_ray_s_limits_of_a_start_are_raised_and_what_the_user_sets_is_kept(tmp_path: Path) -> None:
    name, other = "RAY_agent_register_timeout_ms", "RAY_raylet_start_wait_time_s"
    code = (
        "import os, sys, ray\nfrom pathlib import Path\nfrom mlmclm.cluster.ray_cluster import ray_session\n"
        f"ray.init = lambda **_: sys.exit(os.environ['{name}'] + ' ' + os.environ['{other}'])\n"
        "with ray_session(Path(sys.argv[1])): pass\n"
    )
    environment = {key: value for key, value in os.environ.items() if key not in START_LIMITS} | {other: "77"}
    found = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=environment, check=False, capture_output=True, text=True
    )
    assert found.stderr.strip() == f"{START_LIMITS[name]} 77"


def test_what_a_job_sets_is_left_to_it() -> None:
    job = {"env_vars": {"OMP_NUM_THREADS": "4"}, "worker_process_setup_hook": "theirs"}
    ours = runtime_environment(job)
    assert "OMP_NUM_THREADS" not in ours["env_vars"]
    assert "worker_process_setup_hook" not in ours
    assert runtime_environment()["env_vars"] == worker_environment()


def test_a_temporary_folder_goes_with_its_owner_however_the_owner_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlmclm.storage.temporary.GRACE_SECONDS", 0.0)
    code = (
        "import os, sys; from pathlib import Path; from mlmclm.storage.temporary import swept_folder\n"
        "with swept_folder(Path(sys.argv[1]), 'x-'): os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    (left,) = tmp_path.glob("x-*")
    (tmp_path / "x-half-removed" / "r").mkdir(parents=True)
    with swept_folder(tmp_path, "x-") as first, swept_folder(tmp_path, "x-") as second:
        assert not left.exists(), "the dead owner's folder is swept"
        assert not (tmp_path / "x-half-removed").exists(), "and one whose removal was cut short"
        assert first.is_dir() and second.is_dir(), "a living owner's is not"
    assert list(tmp_path.glob("x-*")) == []
