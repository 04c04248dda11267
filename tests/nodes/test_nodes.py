"""Studies on several nodes with real, separate addresses: the same results as on one machine."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file

from mlmclm.pretraining import states
from node_network import SWITCH, Job, Node, NodeNetwork, need_taps, node_network, wait_until
from object_stores import need_s3
from small_models import save_small_decoder
from small_results import read_results, results, weights
from small_study import run, write_study

pytestmark = pytest.mark.slow
MLMCLM = (sys.executable, "-m", "mlmclm")
FAR = 0.1
"""Seconds that a frame takes from a far node to the others; there and back it is twice that."""
RUNS = ".cache/mlmclm/stores/*/runs/*"
"""The folders of a node's pretraining runs, where its store is in a bucket."""


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[NodeNetwork]:
    """A network whose nodes share the folder of the test."""
    with node_network(tmp_path) as network:
        yield network


def study_like(finished: Any, folder: Path, *models: str, trained: bool = False, **protocol: int) -> tuple[str, ...]:
    """Copy a finished study with the first of its models; return the words that run it on the store `folder`/store.

    Args:
        trained: whether the store has its states already.
    """
    if trained:
        for name in ("corpora", "prepared", "states", "tokenizers"):
            shutil.copytree(finished.store / name, folder / "store" / name)
    shutil.copytree(finished.study.parent, folder / "study")
    path, space = folder / "study" / "study.yaml", folder / "study" / "space.yaml"
    cells = yaml.safe_load(space.read_text())
    space.write_text(yaml.safe_dump(cells | {"protocol": cells["protocol"] | protocol}))
    study = yaml.safe_load(path.read_text())
    changes = {"models": list(models), "baseline": models[0], "space": "space.yaml"}
    path.write_text(yaml.safe_dump(study | changes))
    return (str(path), "--store", str(folder / "store"), "--data", str(folder / "study" / "data"))


def a_sweep(finished: Any, folder: Path) -> tuple[str, ...]:
    """`study_like` with trained models and cells of a second or more."""
    return study_like(finished, folder, "1m-untrained", "1m-clm-30", trained=True, max_steps=60)


def hosts(store: Path) -> set[str]:
    """The hosts that computed a store's results."""
    return {result["cost"]["worker"].partition("/")[0] for result in read_results(store).values()}


def computes(node: Node) -> bool:
    """Whether a worker of a node is in a cell."""
    return bool(node.processes("ray::1m-"))


