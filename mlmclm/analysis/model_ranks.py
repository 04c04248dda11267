"""Ranks of models that were tested on the same examples: which pairs differ, and the ranks that each model may have.

Every two models are compared on the mean over tasks. A pair's variance over test examples is the jackknife's (`effects.fold_scores`), averaged
over all pairs, as in the analysis of variance of models and examples. Where models have several seeds, the variance of these is added. Student's
p value and interval have Welch-Satterthwaite degrees of freedom, and Holm's method corrects p over all pairs. If B of
N models are shown to be better than a model, and W worse, its rank is from 1 + B to N - W. All ranges hold together at 95 % (as Al Mohamad,
Goeman and van Zwet 2022). Ranges of resampled ranks held in hardly any simulation with near ties.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence, Set
from typing import NamedTuple

import numpy as np

from mlmclm.analysis.effects import fold_scores
from mlmclm.results.intervals import Estimate, holm, satterthwaite, without_error
from mlmclm.results.measures import Array, WeightedMean


class TaskScores(NamedTuple):
    """The scores of all models on the examples of a task.

    Attributes:
        scores: for each model, the scores of its seeds, [S, n]; models may differ in S.
        groups: the groups of examples that belong together, as for `fold_scores`.
    """

    scores: Sequence[Array]
    groups: Array | None = None


class RankedModel(NamedTuple):
    """A model, its mean score over tasks, and the best and the worst rank that it may have."""

    model: str
    score: float
    best: int
    worst: int


class RankedPair(NamedTuple):
    """Two models, the better one first; the interval and `p` are of this pair alone, and `p_holm` is corrected over all."""

    first: str
    second: str
    difference: Estimate
    p_holm: float


class RankedModels(NamedTuple):
    """All models, the best mean first; all pairs; and the groups: sequences of neighbours in rank of which no two differ clearly."""

    models: tuple[RankedModel, ...]
    pairs: tuple[RankedPair, ...]
    groups: tuple[tuple[str, ...], ...]


def ranking(models: Sequence[str], tasks: Sequence[TaskScores], confidence: float = 0.95) -> RankedModels:
    """Rank at least two models by their means over tasks.

    Args:
        models: their names, in the order of the tasks' scores.
    """
    means = np.asarray([[scores.mean() for scores in task.scores] for task in tasks])  # [T, M]
    order = sorted(range(len(models)), key=lambda index: (-means[:, index].mean(), models[index]))
    examples = [_of_examples(task) for task in tasks]
    seeds = [_of_seeds(task) for task in tasks]
    gaps = []
    for one, other in itertools.combinations(order, 2):
        shares = list(examples)
        for task, (variance, freedom) in zip(tasks, seeds, strict=True):
            if freedom:
                shares.append((variance * (1 / len(task.scores[one]) + 1 / len(task.scores[other])), freedom))
        shares = [(variance / len(tasks) ** 2, freedom) for variance, freedom in shares if variance > 0]
        value = float((means[:, one] - means[:, other]).mean())
        gaps.append(
            (one, other, satterthwaite(value, shares, confidence=confidence) if shares else without_error(value))
        )
    corrected = holm([gap.p for *_, gap in gaps])
    pairs = tuple(
        RankedPair(models[one], models[other], gap, p) for (one, other, gap), p in zip(gaps, corrected, strict=True)
    )
    clear = {(pair.first, pair.second) for pair in pairs if pair.p_holm < 1 - confidence}
    names = [models[index] for index in order]
    ranked = tuple(
        RankedModel(model, float(means[:, index].mean()), *rank_range(model, len(names), clear))
        for index, model in zip(order, names, strict=True)
    )
    return RankedModels(ranked, pairs, tuple(map(tuple, level_runs(names, clear))))


def rank_range(model: str, models: int, clear: Set[tuple[str, str]]) -> tuple[int, int]:
    """Return the best and the worst rank that a model may have, given the pairs that differ clearly, the better one first."""
    return 1 + sum(worse == model for _, worse in clear), models - sum(better == model for better, _ in clear)


def level_runs(ranked: Sequence[str], clear: Set[tuple[str, str]]) -> list[list[str]]:
    """Return the longest sequences of two or more neighbours in rank of which no two differ clearly.

    Args:
        ranked: the models, from the best on.
        clear: the pairs that differ clearly, the better one first.
    """
    groups: list[list[str]] = []
    start = 0
    for end, last in enumerate(ranked):
        first = start
        while any((other, last) in clear for other in ranked[first:end]):
            first += 1
        if first > start:
            groups.append(list(ranked[start:end]))
        start = first
    return [group for group in [*groups, list(ranked[start:])] if len(group) > 1]


def _of_examples(task: TaskScores) -> tuple[float, float]:
    """Return the jackknife's variance of a difference, the mean over all pairs of models, and its degrees of freedom."""
    measures = [WeightedMean(scores.mean(axis=0)) for scores in task.scores]
    folds = np.stack([fold_scores(measure, len(measure.values), task.groups) for measure in measures])  # [M, G]
    deviations = folds - folds.mean(axis=1, keepdims=True)
    deviations -= deviations.mean(axis=0)
    models, count = deviations.shape
    return float((count - 1) / count * 2 / (models - 1) * (deviations**2).sum()), (models - 1) * (count - 1)


def _of_seeds(task: TaskScores) -> tuple[float, int]:
    """Return the variance of one seed's score, pooled over the models, and its degrees of freedom; 0 for single seeds."""
    parts = [scores.mean(axis=1) for scores in task.scores]
    freedom = sum(len(seed_scores) - 1 for seed_scores in parts)
    squares = math.fsum(float(((seed_scores - seed_scores.mean()) ** 2).sum()) for seed_scores in parts)
    return (squares / freedom if freedom else 0.0), freedom
