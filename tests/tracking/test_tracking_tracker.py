"""The exporter against real MLflow: idempotent, rebuildable, and never in the way."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import sqlalchemy

from mlmclm.storage.files import in_turn
from mlmclm.tracking import saved_views, views
from mlmclm.tracking import tracker as tracker_module
from mlmclm.tracking.address import default_address
from mlmclm.tracking.connection import Connection
from mlmclm.tracking.database import sqlite_address
from mlmclm.tracking.index import Entry, Index
from mlmclm.tracking.records import RunRecord
from mlmclm.tracking.tracker import ExportReport, Tracker, next_batch, passing
from small_results import make_result


@pytest.fixture
def store(empty_store: Path, tmp_path: Path) -> Path:
    shutil.copytree(empty_store, tmp_path, dirs_exist_ok=True)
    return tmp_path


def client(store: Path, address: str | None = None) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(address or default_address(store))


def runs(store: Path, address: str | None = None) -> list[Any]:
    found = client(store, address).get_experiment_by_name("study")
    return list(client(store, address).search_runs([found.experiment_id], order_by=["attributes.run_name ASC"]))


@pytest.fixture
def elsewhere(empty_store: Path, tmp_path: Path) -> str:
    """The address of a database that isn't the store's own."""
    shutil.copy(empty_store / "mlflow" / "mlflow.db", tmp_path / "other.db")
    return sqlite_address(tmp_path / "other.db")


@dataclass(frozen=True)
class Place:
    """A store, and the address to which its records are written; None for its own database."""

    store: Path
    address: str | None

    def export(self, *records: RunRecord) -> ExportReport:
        return export(self.store, *records, address=self.address)

    def runs(self) -> list[Any]:
        return runs(self.store, self.address)

    def client(self) -> Any:
        return client(self.store, self.address)


@pytest.fixture(params=["in the store", "elsewhere"])
def place(request: pytest.FixtureRequest, store: Path, elsewhere: str) -> Place:
    return Place(store, None if request.param == "in the store" else elsewhere)


PARENT = RunRecord(
    "p", "parent", params={"a": "1"}, tags={"t": "x"}, metrics=[("m", 0.5, 0, 1000)], start_ms=900, end_ms=1100
)
CHILD = RunRecord("c", "child", parent_key="p", metrics=[("loss", 2.0, 1, 1000), ("loss", 1.0, 2, 1001)])


def export(store: Path, *records: RunRecord, address: str | None = None) -> ExportReport:
    with closing(Tracker(store, "study", address=address)) as tracker:
        for record in records:
            tracker.put(record)
        return tracker.close()


def test_records_become_finished_runs_with_all_that_is_in_them(store: Path, tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("a,b\n")
    report = export(store, replace(PARENT, artifacts=[(tmp_path / "table.csv", "tables")]), CHILD)
    assert report == ExportReport(exported=2, unchanged=0, failed=0)
    child, parent = runs(store)
    assert (parent.info.run_name, parent.info.status) == ("parent", "FINISHED")
    assert (parent.info.start_time, parent.info.end_time) == (900, 1100)
    assert (parent.data.params, parent.data.metrics) == ({"a": "1"}, {"m": 0.5})
    assert parent.data.tags.items() >= {"t": "x", "mlmclm.key": "p"}.items()
    assert [item.path for item in client(store).list_artifacts(parent.info.run_id, "tables")] == ["tables/table.csv"]
    assert (store / "mlflow" / "artifacts" / parent.info.run_id / "artifacts" / "tables" / "table.csv").exists()
    assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert [point.value for point in client(store).get_metric_history(child.info.run_id, "loss")] == [2.0, 1.0]


def test_mlflow_finds_sweep_groups_cells_and_stages_by_their_kind_each_below_its_own(store: Path) -> None:
    result = make_result(model="m")
    sweep = views.sweep_record("study", models=["m"], tasks=["sst2"], learning_rates=[1e-3], seeds=[2])
    group = views.group_record("study", "m", "sst2")
    cell = views.cell_record("study", result)
    stage = views.stage_record("study", stage="s", title="m clm 0-10", settings={}, rows=[])
    export(store, sweep, group, cell, stage)
    found = {run.data.tags["mlmclm.kind"]: run for run in runs(store)}
    assert len(runs(store)) == 4
    names = {kind: run.info.run_name for kind, run in found.items()}
    assert names == {
        "sweep": "sweep study",
        "group": "m sst2",
        "cell": "sst2 lr0.001 s2 m",
        "pretraining": "m clm 0-10",
    }
    parents = {kind: run.data.tags.get("mlflow.parentRunId") for kind, run in found.items()}
    ids = {kind: run.info.run_id for kind, run in found.items()}
    assert parents == {"sweep": None, "group": ids["sweep"], "cell": ids["group"], "pretraining": None}


def test_a_run_names_its_user_program_commit_and_data_sets_and_its_cells(store: Path) -> None:
    result = make_result(task_data="d" * 64)
    result["cost"]["commit"] = "c0ffee"
    export(
        store, views.group_record("study", "2m-clm-600", "sst2", results=[result]), views.cell_record("study", result)
    )
    group, cell = runs(store)
    for run in (group, cell):
        assert run.data.tags["mlflow.source.git.commit"] == "c0ffee"
        assert (run.data.tags["mlflow.source.name"], bool(run.data.tags["mlflow.user"])) == ("mlmclm", True)
    (data,) = group.inputs.dataset_inputs
    assert (data.dataset.name, data.dataset.digest, data.tags[0].value) == ("sst2", "d" * 36, "fine-tuning")
    number, chosen = re.fullmatch(
        r"\[Its cells\]\(#/experiments/(\d+)/runs\?.*&searchFilter=(.*)\)", group.data.tags["mlflow.note.content"]
    ).groups()
    assert [run.info.run_id for run in client(store).search_runs([number], unquote(chosen))] == [cell.info.run_id]


def test_the_child_runs_that_mlflow_looks_for_in_a_parents_own_experiment_are_its_cells(store: Path) -> None:
    cells = [views.cell_record("study", make_result(key=str(n), model=m)) for n in range(3) for m in ("a", "b")]
    groups = [views.group_record("study", model, "sst2") for model in ("a", "b")]
    export(store, *groups, *cells)
    for group in (run for run in runs(store) if run.data.tags["mlmclm.kind"] == "group"):
        # The query of the page of a run in MLflow 3.17.
        found = client(store).search_runs(
            [group.info.experiment_id],
            f"tags.`mlflow.parentRunId` = '{group.info.run_id}'",
            order_by=["attributes.start_time DESC"],
        )
        assert [run.data.params["model"] for run in found] == 3 * [group.data.params["model"]]


def test_every_view_of_a_study_shows_the_runs_that_it_is_for(store: Path) -> None:
    sweep = views.sweep_record("study", models=["m"], tasks=["sst2"], learning_rates=[1e-3], seeds=[2])
    stage = views.stage_record("study", stage="s", title="m clm 0-10", settings={}, rows=[])
    export(store, sweep, stage, views.group_record("study", "m", "sst2"), views.cell_record("study", make_result()))
    experiment = client(store).get_experiment_by_name("study")
    shown = {}
    for key in (saved_views.VIEW, saved_views.CELLS, saved_views.CHARTS):
        state = json.loads(json.loads(experiment.tags[f"mlflow.sharedViewState.{key}"])["state"])
        order = f"{state['orderByKey']} {'ASC' if state['orderByAsc'] else 'DESC'}"
        found = client(store).search_runs([experiment.experiment_id], state["searchFilter"], order_by=[order])
        shown[key] = {run.data.tags["mlmclm.kind"] for run in found}
    assert shown == {
        saved_views.VIEW: {"sweep", "pretraining", "group"},
        saved_views.CELLS: {"cell"},
        saved_views.CHARTS: {"group"},
    }


@pytest.mark.parametrize("size", [1, 3, 100])
def test_batches_are_full_and_hold_parents_before_their_children_and_suspects_alone(size: int) -> None:
    parents = {"a": "b", "b": "c", "d": "c", "e": "not queued"}
    queue = {key: RunRecord(key, key, parents.get(key)) for key in "abcdef"}
    seen: list[str] = []
    while queue:
        batch = [record.key for record in next_batch(queue, size, alone={"d"})]
        assert len(batch) <= size
        assert batch == ["d"] or "d" not in batch
        for key in batch:
            del queue[key]
            assert parents.get(key) not in queue, "a child comes before its parent"
        seen += batch
    assert sorted(seen) == list("abcdef")


def test_summaries_are_written_before_cells_that_were_put_earlier(store: Path, elsewhere: str) -> None:
    cells = [replace(CHILD, key=f"c{number}", bulk=True) for number in range(20)]
    with closing(Tracker(store, "study", address=elsewhere)) as tracker:
        for record in (*cells, PARENT):
            tracker.put(record)
    *made, parent = runs(store, elsewhere)
    parents = [run.data.tags.get("mlflow.parentRunId") for run in made]
    # A cell that is written before the parent has none.
    assert (len(made), parents.count(parent.info.run_id) >= 19) == (20, True)


def slow_after(count: int, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let a connection export so many records, and the rest only once the event is set."""
    go_on, whole, seen = threading.Event(), Connection.export, itertools.count()

    def slow(self: Connection, records: list[RunRecord], **options: Any) -> int:
        if next(seen) >= count:
            go_on.wait()
        return whole(self, records, **options)

    monkeypatch.setattr(Connection, "export", slow)
    return go_on


