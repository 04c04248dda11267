"""The process that follows a study writes to MLflow what the store has: untold, idempotent, and never in the way."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

import mlmclm
from mlmclm.finetuning.cell import Cell, cell_key
from mlmclm.seeds import Seeds, seed_value
from mlmclm.storage.checksums import write_checksums
from mlmclm.storage.files import only_one
from mlmclm.storage.place import LOCK
from mlmclm.storage.retrying import NoAnswer
from mlmclm.studies import follower as follower_module
from mlmclm.studies import follower as follower_process
from mlmclm.studies.follower import FILE, FollowedStage, Follower, TrackedStudy, following, summary_of, write_runs
from mlmclm.studies.study_file import SweepFile
from mlmclm.studies.study_tracking import follow_study
from mlmclm.sweeps.manifest import listed_cells, write_manifest
from mlmclm.sweeps.results_store import ResultsStore
from mlmclm.sweeps.starts import Planned
from mlmclm.tracking.address import VARIABLE, default_address, without_password
from mlmclm.tracking.bulk_writer import BulkWriter
from mlmclm.tracking.database import make_usable, sqlite_address
from mlmclm.tracking.records import DataSet, RunRecord
from mlmclm.tracking.views import group_record, model_record, stage_record
from small_mlflow import client, names, runs
from small_results import make_result
from sweep_cells import make_cells

LIMITS = "LIMIT_AFTER_ERROR = follower_process.LIMIT_IF_TERMINATED = follower_process.SECONDS_TO_END = 300.0"
PATIENT = f"""
from mlmclm.studies import follower as follower_process
follower_process.{LIMITS}
follower_process.PROGRAM = follower_process.PROGRAM.replace(
    "main()", "from mlmclm.studies import follower as follower_process; follower_process.{LIMITS}; follower_process.TIMEOUT = 200.0; main()"
)
"""
"""A slow machine writes in five minutes what others write in the seconds that a process has at its end."""
STOPPED = f"""{PATIENT}
import sys, time
from pathlib import Path
from mlmclm.cli.interruption import ended_by_signals
from mlmclm.storage.files import only_one
from mlmclm.studies.follower import TrackedStudy, write_runs
from mlmclm.studies.follower import following
folder = Path(sys.argv[1]) / "studies" / "study"
with ended_by_signals(), only_one(folder / ".lock", "study"):
    end = lambda status: write_runs(folder, TrackedStudy(status))
    with following(Path(sys.argv[1]), "study", sys.argv[2], sys.argv[2], on_end=end):
        time.sleep(300)
"""
"""A study's process that is ended, as a command is."""
NOTEBOOK = """
from pathlib import Path
from mlmclm.studies.follower import following
with following(Path(sys.argv[1]), "study", sys.argv[2], sys.argv[2]):
    pass
"""
MODEL = model_record("study", "a", about={"objective": "clm"}, status="RUNNING")
"""The run of the model whose cells are followed."""
RECORDS = (RunRecord("p", "parent", metrics=[("m", 0.5, 0, 1000)]), RunRecord("c", "child", parent_key="p"))


@pytest.fixture
def store(mlflow_store: Path) -> Path:
    return mlflow_store


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LIMIT_AFTER_ERROR", "LIMIT_IF_TERMINATED", "SECONDS_TO_END", "PROGRAM"):
        monkeypatch.setattr(follower_process, name, getattr(follower_process, name))
    exec(PATIENT)


def filed(store: Path, cells: Sequence[Cell]) -> None:
    """File a result of each cell."""
    for cell in cells:
        ResultsStore(store).write(make_result(key=cell_key(cell), model=cell.model, seed=seed_value(cell.seed)))


def told(follower: Follower, **changes: Any) -> None:
    follower.take(replace(follower._latest, **changes))


def whole(follower: Follower) -> Follower:
    """Let a follower write everything that there is."""
    told(follower, status="FINISHED")
    follower.run()
    return follower


def begun(store: Path, cells: Sequence[Cell] = (), address: str | None = None, **given: Any) -> Follower:
    study = TrackedStudy(cells=tuple(listed_cells(cells)), **given)
    return Follower(store, "study", study, address or default_address(store))


