"""False claims and coverage in studies with diverging runs:  python -m benchmarks.diverging_runs [--studies N]

Models are equally good: their runs that learn have equal expected scores. The number of diverged runs is another quantity,
with its own exact test (`failures.csv`). Its table is a section of RESULTS.md.
"""

from __future__ import annotations

from datetime import date
from typing import Annotated, NamedTuple

import numpy as np
import typer

from benchmarks.calibration import counts_of, covering_zero, result, share
from benchmarks.results import machine, write_section
from mlmclm.analysis.analyse import analyse
from mlmclm.analysis.results import Grid, records
from mlmclm.results.measures import Array
from mlmclm.seeds import Seed

RATES = tuple(1e-5 * 2.0**step for step in range(5))
BEST = 3
"""The place of the best rate."""
TASKS = ("task-0", "task-1", "task-2")
LEVEL = 0.7
"""The expected score, at the best rate, of runs that learn; it is the same for all models."""
NOISE, CORRELATION = 0.01, 0.5
"""Standard deviation of a run, and the correlation of its validation and test score."""
Shares = tuple[float, ...]
"""The probability that a run of a model diverges at each rate."""
NEVER, TENTH, FIFTH = ((share,) * len(RATES) for share in (0.0, 0.1, 0.2))
TENTH_AT_BEST, AT_BEST = (tuple(share * (place == BEST) for place in range(len(RATES))) for share in (0.1, 0.2))
FROM_BEST = tuple(0.1 * (place >= BEST) for place in range(len(RATES)))


class Kind(NamedTuple):
    """How studies are made.

    Attributes:
        title: which runs diverge.
        models: the shares of each model.
        step: the loss in points for each step away from the best rate.
    """

    title: str
    models: tuple[Shares, ...]
    seeds: int
    step: float


class Counts(NamedTuple):
    """Outcome of one study: whether equal models are found different, and how many scores, differences on
    tasks and differences of means are covered."""

    claims: bool
    scores: tuple[int, int]
    tasks: tuple[int, int]
    means: tuple[int, int]


KINDS = [
    *(Kind("of two models, a fifth at the best rate", (AT_BEST,) * 2, seeds, step) for step in (3, 10) for seeds in (3, 5)),
    *(Kind("of one of two models, a tenth at the best rate", (TENTH_AT_BEST, NEVER), seeds, 10) for seeds in (3, 5)),
    *(Kind("of one of four, a fifth at the best rate", (AT_BEST, *(NEVER,) * 3), seeds, 10) for seeds in (3, 5)),
    *(Kind("of one of four, a tenth", (TENTH, *(NEVER,) * 3), seeds, step) for step in (0, 3) for seeds in (3, 5)),
    *(Kind("of one of four, a fifth", (FIFTH, *(NEVER,) * 3), seeds, 3) for seeds in (3, 5)),
    *(Kind("of two of four, a tenth from the best rate on", (FROM_BEST, FROM_BEST, NEVER, NEVER), seeds, 3) for seeds in (3, 5)),
    *(Kind("of all four, a tenth", (TENTH,) * 4, seeds, 3) for seeds in (3, 5)),
    *(Kind("of two models, a tenth", (TENTH,) * 2, seeds, step)
      for seeds, step in ((3, 3), (5, 3), (5, 1), (5, 0))),
]  # fmt: skip


def drawn(shares: Shares, seeds: int, step: float, number: int, draws: np.random.Generator) -> tuple[Array, Array]:
    """Draw validation and test scores around 0, [2, number, R, S], and which runs diverge, [number, R, S]."""
    shape = (number, len(RATES), seeds)
    common, *rest = draws.standard_normal((3, *shape))
    curve = -step / 100 * abs(np.arange(len(RATES)) - BEST)
    scores = [np.sqrt(CORRELATION) * common + np.sqrt(1 - CORRELATION) * side for side in rest]
    return curve[:, None] + NOISE * np.stack(scores), draws.random(shape) < np.asarray(shares)[:, None]


def counted(kind: Kind, number: int) -> Counts:
    """Make and analyse one study."""
    draws = np.random.default_rng([number, kind.seeds])
    names = tuple("abcd"[: len(kind.models)])
    results = []
    for name, shares in zip(names, kind.models, strict=True):
        around, diverged = drawn(shares, kind.seeds, kind.step, len(TASKS), draws)
        both = LEVEL + around
        for place, task in enumerate(TASKS):
            scores: dict[tuple[float, Seed], tuple[float, float] | None] = {
                (rate, seed): None if diverged[place, row, seed] else (float(both[0, place, row, seed]), float(both[1, place, row, seed]))
                for row, rate in enumerate(RATES) for seed in range(kind.seeds)
            }  # fmt: skip
            results += [result(name, task, *place, pair) for place, pair in scores.items()]
    grid = Grid(names, TASKS, RATES, tuple(range(kind.seeds)))
    analysis = analyse(results, ranges=dict.fromkeys(TASKS, (-9.0, 9.0)), grid=grid)
    rows = records(analysis.comparisons)
    scored = [row["score_low"] <= LEVEL <= row["score_high"] for row in records(analysis.best)]
    return Counts(
        any(row["p_holm"] < 0.05 for row in rows),
        (sum(scored), len(scored)),
        covering_zero(rows, "task"),
        covering_zero(rows, "all"),
    )


def main(studies: Annotated[int, typer.Option(help="Studies of each kind.")] = 200) -> None:
    """Measure all kinds."""
    lines = [
        f"`python -m benchmarks.diverging_runs --studies {studies}`, {date.today():%d %B %Y}, {machine()}.",
        "",
        f"{studies} studies of equal models a row, on 3 tasks at 5 rates; a run varies by 1 point; rule `mean`; nominal coverage .95, false "
        f"claims at most .05.",
        "",
        "| runs that diverge | the next rates are lower by, points | seeds | studies with a claim | "
        "scores covered | differences covered | mean differences covered |",
        f"{'|---' * 8}|",
    ]
    for kind, counts in counts_of(KINDS, counted, studies):
        row = [
            kind.title, f"{kind.step:g}", str(kind.seeds),
            f"{sum(count.claims for count in counts)} of {studies}",
            *(share([getattr(count, name) for count in counts]) for name in ("scores", "tasks", "means")),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(row)} |")
        print(lines[-1], flush=True)
    write_section("Runs that diverge: claims on simulated studies", lines)


if __name__ == "__main__":
    typer.run(main)
