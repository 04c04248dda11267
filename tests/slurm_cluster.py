"""A Slurm cluster of Debian's packages (munge, slurmctld, slurmd, slurm-client) on nodes of `node_network`.

Node 1 has the controller, and jobs are submitted there. The others compute. All see the folder of the configuration.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from node_network import PREFIX, Node, NodeNetwork, node_network, wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
CONFIGURATION = """
ClusterName=test
SlurmctldHost=node1({prefix}.1)
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=/run/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
StateSaveLocation=/run/state
SlurmdSpoolDir=/run/spool
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/completed
ReturnToService=2
SlurmdTimeout=30
KillWait=30
{more}
"""
NODE = """
mount -t tmpfs run /run
mount --bind "$1/hosts" /etc/hosts
munged --key-file="$1/key" --socket=/run/munge --pid-file=/run/munged.pid --log-file=/run/munged.log --seed-file=/run/seed
mkdir /run/state /run/spool
while true; do "$2" -D; sleep 1; done
"""


class SlurmCluster:
    """A controller and nodes that compute.

    Args:
        network: where its nodes are started.
        folder: of its configuration, which all nodes see.
        cpus: of each computing node.
        more: lines of slurm.conf.
    """

    def __init__(self, network: NodeNetwork, folder: Path, cpus: Sequence[int], *more: str) -> None:
        self.network, self.folder = network, folder
        names = {f"node{number}": f"{PREFIX}.{number}" for number in range(1, len(cpus) + 2)}
        nodes = [f"NodeName=node{number} NodeAddr={PREFIX}.{number} CPUs={count} RealMemory=4000" for number, count in enumerate(cpus, 2)]
        partitions = [] if any("PartitionName" in line for line in more) else ["PartitionName=all Nodes=ALL Default=YES"]
        (folder / "slurm.conf").write_text(CONFIGURATION.format(prefix=PREFIX, folder=folder, more="\n".join([*nodes, *partitions, *more])))
        (folder / "hosts").write_text("".join(f"{address} {name}\n" for name, address in {"localhost": "127.0.0.1", **names}.items()))
        key = folder / "key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        for name in names:
            self.start("slurmctld" if name == "node1" else "slurmd")
        wait_until(lambda: self.control("ping").count("UP") == 1, seconds=30)
        wait_until(lambda: self.control("show", "nodes").count("State=IDLE ") == len(cpus), seconds=60)

    def start(self, daemon: str) -> Node:
        return self.network.start("bash", "-c", NODE, "bash", str(self.folder), shutil.which(daemon) or daemon, SLURM_CONF=str(self.folder / "slurm.conf"))

    def at(self, node: Node, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command on a node."""
        inside = psutil.Process(node.holder.pid).children()[0].pid
        own = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_A", "MLMCLM_", "SLURM_"))}
        return subprocess.run(
            ["nsenter", "-t", str(inside), "-n", "-m", "-u", "-p", f"--wd={self.folder}", *command],
            env=own | {"SLURM_CONF": str(self.folder / "slurm.conf"), "HOME": str(self.folder)} | environment,
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    def control(self, *words: str) -> str:
        done = self.at(self.network.nodes[0], "scontrol", *words)
        return done.stdout + done.stderr

    def submit(self, *words: str, **environment: str) -> int:
        done = self.at(self.network.nodes[0], "sbatch", "--parsable", *words, **environment)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    def job(self, number: int) -> dict[str, str]:
        return dict(re.findall(r"(\S+?)=(\S*)", self.control("show", "job", str(number))))
