"""A race between learning rates on full grids:  python -m benchmarks.race [--store STORE]... [--csv FILE] [--simulated N]

**Recorded grids.** For every (model, task, setting) whose rates all have all seeds, it asks for cells as a sweep with `allocation: race` does,
and answers from the record. A seed's number means nothing, so each grid is raced with its seeds in many orders. Its tables,
one for each size of grid, are a section of RESULTS.md. Of a CSV file (model, dataset, learning_rate, seed,
validation_score, test_score; an empty score is a diverged run) the rates with all seeds make a grid.

**Simulated grids**, N of each kind (`Kind`), are full grids of known noise. Their table is a section of its own.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import random
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import typer

from benchmarks.results import write_section
from mlmclm.analysis.race import standing
from mlmclm.results.intervals import TIE, mean
from mlmclm.results.measures import Array
from mlmclm.results.metrics import value_of
from mlmclm.seeds import Seed

ERRORS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3)
ORDERS = 60
STATED = (0.01, 0.05, 0.1)
"""Errors of simulated races."""
RATES, BEST, FLOOR = 6, 3, -40.0
"""Rates of a simulated grid, the place of the best one, and the score of a failed run, in standard deviations."""


class Scores(NamedTuple):
    """Scores of a run; NaN where it diverged, or where the score is not recorded."""

    validation: float
    test: float


Recorded = dict[float, dict[Seed, Scores]]


class Case(NamedTuple):
    """Outcome of one race: whether the full grid's rate was selected, share of cells, and what was lost."""

    same: bool
    share: float
    validation: float
    test: float


def of_store(store: Path) -> dict[str, Recorded]:
    """Read the grids of a store's results."""
    grids: dict[str, Recorded] = defaultdict(lambda: defaultdict(dict))
    for path in sorted(store.glob("cells/*/*.json")):
        result = json.loads(path.read_text())
        scores = [math.nan] * 2
        if result["status"] == "ok":
            scores = [value_of(result["scores"][split], result["metric"]) for split in ("validation", "test")]
        group = "/".join((str(store), result["model"], result["task"], result.get("setting", "")))
        grids[group][result["learning_rate"]][result["seed"]] = Scores(*scores)
    return grids


def of_csv(path: Path) -> dict[str, Recorded]:
    """Read the grids of a CSV file."""
    grids: dict[str, Recorded] = defaultdict(lambda: defaultdict(dict))
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            scores = [_number(row[f"{split}_score"]) for split in ("validation", "test")]
            grids[f"{row['model']}/{row['dataset']}"][float(row["learning_rate"])][int(row["seed"])] = Scores(*scores)
    return grids


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def complete(grid: Recorded) -> Recorded:
    """Return the rates that have all seeds, in increasing order."""
    seeds = {seed for runs in grid.values() for seed in runs}
    return {rate: grid[rate] for rate in sorted(grid) if set(grid[rate]) == seeds}


def selected(grid: Recorded) -> float:
    """Return the rate that the full grid selects among these."""
    lost = {rate: sum(math.isnan(run.validation) for run in runs.values()) for rate, runs in grid.items()}
    means = {rate: _mean(grid[rate], 0) for rate, count in lost.items() if count == min(lost.values())}
    return min(rate for rate, value in means.items() if value >= max(means.values()) - TIE)


def _mean(runs: dict[Seed, Scores], split: int) -> float:
    return mean([run[split] for run in runs.values() if not math.isnan(run.validation)])


def raced(grid: Recorded, seeds: list[Seed], error: float) -> Case:
    """Race the rates of a complete grid, with the seeds in this order."""
    # A race takes no notice of scores that it has not asked for.
    scores = {(rate, seed): grid[rate][seed].validation for rate in grid for seed in seeds}
    cut = standing(scores, list(grid), seeds, error).cut
    full, own = selected(grid), selected({rate: runs for rate, runs in grid.items() if rate not in cut})
    lost = [_mean(grid[full], split) - _mean(grid[own], split) for split in (0, 1)]
    used = sum(cut.get(rate, len(seeds)) for rate in grid)
    return Case(full == own, used / (len(grid) * len(seeds)), *lost)


