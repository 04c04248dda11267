"""A race between learning rates: which rates of a grid need no more seeds, because they will not be selected.

The full grid selects the rate with the highest mean validation score over its seeds (`selection`, rule `mean`). A race
asks for all rates with the first seed, then for the better half of them with the second (and for those that lost their first one),
then for the others with the second, and from there on for one more seed of all rates at a time. After each round it looks at the scores, and cuts the
rates that can no longer win, up to a stated error. The better half comes first because two seeds of some rates show how
large the noise is, and a rate far behind then needs no second seed. The selected rate ends with all seeds.

**The question is about a finite population.** The grid's S seeds are given, so the race predicts their mean, not an
expectation over all seeds. Let the scores be normal, with a mean and a variance for each rate and an effect for each seed.
For the leader a and another rate b with the same n seeds, the variance of the lead's error is

    (1 / n - 1 / S) (s_a^2 + s_b^2)

with the finite population correction (Cochran, Sampling Techniques, 1977, 2.6; the same follows from the prediction interval
of a future mean, Hahn and Meeker, Statistical Intervals, 1991, 4.8). The tail of Student's t beyond the lead is the
probability that b overtakes a, and bounds the probability that b wins. Its degrees of freedom are Satterthwaite's (1946), at
most those of all residuals.

Where b has fewer seeds than a, its scores at the others are predicted by least squares from the effects of rates and seeds,
so a seed that is good for all rates favours neither. But this keeps the luck that made a the leader at the seeds they share,
and takes a collapse of a that runs alone for the seed's fault. So the plain difference of their means is judged as well, with
the variance (1 / n_a - 1 / S) s_a^2 + (1 / n_b - 1 / S) s_b^2, and the larger of the two probabilities counts.

**The variance of a rate** is the sum of its squared residuals from the fit of rates and seeds, over the degrees of freedom
that the leverages leave to them (Horn, Horn and Duncan, *Estimating heteroscedastic variances in linear models*, 1975). The
fit takes out what seeds do to all rates alike. The variance is then moderated by the mean of all (`moderate`, after
Smyth 2004), which keeps unequal variances apart. The weight d0 of the mean is fixed: the few seeds of a few rates cannot
estimate it, and the estimate is often infinite where noise differs tenfold, or near 0 where it does not. A rate with one seed
has the mean variance, with d0 degrees of freedom. For two rates alone all this is the paired t-test.

**The error.** At each look the rates with the smallest probabilities are cut, as long as their sum is at most the error.
By Bonferroni's inequality the sum bounds the probability that one of them would win, and a rate far behind uses up next
to nothing of it (the approximate probability of correct selection of Chen and Lee, Stochastic Simulation Optimization,
2011, chapter 3, is one minus such a sum). There is no division by the number of looks, since no cut is final: each look
decides about all rates anew. If the leader falls back, rates that had been cut may race again, and looks follow until
none does. That several looks and the choice of the better half cost no more than is left to spare is not proven but
simulated (`benchmarks/race.py`, with its results in `RESULTS.md`).

**Diverged runs.** The full grid selects among the rates with the fewest lost seeds. A rate is cut, from the first seed
on, when it has lost more of them than another. This costs nothing of the error: if all others lose as many later, the rate
races again. A rate that lost its first seed is asked for the second one all the same. The run may have diverged by chance, and
then the rate could be chosen with other seeds, so that what is known about the choice rests on what the rate scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import special

from mlmclm.analysis.results import Grid, grouped, place_of, records, scored, seeds_of
from mlmclm.results.intervals import TIE, all_equal
from mlmclm.results.measures import Array
from mlmclm.seeds import Seed, Seeds

PRIOR_FREEDOM = 1.5
"""Weight of the mean variance in the variance of a rate, in degrees of freedom; chosen by simulation (`benchmarks/race.py`)."""
ROUNDING = 1e-9
"""Leverages and weights that differ by no more are equal."""

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
        before, cut = cut, {rate for rate, lost in zip(rates, losing, strict=True) if lost and given[rate] < len(seeds)}
        if number == 1 < len(seeds):
            given |= {rate: 2 for rate in rates if _score(scores[rate, seeds[0]]) == -math.inf}
        if (number, most) == (len(seeds), len(rates)) and cut == before:
            break  # the looks that are left would see the same
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
    noise = _noise(table[rivals])
    if noise is None:
        return losing.tolist()
    means = np.array([table[row][np.isfinite(table[row])].mean() for row in rivals])
    # The leader is one of those with the most seeds.
    foremost = np.where(given_seeds[rivals] == given_seeds[rivals].max(), means, -math.inf)
    leader = int(np.argmax(foremost >= foremost.max() - TIE))
    chances = _chances(table[rivals], given_seeds[rivals], leader, noise)
    total = 0.0
    for place, chance in sorted(chances.items(), key=lambda each: each[1]):
        total += chance
        if total > error:
            break
        losing[rivals[place]] = True
    return losing.tolist()


class _Noise(NamedTuple):
    """Moderated variances of rates, net of what seeds do to all alike, and their degrees of freedom, both [R]."""

    variances: Array
    freedom: Array
    total: float
    """Degrees of freedom of the mean of the variances."""


def _noise(table: Array) -> _Noise | None:
    """Estimate the noise of each rate from the residuals of the fit of an effect for each rate and each seed.

    Rates whose seeds give equal scores are left out: scores that happen to agree (accuracies of a small validation set,
    or runs that learn nothing) say nothing about the noise, and must not make that of the others seem smaller. None if
    there are no degrees of freedom, or no residuals.
    """
    varying = np.array([not all_equal(row[np.isfinite(row)].tolist()) for row in table], dtype=bool)
    rows, columns = np.nonzero(np.isfinite(table) & varying[:, None])
    values = table[rows, columns]
    design = _design(rows, columns, table.shape)
    inverse = np.linalg.pinv(design)
    residual = values - design @ (inverse @ values)
    # Each residual has as many degrees of freedom as its leverage leaves of one.
    left = 1 - (design * inverse.T).sum(axis=1)
    freedom = np.bincount(rows, left, len(table))
    freedom[freedom < ROUNDING] = 0.0
    total = float(freedom.sum())
    if not total or np.abs(residual).max() <= TIE:
        return None
    squares = np.bincount(rows, residual**2, len(table))
    variances = np.divide(squares, freedom, out=np.zeros(len(table)), where=freedom > 0)
    moderated = moderate(variances, freedom, PRIOR_FREEDOM)
    return _Noise(moderated, np.minimum(PRIOR_FREEDOM + freedom, total), total)


def _design(rows: Array, columns: Array, shape: tuple[int, ...]) -> Array:
    """Return the design of an effect for each rate and each seed, cells x (rates + seeds)."""
    cells = np.arange(len(rows))
    design = np.zeros((len(rows), sum(shape)))
    design[cells, rows] = design[cells, shape[0] + columns] = 1.0
    return design


def _chances(table: Array, given: Array, leader: int, noise: _Noise) -> dict[int, float]:
    """Return the probability that each rate overtakes the leader, for those of which it can be predicted.

    All rates have lost equally many seeds, so all final means are over equally many scores. A seed that is to come at all
    rates has the mean of the known effects, which cancels between two rates.
    """
    rates, seeds = table.shape
    known = np.isfinite(table)
    rows, columns = np.nonzero(known)
    design = _design(rows, columns, table.shape)
    to_come, begun = np.arange(seeds) >= given[:, None], known.any(axis=0)
    count, left = known.sum(axis=1), to_come.sum(axis=1)
    final = count[0] + left[0]
    effects = to_come * begun + (to_come & ~begun).sum(axis=1, keepdims=True) * begun / begun.sum()
    sought = np.hstack((np.diag(left), effects)) / final
    weights = sought @ np.linalg.pinv(design)
    # Seeds that were lost can leave two rates without a seed in common, directly or through others.
    estimable = np.abs(weights @ design - sought).max(axis=1) < ROUNDING
    sums = np.where(known, table, 0.0).sum(axis=1)
    predicted, means = sums / final + weights @ table[rows, columns], sums / count
    chances = {}
    for rate in set(range(rates)) - {leader}:
        pair = [leader, rate]
        if not estimable[pair].all():
            continue
        errors = np.bincount(rows, (weights[leader] - weights[rate]) ** 2, rates)
        errors[pair] += left[pair] / final**2
        apart = np.zeros(rates)
        apart[pair] = 1 / count[pair] - 1 / final
        chances[rate] = max(
            _tail(float(values[leader] - values[rate]), factors, noise)
            for values, factors in ((predicted, errors), (means, apart))
        )
    return chances


def _tail(lead: float, factors: Array, noise: _Noise) -> float:
    """Return the tail of t beyond a lead whose error has the variance of the rates' noise times `factors`, [R]."""
    parts = factors * noise.variances
    variance = float(parts.sum())
    if lead <= TIE or variance <= 0:
        return 1.0
    freedom = min(variance**2 / float((parts**2 / noise.freedom).sum()), noise.total)
    return float(special.stdtr(freedom, -lead / math.sqrt(variance)))