class Driver:
    """A study's process: it holds the lock of the study's folder, and writes its runs there."""

    process: subprocess.Popen[bytes]

    def __init__(self, folder: Path, **given: Any) -> None:
        self._folder, self._study = folder, TrackedStudy()
        self.tell(**given)

    def tell(self, **changes: Any) -> None:
        self._study = replace(self._study, **changes)
        write_runs(self._folder, self._study)


@contextmanager
def driver(
    store: Path, cells: Sequence[Cell] = (), address: str | None = None, records: Sequence[RunRecord] = ()
) -> Iterator[Driver]:
    """A study with cells of the model `a`, and a follower in a process of its own."""
    folder, address = store / "studies" / "study", address or default_address(store)
    with only_one(folder / LOCK, "study"):
        made = Driver(folder, records=(*([MODEL] if cells else []), *records))
        write_manifest(folder, "study", Planned(list(cells)))
        shown = without_password(address)
        with following(store, "study", address, shown, on_end=lambda status: made.tell(status=status)) as made.process:
            yield made


def keys(store: Path, address: str | None = None) -> list[str]:
    """The keys of the cells that MLflow has; none while there is no database, which MLflow would create."""
    if not (store / "mlflow" / "mlflow.db" if address is None else Path(address[10:])).exists():
        return []
    return sorted(run.data.tags["mlmclm.cell"] for run in runs(store, address) if "mlmclm.cell" in run.data.tags)


def elsewhere(store: Path) -> str:
    """The address of another database. It is there, because two processes must not make one at once."""
    make_usable(store / "other.db", own=False)
    return sqlite_address(store / "other.db")


def said(capfd: pytest.CaptureFixture[str]) -> str:
    return " ".join(capfd.readouterr().err.split())


def test_results_are_found_as_they_are_filed_and_a_group_is_summarised_once_it_is_whole(store: Path) -> None:
    cells = [*make_cells(3, model="a"), *make_cells(3, model="b")]
    about = {"objective": "clm"}
    announced = [group_record("study", model, "sst2", about=about, status="RUNNING") for model in ("a", "b")]
    models = [model_record("study", model, about=about, status="RUNNING") for model in ("a", "b")]
    follower = begun(store, cells, records=(*models, *announced))
    filed(store, cells[:2])
    while len(keys(store)) < 2:
        follower.step()
    filed(store, cells[2:5])
    while len(keys(store)) < 5:
        time.sleep(min(0.1, follower.step()))
    groups = [run for run in runs(store) if run.data.tags["mlmclm.kind"] == "group"]
    summarised, running = sorted(groups, key=lambda run: str(run.data.params["model"]))
    assert (summarised.data.metrics["score"], summarised.data.metrics["seeds"]) == (0.6, 3)
    assert (summarised.data.params["objective"], summarised.info.status) == ("clm", "RUNNING")
    assert running.data.metrics == {}
    of_cells = [run for run in runs(store) if run.data.tags["mlmclm.kind"] == "cell"]
    assert {run.data.params["objective"] for run in of_cells} == {"clm"}, "a cell has what its summary has"
    assert whole(follower).backlog == (0, None)
    assert keys(store) == sorted(map(cell_key, cells[:5]))


def test_a_summary_names_the_best_setting_beside_the_rate() -> None:
    results = [make_result(setting=point, key=f"{point}-key") for point in ("epochs 2", "epochs 3")]
    (found,) = summary_of("study", TrackedStudy(), results)
    assert found.tags["mlmclm.learning_rates"] == "1e-3, epochs 2", "the first of equal ones"


def test_the_next_follower_writes_what_is_missing_and_nothing_twice(store: Path) -> None:
    cells = make_cells(4)
    filed(store, cells[:3])
    whole(begun(store, cells))
    before = [run.to_dictionary() for run in runs(store)]
    whole(begun(store, cells))
    assert [run.to_dictionary() for run in runs(store)] == before and len(before) == 3
    filed(store, cells[3:])
    whole(begun(store, cells))
    assert keys(store) == sorted(map(cell_key, cells))


