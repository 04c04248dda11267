"""Zero-shot results and paired models in the report: encoder, decoder, and each made from the other, side by side.

The comparison is Ettin's (arXiv 2507.11412): the models of a size are shown by how they were made, on every task.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd

from mlmclm.analysis.analyse import Analysis
from mlmclm.analysis.comparison import against
from mlmclm.analysis.results import Record, records
from mlmclm.reports import text
from mlmclm.reports.study_facts import DECODER, ENCODER, MADE, ModelFacts, StudyFacts, TaskFacts, ZeroShotFacts
from mlmclm.results.intervals import Estimate, student

PRONOUNS = ("masculine", "neutral", "feminine")
NO_SHARES = ("perplexity", "bits_per_byte")
"""Endings of the names of metrics that aren't shares of 1."""
NAN = math.nan


@dataclass(frozen=True)
class Score:
    """A score with its interval; unknown ends are NaN."""

    value: float
    low: float
    high: float
    share: bool = True  # whether it can be shown in points out of 100; a perplexity can't

    @classmethod
    def of(cls, metric: str, entry: Mapping[str, float | None]) -> Score:
        """Return a zero-shot metric's score."""
        ends = (entry[name] for name in ("score", "low", "high"))
        value, low, high = (NAN if end is None else float(end) for end in ends)
        return cls(value, low, high, not metric.endswith(NO_SHARES) and not abs(value) > 1)

    def __str__(self) -> str:
        if math.isnan(self.value):
            return text.NONE
        return text.points(self.value) if self.share else f"{self.value:,.4g}"

    @property
    def interval(self) -> str:
        """The interval in the score's unit, in brackets; "" if there is none."""
        if math.isnan(self.low) or math.isnan(self.high):
            return ""
        return text.interval(self.low, self.high) if self.share else f"[{self.low:,.4g}, {self.high:,.4g}]"


def zero_shot_tables(facts: StudyFacts) -> list[dict[str, Any]]:
    """Return a table of models and metrics for each task, as the template needs them."""
    tables = []
    for task in dict.fromkeys(result.task for result in facts.zero_shot):
        results = [result for result in facts.zero_shot if result.task == task]
        metrics = list(dict.fromkeys(name for result in results for name in result.metrics))
        rows = []
        for result in results:
            cells = [Score.of(name, result.entry(name)) if name in result.metrics else None for name in metrics]
            rows.append({"model": result.model, "scoring": result.scoring, "cells": cells})
        examples = max((int(entry["examples"] or 0) for item in results for entry in item.metrics.values()), default=0)
        unit = "occupation" if set(PRONOUNS) <= set(metrics) else "example"
        levels = [results[0].metrics.get(name, {}) for name in metrics]
        chances = [(_chance(name, level), level.get("chance_how")) for name, level in zip(metrics, levels, strict=True)]
        size = text.plural(examples, unit)
        tables.append({"task": task, "metrics": metrics, "rows": rows, "size": size, "chances": chances})
    return tables


def _chance(metric: str, entry: Mapping[str, Any]) -> str:
    level = entry.get("chance")
    return "none" if level is None else str(Score.of(metric, {"score": level, "low": None, "high": None}))


def zero_shot_frame(facts: StudyFacts) -> pd.DataFrame:
    """Return the table `zero_shot.csv`: a row for each model, task and metric."""
    rows = [
        (item.model, item.task, item.scoring, name, *map(entry.get, ("score", "low", "high", "examples", "chance")))
        for item in facts.zero_shot
        for name, entry in item.metrics.items()
    ]
    return pd.DataFrame(
        rows, columns=("model", "task", "scoring", "metric", "score", "low", "high", "examples", "chance")
    )


@dataclass(frozen=True)
class Row:
    """A task in the comparison of a pair."""

    task: str
    kind: str  # `fine-tuned` or `zero-shot`
    metric: str
    scores: Mapping[str, Score]  # by how the model was made
    difference: Score | None  # decoder minus encoder


@dataclass(frozen=True)
class PairedModels:
    """The models of one size by how they were made, and their scores on every task."""

    size: str
    models: Mapping[str, str]
    rows: tuple[Row, ...]