def cases(grid: Recorded, error: float) -> list[Case]:
    """Race a grid in the recorded order of the seeds, and in others: all, or `ORDERS` of them."""
    seeds = sorted(next(iter(grid.values())))
    orders = [list(order) for order in itertools.permutations(seeds)] if len(seeds) < 5 else [seeds]
    draw = random.Random(0)
    while len(orders) < ORDERS and len(seeds) >= 5:
        orders.append(draw.sample(seeds, len(seeds)))
    return [raced(grid, order, error) for order in orders]


def table(grids: list[Recorded]) -> list[str]:
    """Tabulate all errors over grids of one size."""
    lines = [
        "| error | same selection, races | same, recorded order | cells used | lost on validation | lost on test | most lost |",
        "|---|---|---|---|---|---|---|",
    ]
    for error in ERRORS:
        found = [cases(grid, error) for grid in grids]
        every = [case for group in found for case in group]
        tests = [case.test for case in every if not math.isnan(case.test)]
        lines.append(
            f"| {error:g} | {mean([float(case.same) for case in every]):.1%} | {sum(group[0].same for group in found)} of {len(grids)} | "
            f"{mean([case.share for case in every]):.1%} | {mean([case.validation for case in every]):.5f} | {mean(tests):.5f} | "
            f"{max(case.validation for case in every):.4f} |"
        )
        print(lines[-1], flush=True)
    return lines


class Kind(NamedTuple):
    """How grids of 6 rates are simulated, in standard deviations of a run.

    Attributes:
        curve: of the rates' means. "flat"; "close", whose steps away from the best rate cost 0.3 each, or "peak", 1; or "two", equal
            rates 5 above the others.
        noise: "normal", "t" (4 degrees of freedom) or "skew" (reversed lognormal). Or normal, and growing tenfold from the
            lowest to the highest rate ("tenfold"), or a tenth ("best quiet") or ten times ("best noisy") as large at the best
            rate.
        failing: the probability that a run fails.
        shared: share of the variance of a seed's runs that is common to all rates.
    """

    curve: str
    noise: str
    failing: float = 0.0
    shared: float = 0.0


KINDS = [
    *(Kind(curve, noise) for noise in ("normal", "t", "skew", "tenfold", "best quiet", "best noisy")
      for curve in ("flat", "close", "peak", "two")),
    *(Kind(curve, "normal", failing=0.2) for curve in ("flat", "close", "peak", "two")),
    *(Kind(curve, noise, shared=0.5) for noise in ("normal", "tenfold") for curve in ("flat", "peak")),
]  # fmt: skip


def simulate(kind: Kind, seeds: int, races: int) -> Array:
    """Return the scores of full grids, [races, rates, seeds]."""
    draws = np.random.default_rng(seeds)
    away = np.abs(np.arange(RATES) - BEST)
    two = np.where(np.isin(np.arange(RATES), (BEST, BEST + 1)), 0.0, -5.0)
    curves = {"flat": 0.0 * away, "close": -0.3 * away, "peak": -1.0 * away, "two": two}
    scales = {
        "tenfold": np.geomspace(10**-0.5, 10**0.5, RATES),
        "best quiet": np.where(away == 0, 0.1, 1.0),
        "best noisy": np.where(away == 0, 10.0, 1.0),
    }
    shape = (races, RATES, seeds)
    noise = draws.standard_normal(shape)
    if kind.noise == "t":
        noise *= np.sqrt(2 / draws.chisquare(4, shape))
    if kind.noise == "skew":
        noise = -(np.exp(0.8 * noise) - np.exp(0.32)) / np.sqrt((np.exp(0.64) - 1) * np.exp(0.64))
    common = math.sqrt(kind.shared) * draws.standard_normal((races, 1, seeds))
    own = math.sqrt(1 - kind.shared) * noise * scales.get(kind.noise, np.ones(RATES))[:, None]
    scores = curves[kind.curve][:, None] + common + own
    return np.where(draws.random(shape) < kind.failing, FLOOR + 0.3 * noise, scores)


