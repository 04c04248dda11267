"""`mlmclm compare`: two cells by their keys, or two models of a study at their best learning rates."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import scipy.stats
import yaml

from mlmclm.analysis.results import records
from mlmclm.answers.comparison_of_models import Comparison
from mlmclm.cli.compare import _show
from mlmclm.finetuning.cell import cell_key
from mlmclm.finetuning.run import run_cell
from mlmclm.storage.place import Place
from mlmclm.studies.exports import export_models
from mlmclm.studies.prepare import prepare_study
from mlmclm.studies.study_file import load_study
from mlmclm.studies.study_sweep import StudySweep, SweptModel, prepare_tasks, setting_of, study_space
from mlmclm.sweeps.results_store import ResultsStore
from small_models import write_two
from small_study import remember, write_study

Run = Callable[..., tuple[int, str, str]]
SPACE = {
    "tasks": ["sst2", "conll2003"],
    "learning_rates": [5e-3],
    "seeds": [0, 1],
    "protocol": {"max_steps": 12, "max_length": 48, "stride": 8, "batch_size": 8},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data/, model/, space.yaml and store/."""
    folder = tmp_path_factory.mktemp("compare")
    write_two(folder, sentences=50)
    (folder / "space.yaml").write_text(yaml.safe_dump(SPACE))
    return folder


@pytest.fixture
def run(run_apart: Run, place: Path) -> Run:
    """Runs a verb in this process on the folder's store: exit code, output, errors."""

    def call(*words: str | Path) -> tuple[int, str, str]:
        code, output, errors = run_apart(*words, "--store", place / "store", "--data", place / "data")
        return code, output, " ".join(errors.split())

    return call


@pytest.fixture
def cell(place: Path, run: Run) -> Callable[..., dict[str, Any]]:
    """A cell's result, computed where it isn't there."""

    def make(task: str, seed: int, *words: str) -> dict[str, Any]:
        own = (place / "model", task, "--lr", "5e-3", "--seed", str(seed), "--space", place / "space.yaml", "--json")
        code, output, errors = run("finetune", *own, *words)
        assert code == 0, errors
        return dict(json.loads(output))

    return make


def test_two_cells_are_compared_example_by_example(run: Run, cell: Any) -> None:
    first, second = cell("sst2", 0), cell("sst2", 1)
    code, output, errors = run("compare", first["key"], second["key"], "--json")
    assert code == 0, errors
    (found,) = json.loads(output)["tasks"]
    right = [pd.read_parquet(each["examples_file"]).correct for each in (first, second)]
    only = [int((right[0] & ~right[1]).sum()), int((right[1] & ~right[0]).sum())]
    assert (found["task"], found["metric"], found["examples"], found["test"]) == ("sst2", "accuracy", 50, "mcnemar")
    assert [found["only_first"], found["only_second"]] == only
    exact = scipy.stats.binomtest(only[0], sum(only)).pvalue
    assert found["p"] == pytest.approx(
        exact - scipy.stats.binom.pmf(only[0], sum(only), 0.5) if only[0] != only[1] else 1
    )
    for side, each in (("first", first), ("second", second)):
        assert found[side] == pytest.approx(each["scores"]["test"]["accuracy"])
    assert found["low"] <= found["difference"] <= found["high"]
    code, output, errors = run("compare", first["key"], second["key"], "--metric", "matthews")
    assert code == 0, errors
    assert "Matthews correlation" in output
    assert "p by a paired t test" in output


