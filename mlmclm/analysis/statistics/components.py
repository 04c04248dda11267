"""Components of variance: how much of the variance of scores each source adds, by task and family of models.

**Model.** A family of models is pretrained once, or several times with other seeds (replicates). The test score of a run is a
sum of independent effects: of the learning rate, of the replicate, of the fine-tuning seed, and of their interactions.
Seeds are nested in replicates: the same seed means the same head, but on other weights. Where a grid varies the streams of a seed
independently, its effect has parts: head, order, dropout, and their interaction. A component is the standard deviation that
its source adds at one learning rate, so it includes what a seed or replicate does at that rate alone.

**Estimates** equate sequential sums of squares with their expectations (Henderson 1953, method 3). In a balanced grid they are
those of the analysis of variance, and of REML where they are positive; negative ones are 0. Grids with missing cells have
other coefficients. Failed runs (`failed_runs`) are left out: scores with failures are a mixture, whose variance says little.

**Intervals** are quantiles of generalised pivotal quantities (Weerahandi 1993; Burdick, Borror and Montgomery 2005), which are
nearly exact in balanced grids of normal scores. The grid's rates are fixed and not a sample, so the interval of their component is
that of `sensitivity.spread_interval`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import special

from mlmclm.analysis.analyse import Analysis
from mlmclm.analysis.effects import fold_variance
from mlmclm.analysis.model_runs import Runs
from mlmclm.analysis.results import columns, table
from mlmclm.analysis.sensitivity import spread_interval
from mlmclm.results.intervals import NAN, SINGLE, TIE, deviation_interval
from mlmclm.results.measures import Array
from mlmclm.seeds import STREAMS

RATE, REPLICATE, SEED, INTERACTION, EXAMPLES = "rate", "replicate", "seed", "interaction", "examples"
COLUMNS = columns("object: model_family models task source", "int64: replicates runs", "float64: sd sd_low sd_high")
DRAWS = 4_000
"""Points at which the distribution of a pivotal quantity is evaluated."""


class Component(NamedTuple):
    """The standard deviation that a source adds to a score, with its interval; NaN where it is not known."""

    sd: float
    low: float
    high: float


UNKNOWN = Component(NAN, NAN, NAN)


def components(analysis: Analysis) -> pd.DataFrame:
    """Compute a row per (family of models, task, source) with any cell.

    Learning rates that a grid added because of scores are left out.

    Columns:
        models: the names of the family's models, joined by commas.
        source: "rate"; "seed"; the seed's parts ("head", "order", "dropout", "interaction") where the grid varies them
            independently; if only some streams vary, these, joined by "+", in place of "seed"; "examples", the
            finite test set's noise in a mean over seeds at the chosen rate (jackknife), where predictions are known; and
            "replicate" where there are several.
        replicates, runs: the number of pretraining runs, and of fine-tuning runs that did not fail.
        sd (_low, _high): the component as a standard deviation of the score, with its interval. NaN where it is not known:
            with one seed.
    """
    members: dict[tuple[str, str], list[str]] = {}
    for model, task in analysis.pairs:
        members.setdefault((analysis.model_of[model], task), []).append(model)
    rows = []
    for (family, task), models in sorted(members.items()):
        runs = [analysis.listed((model, task))[0] for model in models]
        by_source = _components_of(runs, analysis.confidence)
        replicate = by_source.pop(REPLICATE, None)
        folds = [analysis.run_effects[model, task].folds for model in models]
        variances = [fold_variance(scores) for scores in folds if scores is not None]
        if variances:
            sd, freedom = math.sqrt(sum(size for size, _ in variances) / len(variances)), variances[0][1]
            by_source[EXAMPLES] = Component(sd, *deviation_interval(sd, freedom, confidence=analysis.confidence))
        if replicate is not None:
            by_source[REPLICATE] = replicate
        count = sum(int(member.learned.sum()) for member in runs)
        rows += [
            {"model_family": family, "models": ", ".join(models), "task": task, "source": source}
            | {"replicates": len(models), "runs": count, "sd": part.sd, "sd_low": part.low, "sd_high": part.high}
            for source, part in by_source.items()
        ]
    return table(rows, COLUMNS)


def _components_of(members: Sequence[Runs], confidence: float = 0.95) -> dict[str, Component]:
    """Return the components of a family of models on one task by source, except that of the test set.

    Args:
        members: the runs of each pretraining run.
    """
    scores, rates, replicates, seeds = _observations(members)
    parts, seed_codes = _streams(seeds)
    sources = [*([SEED] if len(parts) > 1 else []), *parts, *([INTERACTION] if len(parts) > 1 else [])]
    by_source = dict.fromkeys((RATE, *sources, *([REPLICATE] if len(members) > 1 else [])), UNKNOWN)
    groups = [(RATE, rates), (REPLICATE, replicates), (REPLICATE, _crossed(replicates, rates))]
    for name, levels in parts.items():
        nested = _crossed(replicates, levels)
        groups += [(name, nested), (name, _crossed(nested, rates))]
    if len(parts) > 1:
        nested = _crossed(replicates, seed_codes)
        groups += [(INTERACTION, nested), (INTERACTION, _crossed(nested, rates))]
    fit = _fitted(scores, groups)
    if fit is None or fit.names[-1] in (RATE, REPLICATE):  # one seed: noise inseparable from these sources
        return by_source
    noise = max(TIE, SINGLE * float(abs(scores).max())) ** 2
    silent = fit.squares[-1] / fit.freedom[-1] <= noise
    for name in by_source:
        if name != RATE:
            wanted = sources if name == SEED else (name,)
            by_source[name] = fit.component([source in wanted for source in fit.names], confidence)
    if RATE in fit.names:
        by_source[RATE] = fit.rate(confidence)
    return {name: Component(component.sd, NAN, NAN) for name, component in by_source.items()} if silent else by_source


class _Fit(NamedTuple):
    """Sequential sums of squares and their expectations.

    Attributes:
        names: the source of each sum.
        squares, freedom: the sums and their degrees of freedom, [J].
        expected: the share of each variance in each expected mean square, [J, J], upper triangular.
    """

    names: Sequence[str]
    squares: Array
    freedom: Array
    expected: Array

    def component(self, wanted: Sequence[bool], confidence: float) -> Component:
        """Return the sum of some of the variances as a component."""
        if not any(wanted):
            return UNKNOWN
        share = np.linalg.solve(self.expected.T, np.asarray(wanted, np.float64))
        value = float(share @ (self.squares / self.freedom))
        drawn = sum(
            weight * square / _chi_square(int(freedom), index)
            for index, (weight, square, freedom) in enumerate(zip(share, self.squares, self.freedom, strict=True))
            if weight
        )
        low, high = np.quantile(drawn, [(1 - confidence) / 2, (1 + confidence) / 2])
        return Component(*(math.sqrt(max(0.0, float(variance))) for variance in (value, low, high)))

    def rate(self, confidence: float) -> Component:
        """Return the component of the learning rate, the first source, whose levels are fixed."""
        means = self.squares / self.freedom
        share = np.linalg.solve(self.expected[1:, 1:].T, self.expected[0, 1:])
        noise = float(share @ means[1:])
        if noise <= 0:
            return UNKNOWN
        freedom = noise**2 / float(((share * means[1:]) ** 2 / self.freedom[1:]).sum())
        value = max(0.0, float(means[0]) - noise) / self.expected[0, 0]
        ends = spread_interval(float(means[0]) / noise, self.freedom[0], freedom, confidence)
        scale = noise / (self.freedom[0] * self.expected[0, 0])
        return Component(math.sqrt(value), *(math.sqrt(scale * end) for end in ends))


def _fitted(scores: Array, groups: Sequence[tuple[str, Array]]) -> _Fit | None:
    """Return the sums of squares of sources in turn, each adjusted for those before it; None for fewer than two runs.

    Args:
        scores: [n].
        groups: each source, and the level of each run, [n]; in the last group each run has a different level.
    """
    number = len(scores)
    if number < 2:
        return None
    centred = scores - scores.mean()
    basis = np.full((number, 1), number**-0.5)
    kept: list[tuple[str, Array, Array]] = []
    for name, levels in groups[:-1]:
        design = (levels[:, None] == np.arange(levels.max() + 1)).astype(np.float64)
        rest = design - basis @ (basis.T @ design)
        vectors, sizes, _ = np.linalg.svd(rest, full_matrices=False)
        added = vectors[:, sizes > 1e-8 * number]
        if added.shape[1]:
            kept.append((name, design, added))
            basis = np.concatenate((basis, added), axis=1)
    last = number - basis.shape[1]
    squares = [float(((added.T @ centred) ** 2).sum()) for _, _, added in kept]
    freedom = [added.shape[1] for _, _, added in kept]
    if last:
        squares.append(float(((centred - basis @ (basis.T @ centred)) ** 2).sum()))
        freedom.append(last)
    expected = np.eye(len(squares))
    for row, (_, _, added) in enumerate(kept):
        expected[row] = 1.0
        for column, (_, design, _) in enumerate(kept):
            expected[row, column] = float(((added.T @ design) ** 2).sum()) / added.shape[1]
    names = [*(name for name, _, _ in kept), *([groups[-1][0]] if last else [])]
    # What a source shares with those before it is 0 up to rounding.
    return _Fit(names, np.asarray(squares), np.asarray(freedom, np.float64), np.triu(expected))


def _observations(members: Sequence[Runs]) -> tuple[Array, Array, Array, Array]:
    """Return scores, and codes of rates, replicates, all [n], and seeds by stream, [n, 3], of the runs that learn."""
    scores, rates, replicates, seeds = [], [], [], []
    for number, member in enumerate(members):
        rows, places = np.nonzero(member.learned)
        scores.append(member.test[rows, places])
        rates.append(np.asarray(member.rates, np.float64)[rows])
        replicates.append(np.full(len(rows), number))
        streams = [[getattr(seed, name) for name in STREAMS] for seed in member.seeds]
        codes = np.asarray(streams) if streams else np.repeat(np.arange(member.test.shape[1])[:, None], 3, axis=1)
        seeds.append(codes.reshape(-1, len(STREAMS))[places])
    levels = pd.factorize(np.concatenate(rates))[0]
    return np.concatenate(scores), levels, np.concatenate(replicates), np.concatenate(seeds)


def _streams(seeds: Array) -> tuple[dict[str, Array], Array]:
    """Return the parts of the seeds that vary independently by name, and the seeds as a whole, as codes [n].

    Args:
        seeds: by stream, [n, 3].
    """
    groups: dict[bytes, tuple[list[str], Array]] = {}
    for name, column in zip(STREAMS, seeds.T, strict=True):
        levels = pd.factorize(column)[0]
        if len(levels) and levels.max() > 0:
            groups.setdefault(levels.tobytes(), ([], levels))[0].append(name)
    parts = {SEED if len(names) == len(STREAMS) else "+".join(names): levels for names, levels in groups.values()}
    crossed = np.zeros(len(seeds), np.int64)
    for codes in parts.values():
        crossed = _crossed(crossed, codes)
    return parts or {SEED: crossed}, crossed


def _crossed(first: Array, second: Array) -> Array:
    """Return a code for each pair of codes, [n]."""
    return np.asarray(pd.factorize(first * (second.max(initial=0) + 1) + second)[0])


@cache
def _chi_square(freedom: int, place: int) -> Array:
    """Return equally probable values of a chi-square distribution, [DRAWS], in a random order that differs for each `place`."""
    tails = (np.random.default_rng(place).permutation(DRAWS) + 0.5) / DRAWS
    return np.asarray(special.chdtri(freedom, tails))
