"""Cells that start from the best cell of another task: the rule, the keys, the weights, and going on after a stop."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

import mlmclm.sweeps.run_sweep
from mlmclm.errors import UserError
from mlmclm.finetuning.cell import Cell, Start, cell_key
from mlmclm.finetuning.kept import RESULT, WEIGHTS, KeptEncoder
from mlmclm.finetuning.loop import evaluate_splits
from mlmclm.finetuning.run import fresh_layers, keep_encoder, run_cell, streams_of
from mlmclm.models.folder import load_encoder, weights_hash
from mlmclm.storage.checksums import sealed, unsealed
from mlmclm.storage.files import canonical_json
from mlmclm.sweeps.cells import SweepModel, expand, named_result
from mlmclm.sweeps.results_store import ResultsStore
from mlmclm.sweeps.run_sweep import run_layers
from mlmclm.sweeps.space import Space, find_space
from mlmclm.sweeps.starts import KeptWeights, ModelGrid, Planned, best_cell, plan_cells
from mlmclm.sweeps.sweep_options import SweepOptions, SweepOutcome
from mlmclm.sweeps.trainable import KeepEncoders
from mlmclm.tasks.declared_tasks import get_task
from mlmclm.tasks.prepare_task import prepare_task
from small_models import write_two
from sweep_cells import make_cell, make_result
from trainings import trained

SPACE: dict[str, Any] = {
    "tasks": ["conll2003", "sst2"],
    "learning_rates": [1e-3, 5e-3],
    "seeds": [0, 1],
    "protocol": {"max_steps": 4, "max_length": 48, "stride": 8, "batch_size": 8, "max_evaluation_examples": 20},
    "start_from": {"conll2003": "sst2"},
}


def space_of(folder: Path, **changes: Any) -> Space:
    path = folder / "space.yaml"
    path.write_text(yaml.safe_dump({**SPACE, **changes}))
    return find_space(path)


def result(rate: float, seed: int, validation: float, test: float = 0.5, status: str = "ok") -> dict[str, Any]:
    scores = {"validation": {"accuracy": validation}, "test": {"accuracy": test}}
    made = make_result(make_cell(learning_rate=rate, seed=seed), status=status)
    return {**made, "scores": scores if status == "ok" else None}


def test_the_best_validation_score_is_the_start_and_ties_go_to_the_lower_rate_then_the_lower_seed() -> None:
    def chosen(*results: dict[str, Any]) -> tuple[float, int] | None:
        best = best_cell(results)
        return None if best is None else (best["learning_rate"], best["seed"])

    assert chosen(result(1e-3, 0, 0.7, test=0.1), result(1e-4, 0, 0.6, test=0.9)) == (1e-3, 0)
    tied = [result(1e-3, 0, 0.7), result(1e-4, 2, 0.7), result(1e-4, 1, 0.7), result(1e-5, 0, 0.6)]
    assert {chosen(*order) for order in itertools.permutations(tied)} == {(1e-4, 1)}
    assert chosen(result(1e-3, 0, 0.9, status="diverged"), result(1e-4, 3, 0.2)) == (1e-4, 3)
    assert chosen(result(1e-3, 0, 0.9, status="diverged")) is None
    generator = random.Random(1)
    for _ in range(50):
        grid = [result(rate, seed, generator.randint(0, 3) / 3) for rate in (1e-5, 1e-4) for seed in range(4)]
        top = max(one["scores"]["validation"]["accuracy"] for one in grid)
        first = next(one for one in grid if one["scores"]["validation"]["accuracy"] == top)  # in order of rate and seed
        assert chosen(*generator.sample(grid, len(grid))) == (first["learning_rate"], first["seed"])


def test_the_main_metric_of_the_task_decides_which_can_be_a_mean() -> None:
    def chosen(metric: str) -> float:
        scores = {1e-4: {"accuracy": 0.8, "f1": 0.7}, 1e-3: {"accuracy": 0.79, "f1": 0.75}}
        best = best_cell(
            [{**result(rate, 0, 0.0), "metric": metric, "scores": {"validation": own}} for rate, own in scores.items()]
        )
        assert best is not None
        return float(best["learning_rate"])

    assert (chosen("accuracy"), chosen("accuracy+f1")) == (1e-4, 1e-3)


def plan(store: Path, space: Space, *models: str) -> Planned:
    places = [SweepModel(name, Path("/nowhere") / name, f"weights of {name}") for name in models]
    declarations = {task: get_task(task) for task in space.tasks}
    data = dict.fromkeys(space.tasks, "data")
    return plan_cells([ModelGrid(place, space, data, declarations) for place in places], ResultsStore(store))


def file_result(store: Path, cell: Cell, validation: float, status: str = "ok") -> None:
    scores = {split: {"accuracy": validation} for split in ("validation", "test")}
    ResultsStore(store).write({**make_result(cell, status=status), "scores": scores if status == "ok" else None})


def test_cells_wait_for_all_of_their_own_models_sources_and_hold_the_chosen_ones_key(tmp_path: Path) -> None:
    space = space_of(tmp_path)
    planned = plan(tmp_path, space, "a", "b")
    assert {(cell.model, cell.task) for cell in planned.cells} == {("a", "sst2"), ("b", "sst2")}
    assert (planned.waiting, planned.sources) == ({"sst2": 8}, {})
    own = [cell for cell in planned.cells if cell.model == "a"]
    for cell in own[:-1]:
        file_result(tmp_path, cell, 0.5)
    assert plan(tmp_path, space, "a", "b").waiting == {"sst2": 8}
    file_result(tmp_path, own[-1], 0.9)
    planned = plan(tmp_path, space, "a", "b")
    assert planned.waiting == {"sst2": 4}
    assert planned.sources == {cell_key(own[-1]): own[-1]}
    second = [cell for cell in planned.cells if cell.task == "conll2003"]
    assert {(cell.model, cell.start) for cell in second} == {("a", Start(cell_key(own[-1]), "sst2"))}
    assert len(second) == 4
    plain = [dataclasses.replace(cell, start=None) for cell in second]
    others = [dataclasses.replace(cell, start=Start(cell_key(own[0]), "sst2")) for cell in second]
    assert len({cell_key(cell) for cell in (*second, *plain, *others)}) == 12
    # Another learning rate is tried and is better: these cells are others then.
    wider = space_of(tmp_path, learning_rates=[1e-3, 5e-3, 1e-2])
    assert plan(tmp_path, wider, "a").waiting == {"sst2": 6}
    for cell in plan(tmp_path, wider, "a").cells:
        file_result(tmp_path, cell, 0.95 if cell.learning_rate == 1e-2 and cell.seed == 0 else 0.1)
    (source,) = plan(tmp_path, wider, "a").sources.values()
    assert (source.learning_rate, source.seed) == (1e-2, 0)


def test_a_model_whose_every_source_diverged_has_nothing_to_start_from(tmp_path: Path) -> None:
    space = space_of(tmp_path)
    for cell in plan(tmp_path, space, "a").cells:
        file_result(tmp_path, cell, 0.0, status="diverged")
    planned = plan(tmp_path, space, "a")
    assert (planned.blocked, planned.waiting, planned.sources) == ({"a/sst2": 4}, {}, {})
    assert {cell.task for cell in planned.cells} == {"sst2"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start_from": {"conll2003": "sst"}}, "start_from.conll2003: unknown task 'sst'. Did you mean 'sst2'?"),
        ({"start_from": {"conll": "sst2"}}, "start_from: unknown task 'conll'. Did you mean 'conll2003'?"),
        ({"start_from": {"conll2003": "sst2", "sst2": "mnli"}, "tasks": ["conll2003", "sst2", "mnli"]}, "sst2 itself starts from mnli"),
        ({"tasks": ["rte", "sst2"], "protocol": "glue", "start_from": None}, "Add it to the tasks, or start from the models"),
    ],
)  # fmt: skip
def test_a_start_that_cannot_be_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    content = {name: value for name, value in {**SPACE, **changes}.items() if value is not None}
    (tmp_path / "space.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(UserError) as caught:
        find_space(tmp_path / "space.yaml")
    assert message in str(caught.value)
    assert "space.yaml" in str(caught.value)


def test_the_glue_space_starts_three_tasks_from_mnli_and_can_be_told_not_to(tmp_path: Path) -> None:
    assert find_space("glue").start_from == dict.fromkeys(("rte", "mrpc", "stsb"), "mnli")
    only = space_of(tmp_path, tasks=["rte"], protocol="glue", start_from={})
    assert only.start_from == {}
    two = {"tasks": ["rte", "mnli"], "protocol": "glue"}
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(two))
    assert find_space(tmp_path / "two.yaml").start_from == {"rte": "mnli"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """data/ and model/."""
    folder = tmp_path_factory.mktemp("starts")
    write_two(folder)
    return folder


def plan_of(place: Path, store: Path, space: Space) -> Callable[[], Planned]:
    model = SweepModel("m", place / "model", weights_hash(place / "model"))
    data = {
        task: prepare_task(task, place / "model", space.protocol_for(task), store, place / "data").task_data
        for task in space.tasks
    }
    declarations = {task: get_task(task) for task in space.tasks}
    return lambda: plan_cells([ModelGrid(model, space, data, declarations)], ResultsStore(store))


def bits(result: dict[str, Any]) -> str:
    return canonical_json({name: value for name, value in result.items() if name != "cost"})


def test_a_kept_encoder_is_what_fine_tuning_left_and_a_cell_begins_with_it(place: Path, tmp_path: Path) -> None:
    space = space_of(tmp_path)
    source = plan_of(place, tmp_path, space)().cells[0]
    places = {"store": tmp_path, "data_root": place / "data"}
    filed = run_cell(source, **places)
    folder = KeptEncoder(tmp_path, cell_key(source)).ensure(partial(keep_encoder, source, **places))
    kept = KeptWeights(tmp_path).find(cell_key(source))
    assert kept is not None and bits({name: kept[name] for name in filed}) == bits(json.loads(canonical_json(filed)))

    def by_hand(cell: Cell, weights: dict[str, torch.Tensor] | None) -> tuple[Any, Any]:
        """A cell without the engine's own function: its encoder at the end, and its scores."""
        task = prepare_task(cell.task, cell.model_folder, cell.protocol, tmp_path, place / "data")
        streams = streams_of(cell.seed)
        encoder = load_encoder(cell.model_folder)
        with torch.random.fork_rng():
            torch.manual_seed(streams["dropout"])
            if weights is not None:
                encoder.load_state_dict(weights)
            head = task.head(
                encoder.config.hidden_size,
                fresh_layers(torch.Generator().manual_seed(streams["head"]), encoder.config.initializer_range),
            )
            trained(encoder, head, task, cell.protocol, learning_rate=cell.learning_rate, order=streams["order"])
            examples = evaluate_splits(encoder, head, task, cell.protocol, ("validation", "test"))
            return encoder.state_dict(), {split: task.scores(rows) for split, rows in examples.items()}

    weights, scores = by_hand(source, None)
    found = load_file(folder / WEIGHTS)
    assert scores == filed["scores"]
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)

    plain = make_second(space, source)
    started = dataclasses.replace(plain, start=Start(cell_key(source), "sst2"))
    result = run_cell(started, **places)
    assert result["start"] == {"cell": cell_key(source), "task": "sst2"}
    assert result["key"] == cell_key(started)
    assert result["scores"] == by_hand(plain, weights)[1]
    assert result["curve"] != run_cell(plain, **places)["curve"]
    assert "start" not in run_cell(plain, **places)

    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[:-4] + b"\0\0\1\0")
    with pytest.raises(
        UserError, match=r"encoder.safetensors: it is not what was written: its checksum differs\. Delete"
    ):
        run_cell(started, **places)
    shutil.rmtree(folder)
    with pytest.raises(UserError, match="the fine-tuned weights to start from are not there"):
        run_cell(started, **places)


