"""Weighted sums of scores over models and tasks, each with one interval and p value: means over tasks, differences, claims.

The noise of a model that is in several pairs counts once, with its total weight. Fine-tuning seeds on different tasks are independent, unless the tasks
share their trainings (`shared_trainings`). Test sets are independent. A pretraining run moves all of its tasks, so where models
have several runs, the noise is that of the runs' own sums (`run_noise`). The sum of all variances has Welch-Satterthwaite degrees of
freedom. Variances that are pooled over all models are one estimate, so its degrees of freedom count once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mlmclm.analysis.effects import NO_EFFECT, Effect, fold_variance
from mlmclm.analysis.run_noise import RunNoise, noise_of_sum
from mlmclm.results.intervals import NAN, Estimate, satterthwaite, without_error
from mlmclm.results.measures import Array

Effects = Mapping[tuple[str, str], Effect]
"""The models' scores by (model, task); pairs without any cell are absent."""
Share = tuple[float, float]
"""A variance and its degrees of freedom."""


class PairOnTask(NamedTuple):
    """Two models on a task, and the weight of their difference, first minus second."""

    first: str
    second: str
    task: str
    weight: float


@dataclass(frozen=True)
class Contrast:
    """A weighted sum of scores over models and tasks; without variances where the noise is not known.

    Attributes:
        whole: the sum with its interval.
        seeds: the variances of fine-tuning seeds, where no model has several pretraining runs.
        runs: the variances of pretraining runs.
        within: the part of `runs` that fine-tuning seeds add.
        test_sets: the variances of the finite test sets.
        pooled: whether `runs` has a variance that is pooled over the pretraining runs of all models.
    """

    whole: Estimate
    seeds: tuple[Share, ...] = ()
    runs: tuple[Share, ...] = ()
    within: float = 0.0
    test_sets: tuple[Share, ...] = ()
    pooled: bool = False


def model_weights(parts: Sequence[PairOnTask]) -> dict[str, dict[str, float]]:
    """Return by task the weight of each model in a weighted sum of differences: the sum over its pairs."""
    weights: dict[str, dict[str, float]] = {}
    for first, second, task, weight in parts:
        of_task = weights.setdefault(task, {})
        for model, sign in ((first, 1), (second, -1)):
            of_task[model] = of_task.get(model, 0.0) + sign * weight
    return weights


def mean_difference(
    effects: Effects, pair: tuple[str, str], tasks: Sequence[str], confidence: float = 0.95, of: int | None = None
) -> Contrast:
    """Estimate the difference of two models' means over `tasks`, or over `of` tasks, of which those not in `tasks` count as 0."""
    share = 1 / (of or max(1, len(tasks)))
    return weighted_sum(effects, {task: {pair[0]: share, pair[1]: -share} for task in tasks}, confidence)


