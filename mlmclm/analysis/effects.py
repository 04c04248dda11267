"""The score of each model on each task net of the choice of its learning rate, with one standard error for the whole procedure.

The learning rate is chosen on noisy scores, and the score at it shares some of that noise, so it is too high on average: by
nothing where validation and test scores are independent or the curve is steep, by more than a standard deviation under the
rule `per_seed` where they are nearly the same and the curve is flat. So each rate is scored by seeds that had no part in
choosing it (`seed_noise.crossed`): seeds are independent, so this is right whatever the curve and the noise are, and models
with curves of different shapes can be compared, on one task and over many.

What is left is that fewer seeds choose a little worse. The procedure (seeds, then the choice, then the score) is simulated with
the fitted noise (`seed_noise`) under three curves: flat, the observed one, and the observed one shrunk by the noise that it
contains. The middle of the three biases is taken off. The value stands for the score at the rate that was chosen, and for the
mean score at the rates that other seeds would choose; a model is not better because its seeds happened to choose well. So its
variance is the largest under any curve around either, not below that of the seeds at the chosen rate, plus the variance of a
uniform distribution between the smallest and largest bias. The share of runs that fail is drawn anew in each simulated study.
The noise of the finite test set is added where the predictions are known (`Effect.score`, `Effect.minus`). The part of it
that differs between seeds is in both, so these intervals are a little too wide rather than too narrow.
`benchmarks/calibration.py` measures what the resulting intervals cover.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlmclm.analysis.run_noise import RunNoise
from mlmclm.analysis.seed_noise import Fit, Runs, choose, crossed, failing_shares, freedom_of, simulate
from mlmclm.results.intervals import NAN, Estimate, estimate, satterthwaite, unknown
from mlmclm.results.measures import Array, Measure
from mlmclm.results.metrics import Rule

FOLDS = 100
DRAWS = 400
"""Simulated studies of each (model, task) and curve."""


@dataclass(frozen=True)
class Effect:
    """The score of one model on one task at its chosen learning rate.

    Attributes:
        seeds: the score net of optimism with the noise of seeds and of the choice; its value is NaN without scores, and its
            error if the noise of seeds is not known.
        folds: the score without one fold of the test examples after the other, [G] (`fold_scores`); None if not known.
        optimism: the score by the rule minus that.
        chosen: the probability that each rate would be chosen by other seeds, [R].
        regret: how much the best rate is expected to score above the chosen one.
        pooled: whether the error rests on the variance of all models' pretraining runs on the task (`replicates`), so that the
            errors of two models are estimated as one.
        bias: what is taken off the score from seeds that had no part in the choice.
        runs: the noise of pretraining runs that the error rests on; None if no model of the task has several.
    """

    seeds: Estimate
    optimism: float
    chosen: Array
    regret: float
    folds: Array | None = None
    pooled: bool = False
    bias: float = 0.0
    runs: RunNoise | None = None

    def score(self, confidence: float = 0.95) -> Estimate:
        """Return the score with the noise of seeds, of the choice, and, where the folds are known, of the test set."""
        own = [] if self.folds is None else [fold_variance(self.folds)]
        return _with_test_set(self.seeds.value, [_share(self.seeds)], own, confidence)

    def seeds_minus(self, other: Effect) -> list[tuple[float, float]]:
        """Return the variances that seeds and pretraining add to the difference to another model, with their degrees of freedom.

        Two pooled errors rest on one estimate, so its degrees of freedom count once.
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


def fold_scores(score: Measure, rows: int, folds: int = FOLDS) -> Array:
    """Return a score without one fold of its examples after the other, for the delete-a-group jackknife (Kott 2001).

    Folds depend on the number of examples alone, so two models that were tested on the same ones have the same folds.

    Args:
        score: of the test examples, as a function of their weights [R, rows].
        rows: the number of examples, at least 2.
    """
    count = min(folds, rows)
    own = np.random.default_rng(0).permutation(rows) % count
    return np.asarray(score((own[None] != np.arange(count)[:, None]).astype(np.float64)))


NO_EFFECT = Effect(estimate(NAN, NAN, NAN), NAN, np.zeros(0), NAN)
"""The effect of a model without scores."""