def simulated(job: tuple[Kind, int, int]) -> list[tuple[float, float]]:
    """Race grids of a kind, and return the shares of wrong cuts and of cells used at each stated error."""
    kind, seeds, races = job
    found = []
    for error in STATED:
        missed, used = 0, 0
        for full in simulate(kind, seeds, races):
            scores: dict[tuple[float, Seed], float | None] = {
                (float(rate), seed): float(full[rate, seed]) for rate in range(RATES) for seed in range(seeds)
            }
            # A race takes no notice of scores that it has not asked for.
            cut = standing(scores, [float(rate) for rate in range(RATES)], range(seeds), error).cut
            missed += float(full.mean(axis=1).argmax()) in cut
            used += sum(cut.get(float(rate), seeds) for rate in range(RATES))
        found.append((missed / races, used / (races * RATES * seeds)))
    return found


def simulated_table(races: int, sizes: tuple[int, ...] = (2, 3, 5, 10)) -> list[str]:
    """Tabulate simulated races of all kinds."""
    heads = [f"{what} at {error:g}" for error in STATED for what in ("true error", "cells")]
    lines = [f"| seeds | curve | noise | failing | shared | {' | '.join(heads)} |", "|---" * (5 + len(heads)) + "|"]
    jobs = [(kind, seeds, races) for seeds in sizes for kind in KINDS]
    with ProcessPoolExecutor(2) as pool:
        for (kind, seeds, _), found in zip(jobs, pool.map(simulated, jobs), strict=True):
            shares = [f"{missed:.3f} | {used:.0%}" for missed, used in found]
            lines.append(
                f"| {seeds} | {kind.curve} | {kind.noise} | {kind.failing:g} | {kind.shared:g} | {' | '.join(shares)} |"
            )
            print(lines[-1], flush=True)
    return lines


def main(
    store: Annotated[list[Path] | None, typer.Option(help="Store with a full grid's results.")] = None,
    results: Annotated[Path | None, typer.Option("--csv", help="CSV file of results.")] = None,
    simulated_races: Annotated[int, typer.Option("--simulated", help="Simulated grids of each kind.")] = 0,
) -> None:
    """Race, print and write."""
    if simulated_races:
        head = [
            "Command: `python -m benchmarks.race --simulated N`.",
            f"{simulated_races} grids of 6 rates a line. True error: the share of races that cut the rate which the full grid selects.",
            "",
        ]
        write_section("Race, simulated", [*head, *simulated_table(simulated_races)])
    if not store and not results:
        return
    sizes: dict[tuple[int, int], list[Recorded]] = defaultdict(list)
    from_stores = [grid for each in store or [] for grid in of_store(each).values()]
    from_file = list(of_csv(results).values()) if results else []
    published: Counter[tuple[int, int]] = Counter()
    for recorded, counted in ((from_stores, 0), (from_file, 1)):
        for grid in map(complete, recorded):
            size = len(grid), len(next(iter(grid.values()), {}))
            if min(size) > 1:
                sizes[size].append(grid)
                published[size] += counted
    lines = [
        "Command: `python -m benchmarks.race --store STORE --csv FILE`.",
        "Each line is a mean over grids and orders of their seeds. Lost: the full grid's selection minus the race's, in the",
        "mean score over seeds (fractions of 1). The order of the seeds is the only chance in it.",
    ]
    for size, found in sorted(sizes.items(), reverse=True):
        title = f"{size[0]} rates x {size[1]} seeds, {len(found)} grids, {published[size]} of them from the file:"
        lines += ["", title, "", *table(found)]
    write_section("Race", lines)


if __name__ == "__main__":
    typer.run(main)