def killed(processes: list[psutil.Process]) -> bool:
    """Kill processes with SIGKILL; return whether there were any."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    return bool(processes)


def at_bucket(nodes: NodeNetwork, call: str) -> bool:
    """Whether a method of the file system of S3 could be called at the switch."""
    with suppress(subprocess.CalledProcessError):
        nodes.at_switch(sys.executable, "-c", f"import fsspec; fsspec.filesystem('s3').{call}")
        return True
    return False


@contextmanager
def nodes_with_a_bucket() -> Iterator[NodeNetwork]:
    """A network whose nodes share no folder, and have a bucket of S3 at the switch."""
    need_s3()
    with node_network(None) as nodes:
        nodes.environment |= {
            "FSSPEC_S3_ENDPOINT_URL": f"http://{SWITCH}:5000", "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
        }  # fmt: skip
        nodes.serve(sys.executable, "-m", "moto.server", "-H", SWITCH, "-p", "5000")
        wait_until(lambda: at_bucket(nodes, "makedirs('bucket', exist_ok=True)"), seconds=120)
        yield nodes


def checkpoints(nodes: NodeNetwork, step: int) -> list[Node]:
    """The running nodes that have a checkpoint of this step or a later one, in a store without a shared folder."""
    found = []
    for node in nodes.nodes:
        for path in node.folder.glob(f"{RUNS}/ray_train/*/checkpoint_*/step.json"):
            with suppress(OSError):  # it may be deleted at this moment
                found += [node] if json.loads(path.read_text())["step"] >= step else []
    return found


def trained(store: Path) -> dict[str, tuple[dict[str, torch.Tensor], list[float]]]:
    """The states of a store or of a copy of its bucket: weights with moments, and the loss of each step, by key."""
    found = {}
    for folder in store.glob("states/*"):
        names = {path.name: path for path in folder.iterdir()}
        if "manifest.json" in names:
            files = json.loads(names["manifest.json"].read_text())["files"]
            names = {name: folder / "objects" / noted["sha256"] for name, noted in files.items()}
        rows = states.read_metrics(names["metrics.jsonl"])
        parts = [load_file(path) for name, path in names.items() if name.endswith(".safetensors")]
        tensors = {name: tensor for part in parts for name, tensor in part.items()}
        found[folder.name] = tensors, [row["loss"] for row in rows if "loss" in row]
    return found


def assert_close(found: Path, expected: Path, losses: float, tensors: float) -> None:
    """Two stores have the same states, up to a relative error of the losses and an absolute one of weights and moments."""
    own, other = trained(found), trained(expected)
    assert own.keys() == other.keys() and len(own) == 2
    for key, (state, curve) in own.items():
        assert curve == pytest.approx(other[key][1], rel=losses)
        torch.testing.assert_close(state, other[key][0], rtol=0, atol=tensors)


@pytest.fixture(scope="module")
def whole_sweep(finished_study: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of `a_sweep` on this machine."""
    folder = tmp_path_factory.mktemp("whole")
    code, _, errors = run("study", *a_sweep(finished_study, folder), home=folder, timeout=1500)
    assert code == 0, errors
    return results(folder / "store")


def assert_part_of(found: dict[str, Any], whole: dict[str, Any], count: int) -> None:
    """`found` has so many items, each of them as in `whole`."""
    assert len(found) == count
    assert [key for key in found if found[key] != whole.get(key)] == []


def test_a_study_submitted_to_a_head_without_cpus_runs_on_the_other_node(
    nodes: NodeNetwork, finished_study: Any, tmp_path: Path
) -> None:
    nodes.start_ray(0)
    nodes.start_ray(2)
    nodes.wait_for_nodes(2)
    words = study_like(finished_study, tmp_path, "1m-untrained", "1m-clm-30")
    assert "report:" in nodes.submit(*MLMCLM, "study", *words).finish(900)
    assert_part_of(weights(tmp_path / "store"), weights(finished_study.store), 1)
    assert_part_of(results(tmp_path / "store"), results(finished_study.store), 16)


@pytest.mark.parametrize("cut_off", [False, True])
def test_pretraining_goes_on_with_a_new_node_in_place_of_one_that_is_lost_and_with_one_that_was_cut_off(
    cut_off: bool, nodes: NodeNetwork, tmp_path: Path
) -> None:
    """Each node has one worker. The norm of gradients is rounded otherwise than in one machine's shared memory, hence `whole`."""
    recipe = yaml.safe_load(write_study(tmp_path / "small").read_text())["recipe"] | {"checkpoint_every": 50}
    path = write_study(tmp_path / "study", models=["1m-clm-1k"], baseline=None, recipe=recipe)
    whole, lost = tmp_path / "whole", tmp_path / "lost"
    words = (*MLMCLM, "study", str(path), "--data", str(path.parent / "data"), "--store")
    nodes.start_ray(0)
    nodes.start_ray(1)
    other = nodes.start_ray(1, again=cut_off)
    nodes.wait_for_nodes(3)
    nodes.submit(*words, str(whole)).finish(600)
    job = nodes.submit(*words, str(lost))
    wait_until(
        lambda: any(lost.glob("runs/*/ray_train/*/checkpoint_*/step.json")) or job.process.poll() is not None,
        seconds=300,
    )
    assert other.processes("RayTrainWorker") and not weights(lost), "the state is not trained yet"
    if cut_off:
        nodes.leave(other)
        time.sleep(120)
        assert not weights(lost)
        nodes.join(other)
    else:
        nodes.lose(other)
        nodes.start_ray(1)
    assert "report:" in job.finish(600)
    assert_part_of(weights(lost), weights(whole), 1)
    assert_part_of(results(lost), results(whole), 8)


