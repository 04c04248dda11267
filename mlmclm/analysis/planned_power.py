"""The differences that a planned grid can find, and the seeds that a difference takes on each task, before cells are run.

Both follow from each task's noise, which is stated, or estimated from earlier runs (`noise_of`). The models of a planned study are equal. Their
noise is as stated, or that of the earlier models: each pair of these is one that may be planned, with its own standard error and degrees of
freedom, for another number of seeds. Where the earlier study found unequal noise, or lost runs that may have moved a choice, so may the planned one.
Without several pretraining runs of a model, all statements are about single runs. A difference counts as found if the first step of the correction for
several tests finds it, on average over the pairs (`power.smallest_differences`, which the report uses too).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, cycle

import numpy as np

from mlmclm.analysis.analyse import Analysis
from mlmclm.analysis.comparison import holm_level
from mlmclm.analysis.contrasts import Effects, test_set_noise
from mlmclm.analysis.effects import FOLDS, NO_EFFECT, Effect
from mlmclm.analysis.power import (
    differences,
    found_at_best,
    runs_or_obstacle,
    seeds_or_obstacle,
    smallest_differences,
)
from mlmclm.analysis.redrawn_failures import redrawn
from mlmclm.analysis.run_noise import RunNoise, noise_of_sum
from mlmclm.results.intervals import NAN, estimate


@dataclass(frozen=True)
class TaskNoise:
    """The noise of the scores of models on one task; scores are fractions of 1.

    Attributes:
        seeds: standard deviation of a model's score from one seed; that from n seeds is smaller by sqrt(n).
        test_set: standard deviation that the finite test set adds to the difference of two models; 0 if it is not known.
        pretraining: standard deviation that pretraining runs add to a model's score; None if it is not known.
        together: the correlation over tasks of what a pretraining run adds. It is 1 where it is not known, so that the precision of a
            mean over tasks is not overstated.
        alike: correlation of the seeds' noise with that on other tasks of the same trainings (`shared_trainings`), by task.
        drawn: the scores, 0, of the earlier pretraining runs, by number, with the noise of two seeds: of the earlier study, and of the same
            study with other lost runs (`redrawn_failures`). Where the noise is pooled, its degrees of freedom are divided by the number of
            models. It is empty if the noise is stated; then all models and rates have the same noise.
        runs, models: number of runs that the noise is estimated from, and of their models; 0 if it is stated.
    """

    seeds: float
    test_set: float = 0.0
    pretraining: float | None = None
    together: float = 1.0
    alike: Mapping[str, float] = field(default_factory=dict)
    drawn: Sequence[Mapping[str, Effect]] = ()
    runs: int = 0
    models: int = 0


def noise_of(analysis: Analysis, models: Collection[str] | None = None) -> dict[str, TaskNoise]:
    """Return the noise of each task for which a study's results show any, of some models (all by default).

    The variance of a seed is the mean over models of the variance of the whole procedure (`effects`), which includes the noise of the choice and
    of lost runs. It falls with the number of seeds, except where rates that are equally good on validation have different test scores.
    """
    by_task = {}
    counted = [run for run in analysis.models if models is None or run in models]
    pretraining, together = pretraining_noise(analysis.effects, sorted(analysis.families))
    studies = [analysis.run_effects, *redrawn(analysis)]
    for task in sorted(analysis.families):
        number = len({analysis.model_of[run] for run in counted if (run, task) in analysis.run_effects})
        drawn = [
            {
                str(place): own
                for place, run in enumerate(counted)
                if (own := _of_two_seeds(analysis, effects, run, task, number))
            }
            for effects in studies
        ]
        each = list(drawn[0].values())
        if not each:
            continue
        moved = [
            math.fsum(size for size, _ in parts)
            for first, second in combinations(each, 2)
            if (parts := test_set_noise([(1.0, first), (-1.0, second)]))
        ]
        by_task[task] = TaskNoise(
            seeds=math.sqrt(float(np.mean([2 * effect.seeds.error**2 for effect in each]))),
            test_set=math.sqrt(float(np.median(moved or [0.0]))),
            pretraining=pretraining.get(task),
            together=together,
            alike={other: float(np.mean([effect.alike[other] for effect in each])) for other in each[0].alike},
            drawn=drawn,
            runs=sum(int(analysis.runs[counted[int(place)], task].present.sum()) for place in drawn[0]),
            models=number,
        )
    return by_task


def _of_two_seeds(analysis: Analysis, effects: Effects, run: str, task: str, models: int) -> Effect | None:
    """Return an entry of `TaskNoise.drawn`; None if the noise is not known."""
    effect = effects.get((run, task), NO_EFFECT)
    if math.isnan(effect.seeds.error):
        return None
    seeds = int(analysis.runs[run, task].present.any(axis=0).sum())
    freedom = effect.seeds.freedom / (seeds - 1) / (models if effect.pooled else 1)
    return replace(effect, seeds=estimate(0.0, effect.seeds.error * math.sqrt(seeds / 2), freedom))


def pretraining_noise(effects: Effects, tasks: Sequence[str]) -> tuple[dict[str, float], float]:
    """Return the deviation that pretraining runs add to a model's score by task, and its correlation over tasks.

    The deviation does not include that of fine-tuning seeds; tasks on which no model has several runs are left out. The correlation
    is 1 if it is not known.

    Args:
        effects: the scores of models over their runs (`replicates`).
    """
    noises = {
        task: {model: effect.runs for (model, its), effect in effects.items() if its == task and effect.runs}
        for task in tasks
    }
    noises = {task: runs for task, runs in noises.items() if runs}
    if not noises:
        return {}, 1.0
    roots = np.stack([next(iter(runs.values())).root for runs in noises.values()], axis=1)
    covariance = roots.T @ roots
    seeds = [float(np.mean([noise.seeds * noise.number for noise in runs.values()])) for runs in noises.values()]
    deviations = np.sqrt(np.maximum(np.diag(covariance) - seeds, 0.0))
    pairs = [
        (one, other)
        for (one, first), (other, second) in combinations(enumerate(noises.values()), 2)
        if first.keys() & second.keys()
    ]
    size = math.fsum(deviations[one] * deviations[other] for one, other in pairs)
    together = math.fsum(covariance[pair] for pair in pairs) / size if size else 1.0
    return dict(zip(noises, map(float, deviations), strict=True)), min(1.0, max(0.0, together))


def planned_effects(
    noise: Mapping[str, TaskNoise], seeds: int, rates: int, models: int
) -> tuple[Sequence[Effects], list[str]]:
    """Return the scores, all 0, of single pretraining runs of equal models in planned studies, and the models' names.

    The names are numbers. There are as many as earlier runs, since each pair of these is one that may be planned. There are as many studies
    as were drawn (`TaskNoise.drawn`).

    Args:
        seeds, rates, models: numbers of seeds, learning rates and planned models.
    """
    drawn = [known for task_noise in noise.values() for known in task_noise.drawn]
    names = sorted({"0", "1"}.union(*drawn), key=int)
    most = max([1, *(len(task_noise.drawn) for task_noise in noise.values())])
    studies: list[dict[tuple[str, str], Effect]] = [{} for _ in range(most)]
    # Each model deviates in a different fold, so that the difference of any two has the variance of the test set.
    count = max(FOLDS, len(names))
    for task, task_noise in noise.items():
        moved = task_noise.test_set * math.sqrt(count / (2 * (count - 1)))
        of_two = estimate(0.0, task_noise.seeds / math.sqrt(2), float(rates))
        stated = {
            name: Effect(of_two, of_two, np.ones(1), 0.0, moved * fold if moved else None, True, alike=task_noise.alike)
            for name, fold in zip(names, np.eye(len(names), count), strict=True)
        }
        for study, known in zip(studies, cycle(task_noise.drawn or [stated]), strict=False):
            for name, effect in (dict.fromkeys(names, *known.values()) if len(known) == 1 else known).items():
                freedom = effect.seeds.freedom * (seeds - 1) * (models if effect.pooled else 1)
                score = estimate(0.0, effect.seeds.error * math.sqrt(2 / seeds) if seeds > 1 else NAN, freedom)
                study[name, task] = replace(effect, seeds=score)
    return studies, names


def over_planned_runs(
    effects: Effects, noise: Mapping[str, TaskNoise], seeds: int, models: int, runs: int
) -> dict[tuple[str, str], Effect]:
    """Return the scores of models over several pretraining runs each, given those of single runs.

    Args:
        noise: the noise of all tasks; that of pretraining must be known.
    """
    tasks = list(noise)
    added = np.asarray([task_noise.pretraining for task_noise in noise.values()], dtype=np.float64)
    together = np.asarray([task_noise.together for task_noise in noise.values()])
    correlation = np.sqrt(np.outer(together, together))
    np.fill_diagonal(correlation, 1.0)
    within = np.asarray([task_noise.seeds**2 / seeds for task_noise in noise.values()])
    alike = [[1.0 if one == other else noise[one].alike.get(other, 0.0) for other in tasks] for one in tasks]
    seeds_added = np.sqrt(np.outer(within, within)) * alike
    values, vectors = np.linalg.eigh(np.outer(added, added) * correlation + seeds_added)
    root = (vectors * np.sqrt(np.maximum(values, 0.0))).T
    over_runs = {}
    for (model, task), single in effects.items():
        column = tasks.index(task)
        freedom = single.seeds.freedom if seeds > 1 else 1.0
        run_noise = RunNoise(root[:, column], models * (runs - 1.0), runs, (float(within[column]) / runs, freedom))
        sum_noise = noise_of_sum([(1.0, run_noise)])
        score = estimate(0.0, math.sqrt(sum_noise.variance), sum_noise.freedom)
        over_runs[model, task] = replace(single, seeds=score, pooled=sum_noise.pooled, runs=run_noise)
    return over_runs


@dataclass(frozen=True)
class PlannedPower:
    """The differences that a planned study will be able to find.

    Attributes:
        needed: the number of seeds that a difference takes, by task with known noise; None if the test set is too small, the
            pretraining runs are too few, or more than `power.MOST` seeds are needed.
        floors: the smallest difference that any number of seeds and runs finds, by task with known noise.
        smallest: the smallest difference that the planned study finds, by task and for the mean over tasks.
        runs: the pretraining runs of each model.
        runs_needed: how many pretraining runs the difference takes, by task; None as for `needed`. Empty for single runs.
    """

    needed: Mapping[str, int | None]
    floors: Mapping[str, float]
    smallest: Mapping[str, float]
    runs: int = 1
    runs_needed: Mapping[str, int | None] = field(default_factory=dict)


def planned_power(
    noise: Mapping[str, TaskNoise],
    families: dict[str, str],
    models: Sequence[str],
    seeds: int,
    rates: int,
    difference: float,
    *,
    runs: int = 1,
) -> PlannedPower:
    """Return the differences that a planned study of at least two models will be able to find with a power of `POWER`.

    Args:
        noise: the noise of the tasks for which it is known.
        families: the family of each task, by task name.
        seeds, rates: numbers of seeds and learning rates.
        difference: the difference to find on each task, as a fraction of 1.
        runs: the pretraining runs of each model; with several, the noise of pretraining is known on all tasks.
    """
    studies, names = planned_effects(noise, seeds, rates, len(models))
    of_two, _ = planned_effects(noise, 2, rates, len(models))
    if runs > 1:
        studies = [over_planned_runs(studies[0], noise, seeds, len(models), runs)]
    level = holm_level("task", families, len(models), 0.95)
    needed: dict[str, int | None] = {}
    runs_needed: dict[str, int | None] = {}
    floors = {}
    for task in noise:
        pairs = differences(of_two, names, [task])
        floors[task] = found_at_best(pairs, level)
        counts = [seeds_or_obstacle(difference, pairs, 2, level)]
        if runs > 1:
            pairs = differences(studies, names, [task])
            counts = [
                seeds_or_obstacle(difference, pairs, seeds, level),
                runs_or_obstacle(difference, pairs, runs, level),
            ]
        for by_task, count in zip((needed, runs_needed), counts, strict=False):
            by_task[task] = count if isinstance(count, int) else None
    return PlannedPower(
        needed=needed,
        floors=floors,
        smallest=smallest_differences(studies, names, families, compared=len(models)),
        runs=runs,
        runs_needed=runs_needed,
    )
