"""Runs written in bulk are those that MLflow's client writes, whole or absent, and never twice."""

from __future__ import annotations

import math
import platform
import shutil
import signal
import sqlite3
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import psutil
import pytest
from mlflow import MlflowClient

from mlmclm.service.mlflow_server import running_server
from mlmclm.service.run_service import study_links
from mlmclm.service.state import MLFLOW, ServiceState, members_of, write_service_state
from mlmclm.storage.files import machine
from mlmclm.tracking import saved_views, views
from mlmclm.tracking.address import default_address, experiment_id
from mlmclm.tracking.database import sqlite_address
from mlmclm.tracking.records import DataSet, RunRecord
from small_mlflow import export, names, runs
from small_results import make_result

KILLED = """
import os, sys
from pathlib import Path
from sqlalchemy import event
from sqlalchemy.engine import Engine
from mlmclm.tracking.address import default_address, experiment_id
from mlmclm.tracking.experiment import writer_of
from mlmclm.tracking.records import RunRecord
store, moment = Path(sys.argv[1]), sys.argv[2]
records = [RunRecord(f"k{n}", f"run {n}", params={"n": str(n)}, metrics=[("m", n, 0, 1000)]) for n in range(100)]
if moment == "inserting":
    @event.listens_for(Engine, "before_cursor_execute")
    def die(connection, cursor, statement, *_):
        if "INSERT INTO tags" in statement:
            os.kill(os.getpid(), 9)
with writer_of(default_address(store), "study", store) as writer:
    writer.write(records)
    os.kill(os.getpid(), 9)
"""
"""A process that is killed while it writes 100 runs."""
CELLS = [
    views.cell_record("study", make_result(key=str(number), seed=number), about={"objective": "clm", "tokens": ""})
    for number in range(4)
]
CURVE = [("loss", 2.0, 1, 1000), ("loss", 1.0, 2, 1001), ("loss", 3.0, 2, 1001), ("loss", 0.5, 2, 1000)]
ODD = [
    ("loss", math.nan, 3, 5),
    ("up", math.inf, 0, 5),
    ("down", -math.inf, 0, 5),
    ("up", 1.0, 0, 5),
    ("n", math.nan, 0, 1),
]
RECORDS = [
    views.sweep_record("study", models=["2m-clm-600"], tasks=["sst2"], learning_rates=[1e-3], seeds=[0], time_ms=5),
    views.model_record("study", "2m-clm-600", about={}, source="owner/model"),
    views.group_record(
        "study",
        "2m-clm-600",
        "sst2",
        rates="1e-3",
        metrics={"score": 0.6, "best_learning_rate": 1e-3},
        results=[make_result(), make_result(task_data="other")],
    ),
    *CELLS,
    RunRecord(
        "curve",
        "a curve, ärger",
        params={"a.b": "x" * 7000, "empty": ""},
        tags={"long": "y" * 6000, "mlflow.note.content": "note"},
        metrics=[*CURVE, *CURVE, *ODD],
        inputs=[DataSet("set", "d" * 64, "here", "pretraining"), DataSet("set", "d" * 64, "here", "again")],
        status="FAILED",
        start_ms=900,
        end_ms=1100,
    ),
    RunRecord(
        "running", "runs still", metrics=CURVE[:1], inputs=[DataSet("set", "d" * 64, "here", "x")], status="RUNNING"
    ),
]
WITHOUT_CLOCK = ("creation_time", "last_update_time", "creation_timestamp_ms", "last_updated_timestamp_ms")


def rows(database: Path) -> dict[str, list[str]]:
    """All rows of all tables; random ids are replaced by what they stand for, and current times by their kind."""
    with closing(sqlite3.connect(database)) as connection:
        connection.row_factory = sqlite3.Row
        names = dict(connection.execute("SELECT run_uuid, value FROM tags WHERE key = 'mlmclm.key'").fetchall())
        names |= dict(connection.execute("SELECT dataset_uuid, 'set ' || digest FROM datasets").fetchall())
        inputs = connection.execute("SELECT input_uuid, source_id, destination_id FROM inputs").fetchall()
        models = connection.execute("SELECT model_id, tag_value FROM logged_model_tags WHERE tag_key = 'mlmclm.key'")
        names |= dict(models.fetchall())
        names |= {number: f"{names[source]} of {names[run]}" for number, source, run in inputs}
        identities = connection.execute("SELECT value FROM experiment_tags WHERE key = 'mlmclm.experiment'").fetchall()
        names |= {identity: "identity" for (identity,) in identities}
        found = {}
        for (table,) in connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_stat%'"
        ).fetchall():
            found[table] = sorted(
                str({name: tidy(name, row[name], names) for name in row.keys()})  # noqa: SIM118
                for row in connection.execute(f"SELECT * FROM {table}")
            )
    return found


