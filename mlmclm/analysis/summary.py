"""Analysis results as plain values: metrics of each (model, task), and a JSON-serialisable summary."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import pandas as pd

from mlmclm.analysis.analyse import Analysis
from mlmclm.analysis.comparison import ALL_TASKS
from mlmclm.analysis.results import Record, cell_columns, records, seeds_of
from mlmclm.analysis.statistics.stability import COLUMNS
from mlmclm.numbers import without_nan
from mlmclm.seeds import Seeds

_BEST = (
    *("learning_rate", "n", "validation_mean", "test_mean", "test_sd", "score", "score_low", "score_high"),
    *("fresh", "fresh_low", "fresh_high", "p_chosen", "regret", "chance"),
)
_STABILITY = tuple(name for name, kind in COLUMNS.items() if kind == "float64")


def task_metrics(analysis: Analysis) -> dict[tuple[str, str], dict[str, float]]:
    """Return the numbers of each (model, task) by name, in the form of tracker metrics; non-finite values are left out.

    Names: best_learning_rate, seeds, cells_missing, columns of `selection.best_table` (`regret` is named
    expected_regret), the columns of `statistics.stability`, and the components of variance as `component_SOURCE`, with
    `_low` and `_high`; the components of a family of several models are given for each of them.
    """
    renamed = {"learning_rate": "best_learning_rate", "n": "seeds", "regret": "expected_regret"}
    metrics: dict[tuple[str, str], dict[str, float]] = {}
    for row in records(analysis.best):
        metrics[row["model"], row["task"]] = {renamed.get(name, name): float(row[name]) for name in _BEST}
    for row in records(analysis.stability):
        metrics[row["model"], row["task"]] |= {name: float(row[name]) for name in _STABILITY}
    for row in records(analysis.components):
        name = f"component_{row['source'].replace('+', '_')}"
        component = {name: row["sd"], f"{name}_low": row["sd_low"], f"{name}_high": row["sd_high"]}
        for model in row["models"].split(", "):
            metrics[model, row["task"]] |= component
    for row in records(analysis.coverage):
        metrics[row["model"], row["task"]]["cells_missing"] = float(row["missing"])
    return {
        pair: {name: value for name, value in numbers.items() if math.isfinite(value)}
        for pair, numbers in sorted(metrics.items())
    }


def model_metrics(analysis: Analysis) -> dict[str, dict[str, float]]:
    """Return the numbers of each model over its tasks by name, in the form of tracker metrics; non-finite values are left out.

    Names: `score` with `_low` and `_high` is the mean over tasks, `chance` its chance level, `sd_seeds` the root mean square of the
    tasks' deviations over seeds, without corrections, and `TASK score` the score on one task.
    """
    deviations = {(row["model"], row["task"]): float(row["sd_seeds"]) for row in records(analysis.stability)}
    metrics = {}
    for row in records(analysis.overall):
        if row["scope"] == ALL_TASKS:
            runs = analysis.groups[row["model"]]
            squares = [deviations.get((run, task), math.nan) ** 2 for run in runs for task in analysis.families]
            numbers = {
                "score": row["mean"],
                "score_low": row["low"],
                "score_high": row["high"],
                "chance": row["chance"],
                "sd_seeds": math.sqrt(sum(squares) / len(squares)),
            }
            numbers |= {
                f"{task} score": effect.seeds.value
                for (model, task), effect in analysis.effects.items()
                if model == row["model"]
            }
            metrics[row["model"]] = {name: float(value) for name, value in numbers.items() if math.isfinite(value)}
    return metrics


def study_metrics(analysis: Analysis) -> dict[str, float]:
    """Return the differences that the study finds by name, in the form of tracker metrics; unknown ones are left out.

    Names: `smallest_difference_` with a task's name or `all_tasks`.
    """
    numbers = {f"smallest_difference_{scope.replace(' ', '_')}": value for scope, value in analysis.smallest.items()}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def summary(analysis: Analysis) -> dict[str, Any]:
    """Summarise the outcome of the study as JSON-serialisable values, with None for unknown numbers."""
    return {
        "rule": analysis.rule,
        "confidence": analysis.confidence,
        "baseline": analysis.baseline,
        "cells": {"present": len(analysis.cells), "diverged": analysis.diverged, "missing": analysis.missing},
        "chance": {task: asdict(level) for task, level in analysis.chances.items()},
        "overall": _plain(analysis.overall),
        "best": _plain(analysis.best),
        "stability": _plain(analysis.stability),
        "components": _plain(analysis.components),
        "claims": _plain(analysis.claims),
    }


def chosen_results(
    analysis: Analysis, results: Sequence[Mapping[str, Any]]
) -> dict[tuple[str, str], dict[Seeds, Mapping[str, Any]]]:
    """Return the results at the chosen learning rates by (model, task) and seed; pairs without any are left out.

    Args:
        results: the results that were analysed.
    """
    # A result's key identifies its weights, not the model's name, and two names may have the same weights.
    by_key = {(result["model"], result["key"]): result for result in results}
    # The table of chosen cells has no keys, so they are looked up in the table of all cells.
    keys = {cell_columns(row): row["key"] for row in records(analysis.cells)}
    chosen: dict[tuple[str, str], dict[Seeds, Mapping[str, Any]]] = {}
    for row in records(analysis.chosen):
        by_seed = chosen.setdefault((row["model"], row["task"]), {})
        by_seed[seeds_of(row)] = by_key[row["model"], keys[cell_columns(row)]]
    return chosen


def _plain(frame: pd.DataFrame) -> list[Record]:
    return list(map(without_nan, records(frame)))
