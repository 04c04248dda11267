"""A trial of a sweep computes what it is given, knows where it cannot, and reports its trainings one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from mlmclm.errors import UserError
from mlmclm.finetuning.cell import Cell, cell_key
from mlmclm.finetuning.protocol import Protocol
from mlmclm.sweeps.cells import SweepModel, expand
from mlmclm.sweeps.results_store import ResultsStore
from mlmclm.sweeps.space import Space
from mlmclm.sweeps.trainable import COMPUTED, ENVIRONMENT_FAULT, REUSED, TAKEN, USER_ERROR
from mlmclm.sweeps.trial import SWEEP, SweepTrial, Training, trainings_of
from sweep_cells import FakeWorker, make_cell, make_cells, make_result


@pytest.fixture(autouse=True)
def _without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlmclm.sweeps.trainable.compile_kernels", lambda *args: None)
    monkeypatch.setattr("mlmclm.sweeps.trainable.shapes_of", lambda cells: [])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)


def trial_of(cells: Sequence[Cell], store: Path, **options: Any) -> dict[str, Any]:
    trainings = tuple(trainings_of({cell_key(cell): cell for cell in cells}))
    return SweepTrial(trainings, store, resources={"CPU": 1.0}, seen=store, **options).config


def reports(worker: FakeWorker) -> list[dict[str, Any]]:
    """All reports of the worker's present trial."""
    found = [worker.step()]
    while not found[-1]["done"]:
        found.append(worker.step())
    return found


def test_a_trial_reports_each_training_and_files_its_results(tmp_path: Path) -> None:
    cells = make_cells(3)
    ResultsStore(tmp_path).write(make_result(cells[1]))
    worker = FakeWorker(trial_of(cells, tmp_path))
    found = reports(worker)
    assert [each["outcomes"] for each in found] == [[COMPUTED], [REUSED], [COMPUTED]]
    assert [(each["training_iteration"], each["seed"]) for each in found] == [(1, 0), (2, 1), (3, 2)]
    assert [each["score"] for each in found] == [each["test"]["accuracy"] for each in found] == [0.5, 0.51, 0.52]
    assert [each["computed"] for each in found] == [True, False, True]
    assert ResultsStore(tmp_path).missing(cells) == [] and ResultsStore(tmp_path).holders() == {}
    assert worker.reset_config(trial_of(make_cells(1, model="b"), tmp_path))
    assert [each["outcomes"] for each in reports(worker)] == [[COMPUTED]]


def test_of_tasks_that_share_a_training_each_is_reported(tmp_path: Path) -> None:
    cells = [replace(make_cell(task=task), training_data="rows") for task in ("mnli", "mnli_mm")]
    config = trial_of(cells, tmp_path)
    assert config["task"] == "mnli+mnli_mm"
    (found,) = reports(FakeWorker(config))
    assert found["task"] == "mnli+mnli_mm" and found["score"] == found["mnli_mm"]["validation"]["accuracy"] == 0.5
    assert [found["key"], found["mnli_mm"]["key"]] == list(map(cell_key, cells))


def test_the_config_of_a_trial_has_the_point_of_a_grid(tmp_path: Path) -> None:
    grid = {"weight_decay": [1e-6, 0.1], "max_steps": [10, 20]}
    space = Space(tasks=("sst2",), learning_rates=(1e-3,), seeds=(0,), protocol=Protocol(max_steps=10), grid=grid)
    cells = expand(space, [SweepModel("a", tmp_path, "weights")], {"sst2": "data"})
    found = [trial_of([cell], tmp_path) for cell in cells]
    assert [(each["weight_decay"], each["max_steps"]) for each in found] == list(product(*grid.values()))
    assert {name for each in found for name in each} - set(grid) == {"model", "task", "learning_rate", "seed", SWEEP}


