"""The local Ray session: on loopback, with a token, without leftovers, and gone with its driver."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import ray

from mlmclm.service.ray_cluster import ray_session
from mlmclm.temporary import swept_folder
from mlmclm.workers import runtime_environment, worker_environment

DRIVER = """
import sys, time
from pathlib import Path
import ray
from mlmclm.service.ray_cluster import ray_session

with ray_session(Path(sys.argv[1]), num_cpus=1):
    @ray.remote
    class Sleeper:
        def sleep(self):
            time.sleep(600)
    sleeper = Sleeper.remote()
    future = sleeper.sleep.remote()
    time.sleep(1)
    print("ready", ray._private.worker._global_node.get_session_dir_path(), flush=True)
    ray.get(future)
"""


def test_a_local_session_listens_on_loopback_with_a_token_and_leaves_nothing(tmp_path: Path) -> None:
    with ray_session(tmp_path, num_cpus=1) as session:
        assert session.local
        assert ray.cluster_resources()["CPU"] == 1
        token = tmp_path / "ray" / "auth_token"
        assert session.token_file is None or (session.token_file == token and token.stat().st_mode & 0o077 == 0)
        root = Path(ray._private.worker._global_node.get_temp_dir_path())
        link = root.with_suffix(".json")
        assert link.is_symlink()
        daemons = psutil.Process().children(recursive=True)
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
    assert not ray.is_initialized()
    assert not root.exists() and not link.is_symlink()
    assert not (Path.home() / ".ray").exists()
    assert [daemon for daemon in psutil.wait_procs(daemons, timeout=10)[1] if daemon.status() != "zombie"] == []


def test_when_the_driver_is_killed_its_cluster_dies_with_it(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert driver.stdout is not None
    line = driver.stdout.readline()
    assert line.startswith("ready")
    family = psutil.Process(driver.pid).children(recursive=True)
    assert len(family) > 3
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    _, alive = psutil.wait_procs(family, timeout=15)
    for process in alive:
        process.kill()
    assert alive == []


def test_a_cluster_that_does_not_answer_is_a_fault(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from mlmclm.service.ray_cluster import ray_session\n"
        "from mlmclm.errors import EnvironmentFault\n"
        "try:\n"
        "    with ray_session(Path(sys.argv[1]), address='127.0.0.1:1'): pass\n"
        "except EnvironmentFault as fault: print(fault)\n"
    )
    # A process of its own, since how long Ray tries is read once.
    environment = {
        **os.environ,
        "RAY_gcs_rpc_server_connect_timeout_s": "1",
        "RAY_gcs_server_request_timeout_seconds": "2",
    }
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=100, env=environment
    )
    assert "The Ray cluster at 127.0.0.1:1 cannot be used" in done.stdout, done.stderr


def test_what_a_job_sets_is_left_to_it() -> None:
    job = {"env_vars": {"OMP_NUM_THREADS": "4"}, "worker_process_setup_hook": "theirs"}
    ours = runtime_environment(job)
    assert "OMP_NUM_THREADS" not in ours["env_vars"]
    assert "worker_process_setup_hook" not in ours
    assert runtime_environment()["env_vars"] == worker_environment()


def test_a_temporary_folder_goes_with_its_owner_however_the_owner_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlmclm.temporary.GRACE_SECONDS", 0.0)
    code = (
        "import os, sys; from pathlib import Path; from mlmclm.temporary import swept_folder\n"
        "with swept_folder(Path(sys.argv[1]), 'x-'): os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    (left,) = tmp_path.glob("x-*")
    with swept_folder(tmp_path, "x-") as first, swept_folder(tmp_path, "x-") as second:
        assert not left.exists(), "the dead owner's folder is swept"
        assert first.is_dir() and second.is_dir(), "a living owner's is not"
    assert list(tmp_path.glob("x-*")) == []
