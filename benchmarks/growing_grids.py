"""False claims and coverage of studies whose grids add learning rates:  python -m benchmarks.growing_grids [--studies N]

Equal models are tried on three tasks at three listed rates, and at up to three further ones at each end, as a sweep with `extend:
true` plans them. In other studies each model extends its grid by itself, like models of separately published parts. The true
difference of any two models is 0. Its table is a section of RESULTS.md.
"""

from __future__ import annotations

from datetime import date
from typing import Annotated, NamedTuple

import numpy as np
import typer

from benchmarks.calibration import counts_of, covering_zero, result, share
from benchmarks.results import machine, write_section
from mlmclm.analysis.analyse import analyse
from mlmclm.analysis.extension import extension
from mlmclm.analysis.results import Grid, Record, records
from mlmclm.results.measures import Array
from mlmclm.results.metrics import Rule
from mlmclm.seeds import Seed

RATES = tuple(1e-5 * 2.0**step for step in range(-3, 6))
LISTED = slice(3, 6)
TASKS = ("task-0", "task-1", "task-2")
STEPS = np.arange(len(RATES)) - 4
CURVES = {
    "flat": np.full(len(RATES), 0.7),
    "concave, best beyond the list": 0.7 - 0.01 * (STEPS - 2.3) ** 2,
    "a slope of 0.5 points a rate": 0.7 + 0.005 * STEPS,
    "the last listed rate leads by 0.1 points, the next by 2 and 5": np.asarray(
        [0.6, 0.6, 0.6, 0.65, 0.699, 0.7, 0.72, 0.77, 0.76]
    ),
}
NOISE, CORRELATION = 0.01, 0.5
"""Standard deviation of a run, and the correlation of its validation and test score."""


class Kind(NamedTuple):
    """How studies are made; `alone`: each model adds rates by itself."""

    curve: str
    seeds: int
    models: int = 2
    rule: Rule = "mean"
    alone: bool = False


class Counts(NamedTuple):
    """Outcome of one study: whether equal models are found different, and how many intervals of
    differences on tasks and on the mean over tasks cover 0."""

    claims: bool
    tasks: tuple[int, int]
    means: tuple[int, int]
    added: int


KINDS = [
    *(Kind(curve, seeds) for curve in CURVES for seeds in (3, 5)),
    *(Kind(curve, seeds, alone=True) for curve in CURVES for seeds in (3, 5)),
    Kind(list(CURVES)[-1], 3, models=4),
    Kind(list(CURVES)[-1], 3, rule="per_seed"),
]


def swept(kind: Kind, noise: Array) -> tuple[list[dict[tuple[float, Seed], float | None]], tuple[float, ...]]:
    """Sweep one task of models with this noise of validation scores, [models, rates, seeds], as the planner does.

    Returns:
        The validation scores of each model by (rate, seed), and the rates that were added.
    """
    listed, lower, higher = RATES[LISTED], RATES[: LISTED.start][::-1], RATES[LISTED.stop :]
    seeds = range(kind.seeds)
    scores: list[dict[tuple[float, Seed], float | None]] = [{} for _ in noise]
    added: tuple[float, ...] = ()
    while True:
        tried = (*listed, *added)
        for by_cell, deviations in zip(scores, noise, strict=True):
            for rate in tried:
                for seed in seeds:
                    place = RATES.index(rate)
                    by_cell[rate, seed] = float(CURVES[kind.curve][place] + deviations[place, seed])
        extended = extension(scores, listed, lower, higher, seeds, rule=kind.rule).added
        if len(extended) == len(added):
            return scores, added
        added = extended


def counted(kind: Kind, number: int) -> Counts:
    """Make and analyse one study."""
    draws = np.random.default_rng([number, kind.seeds])
    names = tuple("abcd"[: kind.models])
    results: list[Record] = []
    added: dict[tuple[str, str, str], tuple[float, ...]] = {}
    for task in TASKS:
        common, *rest = draws.standard_normal((3, kind.models, len(RATES), kind.seeds))
        validation, test = (NOISE * (np.sqrt(CORRELATION) * common + np.sqrt(1 - CORRELATION) * side) for side in rest)
        groups = [[place] for place in range(kind.models)] if kind.alone else [list(range(kind.models))]
        for group in groups:
            scores, later = swept(kind, validation[group])
            for place, by_cell in zip(group, scores, strict=True):
                added |= {(names[place], task, ""): later} if later else {}
                tested = CURVES[kind.curve][:, None] + test[place]
                results += [
                    result(names[place], task, rate, seed, (score, float(tested[RATES.index(rate), seed])))
                    for (rate, seed), score in by_cell.items()
                    if score is not None
                ]
    grid = Grid(names, TASKS, RATES[LISTED], tuple(range(kind.seeds)), added=added)
    analysis = analyse(results, grid=grid, rule=kind.rule, ranges=dict.fromkeys(TASKS, (-9.0, 9.0)))
    rows = records(analysis.comparisons)
    return Counts(
        any(row["p_holm"] < 0.05 for row in rows),
        covering_zero(rows, "task"),
        covering_zero(rows, "all"),
        sum(map(len, added.values())),
    )


def main(studies: Annotated[int, typer.Option(help="Studies of each kind.")] = 100) -> None:
    """Measure all kinds."""
    lines = [
        f"`python -m benchmarks.growing_grids --studies {studies}`, {date.today():%d %B %Y}, {machine()}.",
        "",
        f"{studies} studies of equal models a row, on 3 tasks; a run varies by 1 point; nominal coverage .95, false claims at most .05.",
        "",
        "| curve | seeds | models | rule | rates are added | studies with a claim | "
        "differences covered | mean differences covered | rates added to a model and task |",
        f"{'|---' * 10}|",
    ]
    for kind, counts in counts_of(KINDS, counted, studies):
        row = [
            kind.curve, str(kind.seeds), str(kind.models), kind.rule,
            "for each model" if kind.alone else "for all models",
            f"{sum(count.claims for count in counts)} of {studies}",
            share([count.tasks for count in counts]),
            share([count.means for count in counts]),
            f"{np.mean([count.added for count in counts]) / kind.models / len(TASKS):.1f}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(row)} |")
        print(lines[-1], flush=True)
    write_section("Grids that add learning rates: claims on simulated studies", lines)


if __name__ == "__main__":
    typer.run(main)
