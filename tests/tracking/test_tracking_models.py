"""Models of a study in MLflow: one table has their scores, and their runs lead to the data."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

from mlmclm.analysis.analyse import analyse
from mlmclm.analysis.summary import model_metrics
from mlmclm.tasks.declared_tasks import get_task
from mlmclm.tasks.splits import data_source
from mlmclm.tracking import saved_views, views
from mlmclm.tracking.records import DataSet, RunRecord
from small_hub import served
from small_mlflow import client, export, runs
from small_results import make_result

SCORES = {
    (model, rate, seed): score
    for model, rates in {
        "a": {1e-3: (0.61, 0.63), 4e-3: (0.80, 0.84)},
        "b": {1e-3: (0.70, 0.74), 4e-3: (0.5, 0.55)},
    }.items()
    for rate, scores in rates.items()
    for seed, score in enumerate(scores)
}
LOADED = """
import sys, mlflow
mlflow.set_tracking_uri(sys.argv[1])
run = mlflow.get_run(sys.argv[2])
print(mlflow.data.get_source(run.inputs.dataset_inputs[0].dataset).load()["test"]["text"][:])
"""
"""How an auditor loads the data of a run."""


def results(task: str = "sst2", **changes: Any) -> list[dict[str, Any]]:
    return [
        make_result(
            model=model, task=task, learning_rate=rate, seed=seed, key=f"{model}{rate}{seed}{task}", task_data="d" * 64,
            scores={"validation": {"accuracy": score}, "test": {"accuracy": score}}, **changes,
        )
        for (model, rate, seed), score in SCORES.items()
    ]  # fmt: skip


def test_one_table_has_each_models_mean_interval_and_deviation_and_a_column_for_each_task(store: Path) -> None:
    rows = [*results(), *results("mnli")]
    for row in rows[len(SCORES) :]:
        row["scores"] = {split: {"accuracy": own["accuracy"] - 0.1} for split, own in row["scores"].items()}
    numbers = model_metrics(analyse(rows))
    models = [views.model_record("study", model, about={}, metrics=numbers[model]) for model in "ab"]
    tasks = ["sst2", "mnli"]
    grid: dict[str, Any] = {"models": ["a", "b"], "tasks": tasks, "learning_rates": [1e-3], "seeds": [0]}
    sweep = views.sweep_record("study", **grid, baseline="b", answer=["Best: a."])
    export(store, [sweep, *models])
    experiment = client(store).get_experiment_by_name("study")
    assert experiment.tags["mlflow.note.content"].startswith("Best: a.\n\n")
    (whole,) = [run for run in runs(store) if run.info.run_name == "sweep study"]
    assert whole.data.tags["mlmclm.baseline"] == "b"
    table = {run.info.run_name: run.data.metrics for run in runs(store) if run.data.tags["mlmclm.kind"] == "model"}
    assert table["a"]["sst2 score"] == pytest.approx(0.82) and table["a"]["mnli score"] == pytest.approx(0.72)
    assert table["a"]["score"] == pytest.approx(0.77) and table["a"]["sd_seeds"] == pytest.approx(stdev([0.80, 0.84]))
    assert table["b"]["score"] == pytest.approx(fmean([0.72, 0.62]))
    assert table["a"]["score_low"] < table["a"]["score"] < table["a"]["score_high"]
    shown = saved_views.view_tags(tasks)[f"mlflow.sharedViewState.{saved_views.VIEW}"]
    assert "metrics.`sst2 score`" in shown and "metrics.`mnli score`" in shown
    assert experiment.tags[f"mlflow.sharedViewState.{saved_views.VIEW}"] == shown, "and a later start keeps it"
    export(store, models)
    assert client(store).get_experiment_by_name("study").tags == experiment.tags
    assert not any(math.isnan(value) for own in table.values() for value in own.values())


def test_an_auditor_loads_a_runs_data_from_the_hub_at_its_revision_or_from_its_files(
    store: Path, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "test.csv").write_text("text\nlocal\n")
    with served() as hub:
        first = hub.put("owner/set", {"test.csv": b"text\nfirst\n"}, "dataset")
        hub.put("owner/set", {"test.csv": b"text\nlater\n"}, "dataset")
        sources = {"hub": {"path": "owner/set", "revision": first}, "folder": {"path": str(tmp_path / "data")}}
        inputs = {name: DataSet(name, "d", source, "fine-tuning") for name, source in sources.items()}
        inputs["files"] = DataSet("files", "d", str(tmp_path / "data"), "fine-tuning")
        export(store, [RunRecord(name, name, inputs=[data]) for name, data in inputs.items()])
        ids = {run.info.run_name: run.info.run_id for run in runs(store)}
        read = subprocess.run(
            [sys.executable, "-c", LOADED, f"sqlite:///{store / 'mlflow' / 'mlflow.db'}", ids["hub"]],
            env={**os.environ, "HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"},
            capture_output=True,
            text=True,
            check=False,
        )
    assert read.stdout.strip() == "['first']", read.stderr
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{store / 'mlflow' / 'mlflow.db'}")
    files = mlflow.data.get_source(mlflow.get_run(ids["files"]).inputs.dataset_inputs[0].dataset).load()
    assert (Path(files) / "test.csv").read_text() == "text\nlocal\n"


def test_a_tasks_data_are_on_the_hub_at_its_revision_unless_a_folder_stands_in_for_it(tmp_path: Path) -> None:
    task = get_task("sst2")
    assert data_source(task, tmp_path, tmp_path) == {"path": "stanfordnlp/sst2", "revision": task.revision}
    (tmp_path / "sst2").mkdir()
    assert data_source(task, tmp_path, tmp_path) == str(tmp_path / "sst2")
