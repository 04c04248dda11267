"""A race between learning rates: which rates of a grid need no more seeds, because they will not be selected.

The full grid selects the rate with the highest mean validation score over its seeds (`selection`, rule `mean`). A race
asks for all rates with the first seed, then for the better half of them with the second, then for the others with the
second, and from there on for one more seed of all rates at a time. After each round it looks at the scores, and cuts the
rates that can no longer win, up to a stated error. The better half comes first because two seeds of some rates show how
large the noise is, and a rate far behind then needs no second seed. The selected rate ends with all seeds.

**The question is about a finite population.** The grid's S seeds are given, so the race predicts their mean, not an
expectation over all seeds. A rate that has n of its S seeds has S - n scores left to come. Let the scores be normal with
a mean for each rate, an effect for each seed, and one variance for all. Then, for the leader a and another rate b,

    ((mean_a - mean_b) - (final mean_a - final mean_b)) / (s sqrt((1 - n_a / S) / n_a + (1 - n_b / S) / n_b))

has Student's t distribution where both have the same seeds; the factors 1 - n / S are the finite population correction
(Cochran, Sampling Techniques, 1977, 2.6); the same follows from the prediction interval of a future mean (Hahn and
Meeker, Statistical Intervals, 1991, 4.8). So the tail of t beyond the lead is the probability that b overtakes a, and
bounds the probability that b wins. s^2 is the residual variance of the fit of rates and seeds to all scores so far
(analysis of variance of a two-way layout, with unequal numbers), which takes out what seeds do to all rates alike.

**The error.** At each look the rates with the smallest probabilities are cut, as long as their sum is at most the error.
By Bonferroni's inequality the sum bounds the probability that one of them would win, and a rate far behind uses up next
to nothing of it (the approximate probability of correct selection of Chen and Lee, Stochastic Simulation Optimization,
2011, chapter 3, is one minus such a sum). There is no division by the number of looks, since no cut is final: each look
decides about all rates anew. If the leader falls back, rates that had been cut may race again, and looks follow until
none does. That several looks and the choice of the better half cost no more than is left to spare is not proven but
simulated, in the tests, for 3 and 5 seeds: the full grid's selection is missed no more often than stated where all rates
are equal, where two are ahead, and where those far behind have less noise or more. It can be missed more often where
scores are far from normal, such as where most runs learn nothing and score exactly 0.

**Diverged runs.** The full grid selects among the rates with the fewest lost seeds. A rate is cut, from the first seed
on, when it has lost more of them than another. This costs nothing of the error: if all others lose as many later, the rate
races again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import special

from mlmclm.analysis.results import Grid, grouped, place_of, records, scored, seeds_of
from mlmclm.results.intervals import TIE, all_equal
from mlmclm.seeds import Seed, Seeds

Scores = Mapping[tuple[float, Seed], float | None]
"""Validation score by (learning rate, seed); None or NaN if the run is lost (diverged), no entry if it is not there."""


@dataclass(frozen=True)
class Standing:
    """Where a race stands."""

    asked: tuple[tuple[float, Seed], ...]
    """The (rate, seed) to compute next, by seed and then in the order of the rates; empty at the end. All of them are
    needed before more can be asked for."""
    cut: Mapping[float, int]
    """For each rate that is cut, the number of its seeds that the race asked for."""


def standing(scores: Scores, rates: Sequence[float], seeds: Sequence[Seed], error: float) -> Standing:
    """Return where the race of one (model, task, setting) stands.

    The answer depends on the scores alone, not on the order in which they came, so a race goes on after a restart. It
    takes no notice of scores that it has not asked for.

    Args:
        scores: the scores so far.
        rates, seeds: all of the grid, in the order in which the race asks for them.
        error: the highest probability, in (0, 1), that a rate is cut that the full grid would select.

    Raises:
        ValueError: the error is not in (0, 1).
    """
    if not 0 < error < 1:
        raise ValueError(f"the error of a race is between 0 and 1, not {error}")
    given = dict.fromkeys(rates, 0)
    cut: set[float] = set()
    for number, most in _rounds(len(rates), len(seeds)):
        racing = [rate for rate in rates if rate not in cut]
        if most < len(racing):
            racing = sorted(racing, key=lambda rate: _score(scores[rate, seeds[0]]), reverse=True)[:most]
        given |= dict.fromkeys(racing, number)
        asked = [
            (rate, seed)
            for place, seed in enumerate(seeds)
            for rate in rates
            if place < given[rate] and (rate, seed) not in scores
        ]
        if asked:
            return Standing(tuple(asked), {rate: given[rate] for rate in rates if rate in cut})
        table = np.full((len(rates), len(seeds)), math.nan)
        for row, rate in enumerate(rates):
            found = [scores[rate, seed] for seed in seeds[: given[rate]]]
            table[row, : len(found)] = [math.nan if score is None else score for score in found]
        losing = cannot_win(table, [given[rate] for rate in rates], error)
        cut = {rate for rate, lost in zip(rates, losing, strict=True) if lost and given[rate] < len(seeds)}
    return Standing((), {rate: given[rate] for rate in rates if rate in cut})


def asked_at(
    error: float,
) -> Callable[[Scores, Sequence[float], Sequence[Seed]], tuple[tuple[float, Seed], ...]]:
    """Return the function that says which (rate, seed) a race at this error asks for next (`standing`)."""
    return lambda scores, rates, seeds: standing(scores, rates, seeds, error).asked


def _rounds(rates: int, seeds: int) -> list[tuple[int, int]]:
    """Return the rounds of a race as (number of seeds, highest number of rates), with a look after each."""
    better = max(3, (rates + 1) // 2)  # the noise of two rates would have one degree of freedom
    half = [(2, better)] if better < rates else []
    # The last rounds are for rates whose cut the look before withdraws; each of them then has all its seeds.
    return [(1, rates), *half, *((number, rates) for number in range(2, seeds + 1)), *[(seeds, rates)] * rates]


def _score(score: float | None) -> float:
    return -math.inf if score is None or math.isnan(score) else score


def cannot_win(table: np.ndarray, given: Sequence[int], error: float) -> list[bool]:
    """Return for each rate whether it can no longer win, at this error.

    Args:
        table: validation scores, rates x seeds; NaN for lost runs and for those still to come.
        given: for each rate, the number of seeds that it has been given, from the left.
        error: the highest sum of the probabilities to win of the rates that it is true for, besides those that have
            lost more seeds than another.
    """
    given_seeds = np.asarray(given)
    counts = np.isfinite(table).sum(axis=1)
    lost = given_seeds - counts
    losing = lost > lost.min()
    rivals = np.flatnonzero(~losing & (counts > 0))
    spread = _residual_deviation(table[rivals])
    if spread is None:
        return losing.tolist()
    means = np.array([table[row][np.isfinite(table[row])].mean() for row in rivals])
    # The leader is one of those with the most seeds.
    foremost = np.where(given_seeds[rivals] == given_seeds[rivals].max(), means, -math.inf)
    leader = int(np.argmax(foremost >= foremost.max() - TIE))
    known, to_come = counts[rivals], table.shape[1] - given_seeds[rivals]
    variance = to_come / (known * (known + to_come))  # (1 - n / S) / n, with S the scores that the rate will have
    deviation, freedom = spread
    width = deviation * np.sqrt(variance[leader] + variance)
    chances = {
        int(row): float(special.stdtr(freedom, -lead / own))
        for row, lead, own in zip(rivals, means[leader] - means, width, strict=True)
        if lead > TIE and own > 0
    }
    total = 0.0
    for row, chance in sorted(chances.items(), key=lambda each: each[1]):
        total += chance
        if total > error:
            break
        losing[row] = True
    return losing.tolist()


def _residual_deviation(table: np.ndarray) -> tuple[float, int] | None:
    """Fit an effect for each rate and each seed, and return the residual standard deviation and degrees of freedom.

    Rates whose seeds give equal scores are left out: scores that happen to agree (accuracies of a small validation set,
    or runs that learn nothing) say nothing about the noise, and must not make that of the others seem smaller. None if
    there are no degrees of freedom, or no residuals.
    """
    table = np.array([row for row in table if not all_equal(row[np.isfinite(row)].tolist())]).reshape(
        -1, table.shape[1]
    )
    rows, columns = np.nonzero(np.isfinite(table))
    design = np.zeros((len(rows), sum(table.shape)))
    design[np.arange(len(rows)), rows] = design[np.arange(len(rows)), len(table) + columns] = 1.0
    values = table[rows, columns]
    fit, _, rank, _ = np.linalg.lstsq(design, values, rcond=None)
    freedom = len(values) - int(rank)
    residual = values - design @ fit
    if freedom < 1 or np.abs(residual).max() <= TIE:
        return None
    return math.sqrt(float(residual @ residual) / freedom), freedom


def mark_cut(cells: pd.DataFrame, grid: Grid) -> pd.DataFrame:
    """Return the table of results with `cut` True for the cells at rates that the grid's race has cut.

    A rate that has a result for every seed all the same, from another sweep, is not marked. Without a race no cell is.
    """
    if grid.race is None:
        return cells
    rows, seeds = records(cells), [Seeds.of(seed) for seed in grid.seeds]
    cut: set[tuple[Any, ...]] = set()
    for group, members in grouped(rows, "model", "task", "setting").items():
        scores: dict[tuple[float, Seed], float | None] = {
            (row["learning_rate"], seeds_of(row)): row["validation"] if scored(row) else None for row in members
        }
        for rate in standing(scores, grid.rates_of(*group), seeds, grid.race).cut:
            if not all((rate, seed) in scores for seed in seeds):
                cut.add((*group, rate))
    return cells.assign(cut=[place_of(row)[:4] in cut for row in rows])
