"""A sweep whose learning rates are extended: which cells it computes, in which rounds, and what it says."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mlmclm.sweeps.run_sweep
from mlmclm.configuration import parse_config
from mlmclm.finetuning.cell import Cell, cell_key
from mlmclm.studies.study_sweep import extending
from mlmclm.sweeps.cells import SweepModel, added_rates
from mlmclm.sweeps.results_store import ResultsStore
from mlmclm.sweeps.run_sweep import run_layers
from mlmclm.sweeps.space import Space
from mlmclm.sweeps.starts import ModelGrid, Planned, plan_cells
from mlmclm.sweeps.sweep_options import SweepOptions, SweepOutcome
from mlmclm.tasks.declared_tasks import get_task
from sweep_cells import make_result

PEAKS = {("a", "mnli"): 8e-3, ("a", "rte"): 2e-3, ("b", "mnli"): 2e-4, ("b", "rte"): 1.0}
"""The best rate of each model and task; that of b on rte is far beyond what may be added."""
VALUES: dict[str, Any] = {
    "tasks": ["mnli", "rte"],
    "learning_rates": {"values": [1e-3, 2e-3, 4e-3], "extend": True},
    "seeds": [0, 1],
    "protocol": {"max_steps": 5},
}


def space_of(**changes: Any) -> Space:
    return parse_config(Space, {**VALUES, **changes}, where="space.yaml")


def planner(space: Space, store: Path, *names: str, absent: bool = False) -> Callable[[], Planned]:
    models = [SweepModel(name, store, f"weights of {name}") for name in names or ("a", "b")]
    declarations = {task: get_task(task).measured_by(space.metrics) for task in space.tasks}
    extend = extending(space) if space.learning_rates.most else None
    data = dict.fromkeys(space.tasks, "data")
    grids = [ModelGrid(model, space, data, declarations) for model in models]
    return lambda: plan_cells(grids, ResultsStore(store), extend, absent=absent)


def score(cell: Cell) -> float:
    distance = abs(PEAKS[cell.model, cell.task] ** 0.1 - cell.learning_rate**0.1)
    return 0.9 - distance + random.Random(f"{cell.learning_rate} {cell.seed}").gauss(0, 1e-4)


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[list[Cell]]:
    """The missing cells of each round, which are computed at once."""
    asked: list[list[Cell]] = []

    def run_here(cells: list[Cell], options: SweepOptions) -> SweepOutcome:
        results_store = ResultsStore(options.store)
        missing = results_store.missing(cells)
        if missing:
            asked.append(missing)
        for cell in missing:
            result = make_result(cell)
            metric = cell.declared.metric
            result |= {"metric": metric}
            result["scores"] = {split: {metric: score(cell)} for split in ("validation", "test")}
            results_store.write(result)
        return SweepOutcome(results_store.results(cells), computed=len(missing), reused=len(cells) - len(missing))

    monkeypatch.setattr(mlmclm.sweeps.run_sweep, "run_sweep", run_here)
    return asked


def test_rates_are_added_until_the_best_one_lies_inside_or_there_are_no_more(
    rounds: list[list[Cell]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    space = space_of()
    plan = planner(space, tmp_path)
    assert len(plan().cells) == 24 and plan().to_come == 4 * 6 * 2
    assert sum(map(space.cells_added_at_most, space.tasks)) * 2 == plan().to_come
    outcome = run_layers(plan, SweepOptions(store=tmp_path))
    added = added_rates(plan().cells, space.learning_rates)
    # All models are tried at the same rates: on mnli, a looks for higher rates and b for lower ones.
    mnli, rte = (5e-4, 2.5e-4, 1.25e-4, 8e-3, 1.6e-2), (8e-3, 1.6e-2, 3.2e-2)
    assert added == {(model, task, ""): own for model in ("a", "b") for task, own in {"mnli": mnli, "rte": rte}.items()}
    assert [len(each) for each in rounds] == [24, 12, 12, 8]
    keys = [result["key"] for result in outcome.results]
    assert len(set(keys)) == len(keys) == outcome.computed == 56
    assert plan().to_come == 0
    assert (
        "added for all models, as the best of some is the lowest or the highest: mnli 5e-4, 8e-3; rte 8e-3 (12 cells)"
        in (capfd.readouterr().err)
    )
    # Again, and after the loss of results anywhere, the same cells and no others.
    rounds.clear()
    assert run_layers(plan, SweepOptions(store=tmp_path)).computed == 0
    for key in random.Random(0).sample(keys, 12):
        ResultsStore(tmp_path).path(key).unlink()
    again = run_layers(plan, SweepOptions(store=tmp_path))
    assert (again.computed, {result["key"] for result in again.results}) == (12, set(keys))


def test_the_list_alone_has_the_keys_that_it_had_without_extend(tmp_path: Path) -> None:
    plain, extended = (planner(space_of(learning_rates=each), tmp_path)().cells for each in ([1e-3, 2e-3, 4e-3], VALUES["learning_rates"]))  # fmt: skip
    assert list(map(cell_key, plain)) == list(map(cell_key, extended))


def test_another_sweep_s_results_at_rates_that_are_not_asked_for_are_not_this_one_s(
    rounds: list[list[Cell]], tmp_path: Path
) -> None:
    wide = space_of(learning_rates=[1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 5e-4])
    run_layers(planner(wide, tmp_path), SweepOptions(store=tmp_path))
    plan = planner(space_of(), tmp_path)
    here = run_layers(plan, SweepOptions(store=tmp_path))
    # The wide sweep has rte's cells at 5e-4 too.
    assert {result["learning_rate"] for result in here.results if result["task"] == "rte"} == {
        1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2
    }  # fmt: skip
    assert len(here.results) == 56


def test_cells_start_from_the_best_one_of_the_extended_rates(
    rounds: list[list[Cell]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlmclm.sweeps.run_sweep, "_keep", lambda sources, options: None)
    plan = planner(space_of(start_from={"rte": "mnli"}), tmp_path)
    assert plan().to_come == 4 * 6 * 2 and plan().waiting == {"mnli": 12}
    outcome = run_layers(plan, SweepOptions(store=tmp_path))
    assert {(cell.model, cell.learning_rate) for cell in plan().sources.values()} == {("a", 8e-3), ("b", 2.5e-4)}
    assert len({result["key"] for result in outcome.results}) == len(outcome.results) == len(plan().cells) == 56
    assert plan().to_come == 0


def test_no_rate_is_added_before_the_cells_of_all_models_are_there(
    rounds: list[list[Cell]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlmclm.sweeps.run_sweep, "_keep", lambda sources, options: None)
    space = space_of(start_from={"rte": "mnli"})
    # Model b is not pretrained yet, so a's grid does not grow, and no start is chosen that a better rate may replace.
    early = planner(space, tmp_path, "a", absent=True)
    assert len(run_layers(early, SweepOptions(store=tmp_path)).results) == 6 and early().waiting == {"mnli": 6}
    # Nor where b is there, and has no results yet.
    both = planner(space, tmp_path)
    assert both().waiting == {"mnli": 12} and {cell.learning_rate for cell in both().cells} == set(space.learning_rates)
    assert both().needed(both().cells[:1]) == {"a", "b"}, "results of one model can ask for cells of all"
    run_layers(both, SweepOptions(store=tmp_path))
    assert both().needed([]) == set() and both().needed(both().cells[:1]) == {"a"}
    alone = {cell_key(cell) for cell in planner(space, tmp_path, "a")().cells}
    assert alone < {cell_key(cell) for cell in both().cells if cell.model == "a"}


def test_a_model_that_diverged_everywhere_is_not_left_out_before_rates_are_added(
    rounds: list[list[Cell]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlmclm.sweeps.run_sweep, "_keep", lambda sources, options: None)
    space = space_of(start_from={"rte": "mnli"})
    plan, results_store = planner(space, tmp_path), ResultsStore(tmp_path)
    for cell in plan().cells:
        if cell.model == "a":
            results_store.write(make_result(cell, status="diverged") | {"metric": cell.declared.metric, "scores": None})
    early = plan()
    assert early.waiting == {"mnli": 12} and not early.blocked
    outcome = run_layers(plan, SweepOptions(store=tmp_path))
    assert len(outcome.results) == len(plan().cells) <= len(early.cells) + early.waiting["mnli"] + early.to_come
    assert "a" in {cell.model for cell in plan().sources.values()}, "b's lower rates gave a its start"
