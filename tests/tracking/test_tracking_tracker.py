"""The exporter against real MLflow: idempotent, rebuildable, and never in the way."""

from __future__ import annotations

import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from mlmclm.tracking import views
from mlmclm.tracking.address import default_address
from mlmclm.tracking.connection import Connection
from mlmclm.tracking.index import Entry, Index
from mlmclm.tracking.records import RunRecord
from mlmclm.tracking.tracker import ExportReport, Tracker
from small_results import make_result


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose MLflow database has a schema and nothing else: creating one takes seconds."""
    store = tmp_path_factory.mktemp("empty")
    Connection(default_address(store), "unused", store / "mlflow")
    return store


@pytest.fixture
def store(empty_store: Path, tmp_path: Path) -> Path:
    shutil.copytree(empty_store, tmp_path, dirs_exist_ok=True)
    return tmp_path


def client(store: Path) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(default_address(store))


def runs(store: Path, experiment: str = "study") -> list[Any]:
    found = client(store).get_experiment_by_name(experiment)
    return list(client(store).search_runs([found.experiment_id], order_by=["attributes.run_name ASC"]))


PARENT = RunRecord(
    "p", "parent", params={"a": "1"}, tags={"t": "x"}, metrics=[("m", 0.5, 0, 1000)], start_ms=900, end_ms=1100
)
CHILD = RunRecord("c", "child", parent_key="p", metrics=[("loss", 2.0, 1, 1000), ("loss", 1.0, 2, 1001)])


def export(store: Path, *records: RunRecord) -> ExportReport:
    with closing(Tracker(store, "study")) as tracker:
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
    both = [*runs(store), *runs(store, "study/cells")]
    found = {run.data.tags["mlmclm.kind"]: run for run in both}
    assert len(both) == 4
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
    (group,), (cell,) = runs(store), runs(store, "study/cells")
    for run in (group, cell):
        assert run.data.tags["mlflow.source.git.commit"] == "c0ffee"
        assert (run.data.tags["mlflow.source.name"], bool(run.data.tags["mlflow.user"])) == ("mlmclm", True)
    (data,) = group.inputs.dataset_inputs
    assert (data.dataset.name, data.dataset.digest, data.tags[0].value) == ("sst2", "d" * 36, "fine-tuning")
    number, chosen = re.fullmatch(
        r"\[Its cells\]\(#/experiments/(\d+)/runs\?.*&searchFilter=(.*)\)", group.data.tags["mlflow.note.content"]
    ).groups()
    assert [run.info.run_id for run in client(store).search_runs([number], unquote(chosen))] == [cell.info.run_id]


def test_summaries_are_written_before_cells_that_were_put_earlier(store: Path) -> None:
    cells = [replace(CHILD, key=f"c{number}", bulk=True) for number in range(20)]
    with closing(Tracker(store, "study")) as tracker:
        for record in (*cells, PARENT):
            tracker.put(record)
    (parent,) = runs(store)
    made = [run.data.tags["mlflow.parentRunId"] for run in runs(store, "study/cells")]
    assert len(made) == 20
    # A cell that is written before the parent has none.
    assert made.count(parent.info.run_id) >= 19


def test_closing_waits_for_summaries_and_leaves_cells_that_take_too_long_to_the_next_export(
    store: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    cells = [replace(CHILD, key=f"c{number}", bulk=True) for number in range(12)]
    whole = Connection.export

    def slow(self: Connection, record: RunRecord, content: str, *, look_first: bool) -> str:
        time.sleep(0.5 if record.bulk else 0)
        return whole(self, record, content, look_first=look_first)

    with monkeypatch.context() as patch:
        patch.setattr(Connection, "export", slow)
        tracker = Tracker(store, "study")
        for record in (PARENT, *cells):
            tracker.put(record)
        report = tracker.close(60, 2)
    assert 0 < report.failed < 12
    assert len(runs(store)) == 1
    said = " ".join(capfd.readouterr().err.split())
    assert f"{report.failed} cells are not written to MLflow" in said
    assert "`mlmclm tracking sync STUDY.yaml`" in said
    assert export(store, PARENT, *cells).exported == report.failed
    keys = [run.data.tags["mlmclm.key"] for run in runs(store, "study/cells")]
    assert sorted(keys) == sorted(record.key for record in cells)


def test_runs_of_the_first_layout_are_put_away_and_written_anew_once(
    store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    old = client(store).create_experiment("study", tags={"mlmclm.experiment": "identity"})
    Index(store / "mlflow" / "index.jsonl", "identity").set(
        Entry("p", client(store).create_run(old, tags={"mlmclm.key": "p"}).info.run_id)
    )
    cell = replace(CHILD, bulk=True)
    assert export(store, PARENT, cell) == ExportReport(exported=2, unchanged=0, failed=0)
    assert export(store, PARENT, cell) == ExportReport(exported=0, unchanged=2, failed=0)
    assert (len(runs(store)), len(runs(store, "study/cells"))) == (1, 1)
    aside = client(store).get_experiment(old)
    assert (aside.name, aside.lifecycle_stage) == ("study/first layout 1", "deleted")
    assert f"`mlflow experiments restore -x {old}`" in " ".join(capfd.readouterr().err.split())


def test_a_run_deleted_by_hand_comes_back_unchanged_when_runs_are_verified(store: Path) -> None:
    export(store, PARENT, replace(CHILD, bulk=True))
    client(store).delete_run(runs(store, "study/cells")[0].info.run_id)
    with closing(Tracker(store, "study", verify=True)) as tracker:
        tracker.put(PARENT)
        tracker.put(replace(CHILD, bulk=True))
        assert tracker.close() == ExportReport(exported=1, unchanged=1, failed=0)
    assert len(runs(store, "study/cells")) == 1


def test_the_same_records_again_change_nothing(store: Path) -> None:
    export(store, PARENT, CHILD)
    before = [run.to_dictionary() for run in runs(store)]
    assert export(store, PARENT, CHILD) == ExportReport(exported=0, unchanged=2, failed=0)
    assert [run.to_dictionary() for run in runs(store)] == before


def test_an_ended_run_that_is_announced_again_stays_as_it_is(store: Path) -> None:
    export(store, PARENT, CHILD)
    before = [run.to_dictionary() for run in runs(store)]
    announced = RunRecord("p", "parent", status="RUNNING")
    assert export(store, announced) == ExportReport(exported=0, unchanged=1, failed=0)
    assert export(store, PARENT, CHILD) == ExportReport(exported=0, unchanged=2, failed=0)
    assert [run.to_dictionary() for run in runs(store)] == before


def test_a_record_with_more_points_appends_only_those(store: Path) -> None:
    export(store, PARENT, replace(CHILD, status="RUNNING"))
    assert runs(store)[0].info.status == "RUNNING"
    longer = replace(CHILD, metrics=[*CHILD.metrics, ("loss", 0.5, 3, 1002)])
    assert export(store, PARENT, longer) == ExportReport(exported=1, unchanged=1, failed=0)
    child, _ = runs(store)
    history = client(store).get_metric_history(child.info.run_id, "loss")
    assert [(point.step, point.value) for point in history] == [(1, 2.0), (2, 1.0), (3, 0.5)]
    assert child.info.status == "FINISHED"


def test_a_changed_metric_is_the_latest_and_a_changed_parameter_is_shown_beside_the_old_one(store: Path) -> None:
    export(store, PARENT)
    export(store, replace(PARENT, metrics=[("m", 0.7, 0, 1000)], params={"a": "2", "b": "3"}))
    (parent,) = runs(store)
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


def test_a_lost_index_finds_the_runs_again_instead_of_doubling_them(store: Path) -> None:
    export(store, PARENT, CHILD)
    (store / "mlflow" / "index.jsonl").unlink()
    export(store, PARENT, CHILD)
    child, _ = runs(store)
    assert len(client(store).get_metric_history(child.info.run_id, "loss")) == 2


def test_a_run_whose_maker_was_killed_before_noting_it_is_taken_up(store: Path) -> None:
    export(store, PARENT)
    experiment = client(store).get_experiment_by_name("study").experiment_id
    client(store).create_run(experiment, tags={"mlmclm.key": "c"}, run_name="child")
    export(store, PARENT, CHILD)
    child, parent = runs(store)
    assert (child.info.status, child.data.metrics["loss"]) == ("FINISHED", 1.0)
    assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id


def test_a_run_deleted_by_hand_comes_back_once_its_record_changes(store: Path) -> None:
    export(store, PARENT)
    client(store).delete_run(runs(store)[0].info.run_id)
    export(store, replace(PARENT, metrics=[("m", 0.7, 0, 1000)]))
    assert [run.data.metrics for run in runs(store)] == [{"m": 0.7}]


def test_a_reply_lost_after_creating_a_run_does_not_double_it(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert export(store, PARENT) == ExportReport(exported=1, unchanged=0, failed=0)
    assert [run.info.run_id for run in runs(store)] == [lost[0].info.run_id]


def test_a_server_that_dies_neither_holds_up_nor_fails_the_work(store: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{probe.getsockname()[1]}"
    tracker = Tracker(store, "study", address=address)
    began = time.monotonic()
    tracker.put(PARENT)
    tracker.put(CHILD)
    assert time.monotonic() - began < 0.5
    report = tracker.close(timeout=1)
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
