"""The results store: a result is whole or absent, and what is damaged is named."""

from __future__ import annotations

import dataclasses
import json
import resource
import signal
from pathlib import Path

import pytest

from mlmclm.errors import EnvironmentFault, UserError
from mlmclm.finetuning.cell import cell_key
from mlmclm.sweeps.results_store import ResultsStore
from mlmclm.tasks.declared_tasks import get_task
from sweep_cells import make_cell, make_cells, make_result


def test_cells_of_equal_keys_are_missing_once(tmp_path: Path) -> None:
    assert len(ResultsStore(tmp_path).missing([*make_cells(2), *make_cells(2)])) == 2


def test_a_result_filed_under_another_models_name_takes_the_asked_ones(tmp_path: Path) -> None:
    results_store, cell = ResultsStore(tmp_path), make_cell()
    results_store.write({**make_result(cell), "model": "an older name"})
    assert results_store.results([cell])[0]["model"] == cell.model


def test_a_result_has_the_main_metric_that_its_task_is_declared_with_now(tmp_path: Path) -> None:
    results_store, cell = ResultsStore(tmp_path), make_cell()
    both = {split: {"accuracy": 0.5, "matthews": 0.1} for split in ("validation", "test")}
    declared = get_task("sst2").model_copy(update={"metric": "matthews"})
    own = dataclasses.replace(cell, declaration=declared)
    results_store.write({**make_result(cell), "scores": both})
    assert results_store.results([cell])[0]["metric"] == "accuracy"
    assert results_store.results([own])[0]["metric"] == "matthews"
    mean = dataclasses.replace(cell, declaration=declared.model_copy(update={"metric": "accuracy+matthews"}))
    assert results_store.results([mean])[0]["metric"] == "accuracy+matthews"


def test_a_result_without_the_score_that_is_asked_for_is_named_and_never_stands_in_with_another(tmp_path: Path) -> None:
    results_store, cell = ResultsStore(tmp_path), make_cell()
    declared = get_task("sst2").model_copy(update={"metric": "accuracy+matthews"})
    own = dataclasses.replace(cell, declaration=declared)
    results_store.write(make_result(cell))
    with pytest.raises(UserError, match=f"result {cell_key(cell)} .* has no matthews, which was not computed then"):
        results_store.results([own])
    results_store.path(cell_key(cell)).unlink()
    results_store.write(make_result(cell, status="diverged"))
    assert results_store.results([own])[0]["metric"] == "accuracy+matthews"


@pytest.mark.parametrize(
    "damage", ["truncated", "empty", "another", "binary", "incomplete", "list", "a digit", "no checksum"]
)
def test_a_damaged_file_is_named_with_what_to_do(tmp_path: Path, damage: str) -> None:
    results_store, cell = ResultsStore(tmp_path), make_cell()
    results_store.write(make_result(cell))
    path = results_store.path(cell_key(cell))
    whole = path.read_bytes()
    path.write_bytes(
        {
            "truncated": whole[: len(whole) // 2],
            "empty": b"",
            "another": json.dumps(make_result(make_cell(seed=9))).encode(),
            "binary": b"\xff\x00" * 100,
            "incomplete": b'{"schema": 1, "key": "x"}',
            "list": b"[]",
            "a digit": whole.replace(b"0.5", b"0.9", 1),
            "no checksum": json.dumps(make_result(cell)).encode(),
        }[damage]
    )
    with pytest.raises(UserError, match="damaged result file") as caught:
        results_store.results([cell])
    assert str(path) in str(caught.value)
    assert "Delete it" in str(caught.value)


def test_all_damaged_results_are_named_at_once(tmp_path: Path) -> None:
    results_store, cells = ResultsStore(tmp_path), make_cells(3)
    for cell in cells:
        results_store.write(make_result(cell))
        results_store.path(cell_key(cell)).write_bytes(b"{")
    with pytest.raises(UserError) as caught:
        results_store.results(cells)
    assert all(str(results_store.path(cell_key(cell))) in str(caught.value) for cell in cells)


def test_on_a_full_disk_nothing_is_left_and_the_fault_says_so(tmp_path: Path) -> None:
    results_store, cell = ResultsStore(tmp_path), make_cell()
    # A file size limit fails the write the way a full disk does, half way through.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(EnvironmentFault):
            results_store.write(make_result(cell))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    results_store.write(make_result(cell))
    assert results_store.missing([cell]) == []
