"""The score of each model on each task: what its rule for the learning rate delivers, and what a fresh run would score.

Two quantities are meant by "the score at the best learning rate", and both are estimated:

- **What the procedure delivers**: the expected test score of the run, or mean of runs, that the rule picks. It is the plain mean of the
  picked runs' test scores, and nothing is taken off: validation and test examples differ, so where the two scores of a run go together
  over seeds, a run that is picked for its validation score is a better run. Only under `on_test` is it flattered by the test examples.
- **A fresh run** at the chosen rate, for those who will train again. It is not picked for anything, so the luck of the choice is taken off.

Both are about runs that learn: how many fail is another quantity, with a comparison of its own (`failed_runs`).

Their noise is that of the seeds and of the choice. Both depend on the true curve over learning rates, which is not known, so truths are
drawn that are plausible given the runs (`simulated_studies.plausible`), and studies of each, with the fitted noise. The variance of the
first is the mean over truths of that between studies of one truth. The luck of the choice is the mean by which the picked runs are
better than their rates' true means; its variance over truths is added to the second. The degrees of freedom are those of the rates'
variances, weighted by how often each rate is chosen (Satterthwaite).

The noise of the finite test set is added where the predictions are known (`Effect.score`, `Effect.minus`). The part of it
that differs between seeds is in both, so these intervals are a little too wide rather than too narrow.
`benchmarks/calibration.py` measures what the resulting intervals cover.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mlmclm.analysis.model_runs import Runs
from mlmclm.analysis.run_noise import RunNoise
from mlmclm.analysis.seed_noise import Fit, freedom_of
from mlmclm.analysis.simulated_choices import choose
from mlmclm.analysis.simulated_studies import Truths, plausible, simulate
from mlmclm.results.intervals import NAN, Estimate, estimate, satterthwaite, unknown
from mlmclm.results.measures import Array, Measure
from mlmclm.results.metrics import Rule

FOLDS = 100
TRUTHS, STUDIES = 100, 8
"""Plausible truths of each (model, task), and simulated studies of each."""


@dataclass(frozen=True)
class Effect:
    """The score of one model on one task at its chosen learning rate.

    Attributes:
        seeds: the score that the procedure delivers with the noise of seeds and of the choice; its value is NaN without scores, and its
            error if the noise of seeds is not known.
        fresh: the same of a fresh run at the chosen rate.
        folds: the score without one fold of the test examples after the other, [G] (`fold_scores`); None if not known.
        chosen: the probability that each rate would be chosen by other seeds, [R].
        regret: how much the best rate is expected to score above the chosen one.
        pooled: whether the error is based on the variance of all models on the task, over their seeds (`pooled_variances`) or over their
            pretraining runs (`replicates`), so that the errors of two models are estimated as one.
        runs: the noise of pretraining runs that the error is based on; None if no model of the task has several.
        alike: correlation of the seeds' noise with that on other tasks of the same trainings (`shared_trainings`), by task.
    """

    seeds: Estimate
    fresh: Estimate
    chosen: Array
    regret: float
    folds: Array | None = None
    pooled: bool = False
    runs: RunNoise | None = None
    alike: Mapping[str, float] = field(default_factory=dict)

    def score(self, confidence: float = 0.95, *, fresh: bool = False) -> Estimate:
        """Return the score, or that of a fresh run, with the noise of seeds, of the choice, and, where it is known, of the test set."""
        seeds, own = self.fresh if fresh else self.seeds, [] if self.folds is None else [fold_variance(self.folds)]
        return _with_test_set(seeds.value, [_share(seeds)], own, confidence)

    def seeds_minus(self, other: Effect) -> list[tuple[float, float]]:
        """Return the variances that seeds and pretraining add to the difference to another model, with their degrees of freedom.

        Two pooled errors are based on one estimate, so its degrees of freedom count once.
        """
        shares = [_share(self.seeds), _share(other.seeds)]
        if self.pooled and other.pooled:
            return [(shares[0][0] + shares[1][0], shares[0][1])]
        return shares

    def test_set_minus(self, other: Effect) -> list[tuple[float, float]]:
        """Return the variances that the test sets add to the difference to another model, with their degrees of freedom.

        That is one on the same examples, one for each model on different numbers of them, and none if it is not known.
        """
        if self.folds is None or other.folds is None:
            return []
        if len(self.folds) != len(other.folds):
            return [fold_variance(self.folds), fold_variance(other.folds)]
        return [fold_variance(self.folds - other.folds)]

    def minus(self, other: Effect, confidence: float = 0.95) -> Estimate:
        """Return the difference to another model on the same test examples.

        Both are tested on the same examples, so what examples do to both alike is not noise of the difference.
        """
        shares, test_set = self.seeds_minus(other), self.test_set_minus(other)
        return _with_test_set(self.seeds.value - other.seeds.value, shares, test_set, confidence)


def fold_variance(folds: Array) -> tuple[float, float]:
    """Return the jackknife's variance, from scores without one fold each, and its degrees of freedom."""
    return float((len(folds) - 1) * folds.var()), len(folds) - 1


