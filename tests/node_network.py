"""Several nodes on one machine: each has its own Linux namespaces, and so its own address, host name, processes and /tmp.

The nodes are connected by a switch in its own network namespace, so this machine's network does not change. The
kernel removes everything when the processes that hold the namespaces end, and these end with the process that started
them, however it ends.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

PREFIX = "10.77.0"
SWITCH = f"{PREFIX}.254"
"""The address of the switch, from which clients use the cluster."""
GCS, DASHBOARD = 6379, 8265
"""Ray's usual ports: every node has all ports to itself."""
RAY = str(Path(sys.executable).with_name("ray"))
HELD = ("setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child")
INSIDE = """
set -e
read -r go  # once the node has its address
hostname "$1"
ip link set lo up
mount --rbind "$2" /tmp
shift 2
exec "$@"
"""


@dataclass(frozen=True)
class Node:
    """A machine: its number, address, holder of its namespaces, and the folder that is its /tmp."""

    number: int
    address: str
    holder: subprocess.Popen[bytes]
    folder: Path

    @property
    def log(self) -> str:
        """Return the output of its first process."""
        return (self.folder / "log").read_text(errors="replace")

    def processes(self, title: str = "") -> list[psutil.Process]:
        """Its processes whose command line contains `title`."""
        processes = []
        with suppress(psutil.Error):
            for process in psutil.Process(self.holder.pid).children(recursive=True):
                with suppress(psutil.Error):
                    if title in " ".join(process.cmdline()):
                        processes.append(process)
        return processes

    def run(self, *command: str) -> str:
        """Return the output of a command that sees its files."""
        return _run("nsenter", "-t", str(self.holder.pid), "--mount", *command)


@dataclass(frozen=True)
class Job:
    """A submitted job: the process that follows it, and the file of its log."""

    process: subprocess.Popen[bytes]
    path: Path

    @property
    def log(self) -> str:
        """Return its output so far."""
        return self.path.read_text(errors="replace")

    def finish(self, seconds: float, *, well: bool = True) -> str:
        """Return the log of a job that ends within `seconds`: without an error if `well`, else with one."""
        self.process.wait(timeout=seconds)
        assert (self.process.returncode == 0) == well, self.log
        return self.log


