"""A computed result is kept until the object store has it, and no outage counts against a cell."""

from __future__ import annotations

import re
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import ray
import torch

import sweep_cells
from mlmclm.cluster.ray_cluster import ray_session
from mlmclm.errors import EnvironmentFault, MissingBucket, UserError
from mlmclm.finetuning.cell import Cell, cell_key
from mlmclm.results.examples import to_parquet
from mlmclm.storage.objects import bucket_of
from mlmclm.storage.place import open_place
from mlmclm.storage.results_place import wait_for_storage
from mlmclm.storage.retrying import NoAnswer
from mlmclm.sweeps.cell_failures import Retries, failure_notes
from mlmclm.sweeps.results_store import Evaluations, ResultsStore
from mlmclm.sweeps.run_sweep import run_sweep
from mlmclm.sweeps.sweep_options import SweepOptions
from mlmclm.sweeps.sweep_progress import SweepProgress
from mlmclm.sweeps.table import SweepTable
from mlmclm.sweeps.trainable import COMPUTED, REUSED, STORAGE_FAULT
from mlmclm.sweeps.trial import SweepTrial, Training
from object_stores import DisturbedStore, store_at, use_endpoint
from sweep_cells import FakeWorker, make_cell, make_cells, make_result

CELL = make_cell()
KEY = cell_key(CELL)


def examples_of(result: dict[str, Any]) -> bytes:
    return to_parquet(result, {"correct": np.array([0, 1])}, ())


def give_up(store: DisturbedStore) -> None:
    """Begin an outage that is longer than the retry timeout."""
    store.be_patient(seconds=0.1)
    store.proxy.outage(3600)


@pytest.fixture
def place(disturbed: DisturbedStore, tmp_path: Path) -> Path:
    """The folder of a store that is at the disturbed address."""
    found = store_at(tmp_path, disturbed.url)
    found.mkdir()
    return found


@pytest.fixture
def results_store(place: Path) -> ResultsStore:
    return ResultsStore(place)


def write(results_store: ResultsStore, cell: Cell = CELL) -> None:
    result = make_result(cell)
    results_store.write_examples(result, examples_of(result))
    results_store.write(result)


def test_a_result_that_cannot_be_filed_is_kept_and_filed_by_the_next_run(
    results_store: ResultsStore, disturbed: DisturbedStore, place: Path
) -> None:
    give_up(disturbed)
    with pytest.raises(
        NoAnswer, match=rf"It was waited for .* The computed result is kept in {re.escape(str(place))}/unfiled"
    ):
        write(results_store)
    disturbed.proxy.clear()
    assert results_store.find(KEY) is None and results_store.unfiled and results_store.unfiled.keys() == {KEY}
    again = ResultsStore(place)
    assert again.file_unfiled() == 1 and again.file_unfiled() == 0
    assert again.find(KEY) == make_result(CELL) and again.missing([CELL]) == []
    assert again.examples(make_result(CELL)).columns["correct"].tolist() == [0, 1]
    assert not [path for path in (place / "unfiled").rglob("*") if path.is_file()]
    # The files are those that an undisturbed run writes.
    there = [path.read_bytes() for path in (again.path(KEY), again.examples_path(KEY))]
    again.set_aside(KEY)
    write(again)
    assert [path.read_bytes() for path in (again.path(KEY), again.examples_path(KEY))] == there


def test_a_shorter_outage_is_waited_for_and_said(
    results_store: ResultsStore, disturbed: DisturbedStore, capsys: pytest.CaptureFixture[str]
) -> None:
    disturbed.proxy.outage(1.0)
    write(results_store)
    assert results_store.find(KEY) == make_result(CELL)
    said = capsys.readouterr().err
    assert re.search(r"s3://bucket: waiting for storage since .*\n.*storage answers again, after \d+ s", said)


def test_a_command_for_one_cell_files_what_was_kept_and_computes_nothing(
    results_store: ResultsStore, disturbed: DisturbedStore
) -> None:
    give_up(disturbed)
    with pytest.raises(NoAnswer):
        write(results_store)
    disturbed.proxy.clear()
    assert results_store.ensure(KEY, lambda: pytest.fail("it was computed again")) == (make_result(CELL), False)


def test_a_kept_evaluation_is_not_filed_among_the_cells(
    results_store: ResultsStore, disturbed: DisturbedStore, place: Path
) -> None:
    evaluations, result = Evaluations(place), {"schema": 1, "key": "a" * 64, "model": "m", "task": "blimp"}
    result |= {"scoring": "masked", "metrics": {}, "status": "ok"}
    give_up(disturbed)
    with pytest.raises(NoAnswer):
        evaluations.write(result)
    disturbed.proxy.clear()
    assert results_store.file_unfiled() == 0 and results_store.keys() == set()
    assert evaluations.file_unfiled([result["key"]]) == 1 and evaluations.find(result["key"]) == result


