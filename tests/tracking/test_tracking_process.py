"""The tracker in a process of its own: fast to hand over to, never in the way, and nothing lost with it."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlmclm.tracking.address import default_address
from mlmclm.tracking.database import sqlite_address
from mlmclm.tracking.process import TrackingProcess
from mlmclm.tracking.summaries import CellGroup
from mlmclm.tracking.tracker import ExportReport
from mlmclm.tracking.views import group_record
from small_results import make_result

DRIVER = """
import sys, time
from pathlib import Path
from mlmclm.tracking.process import TrackingProcess
from small_results import make_result
with TrackingProcess(Path(sys.argv[1]), "study", address=sys.argv[2], patience=200) as tracking:
    for number in range(40):
        tracking.cell(make_result(key=str(number)))
    time.sleep(300)
"""
"""A study's process that is killed."""


def tracking(store: Path, address: str | None = None) -> TrackingProcess:
    return TrackingProcess(store, "study", address=address or default_address(store), patience=200)


def runs(store: Path, experiment: str, address: str | None = None) -> list[Any]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(address or default_address(store))
    found = client.get_experiment_by_name(experiment)
    return [] if found is None else list(client.search_runs([found.experiment_id]))


def keys(store: Path, address: str | None = None) -> list[str]:
    found = runs(store, "study", address)
    return sorted(run.data.tags["mlmclm.cell"] for run in found if "mlmclm.cell" in run.data.tags)


def test_a_model_and_task_is_summarised_once_its_cells_are_there(tmp_path: Path) -> None:
    results = [make_result(key=f"{model}{seed}", seed=seed, model=model) for seed in range(3) for model in ("a", "b")][
        :5
    ]
    about = {"objective": "clm"}
    with tracking(tmp_path) as tracker:
        for model in ("a", "b"):
            tracker.put(group_record("study", model, "sst2", about=about, status="RUNNING"))
        tracker.groups({(model, "sst2"): CellGroup(about, 3, (0.0, 1.0)) for model in ("a", "b")}, "mean")
        for result in results:
            tracker.cell(result)
    found = [run for run in runs(tmp_path, "study") if run.data.tags["mlmclm.kind"] == "group"]
    whole, running = sorted(found, key=lambda run: str(run.data.params["model"]))
    assert (whole.data.metrics["score"], whole.data.metrics["seeds"]) == (0.6, 3)
    assert (whole.data.params["objective"], whole.info.status) == ("clm", "RUNNING")
    assert running.data.metrics == {}
    assert keys(tmp_path) == ["a0", "a1", "a2", "b0", "b1"]
    cells = [run for run in runs(tmp_path, "study") if run.data.tags["mlmclm.kind"] == "cell"]
    assert {run.data.params["objective"] for run in cells} == {"clm"}, "a cell has what its summary has from the study"


@pytest.mark.parametrize("moment", ["in a message", "while it closes"])
def test_a_driver_that_dies_leaves_no_traceback(tmp_path: Path, moment: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "mlmclm.tracking.process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin and process.stdout and process.stderr
    pickle.dump(("open", (tmp_path, "study", default_address(tmp_path), False)), process.stdin)
    if moment == "in a message":
        process.stdin.write(pickle.dumps(("cell", make_result()))[:-20])
    else:
        process.stdout.close()
        pickle.dump(("cell", make_result()), process.stdin)
        pickle.dump(("close", (60.0, 60.0)), process.stdin)
    process.stdin.close()
    assert process.stderr.read() == b"" and process.wait() == 0


def test_killed_at_work_it_costs_the_driver_nothing_and_the_next_one_writes_what_is_missing(
    tmp_path: Path, capfd: Any
) -> None:
    address = sqlite_address(tmp_path / "other.db")  # which takes one run at a time
    results = [make_result(key=str(number)) for number in range(30)]
    tracker = tracking(tmp_path, address)
    for result in results:
        tracker.cell(result)
    while len(keys_so_far(tmp_path)) < 3:
        time.sleep(0.05)
    tracker._process.send_signal(signal.SIGKILL)
    tracker._process.wait()
    began = time.monotonic()
    for result in results:
        tracker.cell(result)
    assert tracker.close(60).error is not None
    assert time.monotonic() - began < 10
    assert "writes what is missing" in " ".join(capfd.readouterr().err.split())
    assert len(keys_so_far(tmp_path)) < 30
    with tracking(tmp_path, address) as again:
        for result in results:
            again.cell(result)
        report = again.close(200)
    assert (report.failed, report.exported + report.unchanged) == (0, 30)
    assert keys(tmp_path, address) == sorted(str(number) for number in range(30))


def keys_so_far(store: Path) -> list[str]:
    """Read the index, because MLflow would create a database that isn't there yet."""
    index = store / "mlflow" / "index.jsonl"
    return sorted(set(index.read_text().splitlines())) if index.exists() else []


def test_it_ends_with_a_driver_that_is_killed(tmp_path: Path) -> None:
    words = [sys.executable, "-c", DRIVER, str(tmp_path), default_address(tmp_path)]
    driver = subprocess.Popen(words, env={**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path))})
    while not keys_so_far(tmp_path):
        assert driver.poll() is None
        time.sleep(0.05)
    (child,) = psutil.Process(driver.pid).children()
    driver.kill()
    driver.wait()
    child.wait(30)
    with tracking(tmp_path) as again:
        for number in range(40):
            again.cell(make_result(key=str(number)))
        assert again.close(200).failed == 0
    assert keys(tmp_path) == sorted(str(number) for number in range(40))


def test_closed_twice_it_reports_the_same(tmp_path: Path) -> None:
    tracker = tracking(tmp_path)
    first = tracker.close(60)
    assert first == tracker.close(60) == ExportReport(exported=0, unchanged=0, failed=0)


def test_interrupted_while_it_waits_it_says_how_many_runs_are_missing(
    tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = tracking(tmp_path)
    for number in range(30):
        tracker.cell(make_result(key=str(number)))
    waits = threading.Thread.join

    def interrupted(self: threading.Thread, timeout: float | None = None) -> None:
        waits(self, timeout)
        if self is tracker._thread and tracker._left:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(threading.Thread, "join", interrupted)
        tracker.close(60)
    assert "MLflow: 30 runs are not written yet." in " ".join(capfd.readouterr().err.split())
    assert tracker._process.poll() is not None