@pytest.mark.parametrize("way", [{"patience": 0.5}, {"limit": 0.5}])
def test_cells_that_are_not_written_in_time_are_counted_and_left_to_the_next_export(
    store: Path,
    elsewhere: str,
    way: dict[str, float],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    cells = [replace(CHILD, key=f"c{number}", bulk=True) for number in range(12)]
    monkeypatch.setattr("mlmclm.tracking.tracker.STOP_SECONDS", 0.1)
    with monkeypatch.context() as patch:
        go_on = slow_after(4, patch)
        tracker = Tracker(store, "study", address=elsewhere)
        for record in (PARENT, *cells):
            tracker.put(record)
        while tracker._exported < 4:
            time.sleep(0.01)
        report = tracker.close(**way)
        go_on.set()
        tracker._thread.join()
    assert (report.exported, report.failed) == (4, 9)
    said = " ".join(capfd.readouterr().err.split())
    assert "9 cells could not be written to MLflow" in said
    assert "`mlmclm tracking sync STUDY.yaml`" in said
    assert export(store, PARENT, *cells, address=elsewhere).exported == 8  # one was being written
    keys = [run.data.tags["mlmclm.key"] for run in runs(store, elsewhere)]
    assert sorted(keys) == sorted(record.key for record in (PARENT, *cells))


class Unanswered(Exception):
    """An error that says nothing by itself."""


def failing(monkeypatch: pytest.MonkeyPatch, times: float, error: Callable[[], Exception]) -> list[int]:
    """Let that many exports fail; return the list to which each adds the number of its records."""
    whole, tried = Connection.export, list[int]()

    def fail(self: Connection, records: list[RunRecord], **options: Any) -> int:
        tried.append(len(records))
        if len(tried) <= times:
            raise Unanswered("failed") from error()
        return whole(self, records, **options)

    monkeypatch.setattr(Connection, "export", fail)
    monkeypatch.setattr(tracker_module, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(tracker_module, "SECONDS_OF_SILENCE", -1.0)
    return tried


@pytest.mark.parametrize("error", [sqlite3.OperationalError("database is locked"), OSError(28, "disk full")])
def test_closing_waits_for_a_database_that_is_locked_or_out_of_reach_and_says_so(
    store: Path, error: Exception, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    failing(monkeypatch, 6, lambda: error)
    monkeypatch.setattr("mlmclm.progress.SECONDS_BETWEEN_LINES", 0.0)
    with closing(Tracker(store, "study")) as tracker:
        tracker.put(PARENT)
        tracker.put(CHILD)
        assert tracker.close(patience=60) == ExportReport(exported=2, unchanged=0, failed=0)
    assert len(runs(store)) == 2
    assert "trying again (Unanswered: failed)" in capfd.readouterr().err


@pytest.mark.parametrize("error", [TypeError("no such column"), PermissionError(13, "Permission denied")])
def test_closing_leaves_what_fails_for_a_reason_that_does_not_pass(
    store: Path, error: Exception, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tried = failing(monkeypatch, math.inf, lambda: error)
    with closing(Tracker(store, "study")) as tracker:
        tracker.put(PARENT)
        report = tracker.close(patience=30)
    assert (report.failed, report.error) == (1, "Unanswered: failed") and len(tried) in (3, 4)
    assert "1 record could not be written to MLflow" in " ".join(capfd.readouterr().err.split())


def test_an_error_passes_if_it_needs_nobody_to_act(tmp_path: Path) -> None:
    def raised(act: Callable[[], object]) -> Exception:
        with pytest.raises(Exception) as caught:
            act()
        return caught.value

    def asked(statement: str, mode: str = "rw") -> None:
        with sqlalchemy.create_engine(f"sqlite:///{database.as_uri()}?mode={mode}&uri=true").connect() as connection:
            connection.execute(sqlalchemy.text(statement))

    def write(path: Path) -> None:
        with path.open("wb", buffering=0) as file:
            file.write(b"x")

    database, file = tmp_path / "a.db", tmp_path / "file"
    file.touch()
    with closing(sqlite3.connect(database)) as other:
        assert not passing(raised(lambda: asked("SELECT * FROM runs"))), "no such table"
        assert not passing(raised(lambda: asked("SELECT run FROM sqlite_master"))), "no such column"
        assert not passing(raised(lambda: asked("CREATE TABLE runs (a)", mode="ro"))), "it may only be read"
        other.execute("BEGIN EXCLUSIVE")
        with closing(sqlite3.connect(database, timeout=0.0)) as connection:
            assert passing(raised(lambda: connection.execute("CREATE TABLE runs (a)"))), "it is locked"
    assert not passing(raised(lambda: in_turn(file / "lock").__enter__())), "a file is in the way"
    assert not passing(raised(lambda: write(tmp_path / "none" / "artifact"))), "it is missing"
    assert passing(raised(lambda: write(Path("/dev/full")))), "the disk is full"
    assert passing(raised(lambda: socket.create_connection(("127.0.0.1", 9), timeout=1.0))), "nobody answers"


def test_closing_waits_as_long_as_records_are_written(
    store: Path, elsewhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Connection.export

    def slow(self: Connection, records: list[RunRecord], **options: Any) -> int:
        time.sleep(0.2)
        return whole(self, records, **options)

    monkeypatch.setattr(Connection, "export", slow)
    with closing(Tracker(store, "study", address=elsewhere)) as tracker:
        tracker.put(PARENT)
        while not tracker._exported:
            time.sleep(0.01)
        for number in range(15):
            tracker.put(replace(CHILD, key=f"c{number}", bulk=True))
        assert tracker.close(patience=2.0) == ExportReport(exported=16, unchanged=0, failed=0)


def test_a_run_deleted_by_hand_comes_back_unchanged_when_runs_are_verified(store: Path) -> None:
    export(store, PARENT, replace(CHILD, bulk=True))
    client(store).delete_run(runs(store)[0].info.run_id)
    with closing(Tracker(store, "study", verify=True)) as tracker:
        tracker.put(PARENT)
        tracker.put(replace(CHILD, bulk=True))
        assert tracker.close() == ExportReport(exported=1, unchanged=1, failed=0)
    child, parent = runs(store)
    assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id


def test_the_same_records_again_change_nothing(place: Place) -> None:
    place.export(PARENT, CHILD)
    before = [run.to_dictionary() for run in place.runs()]
    assert place.export(PARENT, CHILD) == ExportReport(exported=0, unchanged=2, failed=0)
    assert [run.to_dictionary() for run in place.runs()] == before


def test_an_ended_run_that_is_announced_again_stays_as_it_is(place: Place) -> None:
    place.export(PARENT, CHILD)
    before = [run.to_dictionary() for run in place.runs()]
    announced = RunRecord("p", "parent", status="RUNNING")
    assert place.export(announced) == ExportReport(exported=0, unchanged=1, failed=0)
    assert place.export(PARENT, CHILD) == ExportReport(exported=0, unchanged=2, failed=0)
    assert [run.to_dictionary() for run in place.runs()] == before


def test_a_record_with_more_points_appends_only_those(place: Place) -> None:
    place.export(PARENT, replace(CHILD, status="RUNNING"))
    assert place.runs()[0].info.status == "RUNNING"
    longer = replace(CHILD, metrics=[*CHILD.metrics, ("loss", 0.5, 3, 1002)])
    assert place.export(PARENT, longer) == ExportReport(exported=1, unchanged=1, failed=0)
    child, _ = place.runs()
    history = place.client().get_metric_history(child.info.run_id, "loss")
    assert [(point.step, point.value) for point in history] == [(1, 2.0), (2, 1.0), (3, 0.5)]
    assert child.info.status == "FINISHED"


def test_elsewhere_a_changed_metric_is_the_latest_and_a_changed_parameter_is_shown_beside_the_old_one(
    store: Path, elsewhere: str
) -> None:
    export(store, PARENT, address=elsewhere)
    changed = replace(PARENT, metrics=[("m", 0.7, 0, 1000)], params={"a": "2", "b": "3"})
    export(store, changed, address=elsewhere)
    (parent,) = runs(store, elsewhere)
    assert parent.data.metrics == {"m": 0.7}
    assert parent.data.params == {"a": "1", "b": "3"}
    assert parent.data.tags["changed.a"] == "2"


def test_a_deleted_database_is_rebuilt_from_the_records(store: Path, empty_store: Path) -> None:
    export(store, PARENT, CHILD)
    # In another folder, for MLflow keeps a database open under its name as long as the process lives.
    fresh = store / "fresh"
    shutil.copytree(empty_store / "mlflow", fresh / "mlflow")
    shutil.copy(store / "mlflow" / "index.jsonl", fresh / "mlflow")  # an index that outlived its database
    assert export(fresh, PARENT, CHILD) == ExportReport(exported=2, unchanged=0, failed=0)
    child, parent = runs(fresh)
    assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id


def test_a_lost_index_finds_the_runs_again_instead_of_doubling_them(place: Place) -> None:
    place.export(PARENT, CHILD)
    (place.store / "mlflow" / "index.jsonl").unlink()
    place.export(PARENT, CHILD)
    child, _ = place.runs()
    assert len(place.client().get_metric_history(child.info.run_id, "loss")) == 2


def test_a_run_whose_maker_was_killed_before_noting_it_is_taken_up(place: Place) -> None:
    place.export(PARENT)
    experiment = place.client().get_experiment_by_name("study").experiment_id
    place.client().create_run(experiment, tags={"mlmclm.key": "c"}, run_name="child")
    place.export(PARENT, CHILD)
    child, parent = place.runs()
    assert (child.info.status, child.data.metrics["loss"]) == ("FINISHED", 1.0)
    assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id


def test_a_run_deleted_by_hand_comes_back_once_its_record_changes(place: Place) -> None:
    place.export(PARENT)
    place.client().delete_run(place.runs()[0].info.run_id)
    place.export(replace(PARENT, metrics=[("m", 0.7, 0, 1000)]))
    assert [run.data.metrics for run in place.runs()] == [{"m": 0.7}]


def test_a_reply_lost_after_creating_a_run_does_not_double_it(
    store: Path, elsewhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking import MlflowClient

    create = MlflowClient.create_run
    lost = []

    def lossy(self: Any, *arguments: Any, **options: Any) -> Any:
        run = create(self, *arguments, **options)
        if not lost:
            lost.append(run)
            raise ConnectionResetError("the reply is lost")
        return run

    monkeypatch.setattr(MlflowClient, "create_run", lossy)
    assert export(store, PARENT, address=elsewhere) == ExportReport(exported=1, unchanged=0, failed=0)
    assert [run.info.run_id for run in runs(store, elsewhere)] == [lost[0].info.run_id]


def test_a_server_that_dies_neither_holds_up_nor_fails_the_work(store: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{probe.getsockname()[1]}"
    tracker = Tracker(store, "study", address=address)
    began = time.monotonic()
    tracker.put(PARENT)
    tracker.put(CHILD)
    assert time.monotonic() - began < 0.5
    report = tracker.close(1)
    assert report.failed == 2
    said = " ".join(capfd.readouterr().err.split())
    assert f"2 records could not be written to MLflow at {address}" in said
    assert "the same command run again" in said


def test_putting_a_queued_record_again_replaces_it(store: Path) -> None:
    with closing(Tracker(store, "study")) as tracker:
        for value in range(50):
            tracker.put(replace(PARENT, metrics=[("m", float(value), 0, 1000)]))
    assert runs(store)[0].data.metrics["m"] == 49.0


@pytest.fixture
def index_path(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "index.jsonl"


def test_an_index_survives_a_line_that_was_cut_off(index_path: Path) -> None:
    index = Index(index_path, "x")
    index.set(Entry("a", "run 1", "hash", 3, "points", None))
    index.set(Entry("b", "run 2"))
    index_path.write_text(index_path.read_text()[:-10])
    again = Index(index_path, "x")
    assert again.get("a") == Entry("a", "run 1", "hash", 3, "points", None)
    assert again.get("b") is None
    again.set(Entry("c", "run 3"))
    assert Index(index_path, "x").get("c") == Entry("c", "run 3")


def test_a_damaged_line_of_an_index_is_left_out(index_path: Path) -> None:
    index = Index(index_path, "x")
    index.set(Entry("a", "run 1"))
    index.set(Entry("b", "run 2"))
    index_path.write_text(index_path.read_text().replace("run 1", "run 9"))
    found = Index(index_path, "x")
    assert (found.get("a"), found.get("b")) == (None, Entry("b", "run 2"))


def test_an_index_keeps_its_last_entries_and_those_of_others_when_it_is_compacted(index_path: Path) -> None:
    Index(index_path, "other").set(Entry("a", "theirs"))
    index = Index(index_path, "x")
    for number in range(300):
        index.set(Entry("a", "ours", points=number))
    assert Index(index_path, "x").get("a") == Entry("a", "ours", points=299)
    assert len(index_path.read_text().splitlines()) == 2
    assert Index(index_path, "other").get("a") == Entry("a", "theirs")


def test_the_exporters_thread_does_not_keep_the_process_alive(store: Path) -> None:
    tracker = Tracker(store, "study")
    assert any(thread.name == "mlmclm-tracker" and thread.daemon for thread in threading.enumerate())
    tracker.close()