def test_pretraining_goes_on_with_one_node_when_the_other_is_lost_and_with_two_when_one_has_come(
    nodes: NodeNetwork, tmp_path: Path
) -> None:
    recipe = yaml.safe_load(write_study(tmp_path / "small").read_text())["recipe"]
    recipe |= {"precision": "fp32", "peak_learning_rate": 3e-4}
    fixed = write_study(tmp_path / "fixed", models=["1m-clm-30-mlm40-120"], baseline=None, recipe=recipe)
    recipe |= {"fewest_workers": 1, "callbacks": ["noted"]}
    elastic = write_study(tmp_path / "elastic", models=["1m-clm-30-mlm40-120"], baseline=None, recipe=recipe)
    data, whole, store = fixed.parent / "data", tmp_path / "whole", tmp_path / "store"
    nodes.start_ray(0)
    nodes.start_ray(1)
    other = nodes.start_ray(1)
    nodes.wait_for_nodes(3)
    nodes.submit(*MLMCLM, "pretrain", str(fixed), "--data", str(data), "--store", str(whole)).finish(600)

    def workers() -> list[str]:
        return (store / "steps").read_text().split() if (store / "steps").is_file() else []

    program = Path(__file__).with_name("elastic_job.py")
    job = nodes.submit(sys.executable, str(program), str(elastic), str(store), str(data))
    wait_until(lambda: len(workers()) > 50 or job.process.poll() is not None, seconds=300)
    assert job.process.poll() is None, job.log
    nodes.lose(other)
    wait_until(lambda: "1" in workers() or job.process.poll() is not None, seconds=300)
    nodes.start_ray(1)
    job.finish(600)
    assert re.fullmatch("2+1+2+", "".join(workers()))
    assert_close(store, whole, losses=1e-6, tensors=1e-6)


def test_pretraining_with_a_node_that_is_200_ms_away_equals_that_of_near_nodes(
    nodes: NodeNetwork, finished_study: Any, tmp_path: Path
) -> None:
    """Each node has one worker."""
    need_taps()
    nodes.start_ray(0)
    nodes.start_ray(1)
    other = nodes.start_ray(1)
    nodes.wait_for_nodes(3)
    path, _, store, *data = study_like(finished_study, tmp_path / "near", "1m-clm-30")
    nodes.submit(*MLMCLM, "pretrain", path, "--store", store, *data).finish(600)
    nodes.lose(other)
    nodes.start_ray(1, delay=FAR)
    nodes.wait_for_nodes(3)
    nodes.submit(*MLMCLM, "pretrain", path, "--store", str(tmp_path / "far"), *data).finish(600)
    assert_part_of(weights(tmp_path / "far"), weights(tmp_path / "near" / "store"), 1)


def test_a_sweep_of_a_node_that_is_200_ms_away_equals_that_of_one_machine(
    nodes: NodeNetwork, finished_study: Any, whole_sweep: dict[str, Any], tmp_path: Path
) -> None:
    need_taps()
    nodes.start_ray(0)
    nodes.start_ray(1, delay=FAR)
    nodes.wait_for_nodes(2)
    words = a_sweep(finished_study, tmp_path)
    assert "report:" in nodes.submit(*MLMCLM, "study", *words).finish(900)
    assert results(tmp_path / "store") == whole_sweep and hosts(tmp_path / "store") == {"node2"}


