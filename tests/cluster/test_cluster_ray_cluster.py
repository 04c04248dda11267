"""The local Ray session: on loopback, with a token, without leftovers, and gone with its driver."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO

import psutil
import pytest
import ray
from ray._private.node import Node

from mlmclm.cluster.cluster_guard import end_processes, guarded
from mlmclm.cluster.private_cluster import SECONDS_A_START, START_LIMITS, STARTS, private_cluster, reason_of, reasons_in
from mlmclm.cluster.ray_cluster import LostNode, check_node, ray_session, started_here
from mlmclm.cluster.worker_environment import runtime_environment, worker_environment
from mlmclm.errors import EnvironmentFault, UserError
from mlmclm.storage.temporary import swept_folder

DRIVER = """
import os, sys, time
from pathlib import Path
import ray
from mlmclm.cluster.ray_cluster import ray_session

with ray_session(Path(sys.argv[1]), num_cpus=1):
    @ray.remote
    class Sleeper:
        def pid(self):
            return os.getpid()
        def sleep(self):
            time.sleep(600)
    sleeper = Sleeper.remote()
    pid = ray.get(sleeper.pid.remote())
    future = sleeper.sleep.remote()
    print(pid, flush=True)
    ray.get(future)
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


def test_when_the_driver_is_killed_its_cluster_dies_with_it(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert driver.stdout is not None
    worker = psutil.Process(int(driver.stdout.readline()))
    family = psutil.Process(driver.pid).children(recursive=True)
    # The node's two agents give up by themselves after the minute that Ray looks for a lost cluster.
    wanted = [process for process in family if process == worker or process.name() in ("raylet", "gcs_server")]
    assert len(wanted) == 3
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    deadline = time.monotonic() + 300
    while (alive := [process for process in wanted if is_alive(process)]) and time.monotonic() < deadline:
        time.sleep(0.2)
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    assert alive == []


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


def test_a_start_that_fails_says_ray_s_reason_and_keeps_its_logs(tmp_path: Path) -> None:
    def fail(_temp_dir: str) -> None:
        logs = Path(_temp_dir) / "session_2026-01-01" / "logs"
        logs.mkdir(parents=True)
        (logs / "raylet.err").write_text(
            "[2026-01-01 00:00:00,000 I 1 1] (raylet) main.cc:1: all is well\n"
            "[2026-01-01 00:00:00,000 C 1 1] (raylet) main.cc:2: the disk is upside down\n"
        )
        raise EnvironmentFault("Ray cannot be started on this machine: it timed out")

    kept = tmp_path / "store" / "ray" / "failed_start"
    with pytest.raises(EnvironmentFault) as found, private_cluster(tmp_path / "store", fail):
        raise AssertionError("started")
    said = str(found.value)
    assert "timed out" in said and "C 1 1] (raylet) main.cc:2: the disk is upside down" in said
    assert "all is well" not in said and said.endswith(f"Ray's logs are in {kept}.")
    assert "upside down" in (kept / "raylet.err").read_text()


def test_the_last_lines_of_a_message_and_the_lines_of_logs_that_give_a_reason_are_shown() -> None:
    message = (
        "Failed to start.\n\nSee the documentation.\nThe last 2 lines of x.log:\n  binding port 8265\nOSError: in use\n"
    )
    assert reason_of(RuntimeError(message)) == (
        "RuntimeError: The last 2 lines of x.log: binding port 8265 OSError: in use"
    )
    logs = {
        "gcs_server.out": "[2026-01-01 00:00:00,000 I 7 7] a.cc:1: fine\n[2026-01-01 00:00:00,000 E 7 7] a.cc:2: bad\n",
        "dashboard.log": "2026-01-01 ERROR head.py:1 -- no\nTraceback (most recent call last):\n  File 1\nOSError: in use\n",
        "raylet.out": "ok\n" * 9,
    }
    assert reasons_in(logs) == [
        "gcs_server.out: [2026-01-01 00:00:00,000 E 7 7] a.cc:2: bad",
        "dashboard.log: 2026-01-01 ERROR head.py:1 -- no",
        "dashboard.log: OSError: in use",
    ]
    assert len(reasons_in({f"{number}.err": "OSError: x\n" for number in range(20)})) == 8


def test_a_cluster_that_does_not_answer_is_a_fault_at_once(tmp_path: Path) -> None:
    message = r"The Ray cluster at 127\.0\.0\.1:1 doesn't answer"
    with pytest.raises(EnvironmentFault, match=message), ray_session(tmp_path, address="127.0.0.1:1"):
        raise AssertionError("connected to nothing")
    assert not ray.is_initialized()


@pytest.mark.parametrize("ours", [True, False])
def test_a_node_that_the_caller_s_own_ray_init_has_started_is_looked_after_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ours: bool
) -> None:
    """Without a look, Ray ends the process at the next task, and says nothing."""
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(gcs_address="127.0.0.1:1"))
    monkeypatch.setattr("mlmclm.cluster.ray_cluster.has_raylet", lambda: ours)
    with ray_session(tmp_path) as outer, ray_session(tmp_path):
        assert started_here() == ours and not outer.local, "it is not ours to end"
        check_node()
        monkeypatch.setattr("mlmclm.cluster.ray_cluster.has_raylet", lambda: False)
        with pytest.raises(LostNode) if ours else contextlib.nullcontext():
            check_node()
    assert not started_here()