def weighted_sum(effects: Effects, weights: Mapping[str, Mapping[str, float]], confidence: float = 0.95) -> Contrast:
    """Estimate a weighted sum of scores.

    Tasks on which the noise is not known count with the mean variance of the others, as long as they are fewer than half and none
    of their scores is based on one seed. Seeds with equal scores suggest little noise, but one seed shows nothing about it.

    Args:
        effects: the models' scores, over their pretraining runs (`replicates`).
        weights: the weight of each model, by task.
    """
    parts_of = {
        task: [(model, weight, effects.get((model, task), NO_EFFECT)) for model, weight in models.items() if weight]
        for task, models in weights.items()
    }
    scores = [(weight, effect) for parts in parts_of.values() for _, weight, effect in parts]
    value = math.fsum(weight * effect.seeds.value for weight, effect in scores) if scores else NAN
    known_parts = {
        task: parts
        for task, parts in parts_of.items()
        if parts and not any(math.isnan(effect.seeds.error) for _, _, effect in parts)
    }
    single = any(effect.seeds.freedom == 0 for _, effect in scores)
    if single or 2 * len(known_parts) <= len(parts_of) or math.isnan(value):
        return Contrast(without_error(value, single=single))
    seeds: list[Share] = []
    test_sets: list[Share] = []
    by_model: dict[str, list[tuple[float, RunNoise]]] = {}
    by_seed: dict[str, dict[str, tuple[float, Effect]]] = {}
    for task, parts in known_parts.items():
        test_sets += test_set_noise([(weight, effect) for _, weight, effect in parts])
        for model, weight, effect in parts:
            if effect.runs is None:
                by_seed.setdefault(model, {})[task] = weight, effect
            else:
                by_model.setdefault(model, []).append((weight, effect.runs))
    of_all: dict[frozenset[str], list[Share]] = {}
    for scored in by_seed.values():
        for tasks, share, is_pooled in _of_seeds(scored):
            if is_pooled:
                of_all.setdefault(tasks, []).append(share)
            else:
                seeds.append(share)
    seeds += [_as_one(shares) for shares in of_all.values()]
    noises = [noise_of_sum(parts) for parts in by_model.values()]
    within = math.fsum(weight**2 * noise.seeds for parts in by_model.values() for weight, noise in parts)
    pooled = [(noise.variance, noise.freedom) for noise in noises if noise.pooled]
    runs = [(noise.variance, noise.freedom) for noise in noises if not noise.pooled]
    runs += [_as_one(pooled)] if pooled else []
    scale = len(parts_of) / len(known_parts)  # for the tasks whose noise is not known
    shares = [*seeds, *runs, *test_sets]
    if not math.fsum(size for size, _ in shares) > 0:  # or it is NaN
        return Contrast(without_error(value))
    return Contrast(
        satterthwaite(value, _times(scale, shares), confidence=confidence),
        seeds=_times(scale, seeds),
        runs=_times(scale, runs),
        within=scale * within,
        test_sets=_times(scale, test_sets),
        pooled=bool(pooled),
    )


def _as_one(shares: Sequence[Share]) -> Share:
    """Return the sum of variances that are based on one estimate, whose degrees of freedom count once."""
    return math.fsum(size for size, _ in shares), min(freedom for _, freedom in shares)


def _of_seeds(scored: Mapping[str, tuple[float, Effect]]) -> list[tuple[frozenset[str], Share, bool]]:
    """Return the variances that fine-tuning seeds add to a weighted sum of a model's scores: one for each set of tasks that share trainings.

    Args:
        scored: the weight and the score of each task.

    Returns:
        Tuples of the tasks, the variance, and whether it is pooled over all models (`Effect.pooled`).
    """
    remaining, variances = dict(scored), list[tuple[frozenset[str], Share, bool]]()
    while remaining:
        task, (_, first) = next(iter(remaining.items()))
        group = {name: remaining.pop(name) for name in (task, *first.alike) if name in remaining}
        errors = {name: weight * effect.seeds.error for name, (weight, effect) in group.items()}
        covariance = math.fsum(
            errors[one] * errors[other] * (1.0 if one == other else group[one][1].alike[other])
            for one, other in itertools.product(group, repeat=2)
        )
        # A seed's luck is in all scores of its training, so together they have no more degrees of freedom than each alone.
        share = covariance, min(effect.seeds.freedom for _, effect in group.values())
        variances.append((frozenset(group), share, all(effect.pooled for _, effect in group.values())))
    return variances


def _times(factor: float, shares: Sequence[Share]) -> tuple[Share, ...]:
    return tuple((factor * size, freedom) for size, freedom in shares)


def test_set_noise(parts: Sequence[tuple[float, Effect]]) -> list[Share]:
    """Return the variances that the test sets of a task add: one for each set of examples, and none if it is not known."""
    by_size: dict[int, list[Array]] = {}
    for weight, effect in parts:
        if effect.folds is None:
            return []
        by_size.setdefault(len(effect.folds), []).append(weight * effect.folds)
    return [fold_variance(np.asarray(sum(folds))) for folds in by_size.values()]
