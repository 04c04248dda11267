"""The micro-batch that fits into a GPU's memory is found by trying, and changes nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_training import prepared

from mlmclm.launches import run_stage as launch
from mlmclm.launches import stage_errors
from mlmclm.models.sizes import SIZES
from mlmclm.plans.names import parse_name
from mlmclm.plans.recipe import Recipe
from mlmclm.plans.stages import make_plan
from mlmclm.pretraining import states
from mlmclm.pretraining.job import StageJob
from mlmclm.studies.prepare import PreparedStudy
from mlmclm.studies.work import train_missing_stages


@pytest.mark.parametrize(
    ("recipe", "rows", "found"),
    [
        ({"batch": 48, "workers": 2}, 48, [24, 12, 8, 6, 4, 3, 2, 1, None]),
        ({"batch": 30, "workers": 2}, 30, [15, 5, 3, 1, None]),
        ({"batch": 26, "workers": 2}, 26, [13, 1, None]),
        ({"batch": 48, "workers": 2}, 12, [24, 12, 8, 6, 4, None]),  # 16 micro-batches can't share 12 sequences
        ({"batch": 4, "workers": 4}, 4, [1, None]),
    ],
)
def test_fewer_sequences_at_once_divide_each_worker_s_share_and_leave_none_without(
    recipe: dict[str, int], rows: int, found: list[int | None]
) -> None:
    tried: list[int | None] = [Recipe.model_validate(recipe).sequences_at_once(recipe["workers"])]
    while tried[-1] is not None:
        tried.append(Recipe.model_validate(recipe | {"micro_batch": tried[-1]}).fewer_at_once(rows))
    assert tried == found


def test_only_a_device_with_memory_of_its_own_is_tried_and_only_where_the_recipe_doesn_t_say() -> None:
    assert launch._searches(Recipe(), "cuda")
    assert not launch._searches(Recipe(), "cpu")
    assert not launch._searches(Recipe(micro_batch=1), "cuda")
    assert not launch._searches(Recipe(micro_batch_tokens=4096), "cuda")


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB.", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("ncclUnhandledCudaError: Cuda failure 2 'out of memory'", True),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes. Error code 12", False),
        ("ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.", False),
    ],
)
def test_a_full_gpu_is_told_from_a_full_machine(text: str, device: bool) -> None:
    found = stage_errors.explain(RuntimeError(text), title="a", folder=Path("runs/x"), recipe=Recipe())
    assert isinstance(found, stage_errors.DeviceMemoryFault) == device
    assert "ran out of memory" in str(found)


def test_what_fitted_is_where_stages_like_it_begin_unless_their_batches_are_too_small_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warmed = {"name": "a", "steps": 10, "batch_warmup": {"steps": 5, "first": 4}}
    recipe = Recipe.model_validate({"block_length": 16, "batch": 8, "workers": 2, "phases": [warmed]})
    (stage,) = make_plan([parse_name("1m-clm-10")], recipe).stages
    job = StageJob(
        stage=stage, shape=SIZES["1m"], store=tmp_path, run_folder=tmp_path, corpus="c",
        train=None, validation=None, tokenizer=tmp_path, whole_recipe=recipe, fingerprint="f", device="cuda",
    )  # type: ignore[arg-type]  # fmt: skip
    tried: list[int] = []

    def fit(job: StageJob, *_: Any) -> None:
        tried.append(job.recipe.sequences_at_once(2))
        if tried[-1] > fits:
            raise stage_errors.DeviceMemoryFault("full")

    monkeypatch.setattr(launch, "_fit", fit)
    fits = 2
    launch._fit_in_memory(job, tmp_path, None)
    assert tried == [4, 2]
    launch._fit_in_memory(job, tmp_path, None)
    assert tried == [4, 2, 2], "what fitted is remembered"
    other = replace(job, whole_recipe=recipe.model_copy(update={"activation_checkpointing": True}))
    launch._fit_in_memory(other, tmp_path, None)
    assert tried == [4, 2, 2, 4, 2], "with other settings more may fit"
    # The first batches have 4 sequences, which 8 micro-batches can't share.
    fits = 1
    with pytest.raises(stage_errors.DeviceMemoryFault):
        launch._fit_in_memory(job, tmp_path, None)
    assert tried[5:] == [2]
    # A stage that began later, with whole batches, can note less.
    (note,) = (path for path in (tmp_path / "fitting").iterdir() if path.stem == launch._fitting_key(job))
    note.write_text('{"micro_batch": 1}')
    fits = 4
    launch._fit_in_memory(job, tmp_path, None)
    assert tried[6:] == [4]
    # Nothing is less than one sequence.
    fits, plain = 0, Recipe(block_length=16, batch=8, workers=2, warmup_steps=1, decay_steps=1)
    (stage,) = make_plan([parse_name("1m-clm-10")], plain).stages
    with pytest.raises(stage_errors.DeviceMemoryFault):
        launch._fit_in_memory(replace(job, stage=stage, whole_recipe=plain), tmp_path, None)
    assert tried[7:] == [4, 2, 1]


def full_above(most: int) -> Callable[[dict[str, Any]], None]:
    """Return a worker's function in which rank 1 has no memory for more sequences at once, from its third step on."""

    def run(config: dict[str, Any]) -> None:
        from mlmclm.launches.worker_entry import run_in_worker
        from mlmclm.pretraining.engine import Engine

        step = Engine.step

        def limited(engine: Any, *given: Any, **named: Any) -> Any:
            engine.taken = getattr(engine, "taken", 0) + 1
            if engine.rank == 1 and engine.taken == 3 and engine.micro > most:
                mark = config["job"].store / "refused"
                mark.write_text((mark.read_text() if mark.exists() else "") + f"{engine.micro} ")
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return step(engine, *given, **named)

        Engine.step = limited  # type: ignore[method-assign]
        run_in_worker(config)

    return run


def weights(made: PreparedStudy, store: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    folder = states.state_folder(store, made.plan.targets[0].key(made.fingerprint))
    return load_file(folder / "state.safetensors"), json.loads((folder / "state.json").read_text())


@pytest.mark.slow
def test_a_full_device_halves_the_micro_batch_of_all_workers_and_changes_nothing_else(
    session: None, study_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # Here the device is a CPU, with the fault and the search of a GPU.
    monkeypatch.setattr(launch, "run_in_worker", full_above(1))
    monkeypatch.setattr(launch, "_searches", lambda recipe, device: recipe.micro_batch is None)
    searched = prepared(study_path, tmp_path / "searched", "1m-mlm40-10", max_failures=0)
    train_missing_stages(searched)
    assert (tmp_path / "searched" / "refused").read_text() == "4 2 ", "each is tried once, before the next smaller one"
    assert "2 sequences at once don't fit into a worker's GPU; it goes on with 1" in capfd.readouterr().err
    given = prepared(study_path, tmp_path / "given", "1m-mlm40-10", micro_batch=1)
    train_missing_stages(given)
    (found, record), (expected, other) = weights(searched, tmp_path / "searched"), weights(given, tmp_path / "given")
    assert record["system"]["micro_batch"] == other["system"]["micro_batch"] == 1
    assert record["recipe"]["micro_batch"] is None
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    # A replicate begins with what was found.
    train_missing_stages(prepared(study_path, tmp_path / "searched", "1m-mlm40-10-r2", max_failures=0))
    assert (tmp_path / "searched" / "refused").read_text() == "4 2 "
