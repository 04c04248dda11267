"""A Slurm cluster on nodes of `node_network`, with the packages slurmctld, slurmd, slurm-client and munge.

Node 1 has the controller, and jobs are submitted there. The others compute.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from node_network import PREFIX, Node, NodeNetwork, node_network, wait_until

EXPORTED = ("PATH", "HOME", "PYTHONPATH", "OMP_NUM_THREADS", "DS_ACCELERATOR", "HF_HUB_OFFLINE", "NUMBA_CACHE_DIR")
"""The only variables that a job gets; its script must pass on those that it sets itself."""
CONFIGURATION = """
ClusterName=test
SlurmctldHost=node1({prefix}.1)
SlurmUser=root
AuthInfo=socket=/run/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
StateSaveLocation=/run/state
SlurmdSpoolDir=/run/spool
SlurmdTimeout=30
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=ALL Default=YES
PartitionName=urgent Nodes=ALL PriorityTier=10
"""
START = """
set -e
mount -t tmpfs run /run
mkdir /run/state /run/spool
# Debian's installer gives a machine's own name this address, at which no other machine reaches it.
printf '127.0.0.1 localhost\\n127.0.1.1 %s\\n' "$(hostname)" > /run/hosts
mount --bind /run/hosts /etc/hosts
munged --key-file="$1" --socket=/run/munge --pid-file=/run/munged.pid --log-file=/run/munged.log --seed-file=/run/seed
"$2" -D &
while true; do wait; sleep 1; done  # reaps processes whose parent has ended
"""


class SlurmCluster:
    """A controller and nodes that compute.

    Args:
        network: a network without nodes, which shares the folder.
        folder: for the configuration and the jobs' output; it is also their home folder.
        cpus: of each computing node.
    """

    def __init__(self, network: NodeNetwork, folder: Path, cpus: Sequence[int]) -> None:
        self.folder = folder
        names = [f"NodeName=node{at} NodeAddr={PREFIX}.{at} CPUs={count}" for at, count in enumerate(cpus, start=2)]
        self.configuration, key = folder / "slurm.conf", folder / "munge.key"
        self.configuration.write_text("\n".join([CONFIGURATION.format(prefix=PREFIX), *names, ""]))
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        for daemon in ("slurmctld", *("slurmd" for _ in cpus)):
            words = ("bash", "-c", START, "bash", str(key), shutil.which(daemon) or daemon)
            network.start(*words, SLURM_CONF=str(self.configuration))
        self.controller, *self.computing = network.nodes
        idle = ("sinfo", "--noheader", "--partition=all", "--format=%D %T")
        wait_until(lambda: self.run(*idle) == f"{len(cpus)} idle\n", seconds=60)
        self.daemons = {process.pid for node in self.computing for process in node.processes()}

    def run(self, *command: str, node: Node | None = None) -> str:
        """Return the output of a command on a node, by default the controller's."""
        env = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_A", "MLMCLM_", "SLURM_"))}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        first = psutil.Process((node or self.controller).holder.pid).children()[0]
        done = subprocess.run(
            ["nsenter", "--target", str(first.pid), "--net", "--mount", "--uts", "--pid", f"--wd={self.folder}", *command],
            env=env | {"SLURM_CONF": str(self.configuration), "HOME": str(self.folder), "PATH": path},
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        return done.stdout + done.stderr

    def submit(self, *words: str | Path) -> int:
        """Submit a job; return its number. Its output is in `output`."""
        words = (f"--export={','.join(EXPORTED)}", "--output=%j.log", *map(str, words))
        return int(self.run("sbatch", "--parsable", *words))

    def output(self, job: int) -> str:
        """Return a job's output so far, over all of its restarts."""
        path = self.folder / f"{job}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def job(self, job: int) -> dict[str, str]:
        """Return Slurm's record of a job."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.run("scontrol", "show", "job", str(job))))

    def wait(self, job: int, state: str, seconds: float) -> dict[str, str]:
        """Return the record of a job when it is in a state; fail if it ends in another."""

        def reached() -> bool:
            now = self.job(job)["JobState"]
            assert now in (state, "PENDING", "RUNNING", "COMPLETING"), (now, self.output(job))
            return now == state

        try:
            wait_until(reached, seconds)
        except AssertionError as error:
            raise AssertionError(self.output(job)) from error
        return self.job(job)

    def left(self) -> list[str]:
        """Return the processes on computing nodes that are not Slurm's daemons, and what jobs have left in /tmp."""
        left = []
        for node in self.computing:
            for process in node.processes():
                with suppress(psutil.Error):  # it has ended
                    if process.pid not in self.daemons and process.name() not in ("sleep", "slurmd"):
                        left.append(" ".join(process.cmdline()))
            shared = self.folder.relative_to("/tmp").parts[0] if self.folder.is_relative_to("/tmp") else ""
            left += [path.name for path in node.folder.iterdir() if path.name not in ("log", shared)]
        return left


@contextmanager
def slurm_cluster(folder: Path, cpus: Sequence[int]) -> Iterator[SlurmCluster]:
    """Yield a cluster that ends with the block; skip the test if Slurm is not installed."""
    programs = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
    missing = [name for name in programs if shutil.which(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)} (packages slurmctld, slurmd, slurm-client, munge)")
    with node_network(folder) as network:
        yield SlurmCluster(network, folder, cpus)