def make_second(space: Space, source: Cell) -> Cell:
    """A cell of the other task, on the same model and store."""
    data = prepare_task(
        "conll2003", source.model_folder, space.protocol_for("conll2003"), source.model_folder.parent / "other",
        source.model_folder.parent / "data",
    )  # fmt: skip
    model = SweepModel(source.model, source.model_folder, source.weights)
    every = expand(space.model_copy(update={"start_from": {}}), [model], dict.fromkeys(space.tasks, data.task_data))
    return next(cell for cell in every if cell.task == "conll2003")


@pytest.fixture
def layers(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[SweepOutcome, list[str]]]:
    """Runs a sweep's layers in this process, real cells without Ray: the outcome, and what was computed in order."""
    computed: list[str] = []
    budget = [1000]

    def run_here(cells: list[Cell], options: SweepOptions) -> SweepOutcome:
        places = {"store": options.store, "data_root": place / "data"}
        keeping = options.worker is KeepEncoders
        results_store = options.results_store or ResultsStore(options.store)
        results, count = [], 0
        for cell in cells:
            if results_store.find(cell_key(cell)) is None:
                if not budget[0]:
                    raise KeyboardInterrupt
                budget[0] -= 1
                computed.append(f"keep {cell.task}" if keeping else cell.task)
                count += 1
                if keeping:
                    KeptEncoder(options.store, cell_key(cell)).ensure(partial(keep_encoder, cell, **places))
                else:
                    results_store.write(run_cell(cell, **places))
            found = results_store.find(cell_key(cell))
            assert found is not None
            results.append(named_result(found, cell))
        return SweepOutcome(results, computed=count, reused=len(cells) - count)

    monkeypatch.setattr(mlmclm.sweeps.run_sweep, "run_sweep", run_here)
    space = space_of(tmp_path)
    ready = plan_of(place, tmp_path / "store", space)

    def run(most: int = 1000) -> tuple[SweepOutcome, list[str]]:
        computed.clear()
        budget[0] = most
        return run_layers(ready, SweepOptions(store=tmp_path / "store")), list(computed)

    return run


