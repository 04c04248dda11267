"""The score of each model on each task: of the runs that the rule for the learning rate picks, and of a fresh run.

Two quantities are meant by "the score at the best learning rate", and both are estimated:

- **What the procedure delivers**: the expected test score of the run, or mean of runs, that the rule picks. It is the plain mean of the
  picked runs' test scores, and nothing is subtracted for the choice. Validation and test examples differ, so where seeds' validation and test
  scores are correlated, a run picked for its validation score is truly better. Only under `on_test` do the test examples bias it upwards.
- **A fresh run** at the chosen rate, for those who will train again. It is not picked for its score, so the bias of picked runs is subtracted.

Both are about runs that learn. Lost runs, which failed or diverged, are left out before the choice; their number is compared
separately (`failed_runs`). But if most or all runs at a rate are lost by chance, another rate is chosen. So the error is at least
the change of the score that these losses may have caused (`_moved`).

The error of both covers the seeds and the choice: it is the deviation of the scores in simulated studies with the fitted noise, around a
likely curve over learning rates (`Fit.likely`). The bias is the mean by which the picked runs exceed their rates' means in these
studies. The degrees of freedom are those of the variances at the chosen rates (Satterthwaite).

The noise of the finite test set is added where the predictions are known (`Effect.score`, `contrasts.weighted_sum`). The part of it
that differs between seeds is counted twice, so these intervals are a little too wide rather than too narrow.
`benchmarks/calibration.py` measures what the resulting intervals cover.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from mlmclm.analysis.model_runs import Runs
from mlmclm.analysis.run_noise import RunNoise
from mlmclm.analysis.seed_noise import Fit, freedom_of
from mlmclm.analysis.simulated_choices import choose
from mlmclm.results.intervals import NAN, Estimate, estimate, satterthwaite, without_error
from mlmclm.results.measures import Array, Measure
from mlmclm.results.metrics import Rule

FOLDS = 100
STUDIES = 4_000
"""Number of simulated studies of each (model, task). All share the random draws; with 800, all errors at five seeds happened to be 6 % too large."""


@dataclass(frozen=True)
class Effect:
    """The score of one model on one task at its chosen learning rate.

    Attributes:
        seeds: the score that the procedure delivers, with the noise of seeds and of the choice. The value is NaN without scores; the
            error is NaN if the noise of seeds is not known.
        fresh: the same for a fresh run at the chosen rate.
        folds: the scores that each leave out one fold of the test examples, [G] (`fold_scores`); None if not known.
        chosen: the probability that each rate would be chosen by other seeds, [R].
        regret: how much the best rate is expected to score above the chosen one.
        pooled: whether the error is based on a variance that is pooled over all models on the task, over their seeds (`pooled_variances`)
            or over their pretraining runs (`replicates`), so that two models' errors are one estimate.
        runs: the noise of pretraining runs that the error is based on; None if no model of the task has several.
        alike: correlation of the seeds' noise with that on other tasks which may have the same trainings (`shared_trainings`), by task.
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
        score = self.fresh if fresh else self.seeds
        if math.isnan(score.error):
            return without_error(score.value, single=score.freedom == 0)
        test_set = [] if self.folds is None else [fold_variance(self.folds)]
        return satterthwaite(score.value, [(score.error**2, score.freedom), *test_set], confidence=confidence)


def fold_variance(folds: Array) -> tuple[float, float]:
    """Return the jackknife's variance and its degrees of freedom, given the scores that each leave out one fold."""
    return float((len(folds) - 1) * folds.var()), len(folds) - 1


def fold_scores(score: Measure, rows: int, groups: Array | None = None, folds: int = FOLDS) -> Array:
    """Return the scores that each leave out one fold of the examples, for the delete-a-group jackknife (Kott 2001).

    Folds depend on the examples alone, so two models that were tested on the same ones have the same folds.

    Args:
        score: the score of the test examples, as a function of their weights [R, rows].
        rows: the number of examples, at least 2.
        groups: the number of each example's group, from 0, [rows]: examples that belong together are in one fold. There are at
            least two groups; None if all examples are independent.
    """
    units = np.arange(rows) if groups is None else groups
    number = int(units.max()) + 1
    count = min(folds, number)
    fold_of = (np.random.default_rng(0).permutation(number) % count)[units]
    return np.asarray(score((fold_of[None] != np.arange(count)[:, None]).astype(np.float64)))


