"""Studies on several nodes with real, separate addresses: the same results as on one machine."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from node_network import NodeNetwork, node_network, wait_until

from small_study import write_study

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
MLMCLM = (sys.executable, "-m", "mlmclm")


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[NodeNetwork]:
    """A network whose nodes share the folder of the test."""
    with node_network(tmp_path) as network:
        yield network


def study_like(finished: Any, folder: Path, *models: str) -> tuple[str, ...]:
    """Copy a finished study with the first of its models; return the words that run it on the store `folder`/store."""
    shutil.copytree(finished.study.parent, folder / "study")
    path = folder / "study" / "study.yaml"
    study = yaml.safe_load(path.read_text())
    changes = {"models": list(models), "baseline": models[0], "space": "space.yaml"}
    path.write_text(yaml.safe_dump(study | changes))
    return (str(path), "--store", str(folder / "store"), "--data", str(folder / "study" / "data"))


def results(store: Path) -> dict[str, Any]:
    """The results of a store's cells by key, without what they cost, and with those of each test example."""
    found = {}
    for path in (store / "cells").glob("*/*.json"):
        result = json.loads(path.read_text())
        found[path.stem] = {**result, "cost": None, "checksum": None}, path.with_suffix(".parquet").read_bytes()
    return found


def weights(store: Path) -> dict[str, bytes]:
    """A store's states by key: weights and moments."""
    return {path.parent.name: path.read_bytes() for path in store.glob("states/*/state.safetensors")}


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


def test_pretraining_goes_on_with_a_new_node_in_place_of_one_that_is_lost(nodes: NodeNetwork, tmp_path: Path) -> None:
    """Each node has one worker. The norm of gradients is rounded otherwise than in one machine's shared memory, hence `whole`."""
    recipe = yaml.safe_load(write_study(tmp_path / "small").read_text())["recipe"] | {"checkpoint_every": 50}
    path = write_study(tmp_path / "study", models=["1m-clm-1k"], baseline=None, recipe=recipe)
    whole, lost = tmp_path / "whole", tmp_path / "lost"
    words = (*MLMCLM, "study", str(path), "--data", str(path.parent / "data"), "--store")
    nodes.start_ray(0)
    nodes.start_ray(1)
    other = nodes.start_ray(1)
    nodes.wait_for_nodes(3)
    nodes.submit(*words, str(whole)).finish(600)
    job = nodes.submit(*words, str(lost))
    wait_until(
        lambda: any(lost.glob("runs/*/ray_train/*/checkpoint_*/step.json")) or job.process.poll() is not None,
        seconds=300,
    )
    assert other.processes("RayTrainWorker") and not weights(lost), "the state is not trained yet"
    nodes.lose(other)
    nodes.start_ray(1)
    assert "report:" in job.finish(600)
    assert_part_of(weights(lost), weights(whole), 1)
    assert_part_of(results(lost), results(whole), 8)
