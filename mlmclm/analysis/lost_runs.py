"""How often runs are lost, because they fail or because they diverge: the share that is expected at a rate, and how sure it is.

The share of a model at a rate on a task is shrunk to the model's share over all rates, and to that of the other models: the more, the less
rates or models differ in their shares. A few runs that all went well don't show that none would be lost. But a model that is shown to lose
fewer runs than the others takes nothing from them. Its runs on the other tasks count only where losing runs is shown to be the model's: where
it loses more than the others over all tasks. So one lost run on one task says nothing about the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from scipy import stats

from mlmclm.analysis.model_runs import Runs
from mlmclm.results.measures import Array

SAFE = 0.01
"""Level of the exact test from which on a model loses fewer runs than the other models, or more of them."""
HOPELESS = 0.025
"""Level of the exact test from which on a rate that lost all its runs loses every run."""
LEAST_POOLING, MOST_POOLING = 2.0, 200.0
"""Bounds of the weight of other places in the share of lost runs at one, in runs."""
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

    def spread(self, lost: Array, weights: Array) -> Array:
        """Return the expected variance of whether a run is lost, [...], in studies with these numbers of lost runs.

        The share over all rates is taken as known.

        Args:
            lost: [..., R].
            weights: of the rates, [R].
        """
        shares, runs = self.expected(lost), self._runs
        return np.asarray((weights * shares * (1 - shares) * runs / (runs + 1)).sum(axis=-1))

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
        """The number of runs that the share at each rate rests on, [R]."""
        return np.asarray(self.counted + self.pooling + self.alike.sum(axis=0))


@dataclass(frozen=True)
class Losses:
    """How often runs are lost over all tasks of a study, and how alike the shares of lost runs are.

    Attributes:
        count: counts the lost runs.
        models, rates: all of the study's.
        numbers: of lost and of all runs on all tasks, [2, M, R].
        safe, often: the models that lose fewer runs than the others, and more (`SAFE`).
        pooling: weight of a model's share over all rates in that at one, in runs.
        others: weight of the other models' share at a rate in that of one model, in runs; `overall`, over all rates.
    """

    count: Count
    models: Sequence[str]
    rates: Sequence[float]
    numbers: Array
    safe: Set[str]
    often: Set[str]
    pooling: float
    others: float
    overall: float

    def shares(self, task: Mapping[str, Runs]) -> dict[str, Shares | None]:
        """Return what is known of the models of one task; None for a model of which no run is expected to be lost."""
        numbers = _numbers(task, self.models, self.rates, self.count)
        elsewhere = _without_lost(self.numbers - numbers).sum(axis=-1)
        elsewhere = elsewhere * np.asarray([name in self.often for name in self.models])
        lost, ran = self.numbers.sum(axis=(1, 2))
        usual = min(0.5, float(lost / max(1, ran)))
        found: dict[str, Shares | None] = {}
        for name, runs in task.items():
            model, places = self.models.index(name), [self.rates.index(rate) for rate in runs.rates]
            own = numbers[:, model, places]
            others = np.zeros(own.shape) if name in self.safe else numbers[:, :, places].sum(axis=1) - own
            if not (own[0].any() or elsewhere[0, model].any() or others[0].any()):
                found[name] = None
                continue
            at_rates = np.minimum(self.others / np.maximum(others[1], 1), 1.0)
            over_all = min(self.overall, float(others[1].sum())) / max(1.0, float(others[1].sum()))
            known = elsewhere[:, model] + over_all * _without_lost(others).sum(axis=-1) + (usual, 1 - usual)
            found[name] = Shares(
                lost=own[0],
                counted=own[1],
                alike=at_rates * _without_lost(others),
                usual=(float(known[0]), float(known[1])),
                pooling=self.pooling,
            )
        return found


def losses(tasks: Sequence[Mapping[str, Runs]], count: Count) -> Losses:
    """Count the lost runs of all tasks, and estimate how alike their shares are over rates and models."""
    models = list(dict.fromkeys(name for task in tasks for name in task))
    rates = sorted({rate for task in tasks for runs in task.values() for rate in runs.rates})
    numbers = np.stack([_numbers(task, models, rates, count) for task in tasks], axis=2)  # [2, M, T, R]
    at_all_rates, total = numbers.sum(axis=-1), numbers.sum(axis=1)
    by_model = dict(zip(models, numbers.transpose(1, 0, 2, 3), strict=True))
    return Losses(
        count=count,
        models=models,
        rates=rates,
        numbers=numbers.sum(axis=2),
        safe={name for name, own in by_model.items() if few_or_many(own, total)[0] < SAFE},
        often={name for name, own in by_model.items() if few_or_many(own, total)[1] < SAFE},
        pooling=pooling_of(numbers.transpose(1, 2, 0, 3).reshape(-1, 2, len(rates))),
        others=pooling_of(numbers.transpose(2, 3, 0, 1).reshape(-1, 2, len(models))),
        overall=pooling_of(at_all_rates.transpose(2, 0, 1)),
    )


def _numbers(task: Mapping[str, Runs], models: Sequence[str], rates: Sequence[float], count: Count) -> Array:
    """Return the numbers of lost and of all runs on one task, [2, M, R]."""
    numbers, found = np.zeros((2, len(models), len(rates)), int), count(task)
    for name, runs in task.items():
        numbers[:, models.index(name), [rates.index(rate) for rate in runs.rates]] = found[name]
    return numbers


def _without_lost(numbers: Array) -> Array:
    """Return the numbers of lost runs and of others, given those of lost and of all runs, [2, ...]."""
    return np.stack((numbers[0], numbers[1] - numbers[0]))


def few_or_many(own: Array, total: Array) -> tuple[float, float]:
    """Return the p values of the tests whether some of all runs are lost less often than the others, and more often (`_lost_of_all`)."""
    chances, lost = _lost_of_all(own, total)
    return float(chances[: lost + 1].sum()), float(chances[lost:].sum())


def unlike(own: Array, total: Array) -> float:
    """Return the two-sided p value of the same: the probability of numbers that are at most as probable (Fisher's exact test)."""
    chances, lost = _lost_of_all(own, total)
    return min(1.0, float(chances[chances <= chances[lost] * (1 + _TINY)].sum()))


def _lost_of_all(own: Array, total: Array) -> tuple[Array, int]:
    """Return the probabilities of numbers of own lost runs, if all runs are lost alike, and the number that was.

    They are exact, given how many runs are lost in each stratum, in which runs are compared: on the same task at the same rate. In each
    the number of own lost runs is hypergeometric.

    Args:
        own, total: numbers of lost and of all runs in each stratum, [2, ...].
    """
    (own_lost, own_ran), (lost, ran) = own.reshape(2, -1), total.reshape(2, -1)
    chances, known = np.ones(1), (lost > 0) & (own_ran > 0)
    for stratum in np.flatnonzero(known).tolist():
        number = own_ran[stratum]
        chances = np.convolve(chances, stats.hypergeom.pmf(np.arange(number + 1), ran[stratum], lost[stratum], number))
    return chances, int(own_lost[known].sum())


def pooling_of(samples: Array) -> float:
    """Return the weight of the share of lost runs over all places in that at one, given lost and all runs at each.

    Places are rates, models or tasks. The numbers of lost runs are taken for beta-binomial, and their dispersion gives the weight: it is
    high where shares differ no more than chance explains. Otherwise the place that happens to have lost no run would be taken for
    one that loses none.

    Args:
        samples: the numbers of lost and of all runs, [samples, 2, places]; places without runs say nothing.
    """
    lost, runs = samples[:, 0], samples[:, 1]
    places = (runs > 0).sum(axis=1)
    share = lost.sum(axis=1) / np.maximum(runs.sum(axis=1), 1)
    known = (share > 0) & (share < 1)
    lost, runs, places, share = lost[known], runs[known], places[known], share[known, None]
    squares = (lost - runs * share) ** 2 / np.maximum(runs * share * (1 - share), _TINY)
    expected = int((places - 1).sum())
    excess = float(squares.sum()) - expected
    if not expected or excess <= _TINY:
        return MOST_POOLING
    weight = (float(np.mean(runs.sum(axis=1) / places)) - 1) * expected / excess - 1
    return float(np.clip(weight, LEAST_POOLING, MOST_POOLING))
