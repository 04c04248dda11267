"""Scores of models that were pretrained several times, for statements about a way of pretraining instead of one run of it.

Replicates of a model differ in their seeds of pretraining alone (`Recipe.seeds_of`), so the variance of their scores includes the
noise of pretraining and that of fine-tuning. It is pooled over the models of a task, each around its own mean: with
three replicates of three models it has six degrees of freedom. A model's score is the mean over its k replicates, with a k-th of
this variance. A model with one run borrows the variance of the others, which assumes that its runs would vary as theirs do. Over
several tasks, the variance is that of the runs' means over these tasks (`run_noise`).

Where no model of a task has replicates, no interval covers the noise of pretraining.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from mlmclm.analysis.contrasts import Effects
from mlmclm.analysis.effects import NO_EFFECT, Effect
from mlmclm.analysis.run_noise import RunNoise, noise_of_sum, root_of
from mlmclm.results.intervals import estimate
from mlmclm.results.measures import Array


def runs_by_model(models: Sequence[str], replicate_of: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the pretraining runs of each model, sorted by name, the model itself first.

    Args:
        replicate_of: the model that a further run is a replicate of, by the run's name.
    """
    groups: dict[str, list[str]] = {}
    for model in sorted(models, key=lambda name: (name in replicate_of, name)):
        groups.setdefault(replicate_of.get(model, model), []).append(model)
    return dict(sorted(groups.items()))


def over_replicates(effects: Effects, groups: Mapping[str, Sequence[str]]) -> dict[tuple[str, str], Effect]:
    """Return the score of each model over its pretraining runs, by (model, task).

    Args:
        effects: the scores of the runs.
        groups: the runs of each model (`runs_by_model`).
    """
    over_runs: dict[tuple[str, str], Effect] = {}
    codes = np.repeat(np.arange(len(groups)), [len(runs) for runs in groups.values()])
    for task in sorted({task for _, task in effects}):
        by_model = {
            model: [effect for run in runs if (effect := effects.get((run, task))) is not None]
            for model, runs in groups.items()
        }
        scored = {model: [run for run in runs if math.isfinite(run.seeds.value)] for model, runs in by_model.items()}
        values = [effects.get((run, task), NO_EFFECT).seeds.value for runs in groups.values() for run in runs]
        root, freedom = root_of(np.asarray(values), codes)
        variances = [
            [error**2 for run in runs if not math.isnan(error := run.seeds.error)]
            for runs in scored.values()
            if len(runs) > 1
        ]
        typical = float(np.mean([np.mean(of_model) for of_model in variances if of_model])) if any(variances) else 0.0
        for model, runs in by_model.items():
            if freedom and scored[model]:
                over_runs[model, task] = _mean(scored[model], root, freedom, typical)
            elif runs:
                over_runs[model, task] = (scored[model] or runs)[0]
    return over_runs


def _mean(runs: Sequence[Effect], root: Array, freedom: float, typical: float) -> Effect:
    """Return the mean of a model's runs, given how the runs of all models vary on the task (`RunNoise`)."""
    number = len(runs)
    within = math.fsum(run.seeds.error**2 for run in runs) / number**2
    run_noise = RunNoise(root, freedom, number, (within, min(run.seeds.freedom for run in runs)), typical)
    noise = noise_of_sum([(1.0, run_noise)])
    folds = [run.folds for run in runs if run.folds is not None]
    same_examples = len(folds) == number and len({len(scores) for scores in folds}) == 1
    seeds, fresh = (
        estimate(float(np.mean(values)), math.sqrt(noise.variance), noise.freedom)
        for values in ([run.seeds.value for run in runs], [run.fresh.value for run in runs])
    )
    return replace(
        runs[0],
        seeds=seeds,
        fresh=fresh,
        regret=float(np.mean([run.regret for run in runs])),
        folds=np.mean(folds, axis=0) if same_examples else None,
        pooled=noise.pooled,
        runs=run_noise,
    )
