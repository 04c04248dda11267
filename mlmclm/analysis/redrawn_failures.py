"""A study with other lost runs: which ones fail or diverge is drawn anew, and the study analysed again.

A study loses few runs, and it matters which: a rate that loses most of its runs is not chosen, and a failure that is not recognised as one makes
the noise seem unequal. So the errors that one study happened to have are too small in most cases and too large in some. Runs that learned
keep their scores, since noise that is drawn around a noisy fit would be larger than that of the study.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from mlmclm.analysis.contrasts import Effects
from mlmclm.analysis.effects import effect
from mlmclm.analysis.failed_runs import with_failures, with_unseen
from mlmclm.analysis.model_runs import Runs
from mlmclm.analysis.seed_noise import Fit, fit_tasks
from mlmclm.results.chance import chance_of
from mlmclm.results.measures import Array

if TYPE_CHECKING:
    from mlmclm.analysis.analyse import Analysis

DRAWS, MOST = 12, 1_500
"""Number of draws, and most (model, task) of all draws together, which take three seconds."""
STUDIES = 400
"""Simulated studies of each (model, task); the 4,000 of an analysis take too long, and differ by 2 % from these."""


def redrawn(analysis: Analysis) -> Iterator[Effects]:
    """Yield the scores of single pretraining runs by (model, task) with other lost runs, the same on every call; nothing if none was lost."""
    tasks: dict[str, dict[str, Runs]] = {}
    for (model, task), runs in sorted(analysis.runs.items()):
        tasks.setdefault(task, {})[model] = runs
    if all((runs.learned == runs.ran).all() for runs in analysis.runs.values()):
        return
    generator, number = np.random.default_rng(0), max(1, min(DRAWS, MOST // len(analysis.runs)))
    for _ in range(number):
        drawn = []
        for task, models in tasks.items():
            lost = _lost(models)
            again = {name: _again(runs, analysis.fits[name, task], lost, generator) for name, runs in models.items()}
            drawn.append(with_failures(again, chance_of(analysis.chances, [task])))
        drawn = with_unseen(drawn)
        effects = {}
        for task, models, fits in zip(tasks, drawn, fit_tasks(drawn), strict=True):
            for name, runs in models.items():
                own = analysis.run_effects[name, task]
                scored = effect(runs, fits[name], analysis.rule, folds=own.folds, studies=STUDIES)
                effects[name, task] = replace(scored, alike=own.alike)
        yield effects


def _lost(models: Mapping[str, Runs]) -> dict[float, tuple[float, Array]]:
    """Return the share of a task's runs that are lost at each rate, and their validation and test scores, [2, runs]."""
    scores: dict[float, list[Array]] = {}
    ran: dict[float, int] = {}
    for runs in models.values():
        gone = runs.ran & ~runs.learned
        for row, rate in enumerate(runs.rates):
            scores.setdefault(rate, []).append(np.stack((runs.validation[row], runs.test[row]))[:, gone[row]])
            ran[rate] = ran.get(rate, 0) + int(runs.ran[row].sum())
    joined = {rate: np.concatenate(parts, axis=1) for rate, parts in scores.items()}
    return {rate: (values.shape[1] / max(1, ran[rate]), values) for rate, values in joined.items()}


def _again(runs: Runs, fit: Fit, lost: Mapping[float, tuple[float, Array]], generator: np.random.Generator) -> Runs:
    """Return a model's runs on a task with others of them lost; where it learned nothing at a rate, it does not now."""
    means = fit.likely if fit.scored.sum() > 1 else fit.means
    fresh = np.concatenate(fit.simulate(means, 1, generator))
    scores: Array = np.where(runs.learned, np.stack((runs.validation, runs.test)), fresh)
    gone: Array = np.zeros(runs.ran.shape, bool)
    for row, rate in enumerate(runs.rates):
        share, values = lost[rate]
        if values.shape[1]:
            gone[row] = generator.random(gone.shape[1]) < (share if runs.learned[row].any() else 1.0)
            picked = values[:, generator.integers(values.shape[1], size=gone.shape[1])]
            scores[:, row] = np.where(gone[row], picked, scores[:, row])
    scores[:, ~runs.ran] = math.nan
    diverged = gone & runs.ran & np.isnan(scores[1])
    again = replace(runs, validation=scores[0], test=scores[1], failed=np.zeros(gone.shape, bool))
    return replace(again, diverged=diverged if diverged.any() else None, hopeless=None, unseen=None)