def test_a_sweep_goes_on_with_a_late_node_after_those_that_began_it_are_lost(
    nodes: NodeNetwork, finished_study: Any, whole_sweep: dict[str, Any], tmp_path: Path
) -> None:
    words, store = a_sweep(finished_study, tmp_path), tmp_path / "store"
    nodes.start_ray(0)
    first, second = nodes.start_ray(1), nodes.start_ray(1)
    nodes.wait_for_nodes(3)
    job = nodes.submit(*MLMCLM, "study", *words)
    for node in (first, second):
        wait_until(lambda node=node: computes(node) and f"node{node.number}" in hosts(store), seconds=300)
        nodes.lose(node)
    assert 1 < len(results(store)) < 16, "the sweep has begun, and is not done"
    late = nodes.start_ray(1)
    assert "report:" in job.finish(600)
    assert results(store) == whole_sweep
    assert {f"node{node.number}" for node in (first, second, late)} == hosts(store)


def test_a_sweep_whose_worker_and_driver_are_killed_and_whose_disk_is_full_goes_on_to_the_same_results(
    nodes: NodeNetwork, finished_study: Any, whole_sweep: dict[str, Any], tmp_path: Path
) -> None:
    """The store is on a small disk that only the node sees."""
    path, _, store, *data = a_sweep(finished_study, tmp_path)
    disk = tmp_path / "disk"
    disk.mkdir()
    node = nodes.start_ray(2)
    node.run("mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", str(disk))
    node.run("cp", "-r", store, str(disk))
    words = (*MLMCLM, "study", path, "--store", f"{disk}/store", *data)
    there = Path(f"/proc/{node.holder.pid}/root{disk}/store")

    def begin_cells() -> Job:
        before, job = len(results(there)), nodes.submit(*words)
        wait_until(
            lambda: job.process.poll() is not None or (computes(node) and len(results(there)) > before), seconds=300
        )
        assert job.process.poll() is None, job.log
        return job

    job = begin_cells()
    wait_until(lambda: killed(node.processes("ray::1m-")[:1]), seconds=60)
    wait_until(lambda: "will run again" in job.log, seconds=300)
    assert killed(node.processes("mlmclm study"))
    job.finish(300, well=False)
    job = begin_cells()
    with suppress(subprocess.CalledProcessError):
        node.run("dd", "if=/dev/zero", f"of={disk}/filler", "bs=64k")
    said = job.finish(300, well=False)
    assert "the disk is full" in said and "Traceback" not in said, said
    assert len(results(there)) < 16
    node.run("rm", f"{disk}/filler")
    assert "report:" in nodes.submit(*words).finish(600)
    assert results(there) == whole_sweep


@pytest.mark.parametrize("delay", [0.0, FAR])
def test_ray_of_a_node_that_was_cut_off_is_started_again_and_the_sweep_goes_on(
    delay: float, nodes: NodeNetwork, finished_study: Any, whole_sweep: dict[str, Any], tmp_path: Path
) -> None:
    """After a minute the head takes the node for lost. Once it is back, its Ray learns of that, and ends."""
    if delay:
        need_taps()
    words, store = a_sweep(finished_study, tmp_path), tmp_path / "store"
    nodes.start_ray(0)
    node = nodes.start_ray(1, again=True, delay=delay)
    nodes.wait_for_nodes(2)
    job = nodes.submit(*MLMCLM, "study", *words)
    wait_until(lambda: computes(node) and len(results(store)) > 1, seconds=300)
    raylet, *_ = node.processes("raylet")
    nodes.leave(node)
    time.sleep(120)
    assert len(results(store)) < 16
    nodes.join(node)
    wait_until(lambda: not raylet.is_running(), seconds=120)
    assert "report:" in job.finish(600)
    assert results(store) == whole_sweep