def test_a_damaged_result_is_left_out_and_holds_up_no_other(store: Path) -> None:
    cells = make_cells(3)
    filed(store, cells)
    path = ResultsStore(store).path(cell_key(cells[1]))
    path.write_text(path.read_text().replace("0.6", "0.7"))
    assert whole(begun(store, cells)).backlog[0] == 0
    assert keys(store) == sorted(cell_key(cell) for cell in (cells[0], cells[2]))


def test_a_stage_has_its_metrics_while_it_is_trained_and_the_machine_once_its_state_is_there(store: Path) -> None:
    lines = [{"step": step, "time": 1000.0 + step, "loss": 1 / step} for step in range(1, 5)]
    run = store / "runs" / "abc" / "metrics.jsonl"
    run.parent.mkdir(parents=True)
    run.write_text("".join(json.dumps(line) + "\n" for line in lines[:2]))
    record = stage_record("study", stage="abc", title="1m clm 0-4", settings={"size": "1m"})
    follower = begun(store, stages=(FollowedStage(record, "abc", 0),))

    def points() -> list[tuple[int, float]]:
        while not follower.step():
            pass
        (found,) = runs(store)
        history = client(store).get_metric_history(found.info.run_id, "loss")
        return sorted((point.step, point.value) for point in history)

    assert points() == [(1, 1.0), (2, 0.5)]
    assert runs(store)[0].info.status == "RUNNING"
    run.write_text("".join(json.dumps(line) + "\n" for line in lines[:3]))
    assert points() == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    state = store / "states" / "abc"
    state.mkdir(parents=True)
    (state / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (state / "state.json").write_text(json.dumps({"system": {"commit": "c0ffee", "workers": 2}}))
    write_checksums(state)
    assert points() == [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 0.25)]
    (found,) = runs(store)
    assert (found.info.status, found.info.start_time, found.info.end_time) == ("FINISHED", 1_001_000, 1_004_000)
    assert found.data.tags.items() >= {"mlflow.source.git.commit": "c0ffee", "system.workers": "2"}.items()


class Unanswered(Exception):
    """An error that says nothing by itself."""


def failing(monkeypatch: pytest.MonkeyPatch, times: float, error: Exception) -> list[int]:
    """Let that many transactions fail; return the list to which each adds the number of its records."""
    write, tried = BulkWriter.write, list[int]()

    def fail(self: BulkWriter, records: Sequence[RunRecord]) -> int:
        tried.append(len(records))
        if len(tried) <= times:
            raise Unanswered("failed") from error
        return write(self, records)

    monkeypatch.setattr(BulkWriter, "write", fail)
    return tried


@pytest.mark.parametrize("error", [sqlite3.OperationalError("database is locked"), OSError(28, "disk full")])
def test_a_database_that_is_locked_or_out_of_reach_is_tried_again_with_growing_pauses(
    store: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, 6, error)
    follower = begun(store, records=RECORDS, status="FINISHED")
    assert [follower.step() for _ in range(6)] == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0]
    assert (follower.backlog, follower.over) == ((2, "Unanswered: failed"), False)
    assert whole(follower).backlog == (0, None)
    assert names(store) == ["child", "parent"]


