"""A stage on real Ray Train: workers die and it goes on; a plan that grows finds what is there and makes what is missing."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from mlmclm.pipeline import Place, Prepared, prepare, pretrain
from mlmclm.pretraining import states
from mlmclm.study_file import StudyFile, load_study
from small_study import write_study


@pytest.fixture(scope="module")
def study_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_study(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    from mlmclm.pretraining.launch import prepare_environment
    from mlmclm.service.ray_cluster import ray_session

    prepare_environment()
    with ray_session(tmp_path_factory.mktemp("ray"), num_cpus=2):
        yield


def prepared(study_path: Path, store: Path, *models: str, **recipe: Any) -> Prepared:
    study: StudyFile = load_study(study_path)
    changed = study.model_copy(
        update={"models": models, "baseline": None, "recipe": study.recipe.model_copy(update=recipe)}
    )
    return prepare(changed, Place(store, study_path.parent / "data"))


def weights(made: Prepared, index: int = 0) -> dict[str, Any]:
    state = made.plan.targets[index]
    return load_file(states.state_folder(made.place.store, state.key(made.fingerprint)) / "state.safetensors")


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(bool((one[name] == other[name]).all()) for name in one)


def test_a_stage_whose_worker_is_killed_ends_with_the_same_bits(
    session: None, study_path: Path, tmp_path: Path
) -> None:
    undisturbed = prepared(study_path, tmp_path / "one", "1m-mlm40-200")
    pretrain(undisturbed)
    disturbed = prepared(study_path, tmp_path / "other", "1m-mlm40-200")
    killed: list[int] = []

    def kill_one() -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if list((tmp_path / "other").glob("runs/*/ray_train/*/checkpoint_*")):
                for process in psutil.Process().children(recursive=True):
                    if "RayTrainWorker" in " ".join(process.cmdline()):
                        os.kill(process.pid, signal.SIGKILL)
                        killed.append(process.pid)
                        return
            time.sleep(0.02)

    killer = threading.Thread(target=kill_one)
    killer.start()
    pretrain(disturbed)
    killer.join()
    assert killed, "no worker was killed, so nothing was tested"
    assert same(weights(undisturbed), weights(disturbed))
    rows = states.curve(tmp_path / "other", disturbed.plan.targets[0].key(disturbed.fingerprint))
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 201)), "each step's loss once"


def test_a_trunk_trained_for_several_models_gives_each_the_bits_it_has_alone(
    session: None, study_path: Path, tmp_path: Path
) -> None:
    names = ("1m-clm-30", "1m-clm-10-mlm40-30")
    together = prepared(study_path, tmp_path / "together", *names)
    pretrain(together)
    assert (together.plan.steps, together.plan.steps_alone) == (50, 60)
    alone = prepared(study_path, tmp_path / "alone", names[1])
    pretrain(alone)
    assert same(weights(together, 1), weights(alone))


def test_a_plan_that_grows_trains_only_what_is_missing(session: None, study_path: Path, tmp_path: Path) -> None:
    first = prepared(study_path, tmp_path / "store", "1m-clm-30")
    pretrain(first)
    before = weights(first)
    grown = prepared(study_path, tmp_path / "store", "1m-clm-30", "1m-clm-30-20")
    assert len(grown.unfinished()) == 1
    pretrain(grown)
    assert not grown.unfinished()
    assert same(before, weights(grown))
    whole = prepared(study_path, tmp_path / "whole", "1m-clm-30-20")
    pretrain(whole)
    assert same(weights(grown, 1), weights(whole))
