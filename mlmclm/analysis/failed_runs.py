"""Failed runs, as opposed to noisy ones.

A run failed if most of the model's runs are above the chance level and it is not, or if it is below a gap: its distance to the best
run at its rate is at least `LEAST_GAP`, and at least `GAP` times the spread of the runs that learn. At a noisy rate, a run far below
the best has not failed, so the spread is that of the rate. It is the larger of two: the spread of the model's other runs at the rate,
and the largest that all models' runs at the rate allow, up to `NOISIEST` times the spread over all rates.

At a rate that is too high, all runs fail. That says nothing about how often runs fail at other rates, so such rates
(`_hopeless`) are distinguished from those at which only some runs fail.

Scores are those of runs that learn; how often runs fail is compared separately (`statistics.failure_counts`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from scipy import special, stats

from mlmclm.analysis.model_runs import Runs
from mlmclm.results.measures import Array

GAP, LEAST_GAP = 5.0, 0.05
"""A run counts as failed only if it is at least so many spreads, and so much in score (of 1), below the best run at its rate."""
NOISIEST = 4.0
"""Upper limit of a rate's spread, as a multiple of the spread over all rates."""
DOUBT = 0.2
"""Level of the quantile of the chi-square distribution that gives the upper limit of a rate's spread."""
SHOWN = 0.001
"""P value of the exact test below which a model is shown to lose more runs at a rate than the others do."""
HOPELESS = 0.025
"""P value of the exact test below which all runs at a rate are not lost by chance: no run learns there."""


def unlike(own: Array, total: Array) -> float:
    """Return the two-sided p value of Fisher's exact test whether a model's runs are lost (fail or diverge) as often as other models'.

    Runs are compared within strata: on the same task at the same rate. Given how many runs are lost in a stratum, the number of lost
    runs of the model is hypergeometric there.

    Args:
        own, total: numbers of lost and of all runs in each stratum, [2, ...], of the model and of all models.
    """
    (own_lost, own_ran), (lost, ran) = own.reshape(2, -1), total.reshape(2, -1)
    chances, usable = np.ones(1), (lost > 0) & (own_ran > 0)
    for stratum in np.flatnonzero(usable).tolist():
        number = own_ran[stratum]
        chances = np.convolve(chances, stats.hypergeom.pmf(np.arange(number + 1), ran[stratum], lost[stratum], number))
    observed = chances[int(own_lost[usable].sum())]
    return min(1.0, float(chances[chances <= observed * (1 + 1e-9)].sum()))


def with_unseen(tasks: Sequence[Mapping[str, Runs]]) -> list[dict[str, Runs]]:
    """Return the runs of all models on some tasks, with the scores that they may have at rates at which they lost every run (`Runs.unseen`).

    A model that loses more runs at a rate than the others do, by an exact test over the tasks (`SHOWN`), gets no such score there.
    """

    def at(runs: Runs, rate: float) -> tuple[Array, int]:
        """Return the scores of the runs that learned at a rate, and the number of all."""
        if rate not in runs.rates:
            return np.zeros(0), 0
        row = list(runs.rates).index(rate)
        return runs.test[row, runs.learned[row]], int(runs.ran[row].sum())

    def moved(runs: Runs, other_runs: Runs, rate: float) -> float:
        """Return a model's predicted score at a rate: another model's, plus their mean difference at rates where both learn."""
        curves = [(at(runs, tried)[0], at(other_runs, tried)[0]) for tried in runs.rates]
        gaps = [float(first.mean() - second.mean()) for first, second in curves if len(first) and len(second)]
        return float(at(other_runs, rate)[0].mean()) + (float(np.mean(gaps)) if gaps else 0.0)

    def lost(models: Mapping[str, Runs], rate: float) -> Array:
        """Return the numbers of lost and of all runs at a rate, [2]."""
        outcomes = [at(runs, rate) for runs in models.values()]
        return np.asarray([sum(ran - len(scores) for scores, ran in outcomes), sum(ran for _, ran in outcomes)])

    updated = []
    for models in tasks:
        updated_runs = dict(models)
        for name, runs in models.items():
            unseen = np.full(len(runs.rates), math.nan)
            for row in np.flatnonzero(runs.ran.any(axis=1) & ~runs.learned.any(axis=1)).tolist():
                rate = runs.rates[row]
                learned = [other for other in models.values() if len(at(other, rate)[0])]
                if not learned:
                    continue
                losses = [lost({name: task[name]} if name in task else {}, rate) for task in tasks]
                if unlike(np.stack(losses, axis=1), np.stack([lost(task, rate) for task in tasks], axis=1)) >= SHOWN:
                    unseen[row] = np.median([moved(runs, other, rate) for other in learned])
                    updated_runs[name] = replace(runs, unseen=unseen)
        updated.append(updated_runs)
    return updated


