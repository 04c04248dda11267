"""False claims and coverage in studies in which only some models or tasks lose runs:  python -m benchmarks.uneven_failures [--studies N]

Models are equally good: runs that learn have the same expected score in all of them. All rates are alike, so the true score does not
depend on the chosen rate. Its table is a section of RESULTS.md.
"""

from __future__ import annotations

from datetime import date
from typing import Annotated, NamedTuple

import numpy as np
import typer

from benchmarks.calibration import counts_of, covering_zero, result, share
from benchmarks.results import machine, write_section
from mlmclm.analysis.analyse import analyse
from mlmclm.analysis.results import records
from mlmclm.results.metrics import Rule

RATES = tuple(1e-5 * 2.0**step for step in range(5))
TASKS = ("task-0", "task-1", "task-2")
LEVEL, FAILED = 0.7, 0.3
"""The expected score of all models, and that of a run that failed."""
NOISE, CORRELATION = 0.01, 0.5
"""Standard deviation of a run, and the correlation of its validation and test score."""


class Kind(NamedTuple):
    """How studies are made."""

    title: str
    shares: tuple[tuple[float, ...], ...]
    """Shares of failing runs, for each model and task."""
    seeds: int = 3
    rule: Rule = "mean"


class Counts(NamedTuple):
    """Outcome of one study: whether equal models are found different; how many scores of the first model,
    differences on tasks and on the mean over tasks are covered; the median width of a difference's interval on a task, in points."""

    claims: bool
    scores: tuple[int, int]
    tasks: tuple[int, int]
    means: tuple[int, int]
    width: float


NEVER = (0.0, 0.0, 0.0)
KINDS = [
    Kind("none fails", (NEVER,) * 4),
    *(Kind("one of four, 10 %", ((0.1,) * 3, *(NEVER,) * 3), seeds) for seeds in (2, 3, 5, 10)),
    *(Kind("one of four, 30 %", ((0.3,) * 3, *(NEVER,) * 3), seeds) for seeds in (3, 5)),
    Kind("one of two, 10 %", ((0.1,) * 3, NEVER)),
    *(Kind("all four on one task, 10 %", ((0.1, 0.0, 0.0),) * 4, seeds) for seeds in (3, 5)),
    *(Kind("one of four on one task, 10 %", ((0.1, 0.0, 0.0), *(NEVER,) * 3), seeds) for seeds in (3, 5)),
    *(Kind("all four, 10 %", ((0.1,) * 3,) * 4, seeds) for seeds in (3, 5)),
]


def counted(kind: Kind, number: int) -> Counts:
    """Make and analyse one study."""
    draws = np.random.default_rng([number, kind.seeds])
    names = tuple("abcd"[: len(kind.shares)])
    results = []
    for name, shares in zip(names, kind.shares, strict=True):
        for task, fails in zip(TASKS, shares, strict=True):
            common, *rest = draws.standard_normal((3, len(RATES), kind.seeds))
            failed = draws.random(common.shape) < fails
            lost = FAILED + 0.3 * NOISE * draws.standard_normal((2, *common.shape))
            scores = [
                np.where(failed, low, LEVEL + NOISE * (np.sqrt(CORRELATION) * common + np.sqrt(1 - CORRELATION) * side))
                for side, low in zip(rest, lost, strict=True)
            ]
            results += [
                result(name, task, rate, seed, (float(scores[0][place, seed]), float(scores[1][place, seed])))
                for place, rate in enumerate(RATES)
                for seed in range(kind.seeds)
            ]
    analysis = analyse(results, rule=kind.rule, ranges=dict.fromkeys(TASKS, (-9.0, 9.0)))
    rows, best = records(analysis.comparisons), [row for row in records(analysis.best) if row["model"] == names[0]]
    return Counts(
        any(row["p_holm"] < 0.05 for row in rows),
        (sum(row["score_low"] <= LEVEL <= row["score_high"] for row in best), len(best)),
        covering_zero(rows, "task"),
        covering_zero(rows, "all"),
        float(np.median([100 * (row["high"] - row["low"]) for row in rows if row["kind"] == "task"])),
    )


def main(studies: Annotated[int, typer.Option(help="Studies of each kind.")] = 100) -> None:
    """Measure all kinds."""
    lines = [
        f"`python -m benchmarks.uneven_failures --studies {studies}`, {date.today():%d %B %Y}, {machine()}.",
        "",
        f"{studies} studies of equal models a row, on 3 tasks at 5 rates; a run varies by 1 point, and a failed one loses about 40; nominal "
        "coverage .95, false claims at most .05.",
        "",
        "| runs that fail | seeds | rule | studies with a claim | scores of the first model covered | "
        "differences covered | mean differences covered | median width, points |",
        f"{'|---' * 9}|",
    ]
    for kind, counts in counts_of(KINDS, counted, studies):
        row = [
            kind.title, str(kind.seeds), kind.rule,
            f"{sum(count.claims for count in counts)} of {studies}",
            *(share([getattr(count, name) for count in counts]) for name in ("scores", "tasks", "means")),
            f"{np.median([count.width for count in counts]):.1f}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(row)} |")
        print(lines[-1], flush=True)
    write_section("Runs that fail unevenly: claims on simulated studies", lines)


if __name__ == "__main__":
    typer.run(main)
