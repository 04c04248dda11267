"""A study from end to end by the command line: real Ray, DeepSpeed and MLflow; killed at any moment, the same report."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from mlmclm.registry import KINDS
from mlmclm.storage.files import only_one
from mlmclm.sweeps.results_store import ResultsStore
from mlmclm.tasks.declared_tasks import FOLDER
from small_study import run, start, write_study

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def home(finished_study: Any) -> Path:
    return finished_study.home


@pytest.fixture
def finished(finished_study: Any) -> Path:
    """The store of an undisturbed run."""
    return finished_study.store


def test_a_study_leaves_models_results_tables_report_and_mlflow_runs(finished: Path) -> None:
    folder = finished / "studies" / "small"
    assert len(list((finished / "cells").glob("*/*.json"))) == 3 * 2 * 2 * 2
    assert_examples_beside_results(finished)
    report = (folder / "report.html").read_text()
    assert report.count("<svg") > 5 and len(report) < 600_000
    assert (folder / "results.parquet").is_file()
    assert not list((finished / "runs").glob("*")), "a finished stage leaves no working files"
    from mlflow import MlflowClient
    from mlflow.data import get_source

    client = MlflowClient(f"sqlite:///{finished / 'mlflow' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("small")
    runs = client.search_runs([experiment.experiment_id], max_results=1000)
    kinds = [found.data.tags["mlmclm.kind"] for found in runs]
    counts = {kind: kinds.count(kind) for kind in set(kinds)}
    assert counts == {"pretraining": 2, "sweep": 1, "model": 3, "group": 6, "cell": 24}
    assert all(found.info.status == "FINISHED" for found in runs)
    sweep = next(found for found in runs if found.data.tags["mlmclm.kind"] == "sweep")
    note = sweep.data.tags["mlflow.note.content"]
    priced = r"more cells .*about .* worker minutes? on .*run `mlmclm study "
    assert re.search(rf"Open: .*({priced}|within one standard error)", note), note
    groups = [found for found in runs if found.data.tags["mlmclm.kind"] == "group"]
    assert all({"best_learning_rate", "score", "sd_seeds"} <= found.data.metrics.keys() for found in groups)
    assert all({"objective", "size", "mask_ratio", "tokens", "family"} <= found.data.params.keys() for found in groups)
    tried = {(found.data.params["model"], found.data.params["task"]) for found in groups}
    own = {found.info.run_id: found for found in groups}
    cells = [found for found in runs if found.data.tags["mlmclm.kind"] == "cell"]
    of_cells = [own[found.data.tags["mlflow.parentRunId"]] for found in cells]
    assert all({"learning_rate", "seed", "model", "task", "size"} <= found.data.params.keys() for found in cells)
    trained = [found.data.params for found in cells if "untrained" not in found.data.params["model"]]
    assert len(trained) == 16
    assert all({"objective", "tokens", "pretraining_data"} <= params.keys() for params in trained)
    assert {(found.data.params["model"], found.data.params["task"]) for found in of_cells} == tried
    stage = next(found for found in runs if found.data.tags["mlmclm.kind"] == "pretraining")
    losses = client.get_metric_history(stage.info.run_id, "loss")
    assert len(losses) in (20, 30)
    assert "recipe.batch" in stage.data.params
    models = client.search_logged_models([experiment.experiment_id])
    assert Counter(each.model_type for each in models) == {"fine-tuned": 6, "pretrained": 3}
    made_by = {
        each.name: found.data.tags["mlmclm.kind"]
        for each in models
        for found in runs
        if found.info.run_id == each.source_run_id
    }
    assert Counter(made_by.values()) == {"group": 6, "pretraining": 2, "model": 1}, "the untrained one has no stage"
    assert all(len(client.get_run(found.info.run_id).inputs.model_inputs) == 1 for found in groups)
    assert all(
        client.search_runs([experiment.experiment_id], each.tags["mlmclm.cells"])
        for each in models
        if "mlmclm.cells" in each.tags
    )
    for found in (*groups, stage):
        (data,) = found.inputs.dataset_inputs
        assert any(Path(get_source(data.dataset).load()).iterdir()), data.dataset
    assert experiment.tags["mlflow.note.content"] == note


def test_a_deleted_record_in_mlflow_is_written_anew_from_the_store_once(
    finished: Path, study: Path, tmp_path: Path, run_apart: Run
) -> None:
    store = tmp_path / "store"
    shutil.copytree(finished, store, symlinks=True, ignore=shutil.ignore_patterns("mlflow"))
    command = ("tracking", "sync", study, "--store", store, "--data", study.parent / "data")
    with only_one(store / "studies" / "small" / ".lock", "it"):
        code, _, errors = run_apart(*command)
    assert (
        code == 2
        and f"study 'small' is already being worked on by process {os.getpid()} on {platform.node()}" in errors
    )
    for _ in range(2):
        code, _, errors = run_apart(*command)
        assert code == 0, errors
    assert _runs(store) == _runs(finished)
    assert len(_runs(store)) == 36


def _runs(store: Path) -> list[tuple[Any, ...]]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{store / 'mlflow' / 'mlflow.db'}")
    numbers = [found.experiment_id for found in client.search_experiments()]
    return sorted(
        (run.info.run_name, run.info.status, sorted(run.data.metrics.items()), sorted(run.data.params.items()))
        for run in client.search_runs(numbers, max_results=1000)
    )


OWN_SINK = """
import json

