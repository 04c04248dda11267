"""Views of a study in MLflow's web interface: tables and charts that are saved with the experiment, and links to them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

MODEL_TRAINING = "workflowType=machine_learning"
"""Query that selects MLflow's view for model training; a fresh browser would open the one for generative AI."""
BY_SCORE = "orderByKey=metrics.%60score%60&orderByAsc=false"
VIEW, CELLS, CHARTS = "mlmclm", "mlmclm-cells", "mlmclm-charts"
"""Keys of a study's views: the table of its summaries, that of its cells, and charts of the summaries."""
OF_GROUPS, OF_CELLS, WITHOUT_TASKS = (f"tags.`mlmclm.kind` {test}" for test in ("= 'group'", "= 'cell'", "!= 'cell'"))
WITHOUT_TASKS += " and tags.`mlmclm.kind` != 'group'"
"""Filters of MLflow's run search."""
ABOUT_MODELS = ("params.objective", "params.size", "params.mask_ratio", "params.tokens")
MOST_TASKS = 40
"""Tasks that have columns in the tables, as a tag is of 5,000 characters at most."""
CHART_PARAMS, CHART_METRICS = ("objective", "size", "mask_ratio", "task"), ("best_learning_rate", "score")
"""Axes of the parallel coordinates."""


def metric_name(name: str) -> str:
    """Return a metric's name as MLflow accepts it: without @, as in ndcg@10, and without the + of a mean of several."""
    return name.replace("@", "_at_").replace("+", "_and_")


def view_tags(main_scores: Mapping[str, str], charts_by: str = "objective") -> dict[str, str]:
    """Return the tags of an experiment that keep its views: those of MLflow's menu "Views" and of the printed links.

    No column of its tables has scores by different metrics. A tag's value has the form that MLflow's web interface (3.17) gives
    to a view that a user saves there.

    Args:
        main_scores: the main score of each task; without these, the tables have no columns of single tasks.
        charts_by: the parameter over whose values the charts' bars are.
    """
    tasks = [f"metrics.{metric_name(task)} score" for task in list(main_scores)[:MOST_TASKS]]
    scores = [f"metrics.test_{metric_name(part)}" for score in main_scores.values() for part in score.split("+")]
    mean = ("metrics.score", "metrics.score_low", "metrics.score_high", "metrics.sd_seeds")
    of_cells = (
        *("params.learning_rate", "params.seed", "params.setting", "params.model", "params.task"),
        *ABOUT_MODELS,
    )
    of_groups = (
        *mean,
        "metrics.validation_score",
        "metrics.best_learning_rate",
        "params.task",
        "params.model",
        *ABOUT_MODELS,
    )
    views = (
        (VIEW, "Scores", _table((*mean, *tasks, *ABOUT_MODELS), WITHOUT_TASKS)),
        (CELLS, "Cells", _table((*dict.fromkeys(scores), *of_cells), OF_CELLS)),
        (CHARTS, f"Charts by {charts_by}", _table(of_groups, OF_GROUPS) | _charts(charts_by)),
    )
    return {
        f"mlflow.sharedViewState.{key}": json.dumps({"name": name, "createdAt": 0, "state": json.dumps(state)})
        for key, name, state in views
    }


def _table(columns: Sequence[str], condition: str) -> dict[str, Any]:
    """Return the state of a table of runs, the best score first."""
    return {
        "orderByKey": "metrics.`score`",
        "orderByAsc": False,
        "searchFilter": condition,
        "selectedColumns": ["{}.`{}`".format(*name.split(".", 1)) for name in columns],
    }


def _charts(by: str) -> dict[str, Any]:
    """Return the state of MLflow's charts of a study's summaries: means by a parameter, and parallel coordinates."""
    metrics = ("score", "validation_score", "sd_seeds")
    charts: list[dict[str, Any]] = [{"type": "BAR", "metricKey": metric, "displayName": metric} for metric in metrics]
    charts.append({"type": "PARALLEL", "selectedParams": CHART_PARAMS, "selectedMetrics": CHART_METRICS})
    fixed = {"metricSectionId": "scores", "deleted": False, "isGenerated": False, "runsCountToCompare": 100}
    return {
        # MLflow loads 100 runs at a time; in the table's order, these would be the best ones.
        "orderByKey": "params.`task`",
        "orderByAsc": True,
        "searchFilter": OF_GROUPS,
        "groupBy": {"aggregateFunction": "average", "groupByKeys": [{"mode": "param", "groupByData": by}]},
        "runsHiddenMode": "SHOW_ALL",
        "compareRunCharts": [{"uuid": f"chart{number}", **fixed, **chart} for number, chart in enumerate(charts)],
        # MLflow adds a chart to the last section for each metric that has none.
        "compareRunSections": [
            {"uuid": uuid, "name": name, "display": True, "isReordered": False}
            for uuid, name in (("scores", "Scores"), ("others", "Model metrics"))
        ],
    }


def runs_page(experiment: str, condition: str) -> str:
    """Return the page of the runs that a filter finds, relative to the server's address, the best score first."""
    # With a filter MLflow accepts an order but no shared view.
    return f"#/experiments/{experiment}/runs?{MODEL_TRAINING}&{BY_SCORE}&searchFilter={quote(condition, safe='')}"


def experiment_links(base: str, experiments: Mapping[str, str]) -> dict[str, str]:
    """Return links to MLflow's web interface: the scores, cells and charts of each study.

    `experiments` are the ids by name. If there are none, the one link opens MLflow's list of experiments.
    """
    root = f"{base.rstrip('/')}/#/experiments"
    views = {"": VIEW, ", cells": CELLS, ", charts": f"{CHARTS}&compareRunsMode=CHART"}
    links = {} if experiments else {"MLflow": f"{root}?{MODEL_TRAINING}"}
    for name, number in experiments.items():
        for ending, view in views.items():
            links[f"{name}{ending}"] = f"{root}/{number}/runs?{MODEL_TRAINING}&viewStateShareKey={view}"
    return links
