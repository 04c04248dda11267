"""What a study looks like in MLflow, as plain records."""

from __future__ import annotations

import json
import math
import re
from typing import Any
from urllib.parse import parse_qs

import pytest

from mlmclm.tasks.declaration import FAMILIES
from mlmclm.tasks.declared_tasks import find_tasks
from mlmclm.tracking import saved_views, views
from small_results import make_result


def test_a_cells_run_hangs_on_its_group_which_hangs_on_the_sweep() -> None:
    cell = views.cell_record("s", make_result())
    group = views.group_record("s", "2m-clm-600", "sst2")
    sweep = views.sweep_record("s", models=["2m-clm-600"], tasks=["sst2"], learning_rates=[1e-3], seeds=[2])
    assert (cell.parent_key, group.parent_key, sweep.parent_key) == (group.key, sweep.key, None)


def test_a_sweep_says_where_its_numbers_come_from_as_the_report_does() -> None:
    grid: dict[str, Any] = {"models": ["a"], "tasks": ["sst2"], "learning_rates": [1e-3], "seeds": [2]}
    note = views.sweep_record("s", **grid, provenance={"Computed": "today", "Corpus": "c0ffee"}).tags[views.NOTE_TAG]
    assert (
        note
        == f"1 cell: 1 model x 1 task x 1 learning rate x 1 seed. {views.UNITS}\n\n- **Computed**: today\n- **Corpus**: c0ffee"
    )


def test_a_cells_learning_rate_is_its_first_parameter_in_alphabetical_order() -> None:
    """MLflow's parallel coordinates begin with the first three parameters in which runs differ."""
    about = {"objective": "mlm", "size": "2m", "mask_ratio": "0.3", "tokens": "900", "pretraining_data": "wiki"}
    params = views.cell_record("s", make_result(), about={**about, "family": ""}).params
    assert params == {"learning_rate": "1e-3", "model": "2m-clm-600", "seed": "2", "task": "sst2", **about}
    assert min(params) == "learning_rate"
    of_one_model = [name for name in sorted(params) if name not in {*about, "model"}]
    assert of_one_model[:2] == ["learning_rate", "seed"]


def test_a_summary_has_the_settings_that_all_of_its_cells_share() -> None:
    results = [make_result(), make_result(protocol={"max_steps": 10, "batch_size": 8})]
    about = {"objective": "clm", "tokens": "1000"}
    params = views.group_record("s", "2m-clm-600", "sst2", about=about, results=results).params
    assert params == {"model": "2m-clm-600", "task": "sst2", **about, "settings.max_steps": "10"}


def test_streams_seeds_are_parameters_behind_the_learning_rate() -> None:
    record = views.cell_record("s", make_result(seed={"head": 0, "order": 3, "dropout": 0}))
    assert sorted(record.params)[:3] == ["learning_rate", "model", "seed"]
    seeds = {name: value for name, value in record.params.items() if name.startswith("seed")}
    assert seeds == {"seed": "h0-o3-d0", "seed_head": "0", "seed_order": "3", "seed_dropout": "0"}
    assert record.name == "sst2 lr1e-3 h0-o3-d0 2m-clm-600"
    assert views.cell_record("s", make_result()).name == "sst2 lr1e-3 s2 2m-clm-600"


def test_a_cells_metrics_are_its_scores_curve_and_cost_at_times_within_its_run() -> None:
    record = views.cell_record("s", make_result())
    values = {(name, step): value for name, value, step, _ in record.metrics}
    assert values["test_accuracy", 0] == 0.6
    assert (values["loss", 1], values["loss", 10]) == (0.7, 0.5)
    assert values["cost_seconds", 0] == 2.0
    assert (values["score", 0], values["validation_score", 0]) == (0.6, 0.5)
    assert all((record.start_ms or 0) <= time <= (record.end_ms or 0) for *_, time in record.metrics)


