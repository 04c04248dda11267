"""`recipe.deterministic` reaches every worker, changes no bit on CPUs, and refuses what it can't keep."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from small_training import prepared

from mlmclm.backends.determinism import CUBLAS, NCCL
from mlmclm.errors import UserError
from mlmclm.launches import run_stage as launch
from mlmclm.launches.worker_entry import run_in_worker
from mlmclm.plans.recipe import Recipe
from mlmclm.pretraining import states, worker
from mlmclm.studies.work import train_missing_stages


@pytest.mark.parametrize("wanted", [False, True])
def test_a_worker_sets_the_variables_first_and_computes_its_whole_stage_deterministically(
    monkeypatch: pytest.MonkeyPatch, wanted: bool
) -> None:
    seen: list[Any] = []

    def stage(*_: Any) -> None:
        own = {name: os.environ.get(name) for name in (*CUBLAS, *NCCL)}
        seen.append((torch.are_deterministic_algorithms_enabled(), own == CUBLAS | NCCL))

    monkeypatch.setattr(worker, "_train_stage", stage)
    with patch.dict(os.environ):
        for name in (*CUBLAS, *NCCL):
            os.environ.pop(name, None)
        run_in_worker({"job": SimpleNamespace(recipe=Recipe(deterministic=wanted), device="cpu")})
    assert seen == [(wanted, wanted)]
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.slow
def test_all_workers_compute_deterministically_and_to_the_same_bits(
    session: None, study_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def watched(config: dict[str, Any]) -> None:
        """Run a stage in a worker, and write a file for each rank that computes deterministically."""
        import os

        from mlmclm.launches.worker_entry import run_in_worker
        from mlmclm.pretraining.engine import Engine

        step = Engine.step

        def look(engine: Any, *given: Any, **named: Any) -> Any:
            if torch.are_deterministic_algorithms_enabled() and os.environ.get("NCCL_ALGO") == "Ring":
                (config["job"].store / f"deterministic-{engine.rank}").touch()
            return step(engine, *given, **named)

        Engine.step = look  # type: ignore[method-assign]
        run_in_worker(config)

    monkeypatch.setattr(launch, "run_in_worker", watched)
    found = {}
    for wanted in (False, True):
        store = tmp_path / str(wanted)
        made = prepared(study_path, store, "1m-mlm40-10", deterministic=wanted)
        train_missing_stages(made)
        marks = sorted(path.name for path in store.glob("deterministic-*"))
        assert marks == (["deterministic-0", "deterministic-1"] if wanted else [])
        key = made.plan.targets[0].key(made.fingerprint)
        found[wanted] = load_file(states.state_folder(store, key) / "state.safetensors")
    assert all(torch.equal(found[True][name], value) for name, value in found[False].items())


@pytest.mark.slow
def test_a_stage_with_an_operation_that_has_no_deterministic_form_ends_with_its_name(
    session: None, study_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(config: dict[str, Any]) -> None:
        """Run a stage in a worker whose step has an operation without a deterministic form."""
        from mlmclm.launches.worker_entry import run_in_worker
        from mlmclm.pretraining.engine import Engine

        def step(engine: Any, *given: Any, **named: Any) -> Any:
            torch.zeros(1).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))

        Engine.step = step  # type: ignore[method-assign]
        run_in_worker(config)

    monkeypatch.setattr(launch, "run_in_worker", refused)
    with pytest.raises(UserError, match=r"recipe\.deterministic: put_ has no deterministic form"):
        train_missing_stages(prepared(study_path, tmp_path, "1m-mlm40-10", deterministic=True))
