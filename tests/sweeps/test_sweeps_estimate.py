"""The estimate of what a sweep's missing cells take, from results of the model and from a measurement."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scipy import stats

from mlmclm.backends.choice import backend_of
from mlmclm.finetuning.cell import Cell
from mlmclm.sweeps.estimate import estimate_time
from mlmclm.sweeps.results_store import ResultsStore
from mlmclm.sweeps.trial import work_of
from mlmclm.tasks.prepare_task import find_or_prepare
from sweep_cells import make_cells, make_result


def test_time_is_missing_work_at_the_speed_of_the_model_s_own_results(tmp_path: Path) -> None:
    device = backend_of(torch.device("cuda" if torch.cuda.is_available() else "cpu")).title()
    results_store, seconds = ResultsStore(tmp_path), [9.0, 10.0, 12.0, 11.0, 10.5]
    cells = [replace(cell, training_data="rows", work=(90.0, 10.0)) for cell in make_cells(12)]
    for cell, spent in zip(cells, seconds, strict=False):
        result = make_result(cell)
        result["cost"] |= {"seconds": spent, "device": device}
        results_store.write(result)
    missing = results_store.missing(cells)
    made = estimate_time(cells, missing, store=tmp_path, data_root=None, workers=2)
    wanted = stats.t.interval(0.95, len(seconds) - 1, loc=stats.tmean(seconds), scale=stats.sem(seconds))
    assert made.seconds.value == pytest.approx(7 * stats.tmean(seconds) / 2)
    assert (made.seconds.low, made.seconds.high) == pytest.approx([7 * bound / 2 for bound in wanted])
    assert (made.trainings, made.workers) == (7, 2)


def test_cells_that_share_a_training_pay_for_it_once(tmp_path: Path) -> None:
    cells = [replace(cell, training_data="rows", work=(90.0, 10.0)) for cell in make_cells(5)]
    twins = [replace(cell, task="rte", task_data="other test rows") for cell in cells]
    results_store = ResultsStore(tmp_path)
    device = backend_of(torch.device("cuda" if torch.cuda.is_available() else "cpu")).title()
    for cell in cells[:4]:
        result = make_result(cell)
        result["cost"] |= {"seconds": 10.0, "device": device}
        results_store.write(result)
    missing = [cells[4], twins[4]]
    made = estimate_time([*cells, *twins], missing, store=tmp_path, data_root=None, workers=1)
    assert made.trainings == 1
    assert made.seconds.value == pytest.approx(0.1 * (90 + 10 + 10))


def test_work_is_tokens_passed_forward_once(real_cells: list[Cell], tmp_path: Path) -> None:
    cell = real_cells[0]
    task = find_or_prepare(cell.declared, cell.task_data, cell.model_folder, cell.protocol, tmp_path, tmp_path / "data")
    train, tokens = task.table("train"), sum(map(len, task.table("train")["input_ids"].to_pylist()))
    evaluated = sum(len(row) for split in ("validation", "test") for row in task.table(split)["input_ids"].to_pylist())
    assert cell.work == work_of(task, cell.protocol)
    assert cell.work == pytest.approx((3 * 200 * 4 * tokens / len(train), evaluated))


def test_a_model_without_results_is_measured_once(
    real_cells: list[Cell], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    places = {"store": tmp_path, "data_root": tmp_path / "data", "workers": 1}
    first = estimate_time(real_cells, real_cells, **places)  # type: ignore[arg-type]
    assert 0 < first.seconds.low < first.seconds.value < first.seconds.high
    assert "measuring m on" in capfd.readouterr().err
    assert estimate_time(real_cells, real_cells, **places) == first  # type: ignore[arg-type]
    assert "measuring" not in capfd.readouterr().err
    assert ResultsStore(tmp_path).missing(real_cells) == real_cells, "a measurement leaves no result"
