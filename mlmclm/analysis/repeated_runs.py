"""Pretraining runs in repetitions of a study: what they add to the models' scores, and what their variances are estimated as."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mlmclm.analysis.run_noise import RunNoise, larger
from mlmclm.results.measures import Array


class RepeatedNoise(NamedTuple):
    """Noise of a sum of a model's scores (`run_noise.SumNoise`), as each repetition estimates it, [repetitions] each."""

    variance: Array
    freedom: Array
    pooled: Array


@dataclass(frozen=True)
class RepeatedRuns:
    """Repetitions of a study's pretraining runs with the covariance between tasks that its own show.

    Attributes:
        covariance: of a run's scores on tasks, [T, T]; 0 for tasks on which no model has several runs.
        drawn: the runs of each repetition around the means of their models, [repetitions, degrees of freedom, T].
    """

    covariance: Array
    drawn: Array

    @property
    def freedom(self) -> int:
        """The degrees of freedom of a variance between runs."""
        return self.drawn.shape[1]

    def errors(self, runs: Mapping[int, RunNoise], generator: np.random.Generator) -> Array:
        """Draw what a model's mean over its runs has beside the noise of fine-tuning seeds, [repetitions, T].

        Args:
            runs: those of the model, by the number of the task.
        """
        errors = np.zeros((len(self.drawn), len(self.covariance)))
        if not runs:
            return errors
        tasks = list(runs)
        own = self.covariance[np.ix_(tasks, tasks)] / min(each.number for each in runs.values())
        # A single run may be noisier than those that the covariance is of (`run_noise.larger`).
        seeds = [min(each.seeds, each.typical) if each.number == 1 else each.seeds for each in runs.values()]
        kept = np.maximum(np.diag(own) - seeds, 0.0)
        # Without the noise of seeds, an estimated covariance can have negative eigenvalues.
        values, vectors = np.linalg.eigh(own - np.diag(np.diag(own) - kept))
        root = vectors * np.sqrt(np.maximum(values, 0.0))
        size = np.sqrt((root**2).sum(axis=1))
        root *= np.divide(np.sqrt(kept), size, out=np.zeros(len(size)), where=size > 0)[:, None]
        errors[:, tasks] = generator.standard_normal((len(errors), len(tasks))) @ root.T
        return errors

    def noise(self, runs: Mapping[int, RunNoise], within: Array, freedom: Array) -> RepeatedNoise:
        """Return what repetitions take for the noise of the sum of a model's scores over tasks, as `noise_of_sum` does.

        Args:
            runs: those of the model, by the number of the task.
            within: the variances that fine-tuning seeds are known to add to its scores, [repetitions, T].
            freedom: their degrees of freedom, [T].
        """
        tasks = list(runs)
        sums = self.drawn[..., tasks].sum(axis=-1)
        between = (sums**2).mean(axis=1) / min(each.number for each in runs.values())
        seeds = within[:, tasks].sum(axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            own = seeds**2 / (within[:, tasks] ** 2 / freedom[tasks]).sum(axis=1)
        return RepeatedNoise(*larger(between, seeds, [(1.0, each) for each in runs.values()], self.freedom, own))


def repeat_runs(
    runs: Mapping[int, RunNoise], tasks: int, repetitions: int, generator: np.random.Generator
) -> RepeatedRuns:
    """Draw the pretraining runs of repetitions of a study.

    Args:
        runs: those of any model, by the number of the task.
        tasks: number of tasks.
    """
    if not runs:
        return RepeatedRuns(np.zeros((tasks, tasks)), np.zeros((repetitions, 0, tasks)))
    size, freedom = len(next(iter(runs.values())).root), int(min(own.freedom for own in runs.values()))
    root = np.zeros((size, tasks))
    for task, own in runs.items():
        root[:, task] = own.root
    return RepeatedRuns(root.T @ root, generator.standard_normal((repetitions, freedom, size)) @ root)