def lines(study, runs, folder):
    assert list(folder.iterdir()) == [], "what an earlier sync wrote is gone"
    (folder / f"{study}.json").write_text(json.dumps([[each.name, each.by_step(), each.settings] for each in runs]))
    print("not among a command's results")
    return f"cat {folder}"

def needy(study, runs, folder):
    import no_such_package
"""


def test_a_sink_of_another_package_gets_every_run_that_mlflow_has(
    finished: Path, study: Path, tmp_path: Path, run_apart: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site-packages"
    (site / "outside-1.0.dist-info").mkdir(parents=True)
    (site / "outside-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (site / "outside-1.0.dist-info" / "entry_points.txt").write_text(
        "[mlmclm.sinks]\nlines = outside_sink:lines\nneedy = outside_sink:needy\n"
    )
    (site / "outside_sink.py").write_text(OWN_SINK)
    monkeypatch.syspath_prepend(site)
    KINDS["sink"].forget()
    store = tmp_path / "store"
    shutil.copytree(finished, store, symlinks=True)
    command = ("tracking", "sync", study, "--store", store, "--data", study.parent / "data", "--to")
    try:
        for _ in range(2):
            code, output, errors = run_apart(*command, "lines")
            assert (code, output) == (0, ""), errors
        assert f"lines: cat {store}/tracking/lines/small" in errors
        for name, message in {
            "lins": "unknown sink 'lins'. Did you mean 'lines'? Allowed: tensorboard, trackio, wandb, lines, needy.",
            "needy": "The sink needy needs the package no_such_package, which is not installed.",
        }.items():
            code, _, errors = run_apart(*command, name)
            assert code == 2 and message in errors, errors
        code, _, errors = run_apart(*command, "lines", "--follow")
        assert code == 2 and "--follow --to lines: only MLflow can be followed" in errors, errors
    finally:
        KINDS["sink"].forget()
    found = json.loads((store / "tracking" / "lines" / "small" / "small.json").read_text())
    mine = sorted(
        (name, last(steps), {key: str(text) for key, text in settings.items()}) for name, steps, settings in found
    )
    assert [(name, numbers) for name, numbers, _ in mine] == [
        (name, dict(numbers)) for name, _, numbers, _ in _runs(finished)
    ]
    for (_, _, settings), (_, _, _, params) in zip(mine, _runs(finished), strict=True):
        assert dict(params).keys() <= settings.keys()
    (verdict,) = [settings["verdict"] for name, _, settings in mine if name == "sweep small"]
    assert verdict in (finished / "studies" / "small" / "report.html").read_text()


def last(steps: dict[str, dict[str, float]]) -> dict[str, float]:
    """The last value of each metric."""
    return {
        name: value
        for _, values in sorted(steps.items(), key=lambda each: int(each[0]))
        for name, value in values.items()
    }


def test_exported_models_load_in_transformers_without_remote_code_and_agree(finished: Path) -> None:
    import torch
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

    models = finished / "studies" / "small" / "models"
    folder = models / "1m-clm-30"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(["the film was lovely", "Anna in Oslo today"], return_tensors="pt", padding=True)
    encoder = AutoModel.from_pretrained(folder)
    masked = AutoModelForMaskedLM.from_pretrained(folder)
    causal = AutoModelForCausalLM.from_pretrained(folder / "decoder")
    assert type(causal).__name__ == "LlamaForCausalLM"
    ids = inputs["input_ids"][:1, :4]
    with torch.no_grad():
        hidden = encoder(ids).last_hidden_state
        assert torch.equal(masked.lm_head(hidden), masked(ids).logits)
        torch.testing.assert_close(causal(ids).logits, masked(ids, is_causal=True).logits, rtol=1e-4, atol=1e-4)
    assert not (models / "1m-clm-10-mlm40-30" / "decoder").exists()
    assert (folder / "README.md").read_text().startswith("---\n")


def test_the_second_time_nothing_is_computed_and_the_report_is_the_same(
    finished: Path, study: Path, run_apart: Run
) -> None:
    report = finished / "studies" / "small" / "report.html"
    before, cells = report.read_bytes(), _times(finished)
    code, output, errors = run_apart("study", study, "--store", finished, "--data", study.parent / "data", "--json")
    assert code == 0, errors
    assert _times(finished) == cells
    assert report.read_bytes() == before
    assert "Ray dashboard" not in errors, "Ray was started although nothing was missing"
    assert json.loads(output)["cells"] == {"present": 24, "diverged": 0, "missing": 0}


@pytest.mark.parametrize("verb", ["study", "sweep"])
def test_a_study_over_another_grid_than_before_asks_for_a_decision(
    verb: str, finished: Path, study: Path, tmp_path: Path, run_apart: Run
) -> None:
    report = finished / "studies" / "small" / "report.html"
    before, values = report.read_bytes(), yaml.safe_load(study.read_text())
    space = yaml.safe_load(Path(values["space"]).read_text())
    (tmp_path / "space.yaml").write_text(yaml.safe_dump({**space, "learning_rates": [1e-3, 5e-3]}))
    (tmp_path / "study.yaml").write_text(yaml.safe_dump({**values, "space": "space.yaml"}))
    words = (tmp_path / "study.yaml", "--store", finished, "--data", study.parent / "data")
    code, output, errors = run_apart(verb, *words)
    assert (code, output, report.read_bytes()) == (2, "", before)
    for part in ("learning rate left out: 0.01", "learning rate added: 0.005", "--replace", "--name"):
        assert part in errors


def test_a_dry_run_says_what_is_there_and_computes_nothing(
    finished: Path, study: Path, tmp_path: Path, run_apart: Run
) -> None:
    data = study.parent / "data"
    code, output, errors = run_apart("study", study, "--store", finished, "--data", data, "--dry-run", "--json")
    assert code == 0, errors
    found = json.loads(output)
    assert (found["steps_to_train"], found["cells_to_compute"], found["cells"]) == (0, 0, 24)
    code, output, errors = run_apart("study", study, "--store", tmp_path / "new", "--data", data, "--dry-run", "--json")
    assert code == 0, errors
    found = json.loads(output)
    assert (found["steps_to_train"], found["cells_to_compute"]) == (50, 24)
    values = yaml.safe_load(study.read_text())
    more = tmp_path / "more.yaml"
    more.write_text(yaml.safe_dump(values | {"models": [*values["models"], "1m-mlm40-30"]}))
    code, output, errors = run_apart("study", more, "--store", finished, "--data", data, "--dry-run", "--json")
    assert code == 0, errors
    found = json.loads(output)
    assert (found["steps_to_train"], found["cells_to_compute"], found["cells"]) == (30, 8, 32)


@pytest.mark.slow
def test_killed_in_every_phase_and_started_again_the_report_is_the_same_to_the_last_byte(
    finished: Path, study: Path, home: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    words = ("study", study, "--store", store, "--data", study.parent / "data")

    def checkpoints() -> int:
        return len(list(store.glob("runs/*/ray_train/*/checkpoint_*")))

    def cells() -> int:
        return len(list((store / "cells").glob("??/*.json")))

    orphans = _kill_when(lambda: checkpoints() >= 1, words, home)
    assert not list((store / "states").glob("*/model")), "killed too late to test anything"
    orphans += _kill_when(lambda: cells() >= 3, words, home, "ray::RayTrainWorker", "ray::1m-")
    assert 3 <= cells() < 24
    kept = _times(store)
    code, _, errors = run(*words, home=home)
    assert code == 0, errors
    assert {path: stamp for path, stamp in _times(store).items() if path in kept} == kept, (
        "a finished cell was computed again"
    )
    expected = finished / "studies" / "small"
    for name in ("results.csv", "best.csv", "stability.csv", "comparisons.csv"):
        assert (store / "studies" / "small" / name).read_bytes() == (expected / name).read_bytes(), name
    assert _without_provenance(store / "studies" / "small") == _without_provenance(expected)
    assert_examples_beside_results(store)
    # What a killed driver had started ends by itself: Ray's agents look for their raylet once a minute.
    _, alive = psutil.wait_procs(orphans, timeout=120)
    assert not alive


def assert_examples_beside_results(store: Path) -> None:
    """Every scored cell has a file of examples that is whole and its own."""
    results = [json.loads(path.read_text()) for path in (store / "cells").glob("*/*.json")]
    assert {ResultsStore(store).examples(result).rows for result in results} == {30, 40}


def _kill_when(
    condition: Callable[[], bool], words: tuple[str | Path, ...], home: Path, *workers: str
) -> list[psutil.Process]:
    """Starts the study and kills it with SIGKILL once `condition` holds; before that one worker of each title.

    Returns the processes that it had started.
    """
    process, left = start(*words, home=home), list(workers)
    try:
        deadline = time.monotonic() + 600
        while left or not condition():
            assert process.poll() is None, f"ended by itself: {process.stderr.read() if process.stderr else ''}"
            assert time.monotonic() < deadline, f"it didn't get there, or had no {left}"
            left = [title for title in left if not _kill_a_worker(process.pid, title)]
            time.sleep(0.1)
    finally:
        family = _family(process.pid)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    return family


def _kill_a_worker(driver: int, title: str) -> bool:
    """Kills one of the driver's workers of this title with SIGKILL; whether there was one at work."""
    for member in _family(driver):
        try:
            name = " ".join(member.cmdline())
        except psutil.Error:
            continue
        if name.startswith(title):
            member.kill()
            return True
    return False