def _share(part: Estimate) -> tuple[float, float]:
    """Return an estimate's variance and its degrees of freedom."""
    return part.error**2, part.freedom


def _with_test_set(
    value: float, shares: Sequence[tuple[float, float]], test_set: Sequence[tuple[float, float]], confidence: float
) -> Estimate:
    """Return an estimate whose variance is the sum of some and of the test set's."""
    if any(math.isnan(variance) for variance, _ in shares):
        return unknown(value, single=any(freedom == 0 for _, freedom in shares))
    return satterthwaite(value, [*shares, *test_set], confidence=confidence)


def fold_scores(score: Measure, rows: int, groups: Array | None = None, folds: int = FOLDS) -> Array:
    """Return a score without one fold of its examples after the other, for the delete-a-group jackknife (Kott 2001).

    Folds depend on the examples alone, so two models that were tested on the same ones have the same folds.

    Args:
        score: of the test examples, as a function of their weights [R, rows].
        rows: the number of examples, at least 2.
        groups: the number of each example's group, from 0, [rows]: examples that belong together are in one fold. There are at
            least two groups; None if each example stands by itself.
    """
    units = np.arange(rows) if groups is None else groups
    number = int(units.max()) + 1
    count = min(folds, number)
    own = (np.random.default_rng(0).permutation(number) % count)[units]
    return np.asarray(score((own[None] != np.arange(count)[:, None]).astype(np.float64)))


NO_EFFECT = Effect(estimate(NAN, NAN, NAN), estimate(NAN, NAN, NAN), np.zeros(0), NAN)
"""The effect of a model without scores."""