NO_EFFECT = Effect(estimate(NAN, NAN, NAN), estimate(NAN, NAN, NAN), np.zeros(0), NAN)
"""The effect of a model without scores."""


def effect(runs: Runs, fit: Fit, rule: Rule, *, folds: Array | None = None, studies: int = STUDIES) -> Effect:
    """Return the score at the chosen learning rate; the same runs always give the same numbers.

    Args:
        fit: the noise of these runs.
        folds: see `Effect.folds`.
        studies: the number of simulated studies.
    """
    if not runs.present.any():
        return NO_EFFECT
    fit = replace(fit, present=runs.counting(rule))
    picked, seeds, score = _picked(runs, fit.present, rule)
    taken = np.bincount(picked, minlength=len(runs.rates)) / len(seeds)
    if not fit.known:
        unknown_error = without_error(score, single=not (runs.present.sum(axis=1) > 1).any())
        return Effect(unknown_error, unknown_error, taken, NAN, folds)
    moved = _moved(runs, rule, score)
    if fit.scored.sum() == 1:  # there is no choice
        error = max(float(fit.deviations[1] @ taken) / math.sqrt(len(seeds)), moved)
        delivered = estimate(score, error, freedom_of(fit, taken))
        return Effect(delivered, delivered, taken, 0.0, folds, fit.pooled)
    means = fit.likely
    validation, test = fit.simulate(means, studies, np.random.default_rng(0))
    picks, counts = choose(validation, test, fit.present, rule, runs.settings)
    at = np.take_along_axis(test, picks[:, None], axis=1)[:, 0]
    scores, targets = (np.where(counts, draw, 0.0).sum(axis=1) / counts.sum(axis=-1) for draw in (at, means[1][picks]))
    weights = np.broadcast_to(counts / counts.sum(axis=-1, keepdims=True), picks.shape)
    chosen = np.bincount(picks.ravel(), weights=weights.ravel(), minlength=len(taken)) / studies
    # Rates may be unequally noisy, so the noise at the rates that simulations chose is scaled to that of the rates really chosen.
    between, noise = targets.var(ddof=1), np.nan_to_num(fit.deviations[1] ** 2)
    picked_noise = max(0.0, scores.var(ddof=1) - between) * (noise @ taken) / (noise @ chosen)
    # The bias that is subtracted is the better known, the less the rates differ (in simulations about as here), unless test scores choose.
    fresh_noise = float(noise @ taken) / len(seeds)
    if rule != "on_test":
        doubt = between if rule == "per_seed" else 2 * between
        fresh_noise = max(picked_noise, min(fresh_noise, picked_noise + doubt))
    freedom = freedom_of(fit, taken)
    error, fresh_error = (max(math.sqrt(between + noise), moved) for noise in (picked_noise, fresh_noise))
    return Effect(
        seeds=estimate(score, error, freedom),
        fresh=estimate(score - float((scores - targets).mean()), fresh_error, freedom),
        chosen=chosen,
        regret=max(float(means[1][fit.scored].max() - targets.mean()), 0.0),
        folds=folds,
        pooled=fit.pooled,
    )


def _picked(runs: Runs, among: Array, rule: Rule) -> tuple[Array, Array, float]:
    """Return the indices of the rates that are chosen among some runs (a mask, [R, S]), the seeds that have one, and their mean test score."""
    picked, counts = choose(runs.validation, runs.test, among, rule, runs.settings)
    seeds = np.flatnonzero(counts)
    return picked[seeds], seeds, float(runs.test[picked[seeds], seeds].mean())


def _moved(runs: Runs, rule: Rule, score: float) -> float:
    """Return how much lost runs may have changed a score by moving the choice of its rate; the estimate is noisy."""
    distances = [0.0]
    if runs.learned.any():
        rates, _, best = _picked(runs, runs.learned, "mean" if rule == "per_seed" else rule)
        if (runs.ran & ~runs.learned)[rates[0]].any():
            distances.append(abs(best - score))
    if runs.unseen is not None:
        distances.append(float(np.nanmax(runs.unseen)) - score)
    return max(distances)
