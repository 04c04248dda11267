"""A stage whose worker is killed goes on; one that cannot says why in one message: no number any more, no memory, no room."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from small_training import dying_at, dying_in_a_write, prepared

from mlmclm.corpora.order import sample_rows
from mlmclm.errors import EnvironmentFault, UserError
from mlmclm.launches import run_stage as launch
from mlmclm.launches import stage_errors
from mlmclm.plans.recipe import Recipe
from mlmclm.pretraining import states
from mlmclm.pretraining.checkpoints import read_tensors
from mlmclm.storage.files import disk_fault
from mlmclm.storage.place import Place
from mlmclm.studies.prepare import prepare_study
from mlmclm.studies.study_file import load_study
from mlmclm.studies.work import train_missing_stages


def test_a_stage_whose_worker_is_killed_ends_with_the_same_bits(
    session: None, finished_study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "run_in_worker", dying_at(13))
    study = load_study(finished_study.study).model_copy(update={"models": ("1m-clm-30",), "baseline": None})
    disturbed = prepare_study(study, Place(tmp_path, finished_study.study.parent / "data"))
    train_missing_stages(disturbed)
    assert (tmp_path / "killed-0").exists(), "no worker was killed, so nothing was tested"
    key = disturbed.plan.targets[0].key(disturbed.fingerprint)
    found, expected = (
        load_file(states.state_folder(store, key) / "state.safetensors") for store in (tmp_path, finished_study.store)
    )
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    losses, undisturbed = (
        [(row["step"], row["loss"]) for row in states.curve(store, key) if "loss" in row]
        for store in (tmp_path, finished_study.store)
    )
    # Both kept every tenth step. There it is a model's state at step 10, here no model ends at it.
    for step in (0, 10, 20):
        key = disturbed.plan.targets[0].at(step).key(disturbed.fingerprint)
        folders = [states.weights_folder(store, key) for store in (tmp_path, finished_study.store)]
        assert folders[0] == states.StoredRevision(tmp_path, key).folder, "no model ends here"
        found, expected = (load_file(folder / "state.safetensors") for folder in folders if folder is not None)
        kept = {name for name in expected if name.startswith("w/")}
        assert found.keys() == kept and all(torch.equal(found[name], expected[name]) for name in kept), step
        if step != 10:
            assert (folders[0] / "state.safetensors").read_bytes() == (folders[1] / "state.safetensors").read_bytes()
    assert len(list((tmp_path / "revisions").iterdir())) == 3
    assert losses == undisturbed and [step for step, _ in losses] == list(range(1, 31)), "each step's loss once"


@pytest.mark.slow  # a kill, and a write that fails, are tested apart
def test_a_stage_whose_worker_is_killed_while_it_writes_a_part_goes_on_and_ends_with_the_same_tensors(
    session: None, finished_study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "run_in_worker", dying_in_a_write(2_000_000))
    study = load_study(finished_study.study).model_copy(update={"models": ("1m-clm-30",), "baseline": None})
    disturbed = prepare_study(study, Place(tmp_path, finished_study.study.parent / "data"))
    train_missing_stages(disturbed)
    assert not Path((tmp_path / "killed").read_text()).exists(), "what was half written is deleted"
    key = disturbed.plan.targets[0].key(disturbed.fingerprint)
    (folder, expected) = (states.state_folder(store, key) for store in (tmp_path, finished_study.store))
    assert len(list(folder.glob("state-*.safetensors"))) > 2 and states.damage(folder) is None
    found = {name: tensor for path in folder.glob("state-*.safetensors") for name, tensor in load_file(path).items()}
    whole = load_file(expected / "state.safetensors")
    assert found.keys() == whole.keys() and all(torch.equal(found[name], whole[name]) for name in found)
    assert {states.read_metrics(each / "metrics.jsonl")[-1]["step"] for each in (folder, expected)} == {30}
    for step in (0, 20):
        key = disturbed.plan.targets[0].at(step).key(disturbed.fingerprint)
        pair = [states.StoredRevision(store, key).folder for store in (tmp_path, finished_study.store)]
        one, other = (read_tensors(each).weights for each in pair)
        assert len(list(pair[0].glob("state-*.safetensors"))) > 1
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_a_loss_that_is_no_number_stops_the_run_and_names_the_step_and_its_blocks(
    session: None, study_path: Path, tmp_path: Path
) -> None:
    made = prepared(
        study_path, tmp_path, "1m-mlm40-30", peak_learning_rate=1e30, warmup_steps=0, checkpoint_every=1, workers=1
    )
    with pytest.raises(UserError, match="is not finite at step") as raised:
        train_missing_stages(made)
    message = str(raised.value)
    found = re.search(r"at step (\d+) \(learning rate 1e\+30\)\. Its batch is blocks ([\d, ]+) of", message)
    assert found is not None, message
    step = int(found[1])
    rows = sample_rows(len(made.corpus.train), range(8 * (step - 1), 8 * step), 0)
    assert [int(block) for block in found[2].split(", ")] == rows.tolist()
    assert f"--steps {step - 1}:{step}" in message
    kept = [path.parent for path in (tmp_path / "runs").glob("*/ray_train/*/checkpoint_*/step.json")]
    assert (len(kept) > 0) == (step > 1)
    for folder in kept:
        state = read_tensors(folder)
        assert state.step < step
        assert all(bool(torch.isfinite(tensor).all()) for tensor in state.weights.values())


@pytest.mark.slow
def test_a_validation_loss_that_is_no_number_stops_the_run_too(session: None, study_path: Path, tmp_path: Path) -> None:
    """The first step's loss and gradient are finite, and the weights that it leaves are not fit for anything."""
    made = prepared(study_path, tmp_path, "1m-mlm40-30", peak_learning_rate=1e39, warmup_steps=0, evaluate_every=1)
    with pytest.raises(UserError, match="the validation loss is not finite after step 1 ") as raised:
        train_missing_stages(made)
    rows = sample_rows(len(made.corpus.train), range(8), 0).tolist()
    assert f"That step's batch, the last that changed the weights, is blocks {', '.join(map(str, rows))} of" in str(
        raised.value
    )
    assert not list(tmp_path.glob("runs/*/ray_train/*/checkpoint_*")) and not list(tmp_path.glob("states/*"))