def test_a_study_whose_store_is_on_s3_needs_no_shared_folder(finished_study: Any, tmp_path: Path) -> None:
    with nodes_with_a_bucket() as nodes:
        nodes.start_ray(0)
        nodes.start_ray(2)
        nodes.start_ray(1)
        nodes.wait_for_nodes(3)
        study_like(finished_study, tmp_path, "1m-untrained", "1m-clm-30")
        job = nodes.submit(
            *MLMCLM, "study", "study.yaml", "--store", "s3://bucket/prefix", "--data", "data", folder=tmp_path / "study"
        )
        assert "report:" in job.finish(900)
        assert at_bucket(nodes, f"get('bucket/prefix', '{tmp_path}/store', recursive=True)")
    assert_part_of(results(tmp_path / "store"), results(finished_study.store), 16)


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_pretraining_on_nodes_whose_store_is_on_s3_needs_no_shared_folder(zero_stage: int, tmp_path: Path) -> None:
    """A stage begins with a state that another stage has made, and goes on without the node that had its checkpoint."""
    recipe = yaml.safe_load(write_study(tmp_path / "small").read_text())["recipe"]
    # Otherwise one machine's workers would share a copy of the weights, with sums that are rounded otherwise.
    partitioned = {"zero_stage": zero_stage, "deepspeed": {"zero_optimization": {"overlap_comm": False}}}
    recipe |= {"checkpoint_every": 50, **partitioned}
    path = write_study(tmp_path / "study", models=["1m-clm-100-mlm40-400"], baseline=None, recipe=recipe)
    with nodes_with_a_bucket() as nodes:
        nodes.start_ray(0)
        nodes.start_ray(1)
        nodes.start_ray(1)
        nodes.wait_for_nodes(3)
        words = (*MLMCLM, "pretrain", "study.yaml", "--store", "s3://bucket/prefix", "--data", "data")
        job = nodes.submit(*words, folder=tmp_path / "study")
        wait_until(lambda: any(checkpoints(nodes, 200)) or job.process.poll() is not None, seconds=300)
        assert job.process.poll() is None, job.log
        assert re.search(r"pretraining 1/2: .*loss \d", job.log), "the driver shows metrics of a worker elsewhere"
        writer, *_ = checkpoints(nodes, 200)
        nodes.lose(writer)
        nodes.start_ray(1)
        job.finish(600)
        resumed = [node for node in nodes.nodes if any(node.folder.glob(f"{RUNS}/ray_train/sent/checkpoint_*"))]
        assert len(resumed) == 1, "rank 0 deletes what it has fetched when it sends the next checkpoint"
        assert at_bucket(nodes, f"get('bucket/prefix', '{tmp_path}/store', recursive=True)")
    code, _, errors = run(
        "pretrain", path, "--store", tmp_path / "whole", "--data", path.parent / "data", home=tmp_path, timeout=1500
    )
    assert code == 0, errors
    assert_close(tmp_path / "store", tmp_path / "whole", losses=0.0, tensors=0.0)


def test_nodes_without_a_shared_folder_send_a_part_each_and_go_on_from_all_of_them(tmp_path: Path) -> None:
    """Each node has one worker. No node keeps a state, since none has all parts, so a new worker fetches them."""
    recipe = yaml.safe_load(write_study(tmp_path / "small").read_text())["recipe"]
    recipe |= {"checkpoint_every": 50, "zero_stage": 3}
    path = write_study(tmp_path / "study", models=["1m-clm-100-mlm40-400"], baseline=None, recipe=recipe)
    shutil.copy(Path(__file__).with_name("parts_job.py"), path.parent)
    with nodes_with_a_bucket() as nodes:
        nodes.start_ray(0)
        nodes.start_ray(1)
        other = nodes.start_ray(1)
        nodes.wait_for_nodes(3)
        job = nodes.submit(
            sys.executable, "parts_job.py", "study.yaml", "s3://bucket/prefix", "data", folder=path.parent
        )
        sent = "glob('bucket/prefix/runs/*/checkpoint_000000[23]*/manifest.json')[0]"
        wait_until(lambda: at_bucket(nodes, sent) or job.process.poll() is not None, seconds=400)
        assert job.process.poll() is None, job.log
        assert not checkpoints(nodes, 0)
        nodes.lose(other)
        nodes.start_ray(1)
        job.finish(600)
        assert at_bucket(nodes, f"get('bucket/prefix', '{tmp_path}/store', recursive=True)")
    for manifest in (tmp_path / "store").glob("states/*/manifest.json"):
        assert len([name for name in json.loads(manifest.read_text())["files"] if name.startswith("state-")]) > 2
    code, _, errors = run(
        "pretrain", path, "--store", tmp_path / "whole", "--data", path.parent / "data", home=tmp_path, timeout=1500
    )
    assert code == 0, errors
    assert_close(tmp_path / "store", tmp_path / "whole", losses=0.0, tensors=0.0)