def mark_cut(cells: pd.DataFrame, grid: Grid) -> pd.DataFrame:
    """Return the table of results with `cut` True for the cells at rates that the grid's race has cut.

    A rate that has a result for every seed all the same, from another sweep, is not marked. Without a race no cell is.
    """
    if grid.race is None:
        return cells
    rows = records(cells)
    cut: set[tuple[Any, ...]] = set()
    for group, members in grouped(rows, "model", "task", "setting").items():
        seeds = [Seeds.of(seed) for seed in grid.seeds_on(group[1])]
        scores: dict[tuple[float, Seed], float | None] = {
            (row["learning_rate"], seeds_of(row)): row["validation"] if scored(row) else None for row in members
        }
        for rate in standing(scores, grid.rates_of(*group), seeds, grid.race).cut:
            if not all((rate, seed) in scores for seed in seeds):
                cut.add((*group, rate))
    return cells.assign(cut=[place_of(row)[:4] in cut for row in rows])


def moderate(variances: Array, freedom: Array, prior: float) -> Array:
    """Return moderated variances, [R], from variances with their degrees of freedom and d0; NaN if there are none.

    A rate with no degrees of freedom has the mean of the others.
    """
    total = float(freedom.sum())
    own = np.where(freedom > 0, np.nan_to_num(variances), 0.0)
    pooled = float((freedom * own).sum() / total) if total else math.nan
    if math.isinf(prior):
        return np.full(own.shape, pooled)
    return np.asarray((prior * pooled + freedom * own) / (prior + freedom))
