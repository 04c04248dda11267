"""Writers against real MLflow, in the store's own database and elsewhere: whole, idempotent, and never twice."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from mlflow.exceptions import MlflowException

from fault_proxy import FaultProxy
from mlmclm.errors import EnvironmentFault
from mlmclm.tracking import saved_views, views
from mlmclm.tracking.database import sqlite_address
from mlmclm.tracking.experiment import writer_of
from mlmclm.tracking.records import RunRecord
from small_mlflow import client, export, runs
from small_results import make_result


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

    def export(self, *records: RunRecord) -> int:
        return export(self.store, records, address=self.address)

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


def test_records_become_finished_runs_with_all_that_is_in_them(store: Path, tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("a,b\n")
    assert export(store, [replace(PARENT, artifacts=[(tmp_path / "table.csv", "tables")]), CHILD]) == 2
    child, parent = runs(store)
    assert (parent.info.run_name, parent.info.status) == ("parent", "FINISHED")
    assert (parent.info.start_time, parent.info.end_time) == (900, 1100)
    assert (parent.data.params, parent.data.metrics) == ({"a": "1"}, {"m": 0.5})
    assert parent.data.tags.items() >= {"t": "x", "mlmclm.key": "p"}.items()
    assert [item.path for item in client(store).list_artifacts(parent.info.run_id, "tables")] == ["tables/table.csv"]
    assert (store / "mlflow" / "artifacts" / parent.info.run_id / "artifacts" / "tables" / "table.csv").exists()
    assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert [point.value for point in client(store).get_metric_history(child.info.run_id, "loss")] == [2.0, 1.0]


def test_mlflow_finds_the_runs_of_a_study_by_kind_below_their_own_and_in_the_views_that_are_for_them(
    store: Path,
) -> None:
    grid: dict[str, Any] = {"models": ["a", "b"], "tasks": ["sst2"], "learning_rates": [1e-3], "seeds": [2]}
    groups = [views.group_record("study", model, "sst2") for model in "ab"]
    cells = [views.cell_record("study", make_result(key=str(number), model=m)) for number in range(3) for m in "ab"]
    stage = views.stage_record("study", stage="s", title="a clm 0-10", settings={})
    model = views.model_record("study", "a", about={})
    export(store, [views.sweep_record("study", **grid), stage, model, *groups, *cells])
    found = runs(store)
    by_name = {run.info.run_name: run.info.run_id for run in found}
    assert {run.info.run_name: run.data.tags.get("mlflow.parentRunId") for run in found} == {
        "sweep study": None,
        "a clm 0-10": None,
        **dict.fromkeys(("a", "a sst2", "b sst2"), by_name["sweep study"]),
        **{f"sst2 lr1e-3 s2 {name}": by_name[f"{name} sst2"] for name in "ab"},
    }
    experiment = client(store).get_experiment_by_name("study")
    for name in "ab":
        # The query of the page of a run in MLflow 3.17.
        children = client(store).search_runs(
            [experiment.experiment_id],
            f"tags.`mlflow.parentRunId` = '{by_name[f'{name} sst2']}'",
            order_by=["attributes.start_time DESC"],
        )
        assert [run.data.params["model"] for run in children] == 3 * [name]
    shown = {}
    for key in (saved_views.VIEW, saved_views.CELLS, saved_views.CHARTS):
        state = json.loads(json.loads(experiment.tags[f"mlflow.sharedViewState.{key}"])["state"])
        order = f"{state['orderByKey']} {'ASC' if state['orderByAsc'] else 'DESC'}"
        seen = client(store).search_runs([experiment.experiment_id], state["searchFilter"], order_by=[order])
        shown[key] = {run.data.tags["mlmclm.kind"] for run in seen}
    assert shown == {
        saved_views.VIEW: {"sweep", "pretraining", "model"},
        saved_views.CELLS: {"cell"},
        saved_views.CHARTS: {"model"},
    }


def test_a_run_names_its_user_program_commit_and_data_sets_and_its_cells(store: Path) -> None:
    result = make_result(task_data="d" * 64)
    result["cost"]["commit"] = "c0ffee"
    records = views.group_record("study", "2m-clm-600", "sst2", results=[result]), views.cell_record("study", result)
    export(store, records)
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


def test_the_same_records_again_change_nothing(place: Place) -> None:
    place.export(PARENT, CHILD)
    before = [run.to_dictionary() for run in place.runs()]
    assert place.export(PARENT, CHILD) == 0
    assert [run.to_dictionary() for run in place.runs()] == before


def test_an_ended_run_that_is_announced_again_stays_as_it_is(place: Place) -> None:
    place.export(PARENT, CHILD)
    before = [run.to_dictionary() for run in place.runs()]
    announced = RunRecord("p", "parent", status="RUNNING")
    assert place.export(announced) == 0
    assert place.export(PARENT, CHILD) == 0
    assert [run.to_dictionary() for run in place.runs()] == before


def test_a_record_with_more_points_appends_only_those(place: Place) -> None:
    place.export(PARENT, replace(CHILD, status="RUNNING"))
    assert place.runs()[0].info.status == "RUNNING"
    longer = replace(CHILD, metrics=[*CHILD.metrics, ("loss", 0.5, 3, 1002)])
    assert place.export(PARENT, longer) == 1
    child, _ = place.runs()
    history = place.client().get_metric_history(child.info.run_id, "loss")
    assert [(point.step, point.value) for point in history] == [(1, 2.0), (2, 1.0), (3, 0.5)]
    assert child.info.status == "FINISHED"


def test_elsewhere_a_changed_metric_is_the_latest_and_a_changed_parameter_is_shown_beside_the_old_one(
    store: Path, elsewhere: str
) -> None:
    export(store, [PARENT], address=elsewhere)
    changed = replace(PARENT, metrics=[("m", 0.7, 0, 1000)], params={"a": "2", "b": "3"})
    export(store, [changed], address=elsewhere)
    (parent,) = runs(store, elsewhere)
    assert parent.data.metrics == {"m": 0.7}
    assert parent.data.params == {"a": "1", "b": "3"}
    assert parent.data.tags["changed.a"] == "2"


def test_a_run_whose_maker_was_killed_before_noting_it_is_taken_up(place: Place) -> None:
    place.export(PARENT)
    experiment = place.client().get_experiment_by_name("study").experiment_id
    place.client().create_run(experiment, tags={"mlmclm.key": "c"}, run_name="child")
    place.export(PARENT, CHILD)
    child, parent = place.runs()
    assert (child.info.status, child.data.metrics["loss"]) == ("FINISHED", 1.0)
    assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id


def test_points_of_a_running_run_are_added_and_those_of_an_ended_one_are_all_that_it_has(store: Path) -> None:
    """A worker that was started again repeats steps, and only the state in which a stage ends says which count."""
    running = replace(CHILD, status="RUNNING")
    for points in ([("loss", 2.0, 1, 1000), ("loss", 1.0, 2, 1001)], [("loss", 1.5, 2, 2000), ("loss", 0.5, 3, 2001)]):
        assert export(store, [replace(running, metrics=points)]) == 1
    (run,) = runs(store)
    assert run.data.metrics == {"loss": 0.5}
    assert len(client(store).get_metric_history(run.info.run_id, "loss")) == 4
    whole = [("loss", 2.0, 1, 1000), ("loss", 1.5, 2, 2000), ("loss", 0.5, 3, 2001)]
    assert export(store, [replace(CHILD, metrics=whole)]) == 1
    history = client(store).get_metric_history(run.info.run_id, "loss")
    assert sorted((point.step, point.value) for point in history) == [(1, 2.0), (2, 1.5), (3, 0.5)]
    assert export(store, [replace(CHILD, metrics=whole)]) == 0


def test_a_run_deleted_by_hand_comes_back_below_its_parent(place: Place) -> None:
    place.export(PARENT, CHILD)
    place.client().delete_run(place.runs()[0].info.run_id)
    assert place.export(PARENT, CHILD) == 1
    child, parent = place.runs()
    assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id


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
    with writer_of(elsewhere, "study", store) as writer:
        with pytest.raises(ConnectionResetError):
            writer.write([PARENT])
        assert writer.write([PARENT]) == 1
    assert [run.info.run_id for run in runs(store, elsewhere)] == [lost[0].info.run_id]


def test_a_request_without_a_reply_is_sent_once(store: Path) -> None:
    """MLflow's client would send it again by itself, and a run that it creates would be there twice."""
    with FaultProxy("http://127.0.0.1:9") as proxy:
        proxy.inject("cut", times=100)
        with pytest.raises(MlflowException, match="get-by-name"), writer_of(proxy.endpoint, "study", store):
            pass
        assert len(proxy.seen) == 1


def test_an_experiment_is_open_in_one_process_of_a_store_and_a_second_one_can_wait(store: Path, elsewhere: str) -> None:
    with writer_of(elsewhere, "study", store):
        with pytest.raises(EnvironmentFault, match="already being worked on"):
            export(store, [PARENT], address=elsewhere)
        assert export(store, [PARENT], address=elsewhere, experiment="other") == 1
    assert export(store, [PARENT], address=elsewhere) == 1
