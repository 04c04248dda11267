"""How often runs fail: numbers of failed runs, how alike their shares are, and the share that is expected at a rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np
from scipy import stats

from mlmclm.analysis.model_runs import Runs
from mlmclm.results.measures import Array

SAFE = 0.01
"""Level of the exact test from which on a model fails less often than the others, so that their failures don't count for it; also
of that from which on runs on a task fail less often than on the others."""
LEAST_POOLING, MOST_POOLING = 2.0, 200.0
"""Bounds of the weight of the share of failed runs over all rates in the share at one, in runs."""


def failures_of(runs: Runs) -> tuple[Array, Array]:
    """Return the numbers of failed and of all runs at each rate, [R]; 0 at rates where no run learns."""
    hopeless = np.zeros(len(runs.rates), bool) if runs.hopeless is None else runs.hopeless
    failed, present = runs.failed.sum(axis=1), runs.present.sum(axis=1)
    return np.where(hopeless, 0, failed), np.where(hopeless, 0, present)


def failures_at(models: Mapping[str, Runs]) -> dict[float, tuple[Array, Array]]:
    """Return the numbers of failed and of all runs of each model at each rate, each [M]; 0 where no run of the model learns."""
    found: dict[float, list[tuple[int, int]]] = {}
    for runs in models.values():
        for rate, failed, count in zip(runs.rates, *failures_of(runs), strict=True):
            found.setdefault(rate, []).append((int(failed), int(count)))
    return {rate: (own[0], own[1]) for rate, numbers in found.items() for own in (np.asarray(numbers).T,)}


def totals_of(models: Mapping[str, Runs]) -> tuple[Array, Array]:
    """Return the numbers of failed and of all runs of each model, [M], at rates where some learn."""
    failed, count = np.asarray([[own.sum() for own in failures_of(runs)] for runs in models.values()]).T
    return failed, count


@dataclass(frozen=True)
class OverTasks:
    """How often runs fail over all tasks of a study.

    Attributes:
        numbers: the numbers of failed and of all runs of each model at each rate, [2].
        safe: the models that fail less often than the others, by an exact test (`SAFE`).
        weight: of a model's share of failed runs on the other tasks in that on one, in runs.
        drop: how far failed runs score below those that learn, the mean over models and tasks, of validation and test scores, [2].
    """

    numbers: Mapping[str, Mapping[float, Array]]
    safe: Set[str]
    weight: float
    drop: Array

    @property
    def total(self) -> Array:
        """The numbers of failed and of all runs, [2]."""
        return sum(map(_total, self.numbers.values()), np.zeros(2, int))

    @property
    def usual(self) -> float:
        """The share of all runs that fail, at most a half."""
        failed, count = self.total
        return min(0.5, float(failed / max(1, count)))

    def elsewhere(self, models: Mapping[str, Runs]) -> dict[str, tuple[Array, Array]]:
        """Return what the runs of one task's models on the other tasks count as: failed runs and others.

        Returns:
            For each model the numbers at all rates, [2], and at each of the rates on this task, [2, R]. They are 0 on a task that
            is shown to lose fewer runs than the others.
        """
        calm = _fewer(np.sum(totals_of(models), axis=1), self.total)
        found = {}
        for name, runs in models.items():
            own, numbers = np.stack(failures_of(runs)), self.numbers[name]
            total = _total(numbers) - own.sum(axis=1)
            share = 0.0 if calm else min(1.0, self.weight / max(1, int(total[1])))
            here = np.asarray([numbers.get(rate, np.zeros(2, int)) for rate in runs.rates]).T - own
            found[name] = (
                share * np.asarray((total[0], total[1] - total[0])),
                share * np.stack((here[0], here[1] - here[0])),
            )
        return found


def over_tasks(tasks: Sequence[Mapping[str, Runs]]) -> OverTasks:
    """Count the failed runs of all tasks, and estimate how alike a model's shares of them are over tasks.

    Tasks may differ for each model by itself, or for all models alike. The smaller of both weights holds.
    """
    numbers: dict[str, dict[float, Array]] = {}
    single: dict[str, list[Array]] = {}
    together, drops = [], []
    for models in tasks:
        found = {name: np.stack(failures_of(runs)) for name, runs in models.items()}
        together.append(sum(own.sum(axis=1) for own in found.values()))
        for name, runs in models.items():
            single.setdefault(name, []).append(found[name].sum(axis=1))
            at_rates = numbers.setdefault(name, {})
            for rate, own in zip(runs.rates, found[name].T, strict=True):
                at_rates[rate] = at_rates.get(rate, np.zeros(2, int)) + own
            if runs.failed.any() and runs.learned.any():
                drops.append([s[runs.learned].mean() - s[runs.failed].mean() for s in (runs.validation, runs.test)])
    of_models = [(own[0], own[1]) for own in (np.transpose(each) for each in single.values())]
    of_tasks = np.transpose(together)
    total = of_tasks.sum(axis=1)
    return OverTasks(
        numbers=numbers,
        safe={name for name, own in numbers.items() if _fewer(_total(own), total)},
        weight=min(pooling_of(of_models), pooling_of([(of_tasks[0], of_tasks[1])])),
        drop=np.mean(drops, axis=0) if drops else np.zeros(2),
    )


def _total(numbers: Mapping[float, Array]) -> Array:
    return sum(numbers.values(), np.zeros(2, int))


def _fewer(own: Array, total: Array) -> bool:
    """Return whether these of all runs fail less often than the others, given the numbers of failed and of all runs."""
    return bool(stats.hypergeom.cdf(own[0], total[1], total[0], own[1]) < SAFE)


def pooling_of(samples: Sequence[tuple[Array, Array]]) -> float:
    """Return the weight of the share of lost runs over all places in that at one, given lost and all runs at each.

    Places are the rates of a model, or its tasks, for failed runs, and the models and tasks at a rate for diverged ones. The numbers of lost
    runs are taken for beta-binomial, and their dispersion gives the weight: it is high where shares differ no more than chance
    explains. Otherwise the place that happens to have lost no run would be taken for one that loses none.
    """
    excess, expected, sizes = 0.0, 0, []
    for failed, runs in samples:
        failed, runs = failed[runs > 0], runs[runs > 0]
        share = failed.sum() / max(1, runs.sum())
        if 0 < share < 1:
            excess += float(((failed - runs * share) ** 2 / (runs * share * (1 - share))).sum()) - (len(runs) - 1)
            expected += len(runs) - 1
            sizes.append(runs.mean())
    if excess <= 0:
        return MOST_POOLING
    weight = (float(np.mean(sizes)) - 1) * expected / excess - 1
    return float(np.clip(weight, LEAST_POOLING, MOST_POOLING))


def shares_of_failures(
    failures: Array, counted: Array, alike: Array, pooling: float, usual: tuple[float, float]
) -> tuple[Array, Array]:
    """Return the expected share of failed runs at each rate, [..., R], and the number of runs that it rests on, [R].

    It is that of the rate's own runs, of the model's runs at all rates, and of the other models' runs at the rate and at all rates.

    Args:
        failures: numbers of failed runs at each rate, [..., R].
        counted, alike, pooling, usual: see `Fit`.
    """
    overall = (failures.sum(axis=-1, keepdims=True) + usual[0]) / (counted.sum() + sum(usual))
    runs = counted + pooling + alike.sum(axis=0)
    return (failures + pooling * overall + alike[0]) / runs, runs


def spread_of(weights: Array, shares: Array, runs: Array) -> Array:
    """Return the expected variance of what has these expected shares, [...], of which each rests on a number of runs."""
    return np.asarray((weights * shares * (1 - shares) * runs / (runs + 1)).sum(axis=-1))
