"""Every model's score on every task, with marks of the best and of those not clearly different from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mlmclm.analysis.analyse import Analysis
from mlmclm.analysis.comparison import ALL_TASKS, against, tied
from mlmclm.analysis.results import Record, records
from mlmclm.analysis.selection import best_rates
from mlmclm.reports import text, wording
from mlmclm.reports.study_facts import ModelFacts, TaskFacts

EDGES = {"highest": "highest tried", "lowest": "lowest tried", "only": "only one tried"}
EMPTY: dict[str, Any] = {
    **dict.fromkeys(("task", "score", "interval", "plain", "fresh", "rate", "edge", "note"), ""),
    **dict.fromkeys(("best", "tied"), False),
}


def score_rows(analysis: Analysis, models: Sequence[ModelFacts], tasks: Sequence[TaskFacts]) -> list[dict[str, Any]]:
    """Return a row for each model with a cell for each task and one for the mean over tasks, in words."""
    best = {(row["model"], row["task"]): row for row in records(analysis.best)}
    overall = {row["model"]: row for row in records(analysis.overall) if row["scope"] == ALL_TASKS}
    by_task = {task.name: [row for (_, row_task), row in best.items() if row_task == task.name] for task in tasks}
    winners = {task: winners_of(analysis, task, rows) for task, rows in by_task.items()}
    top, level = wording.marked(analysis)
    rows = []
    for model in models:
        cells = []
        for task in tasks:
            row = best[model.name, task.name]
            winner, rivals = winners[task.name]
            cells.append(
                EMPTY
                | {
                    "task": task.name,
                    "score": text.points(row["score"]),
                    "interval": text.interval(row["score_low"], row["score_high"]),
                    "plain": text.points(row["test_mean"]),
                    "fresh": text.points(row["fresh"]),
                    "rate": best_rates(row),
                    "edge": EDGES.get(row["edge"], ""),
                    "note": "; ".join(filter(None, (_lost(row), row["note"]))),
                    "best": model.name in winner,
                    "tied": model.name in rivals,
                }
            )
        mean = overall.get(model.name)
        if mean is None:  # a further pretraining run, whose scores count in the mean of its model
            first = next(name for name, runs in analysis.groups.items() if model.name in runs)
            cells.append(EMPTY | {"note": f"in the mean of {first}"})
        else:
            cells.append(
                EMPTY
                | {
                    "score": text.points(mean["mean"]),
                    "interval": text.interval(mean["low"], mean["high"]),
                    "note": "" if mean["tasks"] == mean["tasks_scored"] else "not on every task",
                    "best": model.name in top,
                    "tied": model.name in level,
                }
            )
        rows.append({"model": model.name, "cells": cells})
    return rows


def _lost(row: Record) -> str:
    """Say how many seeds a score is based on if other seeds have diverged or are missing; else empty."""
    lost = [f"{row[kind]} {word}" for kind, word in (("diverged", "diverged"), ("missing", "not run")) if row[kind]]
    return f"{text.plural(row['n'], 'seed')}, {', '.join(lost)}" if lost and row["n"] else ""


def winners_of(analysis: Analysis, scope: str, rows: Sequence[Record]) -> tuple[set[str], set[str]]:
    """Return the models with the highest score on a task or family, and those not clearly different from the first of these.

    Both sets are empty if there are fewer than two scores, or the highest score is not above chance.

    Args:
        rows: `model`, `score` and `above_chance` of each model.
    """
    scored = [row for row in rows if not math.isnan(row["score"])]
    # A single score cannot be better than others.
    if len(scored) < 2:
        return set(), set()
    top = min(scored, key=lambda row: (-row["score"], row["model"]))
    if top["above_chance"] == "no":
        return set(), set()
    rivals = against(analysis.comparisons, top["model"])
    rivals = [row for row in rivals if row["scope"] == scope and not math.isnan(row["difference"])]
    level = {row["model_b"] for row in rivals if tied(row["difference"])}
    near = {row["model_b"] for row in rivals if not wording.clearly_different(row, analysis.confidence)}
    return {top["model"], *level}, near - level


def task_verdicts(analysis: Analysis) -> dict[tuple[str, str], str]:
    """Say of every (model, task) with a score how it compares with the other models on that task, in a sentence.

    Several pretraining runs of a model are compared as one.
    """
    by_task: dict[str, list[Record]] = {}
    for row in records(analysis.best):
        effect = analysis.effects.get((row["model"], row["task"]))
        if row["model"] in analysis.groups and effect is not None and not math.isnan(effect.seeds.value):
            by_task.setdefault(row["task"], []).append(row | {"score": effect.seeds.value})
    verdicts: dict[tuple[str, str], str] = {}
    where = "on this task so far" if analysis.missing else "on this task"
    for task, rows in by_task.items():
        winners, rivals = winners_of(analysis, task, rows)
        top = min(rows, key=lambda row: (-row["score"], row["model"]))["model"]
        gaps = {row["model_b"]: row for row in against(analysis.comparisons, top) if row["scope"] == task}
        for model in (row["model"] for row in rows):
            level = sorted((winners | rivals) - {model})
            if len(rows) < 2:
                continue
            if not winners:
                sentence = f"No model is shown to be above chance {where}."
            elif model in winners and not level:
                best = "Highest score" if analysis.missing else "Best"
                sentence = f"{best} of {len(rows)} models {where}."
            elif model in winners:
                sentence = f"Highest score {where}, not clearly above {text.listing(level)}."
            elif model in rivals:
                sentence = f"No clear difference {where} from the best, {top}."
            else:
                gap = gaps[model]
                lead = text.estimate(-gap["difference"], -gap["high"], -gap["low"], sign=True).strip()
                sentence = f"Below the best {where}, {top}: {lead} points."
            verdicts |= {(run, task): sentence for run in analysis.groups[model]}
    return verdicts