def test_runs_say_which_metric_is_the_main_one_and_show_both_families() -> None:
    both = {"f1": 0.5, "study.f1": 0.6, "study.ndcg@10": 0.7}
    record = views.cell_record("s", make_result(metric="study.f1", scores={"test": both}))
    assert record.tags["mlmclm.metric"] == "study.f1"
    assert {"test_f1", "test_study.f1", "test_study.ndcg_at_10"} <= {name for name, *_ in record.metrics}
    known = {"best_learning_rate": 1e-3, "score": 0.6}
    group = views.group_record("s", "m", "conll2003", metric="study.f1", rates="1e-3", metrics=known)
    assert group.tags["mlmclm.metric"] == "study.f1"
    assert group.tags[views.NOTE_TAG] == "Best learning rate 1e-3: test study.f1 60.00 points."
    note = "equal scores: no interval; not above chance; not final: 3 cells not run"
    group = views.group_record(
        "s", "m", "conll2003", metric="f1", rates="1e-3 (not final)", note=note, metrics=known | {"chance": 0.7}
    )
    assert group.tags["mlmclm.learning_rates"] == "1e-3 (not final)"
    assert group.tags[views.NOTE_TAG] == (
        "Best learning rate 1e-3 (not final): test f1 60.00 points.  \nEqual scores: no interval; not above chance; not final: 3 cells not run."
    )
    assert {name: value for name, value, *_ in group.metrics}["chance"] == 0.7
    grid = {"models": ["m"], "tasks": ["conll2003"], "learning_rates": [1e-3], "seeds": [2]}
    assert views.sweep_record("s", **grid, main_metrics="study").tags["mlmclm.metrics"] == "study"


def test_a_grid_of_other_settings_is_in_names_and_tags() -> None:
    record = views.cell_record("s", make_result(setting="epochs 3"))
    assert (record.name, record.params["setting"]) == ("sst2 lr1e-3 s2 epochs 3 2m-clm-600", "epochs 3")
    sweep = views.sweep_record(
        "s", models=["m", "n"], tasks=["mnli", "qnli"], learning_rates=[1e-3], seeds=[0, 1], points=6,
        grid={"epochs": [1, 2, 3], "qnli: epochs": [2, 5, 10]},
    )  # fmt: skip
    assert sweep.tags["mlmclm.grid.epochs"] == "1, 2, 3"
    assert sweep.tags["mlmclm.grid.qnli.epochs"] == "2, 5, 10"
    assert sweep.tags[views.NOTE_TAG].startswith("24 cells: 2 models x 6 settings of 2 tasks")


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        (6, "6 cells: 1 model x 1 task x 2 learning rates x 3 seeds."),
        (
            9,
            "9 cells: 1 model x 1 task x 2 learning rates x 3 seeds, and 3 at learning rates that were added.",
        ),
    ],
)
def test_a_sweep_counts_the_cells_that_were_asked_for(cells: int, words: str) -> None:
    grid: dict[str, Any] = {"models": ["a"], "tasks": ["sst2"], "learning_rates": [1e-3, 2e-3], "seeds": [0, 1, 2]}
    assert views.sweep_record("s", **grid, cells=cells).tags[views.NOTE_TAG] == f"{words} {views.UNITS}"


@pytest.mark.parametrize("length", [0, 1, 9, 10, 11, 99])
def test_a_cells_curve_is_thinned_to_its_last_point(length: int) -> None:
    curve = [[step, 1 / step] for step in range(1, length + 1)]
    record = views.cell_record("s", make_result(curve=curve, steps=length))
    steps = [step for name, _, step, _ in record.metrics if name == "loss"]
    assert len(steps) <= views.CURVE_POINTS
    assert steps == sorted(steps)
    assert steps[-1:] == [step for step, _ in curve[-1:]]


def test_a_diverged_cell_is_a_failed_run_without_scores() -> None:
    record = views.cell_record("s", make_result(status="diverged", scores=None))
    assert record.status == "FAILED"
    assert not any(name.startswith("test") for name, *_ in record.metrics)