def with_failures(models: Mapping[str, Runs], chance: float = math.nan) -> dict[str, Runs]:
    """Return the runs of all models on one task, with `Runs.failed` and `Runs.hopeless` set.

    Args:
        chance: the task's chance level; NaN if it is not known.
    """
    failed = {name: _at_chance(runs.test, chance) for name, runs in models.items()}
    for split in ("validation", "test"):
        failed = _far_below(models, {name: getattr(runs, split) for name, runs in models.items()}, failed)
    hopeless = _hopeless(models, failed)
    return {name: replace(runs, failed=failed[name], hopeless=hopeless.get(name)) for name, runs in models.items()}


def _hopeless(models: Mapping[str, Runs], failed: Mapping[str, Array]) -> dict[str, Array]:
    """Return at which rates no run learns, and not by chance, as a mask, [R], for each model with any such rate.

    All runs at such a rate have diverged or failed, or score like failed ones. Few runs can all be lost by chance, so an exact test
    compares them with the model's runs at other rates (`HOPELESS`). If no model learns at the rate, all models' runs are tested together.
    """
    scores_at: dict[float, list[float]] = {}
    for name, runs in models.items():
        for rate, scores, low in zip(runs.rates, runs.test, failed[name], strict=True):
            scores_at.setdefault(rate, []).extend(scores[low])
    levels = {rate: float(np.mean(scores)) if scores else -math.inf for rate, scores in scores_at.items()}
    ran = {name: runs.ran for name, runs in models.items()}
    lost = {name: failed[name] | (model_ran & ~models[name].present) for name, model_ran in ran.items()}
    all_lost, losers, spared = {}, dict[float, list[str]](), set[float]()
    for name, runs in models.items():
        all_lost[name] = _none_learned(runs, failed[name]) & lost[name].any(axis=1)
        best = np.where(runs.present, runs.test, -math.inf).max(axis=1)
        for rate, is_lost, highest in zip(runs.rates, all_lost[name].tolist(), best.tolist(), strict=True):
            if is_lost:
                losers.setdefault(rate, []).append(name)
            elif math.isfinite(highest) and highest >= levels[rate] + LEAST_GAP:
                spared.add(rate)

    def by_chance(rate: float, names: Sequence[str]) -> bool:
        at_rate = sum(int(ran[name][models[name].rates.index(rate)].sum()) for name in names)
        rest, rest_lost = (sum(int(runs[name][~all_lost[name]].sum()) for name in names) for runs in (ran, lost))
        return float(stats.hypergeom.pmf(at_rate, at_rate + rest, at_rate + rest_lost, at_rate)) >= HOPELESS

    hopeless = {
        name: np.asarray(
            [
                name in losers.get(rate, ()) and not by_chance(rate, [name] if rate in spared else losers[rate])
                for rate in runs.rates
            ]
        )
        for name, runs in models.items()
    }
    return {name: mask for name, mask in hopeless.items() if mask.any()}


