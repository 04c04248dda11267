"""Stores at an address: those of several machines share their results and compute each cell once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlmclm.errors import UserError
from mlmclm.finetuning.cell import Cell, cell_key
from mlmclm.results.examples import to_parquet
from mlmclm.sweeps.cell_failures import failure_notes, record
from mlmclm.sweeps.manifest import read_manifest, write_manifest
from mlmclm.sweeps.results_store import ResultsStore
from mlmclm.sweeps.run_sweep import KeptWeights
from mlmclm.sweeps.starts import Planned
from mlmclm.sweeps.status import Watch
from object_stores import an_address, store_at
from sweep_cells import make_cell, make_cells, make_result


@pytest.fixture(params=["memory", "s3"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """The folders that two machines have of a store at one address."""
    for address in an_address(request.param):
        one, two = (store_at(tmp_path / name, address) for name in ("one", "two"))
        for folder in (one, two):
            folder.mkdir(parents=True)
        yield one, two


def test_what_one_store_files_the_other_finds(stores: tuple[Path, Path]) -> None:
    cells = make_cells(4)
    first, second = ResultsStore(stores[0]), ResultsStore(stores[1])
    results = [make_result(cell) for cell in cells[:2]]
    content = to_parquet(results[0], {"correct": np.array([0, 1])}, ())
    ResultsStore(stores[0]).write_examples(results[0], content)  # whichever object of the process files the result
    first.write(results[0])
    second.write(results[1])
    for results_store in (first, second):
        assert results_store.results(cells) == results
        assert results_store.missing(cells) == cells[2:]
        assert results_store.find(cell_key(cells[0])) == results[0]
        assert results_store.keys() == {cell_key(cell) for cell in cells[:2]}
        assert results_store.examples(results[0]).columns["correct"].tolist() == [0, 1]
    assert {path.name for path in stores[0].iterdir()} <= {"storage.json", "unfiled"}
    assert not [path for path in (stores[0] / "unfiled").rglob("*") if path.is_file()]
    # The bytes are those of a store's own results store.
    local = ResultsStore(stores[0].parent / "local")
    local.write_examples(results[0], content)
    local.write(results[0])
    assert local.path(cell_key(cells[0])).read_bytes() == first.path(cell_key(cells[0])).read_bytes()


def test_keys_that_were_listed_are_read_without_another_listing(
    stores: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    results, results_store = [make_result(cell) for cell in make_cells(3)], ResultsStore(stores[0])
    for result in results[:2]:
        results_store.write(result)
    monkeypatch.setattr(results_store, "keys", pytest.fail)
    found = results_store.find_all([result["key"] for result in results], listed=True)
    assert found == {result["key"]: result for result in results[:2]}, "one may have been set aside meanwhile"


def test_a_result_that_is_there_stays_and_a_damaged_one_is_named(stores: tuple[Path, Path]) -> None:
    results_store, cell = ResultsStore(stores[0]), make_cell()
    results_store.write(make_result(cell, worker="first"))
    ResultsStore(stores[1]).write(make_result(cell, worker="second"))
    assert results_store.results([cell])[0]["cost"]["worker"] == "first"
    path = results_store.path(cell_key(cell))
    path.write_bytes(path.read_bytes().replace(b"0.5", b"0.9", 1))
    for find in (lambda: results_store.find(cell_key(cell)), lambda: results_store.results([cell])):
        with pytest.raises(UserError, match=f"{path}: damaged result file"):
            find()
    folder = results_store.set_aside(cell_key(cell))
    assert results_store.missing([cell]) == [cell] and [path.name for path in folder.iterdir()] == [path.name]


def test_each_cell_is_computed_once_between_two_stores(stores: tuple[Path, Path]) -> None:
    cells = make_cells(3)
    computed: list[str] = []

    def compute(cell: Cell) -> dict[str, Any]:
        computed.append(cell_key(cell))
        time.sleep(0.2)
        return make_result(cell)

    begin = threading.Barrier(2)

    def work(store: Path) -> None:
        results_store = ResultsStore(store)
        begin.wait()
        for cell in cells:
            results_store.ensure(cell_key(cell), partial(compute, cell))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, stores))
    assert set(computed) == {cell_key(cell) for cell in cells}
    # Exactly once where the store creates exclusively; `memory` may collide, which costs time only.
    assert len(computed) == 3 or str(ResultsStore(stores[0]).folder).startswith("memory")
    assert [result["key"] for result in ResultsStore(stores[1]).results(cells)] == [cell_key(cell) for cell in cells]


def test_a_sweeps_status_is_seen_from_the_other_store(stores: tuple[Path, Path]) -> None:
    cells = make_cells(4)
    results_store = ResultsStore(stores[0])
    write_manifest(stores[1] / "studies" / "mine", "mine", Planned(cells))
    results_store.write(make_result(cells[0]))
    record(results_store.folder, cell_key(cells[1]), "crashed", kind="crash")
    with results_store.leases.attempt([results_store.lease(cell_key(cells[2]))]):
        found = Watch(read_manifest("mine", stores[1]), ResultsStore(stores[1])).look()
    assert [state.status for state in found.states] == ["ok", "failed", "running", "missing"]
    results_store.write(make_result(cells[1]))
    assert failure_notes(results_store.folder) == {}


def test_kept_weights_stay_in_the_store(stores: tuple[Path, Path]) -> None:
    kept = KeptWeights(stores[0])
    assert isinstance(kept.folder, Path) and kept.folder.parent == stores[0]
    assert kept.leases.folder == stores[0] / "claims"
