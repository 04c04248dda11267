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
"""Keys of a study's views: the table of its models, that of its cells, and charts of the models."""
OF_MODELS, OF_GROUPS, OF_CELLS = (f"tags.`mlmclm.kind` = '{kind}'" for kind in ("model", "group", "cell"))
WITHOUT_TASKS = "tags.`mlmclm.kind` != 'cell' and tags.`mlmclm.kind` != 'group'"
"""Filters of MLflow's run search, by the kind of run."""
ABOUT_MODELS = ("params.objective", "params.size", "params.mask_ratio", "params.tokens")
MOST_TASKS, MOST_CHARTS = 40, 8
"""Maximum number of tasks with columns in the tables, and with bar charts: a tag has at most 5,000 characters."""


def metric_name(name: str) -> str:
    """Return a metric's name without characters that MLflow refuses: the @ of ndcg@10, and the + that joins the metrics of a mean."""
    return name.replace("@", "_at_").replace("+", "_and_")


def view_tags(tasks: Sequence[str] = (), charts_by: str = "objective") -> dict[str, str]:
    """Return the tags of an experiment that hold its views, for MLflow's menu "Views" and the printed links.

    A column or bar chart shows one task, or the mean over all. A tag's value has the form in which MLflow's web interface (3.17)
    saves a view.

    Args:
        tasks: those with columns and charts.
        charts_by: the parameter by which the bar charts are grouped.
    """
    scores = [metric_name(f"{task} score") for task in tasks]
    columns = [f"metrics.{name}" for name in scores[:MOST_TASKS]]
    of_models = ("metrics.score", "metrics.score_low", "metrics.score_high", "metrics.sd_seeds", *columns)
    of_cells = ("params.learning_rate", "params.seed", "params.setting", "params.model", "params.task")
    charted = ("params.model", *of_models, *ABOUT_MODELS)
    views = (
        (VIEW, "Scores", _table((*of_models, *ABOUT_MODELS), WITHOUT_TASKS)),
        (CELLS, "Cells", _table((*columns, *of_cells, *ABOUT_MODELS), OF_CELLS)),
        (CHARTS, f"Charts by {charts_by}", _table(charted, OF_MODELS) | _charts(charts_by, scores[:MOST_CHARTS])),
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


def _charts(by: str, scores: Sequence[str]) -> dict[str, Any]:
    """Return the state of MLflow's charts of a study's models: the mean and each task's score by a parameter, and parallel coordinates."""
    charts: list[dict[str, Any]] = [
        {"type": "BAR", "metricKey": name, "displayName": name} for name in ("score", *scores, "sd_seeds")
    ]
    axes = [name.removeprefix("params.") for name in ABOUT_MODELS[:3]]
    charts.append({"type": "PARALLEL", "selectedParams": axes, "selectedMetrics": (*scores, "score")})
    fixed = {"metricSectionId": "scores", "deleted": False, "isGenerated": False, "runsCountToCompare": 100}
    return {
        "groupBy": {"aggregateFunction": "average", "groupByKeys": [{"mode": "param", "groupByData": by}]},
        "runsHiddenMode": "SHOW_ALL",
        "compareRunCharts": [{"uuid": f"chart{number}", **fixed, **chart} for number, chart in enumerate(charts)],
        # MLflow adds a chart for each metric without one to the last section.
        "compareRunSections": [
            {"uuid": uuid, "name": name, "display": True, "isReordered": False}
            for uuid, name in (("scores", "Scores"), ("others", "Model metrics"))
        ],
    }


def runs_page(experiment: str, condition: str) -> str:
    """Return the page of the runs that a filter finds, relative to the server's address, the best score first."""
    # In an address with a filter, MLflow accepts a sort order but no shared view.
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