def _none_learned(runs: Runs, failed: Array) -> Array:
    """Return at which rates no run scores `LEAST_GAP` above the mean of the failed ones, [R], or, if none failed, no run has a score."""
    low = np.where(failed, runs.test, 0.0).sum(axis=1) / np.maximum(failed.sum(axis=1), 1)
    level = np.where(failed.any(axis=1), low + LEAST_GAP, -math.inf)
    return np.asarray(~(runs.present & ~failed & (runs.test >= level[:, None])).any(axis=1))


def _far_below(
    models: Mapping[str, Runs], scores: Mapping[str, Array], failed: Mapping[str, Array]
) -> dict[str, Array]:
    """Return `failed` together with the runs that are below a gap in these scores; all are [R, S], by model."""
    distances = {name: _below_best(np.where(failed[name], math.nan, values)) for name, values in scores.items()}
    of_all = _split(np.concatenate([np.zeros(0), *(values.ravel() for values in distances.values())]))
    splits = {name: _split(values, of_all.gap) for name, values in distances.items()}
    near: dict[float, list[float]] = {}
    for name, runs in models.items():
        for rate, below_best in zip(runs.rates, distances[name], strict=True):
            near.setdefault(rate, []).extend(_near(below_best, splits[name].gap))
    all_failed = {name: mask.copy() for name, mask in failed.items()}
    for name, runs in models.items():
        gap, spread = splits[name]
        for row, (rate, below_best) in enumerate(zip(runs.rates, distances[name], strict=True)):
            widest = np.fmax(_widest(near[rate], spread), _root_mean_square(_near(below_best, gap)))
            all_failed[name][row] |= below_best >= np.fmax(gap, GAP * widest)
    return all_failed


def _at_chance(test: Array, chance: float) -> Array:
    """Return which runs are not above chance; none if half of the runs or more are not, for then the task is not learned."""
    low = np.asarray(test <= chance)
    return low if 2 * low.sum() < np.isfinite(test).sum() else np.zeros(test.shape, bool)


def _below_best(scores: Array) -> Array:
    """Return the runs' distances to the best at their rate, [R, S]; NaN where there is no score."""
    finite = np.isfinite(scores)
    best = np.max(np.where(finite, scores, -math.inf), axis=1, keepdims=True)
    return np.where(finite, best - scores, math.nan)


class _Split(NamedTuple):
    """A gap between runs: the smallest distance to the best beyond it (infinite without a gap), and the spread of the runs before it."""

    gap: float
    spread: float


def _split(distances: Array, beyond: float = math.inf) -> _Split:
    """Split a model's distances at the gap beyond which the most of them lie, but at most half.

    If more than half of its runs failed, there is no such gap, so the gap of all models is tried too.

    Args:
        beyond: the smallest distance beyond the gap of all models.
    """
    values = np.sort(_near(distances, math.inf))
    of_all = int((values >= beyond).sum())
    for count in (*range(len(values) // 2, 0, -1), *([of_all] if 0 < of_all < len(values) else [])):
        near, far = values[:-count], values[-count:]
        spread = _root_mean_square(near) if len(near) > 1 else math.nan
        if far[0] > max(LEAST_GAP, GAP * spread) and far[0] - near[-1] > GAP / 2 * spread:
            return _Split(float(far[0]), spread)
    return _Split(math.inf, math.nan)


def _near(distances: Array, gap: float) -> Array:
    """Return the distances before a gap. The best run at each rate has distance 0 by construction, so it is left out."""
    return np.asarray(distances[(distances > 0) & (distances < gap)])


def _root_mean_square(values: Sequence[float] | Array) -> float:
    return math.sqrt(float(np.mean(np.square(values)))) if len(values) else math.nan


def _widest(near: Sequence[float], spread: float) -> float:
    """Return the largest spread that a rate may have, given the distances of its runs that learn and the spread over all rates."""
    if not near:
        return NOISIEST * spread
    upper = math.sqrt(float(np.sum(np.square(near)) / special.chdtri(len(near), 1 - DOUBT)))
    return float(np.clip(upper, spread, NOISIEST * spread))