def test_layers_come_in_order_and_nothing_is_computed_twice(layers: Any, tmp_path: Path, capfd: Any) -> None:
    outcome, computed = layers()
    assert computed == ["sst2"] * 4 + ["keep sst2"] + ["conll2003"] * 4
    assert (len(outcome.results), outcome.computed, outcome.reused) == (8, 8, 0)
    said = capfd.readouterr().err
    assert "4 cells wait for the best sst2 cell of their model" in said
    assert "it is trained again to keep its weights" in said
    first = outcome.results
    outcome, computed = layers()
    assert (computed, outcome.reused) == ([], 8)
    assert [bits(one) for one in outcome.results] == [bits(one) for one in first]
    # The weights are needed for missing cells only, and can be made again.
    shutil.rmtree(tmp_path / "store" / "tuned")
    assert layers()[1] == []
    lost = next(one for one in first if one["task"] == "conll2003")
    ResultsStore(tmp_path / "store").path(lost["key"]).unlink()
    outcome, computed = layers()
    assert computed == ["keep sst2", "conll2003"]
    assert [bits(one) for one in outcome.results] == [bits(one) for one in first]
    # Weights with another bit are not started from.
    (weights,) = (tmp_path / "store" / "tuned").glob(f"*/*/{WEIGHTS}")
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    ResultsStore(tmp_path / "store").path(lost["key"]).unlink()
    outcome, computed = layers()
    assert computed == ["keep sst2", "conll2003"]
    assert (
        f"{weights.parent} is not used: {WEIGHTS}: it is not what was written: its checksum differs. It is kept as"
        in " ".join(capfd.readouterr().err.split())
    )
    assert weights.read_bytes() == whole and [bits(one) for one in outcome.results] == [bits(one) for one in first]