@pytest.mark.parametrize("address", ["http://127.0.0.1:8265", "https://ray.example"])
def test_the_address_of_a_dashboard_is_the_users_error(tmp_path: Path, address: str) -> None:
    with (
        pytest.raises(UserError, match=r"HOST:PORT of its head.*ray job submit"),
        ray_session(tmp_path, address=address),
    ):
        raise AssertionError("connected to nothing")


def test_a_start_that_fails_leaves_no_process_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start, others, left = Node.start_ray_processes, psutil.Process().children(), []

    def fail_once(node: Node) -> None:
        if not left:
            left.extend(each for each in psutil.Process().children() if each not in others)
            raise Exception("The current node timed out during startup.")
        start(node)

    monkeypatch.setattr(Node, "start_ray_processes", fail_once)
    with ray_session(tmp_path, num_cpus=1):
        assert ray.cluster_resources()["CPU"] == 1
        assert left and not any(is_alive(process) for process in left), "the first start's processes are gone"
    said = "".join(capsys.readouterr().err.split("\n"))
    assert "The current node timed out during startup." in said
    assert "Trying again (2 of 2)." in said


def failing_init(**arguments: object) -> None:
    raise Exception("The current node timed out during startup.")


def test_a_start_is_given_up_after_the_last_try_and_that_of_another_cluster_after_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    roots: list[Path] = []

    def fail(**arguments: object) -> None:
        roots.append(Path(str(arguments.get("_temp_dir"))))
        failing_init()

    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(EnvironmentFault, match=r"cannot be started on this machine.*timed out"), ray_session(tmp_path):
        raise AssertionError("started")
    assert len(set(roots)) == STARTS and not any(root.exists() for root in roots)
    assert capsys.readouterr().err.count("Trying again") == STARTS - 1
    roots.clear()
    with pytest.raises(EnvironmentFault, match="cannot be used"), ray_session(tmp_path, address="auto"):
        raise AssertionError("connected")
    assert len(roots) == 1


def test_a_start_that_hangs_is_ended_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemons: list[subprocess.Popen[bytes]] = []
    over: list[threading.Thread] = []

    def log(arguments: dict[str, object]) -> BinaryIO:
        """A daemon is known by what it writes in the cluster's folder."""
        root = Path(str(arguments["_temp_dir"]))
        root.mkdir()
        return (root / "daemon.out").open("wb")

    class Hung(threading.Timer):
        def start(self) -> None:
            """Its time is over when there is a daemon, however long that takes."""
            assert self.interval == SECONDS_A_START
            over.append(threading.Thread(target=self.function, args=self.args))

    def hang(**arguments: object) -> None:
        daemons.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdout=log(arguments)))
        over[-1].start()
        daemons[-1].wait()
        failing_init()

    monkeypatch.setattr(ray, "init", hang)
    monkeypatch.setattr(threading, "Timer", Hung)
    with pytest.raises(EnvironmentFault, match="cannot be started"), ray_session(tmp_path):
        raise AssertionError("started")
    assert len(daemons) == STARTS and all(daemon.poll() is not None for daemon in daemons)


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
