"""The Slurm script: clean shell, and studies in a real Slurm cluster of this machine's packages."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from node_network import wait_until
from slurm_cluster import SlurmCluster, slurm_cluster
from small_results import results, weights
from small_study import write_study

SCRIPT = Path(__file__).resolve().parents[2] / "deploy" / "slurm.sh"


def test_the_script_is_clean_shell() -> None:
    checker = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([checker, SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[SlurmCluster]:
    """Two nodes of a CPU each, and one of two CPUs. No name of theirs resolves to an address that others reach."""
    with slurm_cluster(tmp_path, (1, 1, 2)) as made:
        yield made


def assert_clean(cluster: SlurmCluster) -> None:
    """No job has left a process or a file on a node. A process that has just lost its parent may still be ending."""
    with suppress(AssertionError):
        wait_until(lambda: not cluster.left(), seconds=60)
    assert cluster.left() == []


def study_like(finished_study: Any, folder: Path, *models: str, more_rates: Sequence[float] = ()) -> Path:
    """Write a study of some of the models and a task of the finished one; return its file, beside which `data` are."""
    study = finished_study.study.parent
    space = yaml.safe_load((study / "space.yaml").read_text())
    path = folder / "study.yaml"
    changes = {"models": list(models), "space": str(folder / "space.yaml")}
    path.write_text(yaml.safe_dump(yaml.safe_load(finished_study.study.read_text()) | changes))
    rates = [*space["learning_rates"], *more_rates]
    Path(changes["space"]).write_text(yaml.safe_dump(space | {"tasks": ["sst2"], "learning_rates": rates}))
    # The data have to be where all nodes see them.
    subprocess.run(["cp", "-r", study / "data", folder / "data"], check=True)
    return path


@pytest.mark.slow
def test_a_study_has_the_same_results_on_a_node_as_without_slurm(cluster: SlurmCluster, finished_study: Any) -> None:
    path = study_like(finished_study, cluster.folder, "1m-untrained", "1m-clm-30")
    words = ("--nodes=1", "--cpus-per-task=2", SCRIPT)
    wrong = cluster.submit(*words, cluster.folder / "absent.yaml", "--store", cluster.folder / "none")
    job = cluster.submit(*words, path, "--store", cluster.folder / "store", "--data", cluster.folder / "data")
    assert cluster.wait(wrong, "FAILED", 300)["ExitCode"] == "2:0"
    cluster.wait(job, "COMPLETED", 600)
    assert_clean(cluster)
    found, expected = results(cluster.folder / "store"), results(finished_study.store)
    assert len(found) == 8 and {key: expected[key] for key in found} == found
    found, expected = weights(cluster.folder / "store"), weights(finished_study.store)
    assert len(found) == 1 and {key: expected[key] for key in found} == found


@pytest.mark.slow
def test_a_sweep_goes_on_with_the_first_node_when_ray_is_lost_on_the_other(
    cluster: SlurmCluster, finished_study: Any
) -> None:
    rates = [1e-5 * number for number in range(1, 31)]  # so many cells that both nodes get some
    path, store = study_like(finished_study, cluster.folder, "1m-untrained", more_rates=rates), cluster.folder / "store"
    words = ("--nodelist=node2,node3", "--cpus-per-task=1", SCRIPT, path, "--store", store)
    job, other = cluster.submit(*words, "--data", cluster.folder / "data"), cluster.computing[1]
    wait_until(lambda: bool(other.processes("ray::1m-")) or "report:" in cluster.output(job), seconds=300)
    raylet, *_ = other.processes("raylet")
    raylet.kill()
    assert len(results(store)) < 64
    cluster.wait(job, "COMPLETED", 300)
    assert_clean(cluster)
    found, expected = results(store), results(finished_study.store)
    same = {key: expected[key] for key in found if key in expected}
    assert len(found) == 64 and len(same) == 4 and {key: found[key] for key in same} == same


@pytest.mark.slow
def test_a_node_whose_folder_is_another_user_s_ends_the_job_and_loses_nothing(cluster: SlurmCluster) -> None:
    """A mount is what root cannot remove. Slurm itself turns TMPDIR into /tmp where it cannot make the folder."""
    job = cluster.submit("--hold", "--nodelist=node2,node3", "--cpus-per-task=1", SCRIPT, "absent.yaml")
    taken, other = f"/tmp/mlmclm-{job}", "/tmp/other"
    where = cluster.computing[1]
    script = f"mkdir {taken} && mount -t tmpfs taken {taken} && touch {taken}/file {other}"
    assert cluster.run("bash", "-c", script, node=where) == ""
    cluster.run("scontrol", "release", str(job))
    cluster.wait(job, "FAILED", 300)
    assert "Device or resource busy" in cluster.output(job)
    assert (
        cluster.run("bash", "-c", f"ls -d {other} && umount {taken} && rm -r {taken} {other}", node=where)
        == f"{other}\n"
    )
    assert_clean(cluster)


@pytest.mark.slow
def test_a_preempted_or_cancelled_job_goes_on_and_leaves_nothing_on_its_nodes(cluster: SlurmCluster) -> None:
    """The recipe has two workers, and each node holds one."""
    path = write_study(cluster.folder, models=["1m-untrained", "1m-clm-30"])
    space = yaml.safe_load((path.parent / "space.yaml").read_text()) | {"tasks": ["sst2"], "learning_rates": [1e-3]}
    (path.parent / "space.yaml").write_text(yaml.safe_dump(space))
    whole, disturbed = cluster.folder / "whole", cluster.folder / "disturbed"

    def submit(nodes: int, store: Path) -> int:
        words = (f"--nodes={nodes}", "--cpus-per-task=1", SCRIPT, path)
        return cluster.submit(*words, "--store", store, "--data", cluster.folder / "data")

    def trains(job: int) -> bool:
        assert cluster.job(job)["JobState"] in ("PENDING", "RUNNING"), cluster.output(job)
        return any(disturbed.glob("runs/*/ray_train/*/checkpoint_*/step.json"))

    cluster.wait(submit(3, whole), "COMPLETED", 600)
    assert_clean(cluster)

    job = submit(2, disturbed)
    wait_until(lambda: trains(job), seconds=300)
    urgent = cluster.submit("--partition=urgent", "--nodes=3", "--wrap=true")
    cluster.wait(urgent, "COMPLETED", 120)
    assert not weights(disturbed), "the state is trained already"
    assert_clean(cluster)
    record = cluster.wait(job, "PENDING", 10)
    assert record["Restarts"] == "1"

    cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now")  # otherwise Slurm waits for two minutes
    wait_until(lambda: bool(weights(disturbed)), seconds=300)
    cluster.run("scancel", str(job))
    cluster.wait(job, "CANCELLED", 120)
    assert_clean(cluster)

    cluster.wait(submit(2, disturbed), "COMPLETED", 300)
    assert_clean(cluster)
    assert len(weights(whole)) == 1 and weights(disturbed) == weights(whole)
    assert len(results(whole)) == 4 and results(disturbed) == results(whole)
