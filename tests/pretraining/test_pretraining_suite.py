"""A suite on real Ray Train: what its models share is trained once, side by side where there is room, with the bits of each alone."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from mlmclm.cluster.ray_cluster import prepare_environment, ray_session
from mlmclm.launches.run_stage import run_stage
from mlmclm.plans.stages import Stage
from mlmclm.pretraining import states
from mlmclm.storage.place import Place
from mlmclm.studies import work as pretraining
from mlmclm.studies.prepare import PreparedStudy, prepare_study, with_suite
from mlmclm.studies.study_file import load_study
from small_study import write_study

NAMES = ("1m-clm-100", "1m-clm-50-mlm40-100", "1m-clm-25-mlm40-100")


def prepared(study_path: Path, store: Path, *names: str) -> PreparedStudy:
    """The study with a suite of these models."""
    suite = study_path.parent / "suite.yaml"
    suite.write_text(yaml.safe_dump({"models": list(names)}), encoding="utf-8")
    return prepare_study(with_suite(load_study(study_path), str(suite)), Place(store, study_path.parent / "data"))


@pytest.mark.slow
def test_a_suite_s_models_have_the_bits_that_each_has_alone_after_fewer_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study_path = write_study(tmp_path)
    spans: list[tuple[float, float]] = []

    def timed(stage: Stage, **given: Any) -> None:
        began = time.monotonic()
        run_stage(stage, **given)
        spans.append((began, time.monotonic()))

    monkeypatch.setattr(pretraining, "run_stage", timed)
    prepare_environment()
    with ray_session(tmp_path / "ray", num_cpus=4):
        suite = prepared(study_path, tmp_path / "suite", *NAMES)
        assert pretraining.train_missing_stages(suite) == 3
        together = sorted(spans)
        alone = [prepared(study_path, tmp_path / name, name) for name in NAMES]
        for made in alone:
            pretraining.train_missing_stages(made)
    trained = sum(made.plan.steps for made in alone)
    print(f"{suite.plan.steps} steps as a suite, {trained} steps one by one")
    assert (suite.plan.steps, suite.plan.steps_alone, trained) == (225, 300, 300)
    for target, made in zip(suite.plan.targets, alone, strict=True):
        key = target.key(suite.fingerprint)
        one, other = (load_file(states.state_folder(p.place.store, key) / "state.safetensors") for p in (suite, made))
        assert one.keys() == other.keys()
        assert all(bool((one[name] == other[name]).all()) for name in one)
    assert len(together) == 3, "each stage once"
    assert any(after[0] < before[1] for before, after in pairwise(together)), (
        "four CPUs have room for two stages of two workers"
    )
