"""How often advice and comparisons find true and false differences on simulated studies:  python -m benchmarks.claims [--studies N]

Each study is one of `benchmarks.calibration`, through `mlmclm.analysis.analyse`, in which all models are equal. Then one model is
made better, on all tasks or on one, by the difference that the analysis states for 80 % power (the study's
`smallest`), and by twice that. A lead only adds to that model's scores, so the fitted noise holds for all three.
Its table is a section of RESULTS.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from benchmarks.calibration import MODELS, NOISE, TASKS, Scenario, study
from benchmarks.results import write_section
from mlmclm.analysis.analyse import Analysis, analyse
from mlmclm.analysis.comparison import ALL_TASKS, comparison_table, overall_table
from mlmclm.analysis.power import smallest_differences
from mlmclm.analysis.results import Record, records
from mlmclm.reports.advice import advise
from mlmclm.reports.wording import clearly_different
from mlmclm.results.measures import Array

BEST = MODELS[0]
RANGES = dict.fromkeys(TASKS, (-9.0, 9.0))
EXAMPLES = 400


class Kind(NamedTuple):
    """A kind of studies.

    Attributes:
        models, tasks: their numbers.
        tested: standard deviation of the noise of the finite test sets, as a multiple of a run's; 0 for none.
    """

    scenario: Scenario
    models: int = 4
    tasks: int = 4
    tested: float = 0.0


class Said(NamedTuple):
    """Statements about one study, or their mean over several: each is a share of the possible statements.

    Attributes:
        claims: whether any two equal models are found different.
        names: whether a best model is named although all are equal.
        on_mean: share of the pairs with the better model that are found different on the mean over tasks, at the stated difference.
        on_task: the same for a lead on one task, at the difference that is stated for a task.
        named: whether the better model is named at twice the stated difference on all tasks.
        wrong: whether another model is named.
    """

    claims: float
    names: float
    on_mean: float
    on_task: float
    named: float
    wrong: float


def analysed(kind: Kind, number: int) -> Analysis:
    """Return the analysis of a study of equal models."""
    names, tasks = MODELS[: kind.models], TASKS[: kind.tasks]
    results = study(kind.scenario, number)
    draws = np.random.default_rng([number, 1])
    answers = {
        (model, task): kind.tested * NOISE * (EXAMPLES**0.5) * draws.standard_normal(EXAMPLES)
        for model in names
        for task in tasks
    }
    selected = [result for result in results if result["model"] in names and result["task"] in tasks]
    for result in selected:
        result["scores"]["test"]["accuracy"] += answers[result["model"], result["task"]].mean()

    def folds(rows: Sequence[Record]) -> Array | None:
        if not kind.tested:
            return None
        parts = answers[rows[0]["model"], rows[0]["task"]].reshape(100, -1)
        left = (parts.sum() - parts.sum(axis=1)) / (parts.size - parts.shape[1])
        return np.asarray(left)

    return analyse(selected, rule=kind.scenario.rule, ranges=RANGES, folds=folds)


def led(analysis: Analysis, lead: float, tasks: list[str]) -> Analysis:
    """Return the analysis of a study in which one model is better on some tasks."""
    effects = {
        (model, task): replace(effect, seeds=replace(effect.seeds, value=effect.seeds.value + lead))
        if model == BEST and task in tasks
        else effect
        for (model, task), effect in analysis.effects.items()
    }
    return replace(
        analysis,
        effects=effects,
        overall=overall_table(effects, analysis.models, analysis.families, ranges=RANGES),
        comparisons=comparison_table(effects, analysis.models, analysis.families),
    )


def said(analysis: Analysis, stated: dict[str, float]) -> Said:
    """Return the statements about one study of equal models, given the differences that are stated for its kind."""
    task, everywhere = TASKS[0], sorted(analysis.families)
    answer = advise(led(analysis, 2 * stated[ALL_TASKS], everywhere)).answer
    return Said(
        claims=float(any(clearly_different(row, analysis.confidence) for row in records(analysis.comparisons))),
        names=float(advise(analysis).answer.clear),
        on_mean=_told(led(analysis, stated[ALL_TASKS], everywhere), ALL_TASKS),
        on_task=_told(led(analysis, stated[task], [task]), task),
        named=float(answer.clear and answer.best == (BEST,)),
        wrong=float(answer.clear and answer.best != (BEST,)),
    )


def _told(analysis: Analysis, scope: str) -> float:
    rows = [row for row in records(analysis.comparisons) if row["scope"] == scope and row["model_a"] == BEST]
    return float(np.mean([clearly_different(row, analysis.confidence) for row in rows]))


def measured(kind: Kind, studies: int, mapped: Callable[..., Iterable[Any]] = map) -> tuple[dict[str, float], Said]:
    """Return the mean stated differences of a kind of studies, and the mean statements about the studies.

    Args:
        mapped: maps a function over values, as `map` does.
    """
    analyses = list(mapped(partial(analysed, kind), range(studies)))
    parts = [smallest_differences([analysis.effects], analysis.models, analysis.families) for analysis in analyses]
    stated = {scope: float(np.mean([part[scope] for part in parts])) for scope in parts[0]}
    statements = list(mapped(partial(said, stated=stated), analyses))
    return stated, Said(*(float(np.mean(values)) for values in zip(*statements, strict=True)))


_NORMAL = Scenario("mean", 3, "peak", "normal", 0.5)
KINDS = [
    *(Kind(_NORMAL._replace(seeds=seeds)) for seeds in (2, 3, 5, 10)),
    Kind(_NORMAL, models=2),
    Kind(_NORMAL._replace(shared=0.5)),
    *(Kind(_NORMAL._replace(noise=noise)) for noise in ("skew", "rates")),
    *(Kind(_NORMAL._replace(seeds=seeds, failing=0.2)) for seeds in (3, 5)),
    Kind(_NORMAL, tested=0.5),
    *(Kind(_NORMAL._replace(rule="per_seed", seeds=seeds)) for seeds in (3, 5)),
]


def main(
    studies: Annotated[int, typer.Option(help="Studies of each kind.")] = 100,
    processes: Annotated[int | None, typer.Option(help="By default as many as there are cores.")] = None,
) -> None:
    """Measure all kinds of studies."""
    lines = [
        f"{studies} studies a row, of 4 tasks at 5 rates with one best rate. `stated` is the difference in points that is said to be found "
        "with 80 % power, on the mean over tasks and on a task. Wanted: claims of equal models at most .05, .75 to .85 found at the "
        "stated difference, .95 named at twice that, and at most .025 named wrongly.",
        "",
        "| rule | models | seeds | noise | failing | shared | noise of test sets | stated | equal: any claim | equal: best named | "
        "found on the mean | found on the task | twice: named | twice: wrongly named |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    with ProcessPoolExecutor(processes) as pool:
        for kind in KINDS:
            means, shares = measured(kind, studies, partial(pool.map, chunksize=4))
            scenario = kind.scenario
            row = [
                scenario.rule, str(kind.models), str(scenario.seeds), scenario.noise, f"{scenario.failing:g}", f"{scenario.shared:g}", f"{kind.tested:g}",
                f"{100 * means[ALL_TASKS]:.1f}, {100 * means[TASKS[0]]:.1f}",
                *(f"{value:.3f}" for value in shares),
            ]  # fmt: skip
            lines.append(f"| {' | '.join(row)} |")
            print(lines[-1], flush=True)
    write_section("Claims: what advice and comparisons find on simulated studies", lines)


if __name__ == "__main__":
    typer.run(main)