def pairs(analysis: Analysis, facts: StudyFacts, tasks: Sequence[TaskFacts]) -> list[PairedModels]:
    """Return the comparison for each size that has an encoder and a decoder.

    Of several models of a size that were made in the same way, only the one that has seen the most tokens counts (the first of equals). A study without
    zero-shot tasks has comparisons only if models were made in all four ways: its tables of scores show the rest.
    """
    best = {(row["model"], row["task"]): row for row in records(analysis.best)}
    zero_shot = {(result.model, result.task): result for result in facts.zero_shot}
    paired = []
    for size in dict.fromkeys(model.size for model in facts.models):
        by_way = most_trained([model for model in facts.models if model.size == size])
        models = {way: model.name for way, model in by_way.items()}
        if ENCODER in models and DECODER in models and (zero_shot or len(models) == len(MADE)):
            compared = against(analysis.comparisons, models[DECODER])
            rows = [_fine_tuned(task, models, best, compared) for task in tasks]
            rows += [_zero_shot(task, models, zero_shot) for task in dict.fromkeys(task for _, task in zero_shot)]
            paired.append(PairedModels(size, models, tuple(row for row in rows if row.scores)))
    return paired


def most_trained(models: Sequence[ModelFacts]) -> dict[str, ModelFacts]:
    """Return, by how models were made, the one that has seen the most tokens; the first of several equal ones."""
    by_way = {way: [model for model in models if model.made == way] for way in MADE}
    return {way: max(group, key=lambda model: model.tokens or 0) for way, group in by_way.items() if group}


def _fine_tuned(
    task: TaskFacts,
    models: Mapping[str, str],
    best: Mapping[tuple[str, str], Record],
    compared: Sequence[Record],
) -> Row:
    rows = {way: best[name, task.name] for way, name in models.items() if (name, task.name) in best}
    scores = {way: Score(*(row[name] for name in ("score", "score_low", "score_high"))) for way, row in rows.items()}
    wanted = "task", task.name, models[ENCODER]
    matches = (row for row in compared if (row["kind"], row["scope"], row["model_b"]) == wanted)
    difference = next((Score(row["difference"], row["low"], row["high"]) for row in matches), None)
    return Row(task.name, "fine-tuned", text.metric(task.metric), scores, difference)


def _zero_shot(task: str, models: Mapping[str, str], results: Mapping[tuple[str, str], ZeroShotFacts]) -> Row:
    by_way = {way: results[name, task] for way, name in models.items() if (name, task) in results}
    scores = {way: Score.of(result.main, result.entry(result.main)) for way, result in by_way.items()}
    main = next((result.main for result in by_way.values()), "")
    pair = [(sign, by_way[way]) for sign, way in ((1.0, DECODER), (-1.0, ENCODER)) if way in by_way]
    estimate = paired_sum(pair) if len(pair) == 2 else None
    difference = None if estimate is None else Score(estimate.value, estimate.low, estimate.high)
    return Row(task, "zero-shot", main, scores, difference)


def paired_sum(results: Sequence[tuple[float, ZeroShotFacts]]) -> Estimate | None:
    """Return the weighted sum of main scores with the interval of paired examples; None where the scores can't be paired.

    Models answer the same examples. A score that isn't the mean of its examples' values, such as a perplexity, is not paired.
    """
    values = [np.asarray(result.values) for _, result in results]
    scores = [result.entry(result.main).get("score") for _, result in results]
    if len({len(row) for row in values}) > 1 or len(values[0]) < 2:
        return None
    if not all(math.isclose(fmean(row), score or 0, abs_tol=1e-9) for row, score in zip(values, scores, strict=True)):
        return None
    return student(np.sum([weight * row for (weight, _), row in zip(results, values, strict=True)], axis=0).tolist())


def pair_frame(found: Sequence[PairedModels]) -> pd.DataFrame:
    """Return the table `pairs.csv`: a row for each size, task and model."""
    rows = [
        (pair.size, row.task, row.kind, row.metric, way, pair.models[way], score.value, score.low, score.high)
        for pair in found
        for row in pair.rows
        for way, score in row.scores.items()
    ]
    return pd.DataFrame(rows, columns=("size", "task", "kind", "metric", "made", "model", "score", "low", "high"))
