"""Components of variance in the report, and how its numbers lead to MLflow's runs."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

from analysis_study import TASKS, synthetic_results
from report_page import read, study, usual
from report_study import MODELS, facts

from mlmclm.analysis.analyse import analyse
from mlmclm.reports.study_facts import RecordedRuns
from mlmclm.reports.text import estimate
from mlmclm.reports.wording import task_verdicts
from mlmclm.results.chance import Chance


def test_the_page_says_how_much_variance_each_source_adds_by_stream_where_the_grid_varies_them() -> None:
    seeds = [{"head": head, "order": order, "dropout": 0} for head in (0, 1) for order in (0, 1)]
    results = [row | {"seed": seeds[row["seed"]]} for row in synthetic_results(MODELS, seeds=4)]
    found = analyse(results, "2m-untrained")
    _, page = read(found)
    words = ["learning rate", "fine-tuning seed", "the head's initial weights", "the order of the data", "streams together"]  # fmt: skip
    assert all(f" {each} " in page.text for each in words)
    row = found.components.query("model_family == '2m-clm-600' and task == 'pydocs-qa' and source == 'head'").iloc[0]
    assert estimate(row["sd"], row["sd_low"], row["sd_high"]) in page.text
    _, page = usual()
    assert " fine-tuning seed " in page.text and " streams together " not in page.text


def test_numbers_lead_to_their_runs_in_mlflow() -> None:
    pages = {(model, task): f"https://host/#/experiments/7/runs?{model}{task}" for model in MODELS for task in ("", *TASKS)}  # fmt: skip
    recorded = RecordedRuns("They are at https://host.", "params.model = 'MODEL'", pages)
    _, page = read(study(), replace(facts(), recorded=recorded))
    found = Counter(address for address in page.addresses if not address.startswith("#"))
    assert set(found) == set(pages.values())
    for (_, task), address in pages.items():
        # A score, its curve, its stability and its components; or the mean twice.
        assert found[address] >= (4 if task else 2)
    assert "They are at https://host." in page.text and "params.model = 'MODEL'" in page.text
    _, page = read(study(), replace(facts(), recorded=replace(recorded, pages={})))
    assert all(address.startswith("#") for address in page.addresses) and "They are at https://host." in page.text


def test_every_model_s_place_on_a_task_is_said_in_words() -> None:
    lead = {"a": 0.60, "b": 0.70, "c": 0.7005, "untrained": 0.40}
    found = task_verdicts(analyse(synthetic_results(lead, tasks=("pydocs-kind",)), "untrained"))
    said = {model: words for (model, _), words in found.items()}
    top, near = ("b", "c") if said["b"].startswith("Highest") else ("c", "b")
    assert said[top] == f"Highest score on this task, not clearly above {near}."
    assert said[near] == f"No clear difference on this task from the best, {top}."
    assert re.fullmatch(rf"Below the best on this task, {top}: −\d+\.\d\d \[.*\] points\.", said["a"])
    clear = task_verdicts(analyse(synthetic_results({"a": 0.60, "b": 0.80}, tasks=("pydocs-kind",))))
    assert clear["b", "pydocs-kind"] == "Best of 2 models on this task."
    low = analyse(synthetic_results(lead, tasks=("pydocs-kind",)), chances={"pydocs-kind": Chance(0.9, "always")})
    assert set(task_verdicts(low).values()) == {"No model is shown to be above chance on this task."}
    several = synthetic_results({"a": 0.60, "a-r2": 0.82, "b": 0.80}, tasks=("pydocs-kind",))
    own = task_verdicts(analyse(several, replicate_of={"a-r2": "a"}))
    assert own["a", "pydocs-kind"] == own["a-r2", "pydocs-kind"] != own["b", "pydocs-kind"]
    several = synthetic_results({"a": 0.60, "a-r2": 0.82, "b": 0.80}, tasks=("pydocs-kind",))
    own = task_verdicts(analyse(several, replicate_of={"a-r2": "a"}))
    assert own["a", "pydocs-kind"] == own["a-r2", "pydocs-kind"] != own["b", "pydocs-kind"]
    unfinished = analyse(synthetic_results({"a": 0.60, "b": 0.80}, tasks=("pydocs-kind",))[1:])
    assert task_verdicts(unfinished)["b", "pydocs-kind"] == "Highest score of 2 models on this task so far."
    assert task_verdicts(analyse(synthetic_results({"a": 0.6}))) == {}, "nothing to compare with"


def test_a_study_with_replicates_compares_models_and_shows_every_run() -> None:
    runs = {**MODELS, "2m-mlm40-600-r2": 0.71, "2m-mlm40-600-r3": 0.69}
    found = analyse(
        synthetic_results(runs), "2m-untrained", replicate_of=dict.fromkeys(list(runs)[-2:], "2m-mlm40-600")
    )
    about = facts()
    more = [replace(about.models[1], name=name) for name in list(runs)[-2:]]
    _, page = read(found, replace(about, models=(*about.models, *more)))
    assert page.text.count("in the mean of 2m-mlm40-600") == 2
    assert "2m-mlm40-600-r3" in page.text
    assert set(found.overall["model"]) == set(MODELS)
    assert "one pretraining run" not in page.text