def effect(
    runs: Runs, fit: Fit, rule: Rule, *, folds: Array | None = None, truths: int = TRUTHS, seed: int = 0
) -> Effect:
    """Return the score at the chosen learning rate; the same runs always give the same numbers.

    Args:
        fit: the noise of these runs.
        folds: see `Effect.folds`.
        truths: the number of plausible truths.
    """
    if not runs.present.any():
        return NO_EFFECT
    picked, counts = choose(runs.validation, runs.test, runs.present, rule, runs.lost, runs.settings)
    seeds = np.flatnonzero(counts)
    learned = seeds[runs.learned[picked[seeds], seeds]]
    learned = learned if len(learned) else seeds
    score = float(runs.test[picked[learned], learned].mean())
    if not fit.known:
        chosen = np.bincount(picked[seeds], minlength=len(runs.rates)) / len(seeds)
        none = unknown(score, single=not (runs.present.sum(axis=1) > 1).any())
        return Effect(none, none, chosen, NAN, folds)
    if len(runs.rates) == 1:  # there is no choice
        own = estimate(score, float(fit.deviations[1][0]) / math.sqrt(len(learned)), fit.freedom)
        return Effect(own, own, np.ones(1), 0.0, folds, fit.pooled)
    if runs.hopeless is not None and not runs.hopeless[picked[seeds]].any():  # such rates say nothing about the others
        kept = ~runs.hopeless
        own_runs = runs.at([rate for rate, keep in zip(runs.rates, kept, strict=True) if keep])
        found = effect(replace(own_runs, hopeless=None), fit.at(kept), rule, folds=folds, truths=truths, seed=seed)
        chosen = np.zeros(len(kept))
        chosen[kept] = found.chosen
        return replace(found, chosen=chosen)
    generator = np.random.default_rng(seed)
    outcome = simulated(fit, rule, plausible(fit, truths, generator), STUDIES, generator)
    freedom = freedom_of(fit, outcome.chosen)
    return Effect(
        seeds=estimate(score, math.sqrt(outcome.variance), freedom),
        fresh=estimate(score - outcome.luck, math.sqrt(outcome.variance + outcome.doubt), freedom),
        chosen=outcome.chosen,
        regret=outcome.regret,
        folds=folds,
        pooled=fit.pooled,
    )


@dataclass(frozen=True)
class Outcome:
    """The choice and the score in simulated studies, several of each truth.

    Attributes:
        scores: the mean test score of the picked runs that learn, [T, studies]; NaN where none of them does.
        targets: the true mean at their rates, [T, studies].
        chosen, regret: see `Effect`.
    """

    scores: Array
    targets: Array
    chosen: Array
    regret: float

    @property
    def luck(self) -> float:
        """The mean by which picked runs are better than fresh ones."""
        return float(np.nanmean(self.scores - self.targets))

    @property
    def variance(self) -> float:
        """The variance between the scores of studies of one truth."""
        return _mean_variance(self.scores)

    @property
    def doubt(self) -> float:
        """The variance of the luck over truths."""
        errors = self.scores - self.targets
        if len(errors) < 2:
            return 0.0
        own = np.nanmean(errors, axis=1)
        return max(0.0, float(np.nanvar(own, ddof=1)) - _mean_variance(errors) / errors.shape[1])


def _mean_variance(values: Array) -> float:
    """Return the mean of the rows' variances."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # rows in which no run learns
        return float(np.nanmean(np.nanvar(values, axis=1, ddof=1)))


def simulated(fit: Fit, rule: Rule, truths: Truths, studies: int, generator: np.random.Generator) -> Outcome:
    """Simulate the choice of the rate and the score, of one model on one task: so many studies for each of the possible truths."""
    validation, test, present, lost, failed = simulate(fit, truths, studies, generator)
    picked, counts = choose(validation, test, present, rule, lost, fit.settings)
    counts = np.broadcast_to(counts, picked.shape)
    expected = truths.expected(fit)

    def at_picked(values: Array) -> Array:
        return np.asarray(np.take_along_axis(values, picked[..., None, :], axis=-2)[..., 0, :])

    learned = counts if failed is None else counts & ~at_picked(failed)
    number = np.where(learned.any(axis=-1), learned.sum(axis=-1), NAN)
    own, whole = (
        np.take_along_axis(np.broadcast_to(each[:, None], test.shape[:-1]), picked, axis=-1)
        for each in (truths.means[1], expected)
    )
    seeds = counts.sum(axis=-1)
    chosen = np.bincount(picked.ravel(), weights=(counts / seeds[..., None]).ravel(), minlength=len(fit.present))
    best = expected[:, fit.present.any(axis=1)].max(axis=1, keepdims=True)
    return Outcome(
        np.where(learned, at_picked(test), 0.0).sum(axis=-1) / number,
        np.where(learned, own, 0.0).sum(axis=-1) / number,
        chosen / seeds.size,
        max(float((best - np.where(counts, whole, 0.0).sum(axis=-1) / seeds).mean()), 0.0),
    )