def test_stopped_anywhere_and_started_again_the_results_are_the_same(layers: Any, tmp_path: Path) -> None:
    whole = [bits(one) for one in layers()[0].results]
    for most in (2, 4, 5):  # in the first layer, before the kept weights, behind them
        shutil.rmtree(tmp_path / "store" / "cells")
        shutil.rmtree(tmp_path / "store" / "tuned")
        with pytest.raises(KeyboardInterrupt):
            layers(most)
        outcome, computed = layers()
        assert len(computed) == 9 - most
        assert [bits(one) for one in outcome.results] == whole


def test_weights_that_another_machine_would_make_differently_are_said(layers: Any, tmp_path: Path, capfd: Any) -> None:
    outcome, _ = layers()
    best = best_cell([one for one in outcome.results if one["task"] == "sst2"])
    assert best is not None
    filed = ResultsStore(tmp_path / "store").path(best["key"])
    content = unsealed(json.loads(filed.read_text()))
    content["scores"]["validation"]["accuracy"] += 0.001
    filed.write_text(json.dumps(sealed(content)))
    shutil.rmtree(tmp_path / "store" / "tuned")
    for one in outcome.results:
        if one["task"] == "conll2003":
            ResultsStore(tmp_path / "store").path(one["key"]).unlink()
    capfd.readouterr()
    assert layers()[1] == ["keep sst2"] + ["conll2003"] * 4
    assert "trained again it scored" in capfd.readouterr().err


def test_a_failed_source_leaves_its_models_cells_waiting_and_stays_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = RuntimeError("broke")

    def run(cells: list[Cell], options: SweepOptions) -> SweepOutcome:
        for cell in cells[1:]:
            file_result(tmp_path, cell, 0.5)
        return SweepOutcome([], computed=len(cells) - 1, failed=[(cells[0], broken)])

    monkeypatch.setattr(mlmclm.sweeps.run_sweep, "run_sweep", run)
    outcome = run_layers(lambda: plan(tmp_path, space_of(tmp_path), "a"), SweepOptions(store=tmp_path))
    assert [(cell.task, error) for cell, error in outcome.failed] == [("sst2", broken)]
    assert outcome.computed == 3


def test_a_worker_keeps_an_encoder_once(place: Path, tmp_path: Path) -> None:
    cell = plan_of(place, tmp_path, space_of(tmp_path))().cells[0]
    worker = KeepEncoders.__new__(KeepEncoders)
    worker._store, worker._data_root, worker._cache = tmp_path, place / "data", {}
    worker._device = "cpu"
    kept, key = KeptWeights(tmp_path), cell_key(cell)
    with kept.leases.attempt([kept.lease(key)]):
        assert worker._keep(key, cell) == "taken"
    assert [worker._keep(key, cell), worker._keep(key, cell)] == ["computed", "reused"]
    folder = KeptEncoder(tmp_path, cell_key(cell)).folder
    whole = (folder / WEIGHTS).read_bytes()
    (folder / RESULT).write_text("{")
    assert worker._keep(key, cell) == "computed"
    assert (folder / WEIGHTS).read_bytes() == whole