def test_a_process_prepares_the_models_that_it_computes_once_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[Path] = []
    monkeypatch.setattr(
        "mlmclm.sweeps.trainable.shapes_of", lambda cells: prepared.extend(each.model_folder for each in cells)
    )
    cells = [replace(cell, model_folder=tmp_path / name) for cell, name in zip(make_cells(3), "aab", strict=True)]
    worker = FakeWorker(trial_of(cells[:1], tmp_path))
    reports(worker)
    for cell in cells[1:]:
        worker.reset_config(trial_of([cell], tmp_path))
        reports(worker)
    assert prepared == [tmp_path / "a", tmp_path / "b"]


def test_the_time_of_a_cell_is_without_that_of_compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("mlmclm.sweeps.trainable.time.perf_counter", lambda: clock[0])
    monkeypatch.setattr("mlmclm.sweeps.trainable.compile_kernels", lambda *args: clock.append(clock.pop() + 100.0))
    (found,) = reports(FakeWorker(trial_of(make_cells(1), tmp_path)))
    assert (found["seconds"], clock) == (0.0, [100.0])


def test_a_trial_that_does_not_see_the_store_says_so_and_computes_nothing(tmp_path: Path) -> None:
    config = trial_of(make_cells(2), tmp_path)
    config[SWEEP] = replace(config[SWEEP], seen=tmp_path / "only the driver's node has this")
    (found,) = reports(FakeWorker(config))
    assert found["outcome"] == ENVIRONMENT_FAULT and "must be on a file system that all nodes" in found["message"]
    assert not list(tmp_path.iterdir())


def test_wrong_input_fails_its_training_and_the_trial_goes_on(tmp_path: Path) -> None:
    (tmp_path / "faults").mkdir()
    (tmp_path / "faults" / "0").write_text("input")
    first, second = reports(FakeWorker(trial_of(make_cells(2), tmp_path)))
    assert (first["outcome"], first["message"]) == (USER_ERROR, "the data set has no such column")
    assert second["outcomes"] == [COMPUTED]


def test_a_cell_that_has_another_key_where_it_would_be_computed_is_refused(tmp_path: Path) -> None:
    cell, other = make_cells(2)
    config = SweepTrial((Training({cell_key(cell): other}),), tmp_path, resources={"CPU": 1.0}, seen=tmp_path).config
    (found,) = reports(FakeWorker(config))
    assert (
        found["outcome"] == USER_ERROR and f"and {cell_key(cell)[:12]} where the sweep was planned" in found["message"]
    )
    assert ResultsStore(tmp_path).missing([cell, other]) == [cell, other]


def test_any_other_error_is_raised_for_tune_to_end_the_process(tmp_path: Path) -> None:
    (tmp_path / "faults").mkdir()
    (tmp_path / "faults" / "0").write_text("raises")
    with pytest.raises(RuntimeError, match="something broke"):
        reports(FakeWorker(trial_of(make_cells(1), tmp_path)))
    assert ResultsStore(tmp_path).holders() == {}


def test_a_cell_that_another_process_computes_is_left_to_it(tmp_path: Path) -> None:
    (cell,), results_store = make_cells(1), ResultsStore(tmp_path)
    with results_store.leases.attempt([results_store.lease(cell_key(cell))]):
        (found,) = reports(FakeWorker(trial_of([cell], tmp_path)))
    assert found["outcomes"] == [TAKEN] and results_store.missing([cell]) == [cell]


def test_earlier_failures_stand_in_the_first_result_alone(tmp_path: Path) -> None:
    cells, failures = make_cells(2), ({"failure": "crash", "error": "killed"},)
    reports(FakeWorker(trial_of(cells, tmp_path, failures=failures)))
    first, second = ResultsStore(tmp_path).results(cells)
    assert first["cost"]["retried_after"] == list(failures) and "retried_after" not in second["cost"]


def test_a_trial_of_a_sweep_cannot_change_its_config(tmp_path: Path) -> None:
    worker = FakeWorker(trial_of(make_cells(1), tmp_path))
    with pytest.raises(UserError, match="one config from beginning to end"):
        worker.load_checkpoint({"config": {"learning_rate": 1.0}, "reports": 1})
