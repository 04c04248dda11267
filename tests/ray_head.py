"""A Ray head node for tests, started as by a user for `ray job submit`."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class RayHead:
    """`dashboard` is the address for job clients, `gcs` the address for drivers, `environment` the variables that a client
    process needs besides its own, and `folder` Ray's temporary folder."""

    dashboard: str
    gcs: str
    environment: dict[str, str]
    folder: Path


def free_ports(count: int) -> list[int]:
    """Return different ports on which no process listens."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that a test has started and all its descendants, by their ids."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.send_signal(signal.SIGKILL)
        psutil.wait_procs(family, timeout=1500)
    process.wait(300)


@contextlib.contextmanager
def running_head() -> Iterator[RayHead]:
    """Run `ray start --head` with tokens, on free ports, with its own temporary folder."""
    folder = Path(tempfile.mkdtemp(prefix="mlmclm-head-", dir="/tmp"))
    gcs, dashboard, client, agent = free_ports(4)
    environment = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # loopback only
    }
    command = [
        *(str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--disable-usage-stats"),
        *("--node-ip-address", "127.0.0.1", "--port", str(gcs), "--num-cpus", "2", "--temp-dir", str(folder)),
        *("--dashboard-host", "127.0.0.1", "--dashboard-port", str(dashboard), "--include-dashboard", "true"),
        *("--ray-client-server-port", str(client), "--dashboard-agent-listen-port", str(agent)),
        *("--object-store-memory", str(150 << 20)),
    ]
    with (folder / "start.log").open("wb") as log:
        process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=log, stderr=subprocess.STDOUT)
    head = RayHead(f"http://127.0.0.1:{dashboard}", f"127.0.0.1:{gcs}", environment, folder)
    try:
        _wait(head, process, folder / "start.log")
        yield head
    finally:
        end_tree(process)
        shutil.rmtree(folder, ignore_errors=True)


def _wait(head: RayHead, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the dashboard accepts jobs."""
    request = urllib.request.Request(f"{head.dashboard}/api/jobs/")
    request.add_header("Authorization", f"Bearer {head.environment['RAY_AUTH_TOKEN']}")
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=30) as answer:
            if answer.status == 200:
                return
        time.sleep(0.2)
    raise RuntimeError(f"ray start failed:\n{log.read_text()}")