def test_records_built_twice_are_equal_in_content() -> None:
    first, second = (views.cell_record("s", make_result()) for _ in range(2))
    assert first == second
    other = views.cell_record("s", make_result(scores={"test": {"accuracy": 0.61}}))
    assert other != first and other.key == first.key


def test_two_names_of_the_same_weights_have_two_runs() -> None:
    first, second = (views.cell_record("s", make_result(model=name)) for name in "ab")
    assert first.key != second.key


def test_a_groups_note_says_the_best_rate_and_its_score_and_unknown_numbers_are_left_out() -> None:
    metrics = {
        "best_learning_rate": 1e-3,
        "score": 0.5,
        "score_low": 0.4,
        "score_high": 0.6,
        "sd_rates": None,
        "x": math.nan,
    }
    record = views.group_record("s", "a", "sst2", rates="1e-3", metrics=metrics)
    assert record.tags[views.NOTE_TAG] == "Best learning rate 1e-3: test 50.00 points (95 % interval 40.00 to 60.00)."
    assert {name for name, *_ in record.metrics} == {"best_learning_rate", "score", "score_low", "score_high"}


def test_runs_have_the_verdict_in_words_and_components_as_metrics() -> None:
    metrics = {"component_seed": 0.01, "component_seed_low": 0.006, "component_head_order": 0.002}
    group = views.group_record("s", "a", "sst2", verdict="Best of 2 models on this task.", metrics=metrics)
    assert group.tags["mlmclm.verdict"] == group.tags[views.NOTE_TAG] == "Best of 2 models on this task."
    assert {name for name, *_ in group.metrics} == set(metrics)
    grid: dict[str, Any] = {"models": ["a"], "tasks": ["sst2"], "learning_rates": [1e-3], "seeds": [2]}
    assert views.sweep_record("s", **grid, answer=("Best: a.", "By 2.")).tags["mlmclm.verdict"] == "Best: a."
    assert "mlmclm.verdict" not in views.sweep_record("s", **grid).tags


def test_a_stages_rows_become_curves_and_its_nested_settings_dotted_parameters() -> None:
    rows = [{"step": 1, "loss": 2.0, "time": 10.0}, {"step": 1, "validation_loss": math.inf, "time": 11.5}]
    stage = views.stage_record("s", stage="k", title="clm to 600", settings={"a": {"b": 1, "c": [1, 2]}})
    record = views.trained(stage, rows, {"commit": "c0ffee", "gpu": {"name": "x"}})
    assert record.params == {"a.b": "1", "a.c": "1, 2"}
    assert record.metrics == [("loss", 2.0, 1, 10000), ("validation_loss", math.inf, 1, 11500)]
    assert (record.start_ms, record.end_ms, record.status) == (10000, 11500, "FINISHED")
    assert record.tags.items() >= {views.COMMIT_TAG: "c0ffee", "system.gpu.name": "x"}.items()
    assert views.trained(stage, rows).status == "RUNNING"


@pytest.mark.parametrize("base", ["http://127.0.0.1:5000", "http://127.0.0.1:5000/"])
def test_links_open_the_summaries_cells_and_charts_of_studies(base: str) -> None:
    runs = "http://127.0.0.1:5000/#/experiments/7/runs?workflowType=machine_learning&viewStateShareKey=mlmclm"
    assert saved_views.experiment_links(base, {"s": "7"}) == {
        "s": runs,
        "s, cells": runs + "-cells",
        "s, charts": runs + "-charts&compareRunsMode=CHART",
    }
    assert list(saved_views.experiment_links(base, {})) == ["MLflow"]


