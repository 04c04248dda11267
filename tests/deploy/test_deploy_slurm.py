"""The Slurm script: clean shell, and a study on two nodes of one machine, with a stand-in for `srun`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray
import yaml

from small_study import write_study

SCRIPT = Path(__file__).resolve().parents[2] / "deploy" / "slurm.sh"
SRUN = r"""#!/bin/bash
# Runs the command once for each task, all of them here.
echo "$@" >> "$SRUN_LOG"
while [[ $1 == --* ]]; do
    case $1 in --ntasks=*) tasks=${1#*=} ;; esac
    shift
done
trap 'kill $(jobs -p); wait' TERM
for ((task = 0; task < tasks; task++)); do "$@" & done
wait
"""


def test_the_script_is_clean_shell() -> None:
    checker = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([checker, SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_study_runs_on_all_nodes_of_an_allocation_and_leaves_none_behind(tmp_path: Path) -> None:
    study = write_study(tmp_path, models=["1m-untrained", "1m-clm-10"])
    space = yaml.safe_load((tmp_path / "space.yaml").read_text()) | {"tasks": ["sst2"], "learning_rates": [1e-3]}
    (tmp_path / "space.yaml").write_text(yaml.safe_dump(space))
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(SRUN)
    srun.chmod(0o755)
    job, address = os.getpid(), ray.util.get_node_ip_address()  # a node that joins is told no loopback address by Ray
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_A", "MLMCLM_"))} | {
        "PATH": f"{srun.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SLURM_JOB_ID": str(job),
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_PER_TASK": "1",
        "SLURMD_NODENAME": address,
        "SRUN_LOG": str(tmp_path / "srun.log"),
    }
    words = ["bash", SCRIPT, study, "--store", tmp_path / "store", "--data", tmp_path / "data"]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "store" / "studies" / "small" / "report.html").is_file()
    # The recipe has two workers of a CPU each, which no node alone can hold.
    assert len(list((tmp_path / "store" / "cells").glob("*/*.json"))) == 4
    asked = (tmp_path / "srun.log").read_text()
    assert f"--nodes=1 --ntasks=1 --exclude={address} --cpus-per-task=1 ray start --block --address={address}:" in asked
    folder = f"/tmp/mlmclm-{job}"
    left = [file for file in Path("/proc").glob("[0-9]*/cmdline") if folder in _text(file)]
    assert left == [] and not Path(folder).exists()


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