def effect(
    runs: Runs, fit: Fit, rule: Rule, *, folds: Array | None = None, draws: int = DRAWS, seed: int = 0
) -> Effect:
    """Return the score at the chosen learning rate net of optimism; the same runs always give the same numbers.

    Args:
        fit: the noise of these runs.
        folds: see `Effect.folds`.
        draws: simulated studies per curve.
    """
    if not runs.present.any():
        return NO_EFFECT
    picked, counts = choose(runs.validation, runs.test, runs.present, rule)
    seeds = np.flatnonzero(counts)
    score = float(runs.test[picked[seeds], seeds].mean())
    if not fit.known:
        chosen = np.bincount(picked[seeds], minlength=len(runs.rates)) / len(seeds)
        single = not (runs.present.sum(axis=1) > 1).any()
        return Effect(unknown(score, single=single), NAN, chosen, NAN, folds)
    own = float((fit.deviations[1] ** 2)[picked[seeds]].mean()) / len(seeds)
    freedom = freedom_of(fit, np.bincount(picked[seeds], minlength=len(runs.rates)))
    if len(runs.rates) == 1 and not fit.failing.any():  # there is no choice
        return Effect(estimate(score, math.sqrt(own), freedom), 0.0, np.ones(1), 0.0, folds)
    outcomes = [simulated(curve, rule, draws, np.random.default_rng(seed)) for curve in (fit.flat(), fit, fit.shrunk())]
    biases = [float(one.errors.mean()) for one in outcomes]
    variances = [float(values.var(ddof=1)) for one in outcomes for values in (one.errors, one.scores)]
    bias = (min(biases) + max(biases)) / 2
    net = float(crossed(runs.validation[None], runs.test[None], runs.present, rule)[0]) - bias
    doubt = (max(biases) - min(biases)) ** 2 / 12
    error = math.sqrt(max(own, *variances) + doubt)
    return Effect(
        seeds=estimate(net, error, freedom),
        optimism=score - net,
        chosen=outcomes[-1].chosen,
        regret=outcomes[-1].regret,
        folds=folds,
        bias=bias,
    )


@dataclass(frozen=True)
class Outcome:
    """The choice and the score in simulated studies.

    Attributes:
        scores: at the chosen rates, from seeds that had no part in the choice (`seed_noise.crossed`), [draws].
        errors: the same minus the true score at the chosen rates, [draws].
        plain_errors: the mean over seeds at the chosen rates minus that, [draws].
        plain: the standard error of the mean over seeds, as Student's interval takes it, [draws].
        seeds: the number of seeds.
        chosen, regret: see `Effect`.
    """

    scores: Array
    errors: Array
    plain_errors: Array
    plain: Array
    seeds: int
    chosen: Array
    regret: float


def simulated(fit: Fit, rule: Rule, draws: int, generator: np.random.Generator) -> Outcome:
    """Simulate the choice and the score of one model on one task."""
    failing = failing_shares(fit, draws, generator)
    validation, test = simulate(fit, draws, generator, failing)
    picked, counts = choose(validation, test, fit.present, rule)
    counts = np.broadcast_to(counts, picked.shape)
    seeds = counts.sum(axis=-1, keepdims=True)
    rows, columns = np.arange(draws)[:, None], np.arange(fit.present.shape[1])[None]
    expected, scores = (1 - failing) * fit.means[1] + failing * fit.floor[1], test[rows, picked, columns]
    target = np.where(counts, expected[rows, picked], 0.0).sum(axis=-1) / seeds[:, 0]
    means = np.where(counts, scores, 0.0).sum(axis=-1) / seeds[:, 0]
    squares = np.where(counts, (scores - means[:, None]) ** 2, 0.0).sum(axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        plain = np.sqrt(squares / (seeds[:, 0] - 1) / seeds[:, 0])
    chosen = np.bincount(picked.ravel(), weights=(counts / seeds).ravel(), minlength=len(fit.failing)) / draws
    regret = float((expected[:, fit.present.any(axis=1)].max(axis=1) - target).mean())
    net = crossed(validation, test, fit.present, rule)
    return Outcome(net, net - target, means - target, plain, int(seeds.min()), chosen, max(regret, 0.0))