@pytest.mark.parametrize("by", ["objective", "model"])
def test_the_charts_show_what_summaries_have_and_fit_into_a_tag(by: str) -> None:
    tags = saved_views.view_tags([f"{name}-{n}" for n in range(4) for name in find_tasks()], by)
    assert max(map(len, tags.values())) <= 5000, "MLflow takes no longer values"
    (value,) = [value for key, value in tags.items() if key.endswith(saved_views.CHARTS)]
    state = json.loads(json.loads(value)["state"])
    shown = {
        *(f"params.{key['groupByData']}" for key in state["groupBy"]["groupByKeys"]),
        *(f"metrics.{chart['metricKey']}" for chart in state["compareRunCharts"] if "metricKey" in chart),
        *(f"params.{name}" for chart in state["compareRunCharts"] for name in chart.get("selectedParams", ())),
        *(f"metrics.{name}" for chart in state["compareRunCharts"] for name in chart.get("selectedMetrics", ())),
    }
    columns = {name.replace("`", "") for name in state["selectedColumns"]}
    assert shown <= columns and f"params.{by}" in shown
    assert {chart["metricSectionId"] for chart in state["compareRunCharts"]} <= {
        section["uuid"] for section in state["compareRunSections"]
    }


def test_no_column_and_no_chart_of_a_view_has_scores_on_several_tasks() -> None:
    """A column `test_accuracy` had the accuracy of tags, which is no score of its task, above that of another task's classes."""
    tags = {"f1": ("ner", {"f1": 0.7, "accuracy": 0.9}), "accuracy": ("kind", {"accuracy": 0.6})}
    cells = [
        views.cell_record("s", make_result(task=task, metric=metric, scores={"test": scores}))
        for metric, (task, scores) in tags.items()
    ]
    shown = saved_views.view_tags(["ner", "kind"])
    states = {
        key: json.loads(json.loads(shown[f"mlflow.sharedViewState.{key}"])["state"])
        for key in (saved_views.VIEW, saved_views.CELLS, saved_views.CHARTS)
    }
    columns = {
        key: [name.split("`")[1] for name in state["selectedColumns"] if name.startswith("metrics.")]
        for key, state in states.items()
    }
    means = ["score", "score_low", "score_high", "sd_seeds"]
    assert columns == {
        saved_views.VIEW: [*means, "ner score", "kind score"],
        saved_views.CELLS: ["ner score", "kind score"],
        saved_views.CHARTS: [*means, "ner score", "kind score"],
    }
    found = [{name: value for name, value, *_ in cell.metrics if name in columns[saved_views.CELLS]} for cell in cells]
    assert found == [{"ner score": 0.7}, {"kind score": 0.6}]
    assert states[saved_views.CHARTS]["searchFilter"] == saved_views.OF_MODELS, "whose `score` is a mean over all tasks"
    page = views.run_pages("http://server", "7", ["m"], ["ner", "kind"])["m", ""]
    assert parse_qs(page)["searchFilter"] == [f"{saved_views.OF_MODELS} and params.model = 'm'"]


def test_a_group_whose_seeds_chose_different_rates_says_how_many_chose_each() -> None:
    group = views.group_record("s", "a", "sst2", rates="1e-4 (4), 2e-4 (1)", metrics={"score": 0.5})
    assert group.tags["mlmclm.learning_rates"] == "1e-4 (4), 2e-4 (1)"
    assert group.tags[views.NOTE_TAG] == "Best learning rate 1e-4 (4), 2e-4 (1): test 50.00 points."
    sweep = views.sweep_record("s", models=["a"], tasks=["sst2"], learning_rates=[1e-3], seeds=[2], rule="per_seed")
    assert sweep.tags["mlmclm.rule"] == "per_seed"


def test_every_metric_of_every_family_gets_a_name_that_mlflow_accepts() -> None:
    names = {name for family in FAMILIES.values() for name in family.metrics}
    record = views.group_record("study", "model", "task", metrics={f"test_{name}": 0.5 for name in names})
    assert len(record.metrics) == len(names)
    for name, *_ in record.metrics:
        assert re.fullmatch(r"[\w\-. :/]+", name), name