def test_a_mistake_is_one_message_that_says_what_to_do(run: Run, cell: Any, place: Path) -> None:
    first, other = cell("sst2", 0), cell("conll2003", 0)
    limited = cell("sst2", 0, "--set", "max_evaluation_examples=20")
    for words, message in (
        ((first["key"], "1m-clm-1k"), "has no result of that key; to compare models by name, give --study NAME"),
        ((first["key"], other["key"]), "the cells have different main scores (accuracy, f1): choose one with --metric"),
        (
            (first["key"], other["key"], "--metric", "accuracy"),
            "cannot be paired: they were tested on different examples",
        ),
        ((first["key"], limited["key"]), "different examples (max_evaluation_examples differ)"),
        ((first["key"], first["key"], "--metric", "acc"), "unknown metric 'acc'"),
        ((first["key"], first["key"], "--task", "sst2"), "--task: two cells have a task already"),
        ((first["key"], first["key"], "--rule", "mean"), "--rule: two cells have a learning rate already"),
    ):
        code, _, errors = run("compare", *words)
        assert code == 2, errors
        assert message in errors
    Path(limited["examples_file"]).unlink()
    code, _, errors = run("compare", limited["key"], limited["key"])
    assert code == 2
    assert "has no examples beside it: " in errors
    assert f"Delete {limited['file']} and run the command that made it again" in errors
    assert cell("sst2", 0, "--set", "max_evaluation_examples=20")["examples_file"] is None, (
        "nothing is recomputed silently"
    )
    Path(limited["file"]).unlink()
    again = cell("sst2", 0, "--set", "max_evaluation_examples=20")
    assert (again["computed"], again["examples_file"]) == (True, limited["examples_file"])


NUMBERS = ("difference", "low", "high", "p", "p_holm", "tests")


def check_other_score(call: Any, names: tuple[str, str]) -> None:
    """A score that did not choose the rates has seeds and examples in its interval too, or says that it has examples alone."""
    code, output, errors = call(*names, "--metric", "matthews", "--json")
    assert code == 0, errors
    (found,) = json.loads(output)["tasks"]
    assert found["metric"] == "matthews" and "p_holm" not in found
    assert (found["covers"] == "examples") == ("test" in found)
    assert found["difference"] == pytest.approx(found["first"] - found["second"])


def check_per_seed(call: Any, names: tuple[str, str], file: Path, results: list[dict[str, Any]]) -> None:
    """With `--rule per_seed` the report and the comparison take every seed at the rate with its own best validation score."""
    own = {}
    for name in names:
        own[name] = [
            max(
                (one for one in results if (one["model"], one["seed"]) == (name, seed)),
                key=lambda one: (one["scores"]["validation"]["accuracy"], -one["learning_rate"]),
            )
            for seed in (0, 1)
        ]
    code, output, errors = call(*names, "--rule", "per_seed", "--json")
    assert code == 0, errors
    (found,) = json.loads(output)["tasks"]
    for name, side in zip(names, ("first", "second"), strict=True):
        assert found[f"{side}_rates"] == [one["learning_rate"] for one in own[name]]
    code, output, errors = call("--rule", "per_seed", "--json", verb=("report", file))
    assert code == 0, errors
    told = json.loads(output)
    score = "test_mean" if found["covers"] == "examples" else "score"
    best = {row["model"]: row[score] for row in told["best"] if row["task"] == "sst2"}
    assert told["rule"] == "per_seed"
    assert [best[name] for name in names] == pytest.approx([found["first"], found["second"]])
    code, _, errors = call("--rule", "per_sed", verb=("report", file))
    assert code == 2
    assert "unknown rule for the best learning rate 'per_sed'. Did you mean 'per_seed'?" in errors