def test_a_given_model_is_pretrained_and_fine_tuned_on_a_machine_that_has_no_copy_of_it(tmp_path: Path) -> None:
    """The driver puts it into the bucket."""
    names = ["tiny-untrained", "tiny-mlm40-12"]
    path = write_study(tmp_path / "study", space="space.yaml", models=names, baseline=None, initial={"tiny": "given"})
    save_small_decoder(path.parent / "given")
    content = yaml.safe_load(path.read_text())
    del content["tokenizer"]  # the model's
    path.write_text(yaml.safe_dump(content))
    with nodes_with_a_bucket() as nodes:
        nodes.start_ray(0)
        nodes.start_ray(2)
        nodes.wait_for_nodes(2)
        words = (*MLMCLM, "study", path.name, "--store", "s3://bucket/prefix", "--data", "data")
        assert "report:" in nodes.submit(*words, folder=path.parent).finish(600)
        assert at_bucket(nodes, f"get('bucket/prefix', '{tmp_path}/store', recursive=True)")
    path.write_text(yaml.safe_dump(content | {"initial": {"tiny": str(path.parent / "given")}}))
    words = ("study", path, "--store", tmp_path / "whole", "--data", path.parent / "data")
    code, _, errors = run(*words, home=tmp_path, timeout=1500)
    assert code == 0, errors
    assert_part_of(results(tmp_path / "store"), results(tmp_path / "whole"), 16)


def test_a_stage_that_diverges_on_another_machine_is_the_user_s_to_mend(tmp_path: Path) -> None:
    recipe = yaml.safe_load(write_study(tmp_path / "small").read_text())["recipe"] | {"peak_learning_rate": 1e12}
    write_study(tmp_path / "study", models=["1m-clm-100"], baseline=None, recipe=recipe)
    with nodes_with_a_bucket() as nodes:
        nodes.start_ray(0)
        nodes.start_ray(2)
        nodes.wait_for_nodes(2)
        words = (*MLMCLM, "pretrain", "study.yaml", "--store", "s3://bucket/prefix", "--data", "data")
        job = nodes.submit(*words, folder=tmp_path / "study")
        assert "is not finite at step" in job.finish(600, well=False)


def test_cells_of_a_node_with_another_backend_say_so_and_differ_by_rounding_alone(
    nodes: NodeNetwork, finished_study: Any, tmp_path: Path
) -> None:
    words, store = study_like(finished_study, tmp_path, "1m-untrained", "1m-clm-30", trained=True), tmp_path / "store"
    nodes.start_ray(0)
    other = nodes.start_ray(1, MLMCLM_BACKEND="reference")
    nodes.wait_for_nodes(2)
    job = nodes.submit(*MLMCLM, "study", *words)
    wait_until(lambda: len(results(store)) > 2, seconds=300)
    nodes.lose(other)
    nodes.start_ray(1)
    assert "report:" in job.finish(600)
    found, whole = read_results(store), read_results(finished_study.store)
    by_other = {key for key, result in found.items() if result["cost"]["worker"].startswith("node2/")}
    assert by_other == {key for key, result in found.items() if result["cost"]["backend"].startswith("reference")}
    own = {key: result for key, result in results(store).items() if key not in by_other}
    assert own
    assert_part_of(own, results(finished_study.store), 16 - len(by_other))
    for key in by_other:
        curve, expected = (torch.tensor(each[key]["curve"]) for each in (found, whole))
        torch.testing.assert_close(curve, expected, rtol=2e-2, atol=2e-3)
    assert re.search(r"backends?\b[^.]*reference", (store / "studies" / "small" / "report.html").read_text())
