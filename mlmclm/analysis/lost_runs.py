"""How often runs are lost, because they fail or because they diverge: the share that is expected at a rate, and how sure it is.

The share of a model at a rate on a task is shrunk to the model's share over all rates, and to that of the other models: a few runs that all
went well don't show that none would be lost. How much depends on exact tests over all tasks: it is hardly at all where these show
that rates, or models, differ in how often they lose runs. Runs on other tasks count only for a model that is shown to lose more than the
others over all tasks; so one lost run on one task says nothing about the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from scipy import stats

from mlmclm.analysis.model_runs import Runs
from mlmclm.results.measures import Array

UNLIKE = 0.01
"""Level of the exact tests from which on rates, or models, differ in the runs that they lose."""
HOPELESS = 0.025
"""Level of the exact test from which on a rate that lost all its runs loses every run."""
LEAST, MOST = 2.0, 200.0
"""Weight of other rates, or of other models, in the share of lost runs at one, in runs: where they differ, and where not."""
_TINY = 1e-9
"""Keeps parameters of beta distributions and divisors above 0; rounding errors are smaller."""

Count = Callable[[Mapping[str, Runs]], Mapping[str, tuple[Array, Array]]]
"""Returns the numbers of lost and of all runs of each model on a task at each rate, [R]; 0 at hopeless rates."""


class Tally(NamedTuple):
    """Numbers of lost and of all runs of a model on a task at each rate, [R], and whether it lost all that it has."""

    rates: Sequence[float]
    lost: Array
    ran: Array
    every: Array


def hopeless_rates(models: Mapping[str, Tally], spared: Set[float]) -> dict[str, Array]:
    """Return the rates that lose every run, and not by chance, [R], of each model of a task.

    Few runs can all be lost by chance, so an exact test compares them with the model's runs at other rates (`HOPELESS`); at a rate
    where no model's runs are spared, with those of all models.
    """

    def by_chance(rate: float, names: Sequence[str]) -> bool:
        here = sum(int(models[name].ran[models[name].rates.index(rate)]) for name in names)
        others = [(own.ran[~own.every].sum(), own.lost[~own.every].sum()) for own in map(models.__getitem__, names)]
        ran, lost = (int(sum(numbers)) for numbers in zip(*others, strict=True))
        return float(stats.hypergeom.pmf(here, here + ran, here + lost, here)) >= HOPELESS

    where: dict[float, list[str]] = {}
    for name, own in models.items():
        for place in np.flatnonzero(own.every & (own.ran > 0)).tolist():
            where.setdefault(own.rates[place], []).append(name)
    return {
        name: np.asarray(
            [
                name in where.get(rate, ()) and not by_chance(rate, [name] if rate in spared else where[rate])
                for rate in own.rates
            ]
        )
        for name, own in models.items()
    }


def failures_on(task: Mapping[str, Runs]) -> dict[str, tuple[Array, Array]]:
    """Return the numbers of failed and of all runs of each model at each rate, [R]; 0 at rates where no run learns."""
    found = {}
    for name, runs in task.items():
        kept = np.ones(len(runs.rates), bool) if runs.hopeless is None else ~runs.hopeless
        found[name] = kept * runs.failed.sum(axis=1), kept * runs.present.sum(axis=1)
    return found


def divergences_on(task: Mapping[str, Runs]) -> dict[str, tuple[Array, Array]]:
    """Return the numbers of diverged and of all runs of each model at each rate, [R]; 0 at rates where all diverge."""
    tallies, spared = {}, set[float]()
    for name, runs in task.items():
        scored = runs.present.sum(axis=1)
        diverged = np.zeros(len(scored), int) if runs.diverged is None else runs.diverged.sum(axis=1)
        tallies[name] = Tally(runs.rates, diverged, diverged + scored, (scored == 0) & (diverged > 0))
        spared |= {rate for rate, number in zip(runs.rates, scored.tolist(), strict=True) if number}
    hopeless = hopeless_rates(tallies, spared)
    return {name: (own.lost * ~hopeless[name], own.ran * ~hopeless[name]) for name, own in tallies.items()}


@dataclass(frozen=True)
class Shares:
    """The probability that a run of one model on one task is lost, by learning rate, and how surely it is known.

    Attributes:
        lost: the number of its own lost runs at each rate, [R], and `counted`, of all its runs there.
        alike: the numbers of lost runs and of others at each rate that runs of other models count as, [2, R].
        usual: the numbers of lost runs and of others, at all rates, that they count as.
        pooling: weight of the share over all rates in that at one, in runs.
    """

    lost: Array
    counted: Array
    alike: Array
    usual: tuple[float, float]
    pooling: float

    def at(self, keep: Array) -> Shares:
        """Return what is known at some of the learning rates, given which, [R]."""
        return replace(self, lost=self.lost[keep], counted=self.counted[keep], alike=self.alike[:, keep])

    def expected(self, lost: Array | None = None) -> Array:
        """Return the expected share at each rate, [..., R], in studies with these numbers of lost runs; by default in this one."""
        lost = self.lost if lost is None else np.where(self.counted > 0, lost, 0)
        overall = (lost.sum(axis=-1, keepdims=True) + self.usual[0]) / (self.counted.sum() + sum(self.usual))
        return np.asarray((lost + self.pooling * overall + self.alike[0]) / self._runs)

    def draw(self, number: int, generator: np.random.Generator) -> Array:
        """Draw probabilities from their posterior distributions, which are beta distributions, [number, R]."""
        lost, whole = float(self.lost.sum()), float(self.counted.sum())
        overall = generator.beta(lost + self.usual[0] + _TINY, whole - lost + self.usual[1] + _TINY, (number, 1))
        return generator.beta(
            self.lost + self.pooling * overall + self.alike[0] + _TINY,
            self.counted - self.lost + self.pooling * (1 - overall) + self.alike[1] + _TINY,
        )

    @property
    def _runs(self) -> Array:
        """The number of runs that the share at each rate is based on, [R]."""
        return np.asarray(self.counted + self.pooling + self.alike.sum(axis=0))


@dataclass(frozen=True)
class Losses:
    """How often runs are lost over all tasks of a study.

    Attributes:
        count: counts the lost runs.
        usual: the share of all runs that are lost.
        pooling: weight of a model's share over all rates in that at one, in runs.
        others: weight of the other models' share, in runs.
        safe: the models that lose fewer runs than the others, from which they take nothing.
        often: the numbers of lost and of all runs, [2], of the models that lose more.
    """

    count: Count
    usual: float
    pooling: float
    others: float
    safe: Set[str]
    often: Mapping[str, Array]

    def shares(self, task: Mapping[str, Runs]) -> dict[str, Shares | None]:
        """Return what is known of the models of one task; None for a model of which no run is expected to be lost."""
        rates = sorted({rate for runs in task.values() for rate in runs.rates})
        numbers = _numbers(task, list(task), rates, self.count)
        found: dict[str, Shares | None] = {}
        for model, (name, runs) in enumerate(task.items()):
            places = [rates.index(rate) for rate in runs.rates]
            own, others = numbers[:, model, places], (numbers.sum(axis=1) - numbers[:, model])[:, places]
            others = others * (name not in self.safe)
            elsewhere = self.often[name] - own.sum(axis=1) if name in self.often else np.zeros(2, int)
            if not (own[0].any() or others[0].any() or elsewhere[0]):
                found[name] = None
                continue
            lost = np.stack((others[0], others[1] - others[0]))
            overall = lost.sum(axis=1) * min(1.0, self.others / max(1, int(others[1].sum())))
            overall += (elsewhere[0] + self.usual, elsewhere[1] - elsewhere[0] + 1 - self.usual)
            found[name] = Shares(
                lost=own[0],
                counted=own[1],
                alike=lost * np.minimum(self.others / np.maximum(others[1], 1), 1.0),
                usual=(float(overall[0]), float(overall[1])),
                pooling=self.pooling,
            )
        return found


def losses(tasks: Sequence[Mapping[str, Runs]], count: Count) -> Losses:
    """Count the lost runs of all tasks, and test whether rates and models differ in their shares of them."""
    models = list(dict.fromkeys(name for task in tasks for name in task))
    rates = sorted({rate for task in tasks for runs in task.values() for rate in runs.rates})
    numbers = np.stack([_numbers(task, models, rates, count) for task in tasks], axis=2)  # [2, M, T, R]
    lost, ran = numbers.sum(axis=(1, 2, 3))

    def differ(axis: int) -> list[bool]:
        total = numbers.sum(axis=axis)
        return [unlike(own, total) < UNLIKE for own in np.moveaxis(numbers, axis, 0)]

    models_differ = differ(1)
    by_model = {name: numbers[:, place].sum(axis=(1, 2)) for place, name in enumerate(models) if models_differ[place]}
    return Losses(
        count=count,
        usual=min(0.5, float(lost / max(1, ran))),
        pooling=LEAST if any(differ(3)) else MOST,
        others=LEAST if any(models_differ) else MOST,
        safe={name for name, own in by_model.items() if own[0] * ran < lost * own[1]},
        often={name: own for name, own in by_model.items() if own[0] * ran > lost * own[1]},
    )


def _numbers(task: Mapping[str, Runs], models: Sequence[str], rates: Sequence[float], count: Count) -> Array:
    """Return the numbers of lost and of all runs on one task, [2, M, R]."""
    numbers, found = np.zeros((2, len(models), len(rates)), int), count(task)
    for name, runs in task.items():
        numbers[:, models.index(name), [rates.index(rate) for rate in runs.rates]] = found[name]
    return numbers


def unlike(own: Array, total: Array) -> float:
    """Return the two-sided p value of the test whether some of all runs are lost as often as the others (Fisher's exact test).

    It is exact, given how many runs are lost in each stratum, in which runs are compared: on the same task at the same rate. In each the
    number of own lost runs is hypergeometric.

    Args:
        own, total: numbers of lost and of all runs in each stratum, [2, ...].
    """
    (own_lost, own_ran), (lost, ran) = own.reshape(2, -1), total.reshape(2, -1)
    chances, known = np.ones(1), (lost > 0) & (own_ran > 0)
    for stratum in np.flatnonzero(known).tolist():
        number = own_ran[stratum]
        chances = np.convolve(chances, stats.hypergeom.pmf(np.arange(number + 1), ran[stratum], lost[stratum], number))
    observed = chances[int(own_lost[known].sum())]
    return min(1.0, float(chances[chances <= observed * (1 + _TINY)].sum()))