def test_two_models_of_a_study_are_compared_at_their_best_rates_as_the_report_does(
    tmp_path: Path, run_apart: Run
) -> None:
    names = ("1m-untrained", "2m-untrained")
    file = write_study(tmp_path, models=list(names), baseline=None, tasks=["sst2", "conll2003"])
    study, place = load_study(file), Place(tmp_path / "store", tmp_path / "data")
    results_store = ResultsStore(place.store)

    def call(*words: str | Path, verb: tuple[str | Path, ...] = ("compare", "--study", file)) -> tuple[int, str, str]:
        places = ("--store", place.store, "--data", place.data_root or "")
        code, output, errors = run_apart(*verb, *words, *places)
        return code, output, " ".join(errors.split())

    space, prepared = study_space(study), prepare_study(study, place)
    tasks = prepare_tasks(prepared, space)
    models = tuple(SweptModel(model, space, tasks) for model in export_models(prepared))
    sweep = StudySweep(study, place, space, models, prepared)
    cells = sweep.plan().cells
    for planned in (False, True):
        if planned:
            remember(sweep)
        code, _, errors = call(*names)
        assert code == 2
        assert f"study 'small' has no results yet: run `mlmclm study {file}` first." in errors
    for cell in cells:
        if cell.task == "sst2":
            places = {"store": place.store, "data_root": place.data_root}
            results_store.write(run_cell(cell, **places, on_examples=results_store.write_examples))
    code, output, errors = call(*names, "--json")
    assert code == 0, errors
    told = json.loads(output)
    assert list(told["left_out"]) == ["conll2003", "all tasks"] and told["over"] == []
    (found,) = told["tasks"]
    found_results = results_store.results(cells)
    setting = setting_of(prepared.study.models, None, space, {}, tasks={})
    analysis = setting.analyse(found_results, results_store)
    best = {row["model"]: row for row in records(analysis.best) if row["task"] == "sst2"}
    for name, side in zip(names, ("first", "second"), strict=True):
        assert found[f"{side}_rate"] == best[name]["learning_rate"]
    (reported,) = [row for row in records(analysis.comparisons) if row["kind"] == "task" and row["scope"] == "sst2"]
    if math.isnan(reported["low"]):
        assert (found["covers"], found["test"], found["examples"]) == ("examples", "t", 40)
    else:
        assert found["covers"] == "seeds and examples"
        assert [found[key] for key in NUMBERS] == [reported[key] for key in NUMBERS], "to the last digit"
        assert [found[side] for side in ("first", "second")] == [best[name]["score"] for name in names]
        code, output, errors = call(*reversed(names), "--json")
        assert code == 0, errors
        (turned,) = json.loads(output)["tasks"]
        assert [turned[key] for key in NUMBERS[:3]] == [-reported[key] for key in ("difference", "high", "low")]
    labels = pd.read_parquet(results_store.examples_path(found_results[0]["key"])).gold
    assert found["chance"] == pytest.approx(labels.value_counts(normalize=True).max()) and found["final"]
    _, output, _ = call(*names)
    assert ("the seeds give equal scores; their noise is not known" in output) == (found["covers"] == "examples")
    assert ("covers other seeds and other test examples" in output) == (found["covers"] != "examples")
    check_other_score(call, names)
    check_per_seed(call, names, file, results_store.results(cells))
    for words, message in (
        (("3m-untrained", names[1]), "unknown model '3m-untrained'"),
        ((*names, "--task", "sst3"), "unknown task 'sst3'. Did you mean 'sst2'?"),
        ((*names, "--task", "conll2003"), "no cell of 1m-untrained and 2m-untrained has a score there"),
        ((*names, "--metric", "f2"), "unknown metric 'f2'"),
    ):
        code, _, errors = call(*words)
        assert code == 2
        assert message in errors
    for cell in cells:
        if (cell.model, cell.seed) == (names[1], 1):
            results_store.path(cell_key(cell)).unlink(missing_ok=True)
    code, output, errors = call(*names, "--task", "sst2", "--json")
    assert code == 0, errors
    (left,) = json.loads(output)["tasks"]
    assert (left["seeds"], left["test"], left["final"], left["covers"]) == (1, "mcnemar", False, "examples")
    _, output, _ = call(*names, "--task", "sst2")
    assert "test examples alone; one seed; what other seeds would give is not known: sst2" in output
    assert "(2 of 1m-untrained on conll2003" not in output
    assert "Not final: " in output and "2 of 2m-untrained on sst2" in output


@pytest.mark.parametrize(("metric", "by"), [("accuracy", ""), ("f1_macro", " in accuracy")])
def test_a_chance_level_names_its_score_where_another_is_compared(
    metric: str, by: str, capfd: pytest.CaptureFixture[str]
) -> None:
    row = {
        "task": "t", "metric": metric, "first": 0.5, "first_rates": [1e-3], "second": 0.4, "second_rates": [1e-3],
        "difference": 0.1, "low": 0.0, "high": 0.2, "confidence": 0.95, "p": 0.5, "examples": 9, "test": "mcnemar",
        "seeds": 1, "equal_seeds": False, "covers": "examples", "chance": 0.5, "chance_of": "accuracy", "at_chance": ["a"], "final": True,
    }  # fmt: skip
    _show("a", "b", Comparison([row], {}))
    output = capfd.readouterr().out
    assert f"t: not above chance{by} (50.00): a" in output and "50.00 (1e-3)" in output
    _show("a", "b", Comparison([row | {"first_settings": ["epochs 3"]}], {}))
    output = capfd.readouterr().out
    assert "(1e-3, epochs" in output and "40.00 (1e-3)" in output