def _family(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _without_provenance(folder: Path) -> str:
    """The report without the lines that say when and at what cost it was computed, which alone may differ."""
    before, found, rest = (folder / "report.html").read_text().partition('<dl id="provenance">')
    assert found
    return re.sub(r", about [\d.,]+ worker \w+ on [^;.]*", "", before + rest.partition("</dl>")[2])


def _times(store: Path) -> dict[str, int]:
    """When each result and each state was written."""
    files: Iterator[Path] = (
        path for pattern in ("cells/??/*.json", "states/*/state.json") for path in store.glob(pattern)
    )
    return {str(path.relative_to(store)): path.stat().st_mtime_ns for path in files}


@pytest.mark.slow
def test_the_users_own_task_is_swept_by_rays_workers_and_reported(home: Path, tmp_path: Path) -> None:
    """The workers are processes of their own, which are told of no folder."""
    own = tmp_path / "own"
    study = write_study(own, models=["1m-untrained"], tasks=["kind_of_film"])
    text = (FOLDER / "sst2.yaml").read_text().replace("name: sst2", "name: kind_of_film")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "kind_of_film.yaml").write_text(text.replace("metric: accuracy", "metric: matthews"))
    words = (study, "--store", tmp_path / "store", "--data", own / "data", "--task-dir", tmp_path / "tasks", "--json")
    code, output, errors = run("study", *words, home=home)
    assert code == 0, errors
    assert "--task-dir" in (tmp_path / "store" / "studies" / "small" / "report.html").read_text()
    results = [json.loads(path.read_text()) for path in (tmp_path / "store" / "cells").glob("*/*.json")]
    assert {(result["task"], result["metric"]) for result in results} == {("kind_of_film", "matthews")}
    assert len(results) == 4
    code, again, errors = run("report", *words, home=home)
    assert (code, json.loads(again)) == (0, json.loads(output)), errors