def tidy(column: str, value: Any, names: dict[str, str]) -> Any:
    if column in WITHOUT_CLOCK or (column in ("start_time", "end_time") and (value or 0) > 1_790_000_000_000):
        return "now" if value else value
    if isinstance(value, str):
        if column.startswith("artifact"):
            run = next((run for run in names if run in value), "")
            return value[value.index("/mlflow/artifacts") :].replace(run or "no run", names.get(run, ""))
        return names.get(value, value)
    return value


def test_a_run_written_in_bulk_equals_one_of_the_client_in_every_field_of_every_table(
    store: Path, empty_store: Path, tmp_path: Path
) -> None:
    report = tmp_path / "report.html"
    report.write_text("the report")
    records = [replace(RECORDS[0], artifacts=[(report, "reports")]), *RECORDS[1:]]
    other = tmp_path / "other" / "mlflow" / "mlflow.db"
    shutil.copytree(empty_store / "mlflow", other.parent)
    assert export(store, records) == len(records)
    assert export(tmp_path / "other store", records, address=sqlite_address(other)) == len(records)
    ours, theirs = rows(store / "mlflow" / "mlflow.db"), rows(other)
    assert ours.keys() == theirs.keys()
    for table, content in ours.items():
        assert content == theirs[table], table
    assert len(ours["runs"]) == len(records)
    assert len(ours["inputs"]) == 7, "four data sets, a model that is used, and two that are chosen or given"
    assert len(ours["logged_models"]) == 2


def history(run: Any, store: Path, metric: str = "loss") -> list[tuple[int, float]]:
    points = MlflowClient(default_address(store)).get_metric_history(run.info.run_id, metric)
    return [(point.step, point.value) for point in points]


@pytest.mark.parametrize(("moment", "left"), [("inserting", 0), ("committed", 100)])
def test_killed_it_leaves_whole_runs_or_none_and_the_next_export_doubles_none(
    store: Path, moment: str, left: int
) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(store), moment], check=False, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert len(names(store)) == left
    records = [RunRecord(f"k{n}", f"run {n}", params={"n": str(n)}, metrics=[("m", n, 0, 1000)]) for n in range(100)]
    assert export(store, records) == 100 - left
    assert names(store) == sorted(record.name for record in records)
    assert export(store, records) == 0


def test_a_changed_record_changes_its_run_and_nothing_that_a_user_added(store: Path) -> None:
    first = RunRecord("k", "first", params={"a": "1"}, tags={"t": "x"}, metrics=CURVE, status="RUNNING", start_ms=900)
    export(store, [first])
    client = MlflowClient(default_address(store))
    (run,) = client.search_runs([client.get_experiment_by_name("study").experiment_id])
    client.set_tag(run.info.run_id, "mine", "kept")
    longer = replace(
        first, name="second", params={"a": "2"}, metrics=[*CURVE, ("loss", 0.1, 3, 1003)], status="FINISHED"
    )
    export(store, [longer])
    run = client.get_run(run.info.run_id)
    assert (run.info.run_name, run.info.status, run.info.start_time) == ("second", "FINISHED", 900)
    assert (run.data.params, run.data.metrics) == ({"a": "2"}, {"loss": 0.1})
    assert run.data.tags.items() >= {"t": "x", "mine": "kept", "mlflow.runName": "second"}.items()
    assert sorted(history(run, store)) == [(1, 2.0), (2, 0.5), (2, 1.0), (2, 3.0), (3, 0.1)]
    export(store, [replace(longer, metrics=[("loss", 9.0, 1, 1000)])])
    run = client.get_run(run.info.run_id)
    assert (history(run, store), run.data.metrics) == ([(1, 9.0)], {"loss": 9.0})