def started(folder: Path) -> int:
    """How often a worker group was started, by the marks that rank 0 left."""
    return len(list(folder.glob("started-*")))


@pytest.mark.slow
def test_a_worker_without_memory_is_said_at_once_and_what_to_do(
    session: None, study_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(config: dict[str, Any]) -> None:
        import os
        import time

        import ray.train
        import torch

        if ray.train.get_context().get_world_rank() != 0:
            time.sleep(600)  # as one that waits for the others
        (Path(config["job"].store) / f"started-{os.getpid()}").touch()
        torch.empty(2**60)

    monkeypatch.setattr(launch, "run_in_worker", allocate)
    with pytest.raises(EnvironmentFault, match=r"ran out of memory.*micro_batch \(now 4"):
        train_missing_stages(prepared(study_path, tmp_path, "1m-clm-30", max_failures=3))
    assert started(tmp_path) == 1


@pytest.mark.slow
def test_a_mistake_that_only_a_worker_can_find_is_said_at_once_and_in_its_own_words(
    session: None, study_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(config: dict[str, Any]) -> None:
        import os

        from mlmclm.errors import UserError

        (Path(config["job"].store) / f"started-{os.getpid()}").touch()
        raise UserError("recipe.compile: no compiler; set it to false.")

    monkeypatch.setattr(launch, "run_in_worker", refuse)
    with pytest.raises(UserError) as raised:
        train_missing_stages(prepared(study_path, tmp_path, "1m-clm-30", workers=1))
    assert str(raised.value) == "pretraining stage '1m clm 0-30': recipe.compile: no compiler; set it to false."
    assert started(tmp_path) == 1


@pytest.mark.slow
def test_a_crash_of_another_kind_is_tried_again_as_often_as_the_recipe_says(
    session: None, study_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(config: dict[str, Any]) -> None:
        import os

        (Path(config["job"].store) / f"started-{os.getpid()}").touch()
        raise RuntimeError("connection reset by peer")

    monkeypatch.setattr(launch, "run_in_worker", crash)
    with pytest.raises(EnvironmentFault, match="connection reset by peer"):
        train_missing_stages(prepared(study_path, tmp_path, "1m-clm-30", workers=1, max_failures=1))
    assert started(tmp_path) == 2


MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: not enough memory: you tried to"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes. Error code 12"),
    OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
    MemoryError("MemoryError"),
    RuntimeError("Task was killed due to the node running low on memory."),
    RuntimeError("ray.exceptions.OutOfMemoryError: the worker was killed"),
]
DISK = [
    OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    disk_fault(OSError(errno.ENOSPC, "full"), Path("state")),
]


@pytest.mark.parametrize("error", [*MEMORY, *DISK])
def test_memory_and_disk_are_recognised_in_what_any_of_the_workers_raised(error: Exception) -> None:
    from ray.train import WorkerGroupError

    wrapped = WorkerGroupError("cut short", {0: RuntimeError("Connection closed by peer"), 1: error})
    recipe = Recipe(batch=64, workers=4, zero_stage=2, block_length=512)
    assert stage_errors.final(wrapped.worker_failures) is not None, "tried again it would fail again"
    found = stage_errors.explain(wrapped, title="2m clm 0-600", folder=Path("runs/x"), recipe=recipe)
    assert "runs/x; the same command resumes from them" in str(found)
    if error in DISK:
        assert "the disk is full" in str(found)
    else:
        knobs = ["micro_batch (now 16", "zero_stage (now 2", "workers, now 4", "block_length (now 512"]
        assert all(knob in str(found) for knob in knobs), str(found)
        in_tokens = recipe.model_copy(update={"micro_batch_tokens": 4096})
        found = stage_errors.explain(wrapped, title="2m clm 0-600", folder=Path("runs/x"), recipe=in_tokens)
        assert "lower recipe.micro_batch_tokens (now 4,096)" in str(found)


def test_any_other_failure_is_its_last_cause_s_last_line() -> None:
    error = RuntimeError("outer")
    error.__cause__ = ValueError("Traceback\nmissing key 7\n")
    found = stage_errors.explain(error, title="2m clm 0-600", folder=Path("runs/x"), recipe=Recipe())
    assert "stage '2m clm 0-600' failed: ValueError: missing key 7. Its checkpoints" in str(found)


def test_a_large_batch_is_not_listed_to_the_last_block() -> None:
    stopped = {"step": 7, "what": "gradient", "learning_rate": 5e-4}
    blocks = np.arange(2304).tolist()
    found = str(stage_errors.not_finite(stopped, blocks, title="x", folder=Path("y"), recipe=Recipe()))
    assert "the gradient is not finite at step 7" in found
    assert "30, 31 and 2,272 more of the training corpus" in found