@pytest.mark.parametrize("suffix", [".json", ".parquet"])
def test_a_damaged_file_of_a_kept_result_is_set_aside(
    results_store: ResultsStore, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert results_store.unfiled is not None
    write(results_store.unfiled)
    path = results_store.unfiled.path(KEY).with_suffix(suffix)
    assert isinstance(path, Path)
    path.write_bytes(path.read_bytes()[:-3])
    assert (
        results_store.file_unfiled() == 0 and results_store.unfiled.keys() == set() and results_store.find(KEY) is None
    )
    assert f"It is kept as {KEY}.json.damaged and computed again" in capsys.readouterr().err


def test_what_another_process_files_at_the_same_time_is_left_to_it(
    results_store: ResultsStore, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert results_store.unfiled is not None
    write(results_store.unfiled)
    read = results_store.unfiled._read

    def overtaken(key: str) -> dict[str, Any] | None:
        found = read(key)
        assert ResultsStore(place).file_unfiled([key]) == 1
        return found

    monkeypatch.setattr(results_store.unfiled, "_read", overtaken)
    assert results_store.file_unfiled() == 0 and results_store.find(KEY) == make_result(CELL)


def test_a_bucket_that_vanishes_in_a_study_loses_no_result(
    results_store: ResultsStore, disturbed: DisturbedStore
) -> None:
    cells = make_cells(3)
    write(results_store, cells[0])
    files = fsspec.filesystem("s3", use_listings_cache=False, endpoint_url=disturbed.direct)
    files.rm("bucket", recursive=True)
    for look in (
        lambda: results_store.missing(cells),
        lambda: results_store.results(cells),
        lambda: results_store.find(KEY),
        results_store.keys,
        results_store.holders,
    ):
        with pytest.raises(MissingBucket, match="no bucket s3://bucket"):
            look()
    with pytest.raises(MissingBucket, match=r"no bucket s3://bucket.* The computed result is kept in"):
        write(results_store, cells[1])
    files.makedirs("bucket")
    assert results_store.file_unfiled() == 1 and results_store.missing(cells) == [cells[0], cells[2]]


def test_an_address_without_a_bucket_is_refused_when_it_is_given(
    disturbed: DisturbedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLMCLM_STORE_FOLDER", str(tmp_path))
    with pytest.raises(UserError, match=r"there is no bucket s3://nowhere at http.*another with --store"):
        open_place(store="s3://nowhere/prefix")
    disturbed.proxy.outage(3600)
    with pytest.raises(EnvironmentFault, match="does not answer"):  # nobody waits an hour for a mistyped endpoint
        open_place(store=disturbed.url)


def test_the_store_remembers_how_long_to_wait(place: Path, tmp_path: Path) -> None:
    assert bucket_of("s3://another").availability.retry.seconds == 3600
    open_place(store=place, wait_for_storage=7200)
    open_place(store=place)
    assert ResultsStore(place).availability.retry.seconds == 7200
    open_place(store=place, wait_for_storage=60)
    assert ResultsStore(place).availability.retry.seconds == 60
    with pytest.raises(UserError, match=r"--wait-for-storage 5: .*local is a folder.*--store"):
        open_place(store=tmp_path / "local", wait_for_storage=5)
    (place / "storage.json").write_text('{"wait_for_storage": "long"}')
    with pytest.raises(UserError, match="wait_for_storage is 'long'; write a number of seconds"):
        ResultsStore(place)


@pytest.fixture
def worker(results_store: ResultsStore, place: Path, monkeypatch: pytest.MonkeyPatch) -> FakeWorker:
    """A process with a trial of the only cell, outside of Ray."""
    monkeypatch.setattr("mlmclm.sweeps.trainable.compile_kernels", lambda *args: None)
    monkeypatch.setattr("mlmclm.sweeps.trainable.shapes_of", lambda cells: [])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    return FakeWorker(config_of(place))


def config_of(place: Path) -> dict[str, Any]:
    return SweepTrial((Training({KEY: CELL}),), place, resources={"CPU": 1.0}, seen=place).config


def last_report(worker: FakeWorker) -> dict[str, Any]:
    found = worker.step()
    while not found.get("done"):
        found = worker.step()
    return found


def test_a_worker_waits_out_an_outage_and_goes_on(worker: FakeWorker, disturbed: DisturbedStore) -> None:
    disturbed.proxy.outage(1.0)
    assert last_report(worker)["outcomes"] == [COMPUTED]
    assert worker._results_store.find(KEY) is not None and worker._results_store.holders() == {}


def test_a_worker_whose_retries_end_blames_storage_and_another_files_its_result(
    worker: FakeWorker, disturbed: DisturbedStore, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = worker.compute

    def compute_into_an_outage(cells: Any) -> Any:
        give_up(disturbed)
        return compute(cells)

    monkeypatch.setattr("mlmclm.storage.leases.SECONDS_FOR_RELEASE", 0.0)
    monkeypatch.setattr(worker, "compute", compute_into_an_outage)
    report = last_report(worker)
    assert report["outcome"] == STORAGE_FAULT and f"kept in {place}/unfiled" in report["message"]
    disturbed.proxy.clear()
    (worker._results_store.folder.parent / "claims" / f"cells-{KEY}").unlink()  # as after a lease
    monkeypatch.setattr(worker, "compute", lambda cells: pytest.fail("it was computed again"))
    worker.reset_config(config_of(place))
    assert last_report(worker)["outcomes"] == [REUSED]


def test_the_status_line_says_since_when_storage_is_waited_for(
    results_store: ResultsStore, disturbed: DisturbedStore
) -> None:
    available = results_store.availability
    shown = SweepProgress([CELL], table=SweepTable([CELL]), notice=lambda: available.notice)
    notes: list[str] = []
    with shown.shown():
        bar = shown._bar
        assert bar is not None
        available.on_change = lambda: (shown.update(), notes.append(bar._note))
        disturbed.proxy.outage(2.0)
        waiting = threading.Thread(target=results_store.find, args=[KEY])
        waiting.start()
        waiting.join()
    assert notes[0].startswith("waiting for storage since ") and "storage" not in notes[-1]
    assert failure_notes(results_store.folder) == {}


def sweep_of_six(store: DisturbedStore, place: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """Run a sweep whose workers reach the bucket through the proxy; check that it computes each cell once, and no wrong."""
    monkeypatch.setenv("FSSPEC_S3_ENDPOINT_URL", store.proxy.endpoint)
    wait_for_storage(place, 600)
    cells = make_cells(6)
    ray.cloudpickle.register_pickle_by_value(sweep_cells)
    try:
        session = partial(ray_session, place / "ray", num_cpus=2)
        outcome = run_sweep(cells, SweepOptions(store=place, worker=FakeWorker, session=session, **options))
    finally:
        ray.cloudpickle.unregister_pickle_by_value(sweep_cells)
    assert outcome.failed == [] and outcome.not_run == []
    same = [{**result, "cost": None} for result in outcome.results]
    assert same == [{**make_result(cell), "cost": None} for cell in cells], "as without an outage"
    assert not any("retried_after" in result["cost"] for result in outcome.results)
    starts = [path.read_text().splitlines() for path in (place / "starts").iterdir()]
    assert len(starts) == 6 and all(len(each) == 1 for each in starts)
    results_store = ResultsStore(place)
    assert (
        results_store.holders() == {}
        and not ResultsStore(place, root=place / "unfiled").keys()
        and failure_notes(results_store.folder) == {}
    )


@pytest.mark.slow
def test_a_sweep_goes_on_after_an_outage_of_minutes_and_computes_each_cell_once(
    disturbed: DisturbedStore, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    minutes = 180.0  # longer than a lease, and than a worker may be silent
    outage = disturbed.proxy.inject(
        "503", method="PUT", path="/cells/", skip=2, act=lambda: disturbed.proxy.outage(minutes)
    )
    sweep_of_six(disturbed, place, monkeypatch)
    assert outage.matched > 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["out of reach", "writes are refused"])
def test_workers_that_wait_for_storage_while_the_driver_reads_it_are_neither_hung_nor_over_the_time_limit(
    kind: str,
    disturbed: DisturbedStore,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    use_endpoint(disturbed.direct)
    monkeypatch.setattr("mlmclm.sweeps.sweep_trials.SECONDS_UNTIL_HUNG", 10.0)
    ends: list[float] = []

    def begin() -> None:
        if kind == "out of reach":
            disturbed.proxy.outage(40.0)
        else:
            disturbed.proxy.inject("503", method="PUT", times=10**6)
            threading.Timer(40.0, disturbed.proxy.clear).start()
        ends.append(time.monotonic() + 40.0)

    disturbed.proxy.inject("503", method="PUT", path="/cells/", skip=2, act=begin)
    sweep_of_six(disturbed, place, monkeypatch, time_limit=15.0, retries=Retries(hung=0))
    assert ends and time.monotonic() >= ends[0]
    assert re.search(r"waiting for storage since [\d:]+ \([12] of [12] workers\)", capsys.readouterr().err)