class NodeNetwork:
    """A switch and its nodes. The first node is the head of a Ray cluster, without CPUs, unless it is started otherwise.

    Args:
        root: folder that holds each node's /tmp.
        shared: folder that all nodes see under its own path, or None.
    """

    def __init__(self, root: Path, shared: Path | None) -> None:
        self.root, self.shared = root, shared
        self.nodes: list[Node] = []
        self._servers: list[subprocess.Popen[bytes]] = []
        self.environment = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        self.holder = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sleep", "infinity"])
        wait_until(lambda: _apart(self.holder.pid), seconds=20)
        # Otherwise its hardware address is that of a port, and nodes cannot reach it once that port is removed.
        self.at_switch("ip", "link", "add", "switch", "address", "02:00:00:00:00:fe", "type", "bridge")
        self.at_switch("ip", "address", "add", f"{SWITCH}/24", "dev", "switch")
        for name in ("lo", "switch"):
            self.at_switch("ip", "link", "set", name, "up")

    def start(self, *command: str, delay: float = 0.0, **environment: str) -> Node:
        """Start a node whose first process is a command.

        Args:
            delay: of its link to the switch, each way, in seconds.
        """
        number = len(self.nodes) + 1
        name, address = f"node{number}", f"{PREFIX}.{number}"
        folder = self.root / name
        folder.mkdir(mode=0o1777)
        log = (folder / "log").open("wb")
        words = [*HELD, "--mount-proc", "bash", "-c", self._script(folder), "bash", name, str(folder), *command]
        folders = {"HOME": "/tmp", "TMPDIR": "/tmp", "NUMBA_CACHE_DIR": os.environ["NUMBA_CACHE_DIR"]}
        holder = subprocess.Popen(
            words, env=os.environ | self.environment | folders | environment, stdin=subprocess.PIPE, stdout=log, stderr=log, cwd="/"
        )  # fmt: skip
        node = Node(number, address, holder, folder)
        self.nodes.append(node)
        wait_until(lambda: _apart(holder.pid), seconds=20)
        if delay:
            self._link_with_delay(node, delay)
        else:
            peer = ("peer", "name", "eth0", "netns", str(holder.pid))
            self.at_switch("ip", "link", "add", f"port{number}", "type", "veth", *peer)
        self.join(node)
        self.at_switch("ip", "link", "set", f"port{number}", "up")
        for words in (("address", "add", f"{address}/24", "dev", "eth0"), ("link", "set", "eth0", "up")):
            _run("nsenter", "-t", str(holder.pid), "-n", "ip", *words)
        assert holder.stdin is not None
        holder.stdin.write(b"\n")
        holder.stdin.flush()
        return node

    def start_ray(self, cpus: int, *, again: bool = False, delay: float = 0.0, **environment: str) -> Node:
        """Start a Ray node: the first is the head, and the others join it.

        Args:
            again: whether Ray is started again when it ends, as by systemd.
            delay: see `start`.
        """
        place = ("--address", f"{PREFIX}.1:{GCS}")
        if not self.nodes:
            place = ("--head", "--port", str(GCS), "--dashboard-host", f"{PREFIX}.1", "--include-dashboard", "true")
        address = f"{PREFIX}.{len(self.nodes) + 1}"
        supervisor = ("bash", "-c", 'while true; do "$@"; sleep 1; done', "bash") if again else ()
        node = self.start(
            *(*supervisor, RAY, "start", "--block", "--disable-usage-stats", "--node-ip-address", address, *place),
            *("--num-cpus", str(cpus), "--object-store-memory", str(100 << 20)),
            delay=delay,
            **environment,
        )
        if node.number == 1:
            self.wait_for_nodes(1)
        return node

    def lose(self, node: Node) -> None:
        """Kill all processes of a node at once; others notice only that their connections are closed."""
        family = node.processes()
        if node.holder.poll() is None:
            node.holder.kill()
        node.holder.wait()
        psutil.wait_procs(family, 20)

    def join(self, node: Node) -> None:
        """Connect a node to the switch."""
        self.at_switch("ip", "link", "set", f"port{node.number}", "master", "switch")

    def leave(self, node: Node) -> None:
        """Disconnect a node from the switch; it keeps running, but reaches no other node."""
        self.at_switch("ip", "link", "set", f"port{node.number}", "nomaster")

    def submit(self, *entrypoint: str, folder: Path | None = None) -> Job:
        """Submit a job from the switch by `ray job submit`, with a copy of a folder to work in."""
        words = [RAY, "job", "submit", "--address", f"http://{PREFIX}.1:{DASHBOARD}"]
        words += [] if folder is None else ["--working-dir", str(folder)]
        path = self.root / "job.log"
        with path.open("wb") as log:
            process = subprocess.Popen(
                self._from_switch(*words, "--", *entrypoint), env=os.environ | self.environment,
                stdout=log, stderr=subprocess.STDOUT, cwd=self.root,
            )  # fmt: skip
        self._servers.append(process)  # it ends with the network, if not before
        return Job(process, path)

    def serve(self, *command: str) -> None:
        """Run a server at the switch until the network ends."""
        words = self._from_switch("setpriv", "--pdeathsig", "KILL", *command)
        self._servers.append(subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))

    def at_switch(self, *command: str) -> str:
        """Return the output of a command that is run at the switch."""
        return _run(*self._from_switch(*command), **self.environment)

    def get(self, path: str) -> Any:
        """Return the response of the cluster's dashboard."""
        program = (
            "import sys, urllib.request as r; q = r.Request(sys.argv[1]);"
            "q.add_header('Authorization', 'Bearer ' + sys.argv[2]); print(r.urlopen(q, timeout=30).read().decode())"
        )
        words = (sys.executable, "-c", program, f"http://{PREFIX}.1:{DASHBOARD}{path}")
        return json.loads(self.at_switch(*words, self.environment["RAY_AUTH_TOKEN"]))

    def wait_for_nodes(self, count: int) -> None:
        """Wait until the cluster has so many nodes, the head included."""

        def alive() -> bool:
            ended = [node.log for node in self.nodes if node.holder.poll() not in (None, -9)]
            assert not ended, ended
            with suppress(subprocess.CalledProcessError):
                states = [node["state"] for node in self.get("/api/v0/nodes")["data"]["result"]["result"]]
                return states.count("ALIVE") == count
            return False

        wait_until(alive, seconds=180)

    def close(self) -> None:
        """End all nodes and the switch."""
        for node in self.nodes:
            self.lose(node)
        for process in (*self._servers, self.holder):
            process.kill()
            process.wait()

    def _link_with_delay(self, node: Node, seconds: float) -> None:
        words = (sys.executable, str(Path(__file__).with_name("delayed_link.py")))
        words += (str(node.holder.pid), str(self.holder.pid), str(node.number), str(seconds))
        link = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *words], stdout=subprocess.PIPE)
        self._servers.append(link)
        assert link.stdout is not None and link.stdout.readline() == b"ready\n"

    def _script(self, folder: Path) -> str:
        # A node's own /tmp hides the shared folder, if that is in the machine's.
        if self.shared is None or not self.shared.is_relative_to("/tmp"):
            return INSIDE
        inside = folder / self.shared.relative_to("/tmp")
        inside.mkdir(parents=True)
        return f"mount --bind '{self.shared}' '{inside}'\n{INSIDE}"

    def _from_switch(self, *command: str) -> tuple[str, ...]:
        return ("nsenter", "-t", str(self.holder.pid), "-n", *command)


def _run(*command: str, **environment: str) -> str:
    variables = os.environ | environment
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60, env=variables).stdout


def _apart(pid: int) -> bool:
    """Return whether a process is in another network namespace than this one."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/ns/net").readlink() != Path("/proc/self/ns/net").readlink()
    return False


def wait_until(done: Callable[[], bool], seconds: float) -> None:
    """Wait until `done` returns true; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"not in {seconds:g} s"
        time.sleep(0.1)


def need_namespaces() -> None:
    """Skip the test if the system does not allow network namespaces."""
    missing = [name for name in ("ip", "nsenter", "setpriv", "unshare") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)} (util-linux, iproute2)")
    tried = subprocess.run(
        [*HELD, "--mount-proc", "ip", "link", "add", "near", "type", "veth", "peer", "name", "far"], capture_output=True, text=True
    )  # fmt: skip
    if tried.returncode:
        pytest.skip(f"this system makes no network namespaces: {tried.stderr.strip()}")


def need_taps() -> None:
    """Skip the test if the system does not allow TAP devices, which links with a delay need."""
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
    except OSError as error:
        pytest.skip(f"this system makes no TAP devices: {error}")


@contextmanager
def node_network(shared: Path | None) -> Iterator[NodeNetwork]:
    """Yield a switch without nodes; everything that is started on it ends with the block."""
    need_namespaces()
    root = Path(tempfile.mkdtemp(prefix="mlmclm-nodes-"))
    network = NodeNetwork(root, shared)
    try:
        yield network
    finally:
        network.close()
        shutil.rmtree(root, ignore_errors=True)