@pytest.mark.parametrize("error", [TypeError("no such column"), PermissionError(13, "Permission denied")])
def test_what_fails_for_a_reason_that_does_not_pass_is_left_after_three_tries(
    store: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = failing(monkeypatch, math.inf, error)
    monkeypatch.setattr(follower_module, "FIRST_PAUSE", 0.01)
    follower = begun(store, records=RECORDS)
    assert whole(follower).backlog[0] == 2 and len(tried) == follower_module.GIVE_UP_AFTER


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may raise a process's priority")
def test_who_waits_for_it_gives_it_the_priority_of_the_driver(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, found = psutil.Process().nice(), list[int]()
    with driver(store) as made:
        other, waits = psutil.Process(made.process.pid), made.process.wait
        while other.nice() != min(19, own + follower_process.NICE):
            time.sleep(0.02)

        def wait(limit: float | None = None) -> Any:
            found.extend([] if found else [other.nice()])
            return waits(limit)

        monkeypatch.setattr(made.process, "wait", wait)
    assert found == [own]


def test_a_record_that_mlflow_refuses_leaves_its_children_a_parent(store: Path) -> None:
    bad = RunRecord("p", "parent", metrics=[("no@metric", 1.0, 0, 0)])
    follower = begun(store, records=(bad, RECORDS[1]))
    left, error = whole(follower).backlog
    assert left == 1 and "no@metric" in (error or "")
    child, parent = sorted(runs(store), key=lambda run: str(run.info.run_name))
    assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert (parent.info.status, parent.data.metrics) == ("RUNNING", {})
    follower = begun(store, records=RECORDS[:1])
    assert whole(follower).backlog[0] == 0
    assert names(store) == ["child", "parent"]


def test_a_pause_covers_the_time_that_stages_take_to_read(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Follower, "_stage", lambda *_: (time.sleep(0.3), (None, 0))[1])
    record = stage_record("study", stage="abc", title="1m", settings={})
    follower = begun(store, stages=(FollowedStage(record, "abc", 0),))
    follower.step()
    assert follower.step() >= 0.9 * 0.3 / follower_module.SHARE_OF_LOOKS


def test_a_backlog_of_cells_does_not_hold_up_a_stage_s_metrics(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server takes one run at a time."""
    cells = make_cells(60)
    filed(store, cells)
    address = sqlite_address(store / "other.db")
    record = stage_record("study", stage="abc", title="1m clm 0-4", settings={})
    follower = begun(store, cells, address, stages=(FollowedStage(record, "abc", 0),))
    while not keys(store, address):
        follower.step()
    run = store / "runs" / "abc" / "metrics.jsonl"
    run.parent.mkdir(parents=True)
    run.write_text(json.dumps({"step": 1, "time": 1000.0, "loss": 0.5}) + "\n")
    monkeypatch.setattr(follower, "_look_at", 1e-9)  # it is time for the next look
    while "1m clm 0-4" not in [run.info.run_name for run in runs(store, address)]:
        follower.step()
    assert len(keys(store, address)) < 60
    assert whole(follower).backlog[0] == 0
    assert len(keys(store, address)) == 60


def test_only_the_study_says_that_an_object_store_does_not_answer(
    store: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    follower = begun(store, make_cells(1))
    available = follower._results_store.availability

    def unanswered() -> None:
        raise NoAnswer("the connection is refused")

    with monkeypatch.context() as patch:
        patch.setattr(follower._results_store, "keys", lambda: available.keep_asking(unanswered))
        follower.step()
        monkeypatch.setattr(available, "_began", time.monotonic() - 60)
        follower.step()
    assert "the connection is refused" in (follower.backlog[1] or "")
    available.keep_asking(lambda: None)
    assert said(capfd) == ""


def test_all_that_a_study_tells_arrives_at_the_process(store: Path) -> None:
    (store / "report.html").write_text("the report")
    own = Seeds(head=0, order=1, dropout=2)
    filed(store, cells := [replace(make_cells(1)[0], seed=own)])
    parent = replace(
        RECORDS[0],
        params={"a": "ä"},
        artifacts=[(store / "report.html", "reports")],
        inputs=[DataSet("set", "d" * 64, "here", "pretraining")],
    )
    with driver(store, cells) as made:
        made.tell(records=(MODEL, parent))
    cell, found, _ = sorted(runs(store), key=lambda run: str(run.info.run_name), reverse=True)
    assert (cell.data.params["seed"], cell.data.params["objective"]) == (str(own), "clm")
    assert (found.data.params, found.data.metrics) == ({"a": "ä"}, {"m": 0.5})
    assert [data.dataset.name for data in found.inputs.dataset_inputs] == ["set"]
    assert [item.path for item in client(store).list_artifacts(found.info.run_id, "reports")] == ["reports/report.html"]


def test_a_password_is_neither_shown_nor_on_the_command_line_nor_on_the_disk(
    store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    address = "postgresql://me:pa5sw0rd@127.0.0.1:1/db"
    with pytest.raises(KeyError), driver(store, address=address, records=RECORDS) as made:
        assert "pa5sw0rd" not in " ".join(psutil.Process(made.process.pid).cmdline())
        assert [path for path in store.rglob("*") if path.is_file() and b"pa5sw0rd" in path.read_bytes()] == []
        raise KeyError
    found = said(capfd)
    assert "MLflow at postgresql://me:***@127.0.0.1:1/db lacks" in found and "pa5sw0rd" not in found


def test_a_server_that_dies_neither_holds_up_nor_fails_the_study(
    store: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{probe.getsockname()[1]}"
    filed(store, cells := make_cells(2))
    monkeypatch.setattr(follower_process, "PROGRAM", follower_process.PROGRAM.replace("200.0", "3.0"))
    with driver(store, cells, address):
        pass
    found = said(capfd)
    assert f"MLflow at {address} lacks 3 runs" in found
    assert "the same command run again, or `mlmclm tracking sync STUDY.yaml`, writes what is missing" in found


def test_a_study_that_fails_does_not_wait_for_mlflow(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_process, "LIMIT_AFTER_ERROR", 0.1)
    monkeypatch.setattr(follower_process, "SECONDS_TO_END", 0.1)
    with pytest.raises(KeyError), driver(store) as made:
        made.process.send_signal(signal.SIGSTOP)
        raise KeyError
    assert made.process.returncode == -signal.SIGKILL


def address_of(store: Path, place: str) -> str:
    return default_address(store) if place == "in the store" else elsewhere(store)


ANNOUNCED = tuple(replace(record, status="RUNNING") for record in RECORDS)
DONE = RunRecord("d", "done", parent_key="p")


def statuses(store: Path, address: str) -> dict[str, str]:
    return {run.info.run_name: run.info.status for run in runs(store, address)}


@pytest.mark.parametrize(
    ("place", "error", "status"), [("in the store", KeyboardInterrupt, "KILLED"), ("elsewhere", KeyError, "FAILED")]
)
def test_a_study_that_ends_early_leaves_no_run_marked_as_running_and_resumes_them(
    store: Path, place: str, error: type[BaseException], status: str, capfd: pytest.CaptureFixture[str]
) -> None:
    address = address_of(store, place)
    with pytest.raises(error), driver(store, address=address) as made:
        made.tell(records=(ANNOUNCED[0], DONE))
        while "done" not in statuses(store, address):
            time.sleep(0.05)
        made.tell(records=(*ANNOUNCED, DONE))  # perhaps told, but not written before the end
        raise error
    assert statuses(store, address) == {"parent": status, "child": status, "done": "FINISHED"}
    assert said(capfd) == ""
    (child,) = (run for run in runs(store, address) if run.info.run_name == "child")
    assert child.info.end_time >= child.info.start_time
    follower = begun(store, address=address, records=(*ANNOUNCED, replace(DONE, status="RUNNING")))
    while not follower.step():
        pass
    assert statuses(store, address) == {"parent": "RUNNING", "child": "RUNNING", "done": "FINISHED"}
    told(follower, records=(*RECORDS, DONE))
    whole(follower)
    assert set(statuses(store, address).values()) == {"FINISHED"}


@pytest.mark.parametrize(
    ("place", "how"), [("elsewhere", "SIGTERM to all of a job"), ("in the store", "SIGKILL to the driver")]
)
def test_however_its_driver_ends_no_run_stays_marked_as_running(store: Path, place: str, how: str) -> None:
    address = address_of(store, place)
    write_runs(store / "studies" / "study", TrackedStudy(records=(RunRecord("p", "parent", status="RUNNING"),)))
    words = [sys.executable, "-c", STOPPED, str(store), address]
    driver = subprocess.Popen(
        words, env={**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path))}, stderr=subprocess.PIPE
    )
    assert driver.stderr is not None
    while statuses(store, address) != {"parent": "RUNNING"}:
        assert driver.poll() is None
        time.sleep(0.05)
    (child,) = psutil.Process(driver.pid).children()
    if how == "SIGTERM to all of a job":
        child.terminate()
        while statuses(store, address) != {"parent": "KILLED"}:
            time.sleep(0.05)
        driver.terminate()
    else:
        driver.kill()
    errors = driver.stderr.read().decode()
    driver.wait()
    child.wait(300)
    assert statuses(store, address) == {"parent": "KILLED"}
    assert "by itself" not in errors and "lacks" not in errors
    assert errors.count("Traceback") == how.startswith("SIGTERM"), "that of the driver"


def test_killed_at_work_it_costs_the_driver_nothing_and_the_next_one_writes_what_is_missing(
    store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    address, cells = elsewhere(store), make_cells(30)
    filed(store, cells[:3])
    with driver(store, cells, address) as made:
        while len(keys(store, address)) < 3:
            time.sleep(0.05)
        with closing(sqlite3.connect(address.removeprefix("sqlite:///"), timeout=1500)) as lock:
            lock.execute("BEGIN IMMEDIATE")  # it writes no more
            filed(store, cells[3:])
            made.process.kill()
            made.process.wait()
        made.tell(records=(MODEL, *RECORDS))
    assert "ended by itself, with exit code -9" in said(capfd)
    assert keys(store, address) == sorted(map(cell_key, cells[:3]))
    with driver(store, cells, address):
        pass
    assert keys(store, address) == sorted(map(cell_key, cells))
    assert "lacks" not in said(capfd)


def test_it_runs_the_package_of_the_driver_wherever_the_driver_has_found_it(store: Path, tmp_path: Path) -> None:
    """A notebook may have put a checkout on its own `sys.path`, which a process that it starts does not have."""
    package = Path(mlmclm.__file__).parent
    (tmp_path / "mlmclm").mkdir()
    for path in package.iterdir():
        (tmp_path / "mlmclm" / path.name).symlink_to(path)
    own = tmp_path / "mlmclm" / "__init__.py"
    own.unlink()
    own.write_text(f"{(package / own.name).read_text()}\nimport sys\nprint('imported here', file=sys.stderr)\n")
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{NOTEBOOK}"
    done = subprocess.run(
        [sys.executable, "-c", script, str(store), default_address(store)], check=True, capture_output=True, text=True
    )
    assert done.stderr.count("imported here") == 2 and "lacks" not in done.stderr


def test_interrupted_while_it_waits_it_says_how_many_runs_are_missing(
    store: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    filed(store, cells := make_cells(400))
    address = elsewhere(store)  # which takes one run at a time
    monkeypatch.setattr(follower_process, "PROGRAM", follower_process.PROGRAM.replace("300.0", "0.0"))
    with pytest.raises(KeyboardInterrupt), driver(store, cells, address) as made:
        process, waits = made.process, made.process.wait

        def wait(limit: float | None = None) -> Any:
            if limit is not None or process.poll() is not None:
                return waits(limit)
            while not keys(store, address):
                time.sleep(0.05)
            raise KeyboardInterrupt

        monkeypatch.setattr(process, "wait", wait)
    assert re.search(r"lacks \d+ runs \(interrupted\)", said(capfd))
    assert process.poll() is not None


def test_another_process_follows_a_study_until_it_has_ended(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    cells, folder = make_cells(3), store / "studies" / "study"
    filed(store, cells[:2])
    study = SweepFile(name="study", models={"a": "anywhere"}, space="quickstart")
    with only_one(folder / LOCK, "study"):
        made = Driver(folder, records=(MODEL,))
        write_manifest(folder, "study", Planned(cells))
        thread = threading.Thread(target=follow_study, args=(study, store))
        thread.start()
        while len(keys(store)) < 2:
            time.sleep(0.05)
        (folder / FILE).write_text("{")  # somebody edits it
        filed(store, cells[2:])
        while len(keys(store)) < 3:
            time.sleep(0.05)
        assert thread.is_alive()
        made.tell(status="FINISHED")
        thread.join()
    assert keys(store) == sorted(map(cell_key, cells))


def test_a_summary_that_comes_late_does_not_replace_that_of_the_whole_study(store: Path) -> None:
    cells = make_cells(3, model="a")
    follower = begun(store, cells)
    filed(store, cells)
    told(follower, records=(group_record("study", "a", "sst2", metrics={"score": 0.25}),))
    for _ in range(20):  # the study takes a while from its analysis to its end
        follower.step()
    whole(follower)
    (group,) = [run for run in runs(store) if run.data.tags["mlmclm.kind"] == "group"]
    assert group.info.status == "FINISHED" and group.data.metrics["score"] == 0.25
