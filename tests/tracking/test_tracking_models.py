"""Models of a study as MLflow lists them: found by rate, task and score, and linked to their runs, cells and data."""

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
from mlmclm.studies.follower import TrackedStudy, summaries
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


def study(source: str | dict[str, str] = "", scores: float = 1.0) -> list[RunRecord]:
    rows = results()
    for row in rows:
        row["scores"]["test"] = {"accuracy": row["scores"]["test"]["accuracy"] * scores}
    models = tuple(views.model_record("study", model, about={"objective": "clm"}) for model in "ab")
    stage = views.stage_record(
        "study",
        stage="s",
        title="a clm 0-10",
        settings={},
        outputs=[
            views.ModelRecord("a", "pretrained", {"model": "a", "objective": "clm"}, {"mlmclm.folder": "/store/a"})
        ],
    )
    trained = views.trained(stage, [{"step": 10, "loss": 2.0, "time": 10.0}], {})
    given = views.model_record("study", "b", about={"objective": "mlm"}, source="owner/b@main", time_ms=5)
    analysis = analyse(rows)
    return [trained, given, *summaries("study", TrackedStudy(records=models, sources={"sst2": source}), analysis, rows)]


def found(store: Path, address: str | None, condition: str, **options: Any) -> list[Any]:
    mlflow = client(store, address)
    return list(
        mlflow.search_logged_models([mlflow.get_experiment_by_name("study").experiment_id], condition, **options)
    )


@pytest.fixture(params=["in the store", "elsewhere"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    return None if request.param == "in the store" else f"sqlite:///{tmp_path / 'other.db'}"


def test_a_search_for_models_answers_which_model_and_which_rate(store: Path, address: str | None) -> None:
    export(store, study(), address=address)
    order = [{"field_name": "metrics.score", "ascending": False, "dataset_name": "sst2"}]
    best, other = found(store, address, "params.task = 'sst2' AND metrics.score > 0.3", order_by=order)
    assert best.params.items() >= {"model": "a", "learning_rate": "4e-3", "task": "sst2", "objective": "clm"}.items()
    assert (other.params["model"], other.params["learning_rate"]) == ("b", "1e-3")
    numbers = {metric.key: metric for metric in best.metrics}
    assert numbers["score"].value == pytest.approx(fmean([0.80, 0.84]))
    assert numbers["sd_seeds"].value == pytest.approx(stdev([0.80, 0.84]))
    assert numbers["best_learning_rate"].value == 4e-3
    assert {"share_failed", "sd_rates", "score_low", "score_high"} <= numbers.keys()
    assert {(each.dataset_name, each.dataset_digest) for each in best.metrics} == {("sst2", "d" * 36)}
    assert [each.name for each in found(store, address, "params.learning_rate = '4e-3'")] == ["a on sst2"]


def test_a_chosen_model_leads_to_its_run_its_cells_its_data_and_the_pretraining(
    store: Path, address: str | None
) -> None:
    cells = [views.cell_record("study", row) for row in results()]
    export(store, [*study(), *cells], address=address)
    mlflow = client(store, address)
    (best,) = found(store, address, "name = 'a on sst2'")
    group = mlflow.get_run(best.source_run_id)
    assert group.info.run_name == "a sst2" and [each.model_id for each in group.outputs.model_outputs] == [
        best.model_id
    ]
    assert [each.dataset.name for each in group.inputs.dataset_inputs] == ["sst2"]
    of_rate = mlflow.search_runs([best.experiment_id], best.tags["mlmclm.cells"])
    assert sorted(run.info.run_name for run in of_rate) == ["sst2 lr4e-3 s0 a", "sst2 lr4e-3 s1 a"]
    (begun,) = [mlflow.get_logged_model(each.model_id) for each in group.inputs.model_inputs]
    stage = mlflow.get_run(begun.source_run_id)
    assert (begun.model_type, begun.tags["mlmclm.folder"]) == ("pretrained", "/store/a")
    assert (stage.data.tags["mlmclm.kind"], {each.key: each.value for each in begun.metrics}) == (
        "pretraining",
        {"loss": 2.0},
    )
    (given,) = found(store, address, "name = 'b'")
    assert given.params["source"] == "owner/b@main"
    assert {each.status for each in found(store, address, "")} == {"READY"}


def test_the_same_records_again_change_no_model_and_other_scores_replace_it(store: Path, address: str | None) -> None:
    export(store, study(), address=address)
    before = {each.model_id for each in found(store, address, "")}
    assert len(before) == 4 and export(store, study(), address=address) == 0
    assert {each.model_id for each in found(store, address, "")} == before
    export(store, study(scores=0.5), address=address)
    (best,) = found(store, address, "name = 'a on sst2'")
    assert best.model_id not in before and {each.key: each.value for each in best.metrics}["score"] == pytest.approx(
        0.41
    )
    assert len(found(store, address, "")) == 4


@pytest.mark.parametrize("step", ["create_logged_model", "log_batch", "finalize_logged_model"])
def test_a_run_whose_models_are_not_whole_gets_them_again(
    store: Path, address: str | None, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    from mlflow.tracking import MlflowClient

    records, real = study(), getattr(MlflowClient, step)

    def lost(self: Any, *arguments: Any, **options: Any) -> Any:
        if step == "log_batch" and not any(point.model_id for point in options["metrics"]):
            return real(self, *arguments, **options)
        raise ConnectionError("lost")

    with monkeypatch.context() as patched:
        patched.setattr(MlflowClient, step, lost)
        with pytest.raises(ConnectionError):
            export(store, records[2:], address=address)
    export(store, records, address=address)
    models = found(store, address, "")
    assert sorted(each.name for each in models) == ["a", "a on sst2", "b", "b on sst2"]
    assert all(each.status == "READY" and (each.metrics or each.name == "b") for each in models)


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
