"""Results outside the store: stores that name one address share their results and compute each cell once."""

from __future__ import annotations

import json
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
from mlmclm.sweeps.cell_failures import failures, record
from mlmclm.sweeps.ledger import Ledger
from mlmclm.sweeps.ledger_place import place_ledger
from mlmclm.sweeps.manifest import read_manifest, write_manifest
from mlmclm.sweeps.run_layers import KeptWeights
from mlmclm.sweeps.starts import Planned
from mlmclm.sweeps.status import Watch
from object_stores import an_address
from sweep_cells import make_cell, make_cells, make_result


@pytest.fixture(params=["folder", "memory", "s3"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Two stores, as of two machines, whose results are in one folder or at one address."""
    for address in [str(tmp_path / "shared")] if request.param == "folder" else an_address(request.param):
        for name in ("one", "two"):
            place_ledger(tmp_path / name, address)
        yield tmp_path / "one", tmp_path / "two"


def test_what_one_store_files_the_other_finds(stores: tuple[Path, Path]) -> None:
    cells = make_cells(4)
    first, second = Ledger(stores[0]), Ledger(stores[1])
    results = [make_result(cell) for cell in cells[:2]]
    content = to_parquet(results[0], {"correct": np.array([0, 1])}, ())
    Ledger(stores[0]).write_examples(results[0], content)  # whichever object of the process files the result
    first.write(results[0])
    second.write(results[1])
    for ledger in (first, second):
        assert ledger.results(cells) == results
        assert ledger.missing(cells) == cells[2:]
        assert ledger.find(cell_key(cells[0])) == results[0]
        assert ledger.keys() == {cell_key(cell) for cell in cells[:2]}
        assert ledger.examples(results[0]).columns["correct"].tolist() == [0, 1]
    assert {path.name for path in stores[0].iterdir()} <= {"ledger.json", "unfiled"}
    assert not [path for path in (stores[0] / "unfiled").rglob("*") if path.is_file()]
    # The bytes are those of a store's own ledger.
    local = Ledger(stores[0].parent / "local")
    local.write_examples(results[0], content)
    local.write(results[0])
    assert local.path(cell_key(cells[0])).read_bytes() == first.path(cell_key(cells[0])).read_bytes()


def test_keys_that_were_listed_are_read_without_another_listing(
    stores: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    results, ledger = [make_result(cell) for cell in make_cells(3)], Ledger(stores[0])
    for result in results[:2]:
        ledger.write(result)
    monkeypatch.setattr(ledger, "keys", pytest.fail)
    found = ledger.find_all([result["key"] for result in results], listed=True)
    assert found == {result["key"]: result for result in results[:2]}, "one may have been set aside meanwhile"


def test_a_result_that_is_there_stays_and_a_damaged_one_is_named(stores: tuple[Path, Path]) -> None:
    ledger, cell = Ledger(stores[0]), make_cell()
    ledger.write(make_result(cell, worker="first"))
    Ledger(stores[1]).write(make_result(cell, worker="second"))
    assert ledger.results([cell])[0]["cost"]["worker"] == "first"
    path = ledger.path(cell_key(cell))
    path.write_bytes(path.read_bytes().replace(b"0.5", b"0.9", 1))
    for find in (lambda: ledger.find(cell_key(cell)), lambda: ledger.results([cell])):
        with pytest.raises(UserError, match=f"{path}: damaged result file"):
            find()
    folder = ledger.set_aside(cell_key(cell))
    assert ledger.missing([cell]) == [cell] and [path.name for path in folder.iterdir()] == [path.name]


def test_each_cell_is_computed_once_between_two_stores(stores: tuple[Path, Path]) -> None:
    cells = make_cells(3)
    computed: list[str] = []

    def compute(cell: Cell) -> dict[str, Any]:
        computed.append(cell_key(cell))
        time.sleep(0.2)
        return make_result(cell)

    begin = threading.Barrier(2)

    def work(store: Path) -> None:
        ledger = Ledger(store)
        begin.wait()
        for cell in cells:
            ledger.ensure(cell_key(cell), partial(compute, cell))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, stores))
    assert set(computed) == {cell_key(cell) for cell in cells}
    # Exactly once where the store creates exclusively; `memory` may collide, which costs time only.
    assert len(computed) == 3 or str(Ledger(stores[0]).folder).startswith("memory")
    assert [result["key"] for result in Ledger(stores[1]).results(cells)] == [cell_key(cell) for cell in cells]


def test_a_sweeps_status_is_seen_from_the_other_store(stores: tuple[Path, Path]) -> None:
    cells = make_cells(4)
    ledger = Ledger(stores[0])
    write_manifest(stores[1] / "studies" / "mine", "mine", Planned(cells))
    ledger.write(make_result(cells[0]))
    record(ledger.folder, cell_key(cells[1]), "crashed", kind="crash")
    with ledger.claims.attempt([ledger.claim(cell_key(cells[2]))]):
        found = Watch(read_manifest("mine", stores[1]), Ledger(stores[1])).look()
    assert [state.status for state in found.states] == ["ok", "failed", "running", "missing"]
    ledger.write(make_result(cells[1]))
    assert failures(ledger.folder) == {}


def test_kept_weights_stay_in_the_store(stores: tuple[Path, Path]) -> None:
    kept = KeptWeights(stores[0])
    assert isinstance(kept.folder, Path) and kept.folder.parent == stores[0]
    assert kept.claims.folder == stores[0] / "claims"


def test_a_ledger_in_another_folder_is_as_one_in_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    place_ledger(tmp_path / "one", "shared")
    place_ledger(tmp_path / "two", f"file://{tmp_path}/shared")
    Ledger(tmp_path / "one").write(make_result(make_cell()))
    assert Ledger(tmp_path / "two").missing([make_cell()]) == []
    assert len(list((tmp_path / "shared" / "cells").glob("*/*.json"))) == 1
    with Ledger(tmp_path / "one").claimed("f00", "a cell"):
        assert Ledger(tmp_path / "two").claims.holder("cells-f00") is not None


def test_a_store_has_one_ledger_for_good(tmp_path: Path) -> None:
    place_ledger(tmp_path / "one", str(tmp_path / "a"))
    place_ledger(tmp_path / "one", str(tmp_path / "a"))
    with pytest.raises(UserError, match=r"the results of .*one are at file://"):
        place_ledger(tmp_path / "one", str(tmp_path / "b"))
    Ledger(tmp_path / "two").write(make_result(make_cell()))
    with pytest.raises(UserError, match="has results of its own"):
        place_ledger(tmp_path / "two", str(tmp_path / "a"))
    (tmp_path / "one" / "ledger.json").write_text(json.dumps(["s3://bucket"]))
    with pytest.raises(UserError, match="not the place of a ledger"):
        Ledger(tmp_path / "one")