def test_a_run_that_is_announced_after_its_end_still_starts_before_it(store: Path) -> None:
    record = RunRecord("k", "run", metrics=[("m", 1.0, 0, 1000)], start_ms=900, end_ms=1000)
    export(store, [RunRecord("k", "run", status="RUNNING")])
    export(store, [record])
    export(store, [replace(record, status="RUNNING", metrics=[("m", 2.0, 1, 2000)], start_ms=None)])
    (run,) = runs(store)
    assert (run.info.status, run.info.start_time) == ("RUNNING", 900)


@pytest.mark.slow
def test_a_server_on_the_database_answers_while_runs_are_written_and_shows_them_and_its_own(store: Path) -> None:
    export(store, RECORDS[:3])
    with running_server(store) as (links, _):
        base = links["study"].partition("/#/")[0]
        client = MlflowClient(base)
        number = client.get_experiment_by_name("study").experiment_id
        (group,) = client.search_runs([number], saved_views.OF_GROUPS)
        cells = [views.cell_record("study", make_result(key=str(n), seed=n)) for n in range(700)]
        assert experiment_id(base, "study", {}) == number and experiment_id(base, "no study", {}) is None
        page = views.run_pages(base, number, ["2m-clm-600"], ["sst2"])["2m-clm-600", "sst2"]
        assert page.startswith(links["study"].partition("?")[0]), "the same table of runs"
        (found,) = client.search_runs([number], parse_qs(page.partition("?")[2])["searchFilter"][0])
        assert found.info.run_id == group.info.run_id
        with ThreadPoolExecutor() as pool:
            written, counts = pool.submit(export, store, cells), [0]
            while counts[-1] < len(cells):
                runs = client.search_runs([number], saved_views.OF_CELLS, max_results=5000)
                counts.append(len(runs))
                client.set_tag(group.info.run_id, "seen", str(counts[-1]))
                assert all(len(run.data.metrics) == 7 for run in runs), "a run is shown before it is whole"
            assert written.result() == len(cells)
        assert client.get_run(group.info.run_id).data.tags["seen"] == "700"
        children = client.search_runs([number], f"tags.`mlflow.parentRunId` = '{group.info.run_id}'", max_results=5000)
        assert len(children) == len(cells)
        with urllib.request.urlopen(f"{base}/health", timeout=20) as answer:
            assert answer.status == 200


def test_a_service_shows_links_to_the_runs_of_each_study_and_not_the_page_for_generative_ai(store: Path) -> None:
    (me,) = members_of(MLFLOW, [psutil.Process()])
    state = ServiceState(machine(), platform.node(), 1.0, True, {"mlflow": "http://127.0.0.1:5000"}, (me,))
    write_service_state(store, state)
    every = {"MLflow": "http://127.0.0.1:5000/#/experiments?workflowType=machine_learning"}
    export(store, CELLS[:1])
    number = MlflowClient(default_address(store)).get_experiment_by_name("study").experiment_id
    page = f"http://127.0.0.1:5000/#/experiments/{number}/runs?workflowType=machine_learning&viewStateShareKey=mlmclm"
    assert study_links(state, store).items() >= (every | {"study": page}).items()
    assert study_links(state, store.parent / "no store") == every
    assert study_links(replace(state, addresses={"mlflow": "http://other"}), store).keys() == {"MLflow"}


def test_the_database_has_the_statistics_without_which_mlflow_sorts_many_runs_slowly(store: Path) -> None:
    export(store, CELLS[:1])
    with closing(sqlite3.connect(store / "mlflow" / "mlflow.db")) as connection:
        tables = {table for (table,) in connection.execute("SELECT DISTINCT tbl FROM sqlite_stat1")}
        assert {"runs", "tags", "params", "metrics", "latest_metrics"} <= tables
        (before,) = connection.execute("PRAGMA schema_version").fetchone()
        export(store, CELLS)
        assert connection.execute("SELECT max(stat) FROM sqlite_stat1 WHERE tbl = 'runs'").fetchone() == ("4 1",)
        (after,) = connection.execute("PRAGMA schema_version").fetchone()
    assert after > before, "or a server's connections would keep to the old ones"