@pytest.mark.slow
def test_cells_that_start_from_another_task_s_best_are_computed_behind_it_and_other_metrics_compute_nothing(
    home: Path, tmp_path: Path
) -> None:
    study = write_study(tmp_path, models=["1m-untrained"])
    space = yaml.safe_load((tmp_path / "space.yaml").read_text())
    space |= {"start_from": {"conll2003": "sst2"}, "grid": {"batch_size": [8, 16]}, "metrics": "study"}
    (tmp_path / "space.yaml").write_text(yaml.safe_dump(space))
    store = tmp_path / "store"
    words = ("study", study, "--store", store, "--data", tmp_path / "data")
    code, output, errors = run(*words, "--dry-run", home=home)
    assert code == 0, errors
    assert "cells: 16 of 16 to compute" in output
    assert "8 of them wait for the cell with the best validation score to start from (conll2003 from sst2)" in output
    code, output, errors = run(*words, "--json", home=home)
    assert code == 0, errors
    assert "it is trained again to keep its weights" in errors
    results = [json.loads(path.read_text()) for path in (store / "cells").glob("*/*.json")]
    first, second = ([one for one in results if one["task"] == task] for task in ("sst2", "conll2003"))
    assert (len(first), len(second)) == (8, 8)
    best = min(first, key=lambda one: (-one["scores"]["validation"]["accuracy"], one["learning_rate"], one["seed"]))
    top = [one["scores"]["validation"]["accuracy"] for one in first].count(best["scores"]["validation"]["accuracy"])
    assert {one["start"]["task"] for one in second} == {"sst2"}
    (start_key,) = {one["start"]["cell"] for one in second}
    assert top > 1 or start_key == best["key"]
    assert [path.parent.name for path in (store / "tuned").glob("*/*/result.json")] == [start_key]
    report = (store / "studies" / "small" / "report.html").read_text()
    assert "study's F1" in report.replace("&#39;", "'")
    assert "batch size" in report
    found = {row["task"]: row["metric"] for row in json.loads(output)["best"]}
    assert found == {"sst2": "accuracy", "conll2003": "study.f1"}

    before = _times(store)
    (tmp_path / "space.yaml").write_text(yaml.safe_dump({**space, "metrics": "standard"}))
    code, output, errors = run(*words, "--json", home=home)
    assert code == 0, errors
    assert _times(store) == before
    assert "Ray dashboard" not in errors
    assert {row["task"]: row["metric"] for row in json.loads(output)["best"]} == {"sst2": "accuracy", "conll2003": "f1"}
    code, output, errors = run(*words, "--dry-run", "--json", home=home)
    assert code == 0, errors
    plan = json.loads(output)
    assert (plan["cells_to_compute"], plan["cells_waiting"]) == (0, 0)
