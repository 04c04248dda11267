"""The differences that a planned grid can find, and the seeds that a difference takes on each task, before cells are run.

Both follow from each task's noise, which is stated, or estimated from earlier runs (`noise_of`): the deviation of one run's
score over seeds, the deviation that the finite test set adds to a difference of two models, and, in studies with several
pretraining runs of a model, the deviation between these runs. Without the last, all statements are about single pretraining runs. The models
of a planned study are assumed to be equal and to have this noise, with the degrees of freedom that its seeds and learning rates will give. A
difference counts as found if the first step of the correction for several tests finds it (`power.smallest_differences`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np

from mlmclm.analysis.analyse import Analysis
from mlmclm.analysis.comparison import holm_level
from mlmclm.analysis.contrasts import Effects, mean_difference, test_set_noise
from mlmclm.analysis.effects import FOLDS, Effect
from mlmclm.analysis.power import POWER, runs_or_obstacle, seeds_or_obstacle, smallest_difference, smallest_differences
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
        freedom: degrees of freedom of a model's variance for each seed beyond the first; None if noise is the same at all rates and for
            all models, so that each rate of each model gives one.
        alike: correlation of the seeds' noise with that on other tasks of the same trainings (`shared_trainings`), by task.
        runs, models: number of runs that the noise is estimated from, and of their models; 0 if it is stated.
    """

    seeds: float
    test_set: float = 0.0
    pretraining: float | None = None
    together: float = 1.0
    freedom: float | None = None
    alike: Mapping[str, float] = field(default_factory=dict)
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
    for task in sorted(analysis.families):
        noises = {run: noise for run in counted if (noise := _model_noise(analysis, (run, task))) is not None}
        if not noises:
            continue
        variances, freedom, runs = zip(*noises.values(), strict=True)
        effects = [effect for (run, its), effect in analysis.run_effects.items() if its == task and run in counted]
        pairs = (((1.0, one), (-1.0, other)) for one, other in combinations(effects, 2))
        moved = [parts for pair in pairs if (parts := test_set_noise(pair))]
        test_sets = [math.fsum(variance for variance, _ in parts) for parts in moved]
        by_task[task] = TaskNoise(
            seeds=math.sqrt(float(np.mean(variances))),
            test_set=math.sqrt(float(np.median(test_sets))) if test_sets else 0.0,
            pretraining=pretraining.get(task),
            together=together,
            freedom=float(np.mean([degrees or 0.0 for degrees in freedom])) if any(freedom) else None,
            alike={other: float(np.mean([effect.alike[other] for effect in effects])) for other in effects[0].alike},
            runs=sum(runs),
            models=len({analysis.model_of[run] for run in noises}),
        )
    return by_task


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


def _model_noise(analysis: Analysis, pair: tuple[str, str]) -> tuple[float, float | None, int] | None:
    """Return a seed's variance, its degrees of freedom for each seed beyond the first (`TaskNoise.freedom`), and the number of runs;
    None if the noise is not known."""
    if pair not in analysis.run_effects or math.isnan(analysis.run_effects[pair].seeds.error):
        return None
    effect, fit, present = analysis.run_effects[pair], analysis.fits[pair], analysis.runs[pair].present
    seeds = int(present.any(axis=0).sum())
    freedom = None if fit.pooled else effect.seeds.freedom / (seeds - 1)
    return effect.seeds.error**2 * seeds, freedom, int(present.sum())


def seeds_needed(
    noise: TaskNoise, difference: float, *, level: float, rates: int, models: int = 2, power: float = POWER
) -> int | None:
    """Return the seeds, at least 2, with which a test at this level finds a difference on one task with this power.

    Args:
        rates, models: numbers of learning rates and of models.

    Returns:
        The number of seeds; None if no number suffices because the test set is too small.
    """
    effects = planned_effects({"": noise}, 2, rates, [str(number) for number in range(models)])
    needed = seeds_or_obstacle(difference, mean_difference(effects, ("0", "1"), [""]), 2, level, power)
    return needed if isinstance(needed, int) else None


def planned_effects(
    noise: Mapping[str, TaskNoise], seeds: int, rates: int, models: Sequence[str]
) -> dict[tuple[str, str], Effect]:
    """Return the scores, all 0, of single pretraining runs of equal models in a planned study, by (model, task).

    Args:
        seeds, rates: numbers of seeds and learning rates.
    """
    effects = {}
    # Each model deviates in a different fold, so that the difference of any two has the variance of the test set.
    count = max(FOLDS, len(models))
    for task, task_noise in noise.items():
        freedom = (rates * len(models) if task_noise.freedom is None else task_noise.freedom) * (seeds - 1)
        score = estimate(0.0, task_noise.seeds / math.sqrt(seeds) if seeds > 1 else NAN, freedom)
        moved = task_noise.test_set * math.sqrt(count / (2 * (count - 1)))
        for index, model in enumerate(models):
            folds = moved * np.eye(1, count, index)[0] if moved else None
            pooled = task_noise.freedom is None
            effects[model, task] = Effect(score, score, np.ones(1), 0.0, folds, pooled, alike=task_noise.alike)
    return effects


def over_planned_runs(
    effects: Effects, noise: Mapping[str, TaskNoise], seeds: int, models: Sequence[str], runs: int
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
        run_noise = RunNoise(root[:, column], len(models) * (runs - 1.0), runs, (float(within[column]) / runs, freedom))
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
    single = planned_effects(noise, seeds, rates, models)
    effects = single if runs == 1 else over_planned_runs(single, noise, seeds, models, runs)
    level = holm_level("task", families, len(models), 0.95)
    needed: dict[str, int | None] = {}
    runs_needed: dict[str, int | None] = {}
    for task, task_noise in noise.items():
        if runs == 1:
            needed[task] = seeds_needed(task_noise, difference, level=level, rates=rates, models=len(models))
            continue
        contrast = mean_difference(effects, (models[0], models[1]), [task])
        counts = (
            seeds_or_obstacle(difference, contrast, seeds, level),
            runs_or_obstacle(difference, contrast, runs, level),
        )
        needed[task], runs_needed[task] = (count if isinstance(count, int) else None for count in counts)
    return PlannedPower(
        needed=needed,
        floors={task: smallest_difference(task_noise.test_set, FOLDS - 1, level) for task, task_noise in noise.items()},
        smallest=smallest_differences(effects, models, families),
        runs=runs,
        runs_needed=runs_needed,
    )
