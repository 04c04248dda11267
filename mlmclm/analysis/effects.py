"""The score of each model on each task net of the choice of its learning rate, with one standard error for the whole procedure.

The learning rate is chosen on noisy scores, and the score at it shares some of that noise, so it is too high on average: by
nothing where validation and test scores are independent or the curve is steep, by more than a standard deviation under the
rule `per_seed` where they are nearly the same and the curve is flat. So each rate is scored by seeds that had no part in
choosing it (`simulated_choices.crossed`): seeds are independent, so this is right whatever the curve and the noise are, and models
with curves of different shapes can be compared, on one task and over many.

The score stands for the whole procedure: the mean true score at the rates that seeds like these choose. A model is not better
because its seeds happened to choose well. Its noise is that of the seeds and of the choice. Both depend on the true curve, which
is not known, so truths are drawn that are plausible given the runs (`simulated_studies.plausible`), and studies of each, with the fitted
noise. The variance is the mean over truths of that of the procedure's score under one truth. The bias, which comes from fewer
seeds choosing a little worse, is the mean over truths too; it is taken off, and its variance over truths is added. The degrees of
freedom are those of the rates' variances, weighted by how often each rate is chosen (Satterthwaite).

The noise of the finite test set is added where the predictions are known (`Effect.score`, `Effect.minus`). The part of it
that differs between seeds is in both, so these intervals are a little too wide rather than too narrow.
`benchmarks/calibration.py` measures what the resulting intervals cover.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mlmclm.analysis.model_runs import Runs
from mlmclm.analysis.run_noise import RunNoise
from mlmclm.analysis.seed_noise import Fit, freedom_of
from mlmclm.analysis.simulated_choices import choose, crossed
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
        alike: correlation of the seeds' noise with that on other tasks of the same trainings (`shared_trainings`), by task.
    """

    seeds: Estimate
    optimism: float
    chosen: Array
    regret: float
    folds: Array | None = None
    pooled: bool = False
    bias: float = 0.0
    runs: RunNoise | None = None
    alike: Mapping[str, float] = field(default_factory=dict)

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
    runs: Runs, fit: Fit, rule: Rule, *, folds: Array | None = None, truths: int = TRUTHS, seed: int = 0
) -> Effect:
    """Return the score at the chosen learning rate net of optimism; the same runs always give the same numbers.

    Args:
        fit: the noise of these runs.
        folds: see `Effect.folds`.
        truths: the number of plausible truths.
    """
    if not runs.present.any():
        return NO_EFFECT
    picked, counts = choose(runs.validation, runs.test, runs.present, rule, runs.lost, runs.settings)
    seeds = np.flatnonzero(counts)
    score = float(runs.test[picked[seeds], seeds].mean())
    if not fit.known:
        chosen = np.bincount(picked[seeds], minlength=len(runs.rates)) / len(seeds)
        single = not (runs.present.sum(axis=1) > 1).any()
        return Effect(unknown(score, single=single), NAN, chosen, NAN, folds)
    fit = fit.cautious(runs)
    if len(runs.rates) == 1 and fit.failing is None:  # there is no choice
        error = float(fit.deviations[1][0]) / math.sqrt(len(seeds))
        return Effect(estimate(score, error, fit.freedom), 0.0, np.ones(1), 0.0, folds)
    generator = np.random.default_rng(seed)
    outcome = simulated(fit, rule, plausible(fit, truths, generator), STUDIES, generator)
    observed = runs.validation[None], runs.test[None], runs.present
    net = crossed(*observed, rule, runs.lost, runs.settings)[0] - outcome.bias
    return Effect(
        seeds=estimate(float(net), math.sqrt(outcome.variance), freedom_of(fit, outcome.chosen)),
        optimism=float(score - net),
        chosen=outcome.chosen,
        regret=outcome.regret,
        folds=folds,
        bias=outcome.bias,
    )


@dataclass(frozen=True)
class Outcome:
    """The choice and the score in simulated studies, several of each truth.

    Attributes:
        scores: at the chosen rates, from seeds that had no part in the choice (`simulated_choices.crossed`), [T, studies].
        targets: the true scores at the chosen rates, [T, studies].
        plain: the mean over seeds at the chosen rates, [T, studies].
        plain_error: its standard error, as Student's interval takes it, [T, studies].
        seeds: the number of seeds.
        chosen, regret: see `Effect`.
        failures, diverged: the number of runs that failed, and that diverged, at each rate, [T, studies, R]; None if none does. The second is
            of as many runs as the study itself has at the rate: where a race goes on in a simulated study, it has more.
    """

    scores: Array
    targets: Array
    plain: Array
    plain_error: Array
    seeds: int
    chosen: Array
    regret: float
    failures: Array | None = None
    diverged: Array | None = None

    @property
    def bias(self) -> float:
        """The mean by which `scores` are too high."""
        return float((self.scores - self.targets).mean())

    @property
    def variance(self) -> float:
        """The variance of a score around the procedure's true one: that between studies of one truth, and that of the bias."""
        studies, errors = self.scores.shape[1], self.scores - self.targets
        within, biases = errors.var(axis=1, ddof=1).mean(), errors.mean(axis=1)
        doubt = biases.var(ddof=1) - within / studies if len(biases) > 1 else 0.0
        return float(self.scores.var(axis=1, ddof=1).mean() + max(0.0, doubt))


def simulated(fit: Fit, rule: Rule, truths: Truths, studies: int, generator: np.random.Generator) -> Outcome:
    """Simulate the choice and the score of one model on one task, in several studies of each truth."""
    validation, test, present, lost, failed, diverged = simulate(fit, truths, studies, generator)
    picked, counts = choose(validation, test, present, rule, lost, fit.settings)
    counts = np.broadcast_to(counts, picked.shape)
    seeds = counts.sum(axis=-1)
    expected = truths.expected(fit)
    own = np.take_along_axis(np.broadcast_to(expected[:, None], test.shape[:-1]), picked, axis=-1)
    scores = np.take_along_axis(test, picked[..., None, :], axis=-2)[..., 0, :]
    targets = np.where(counts, own, 0.0).sum(axis=-1) / seeds
    plain = np.where(counts, scores, 0.0).sum(axis=-1) / seeds
    squares = np.where(counts, (scores - plain[..., None]) ** 2, 0.0).sum(axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        plain_error = np.sqrt(squares / (seeds - 1) / seeds)
    chosen = np.bincount(picked.ravel(), weights=(counts / seeds[..., None]).ravel(), minlength=len(fit.present))
    best = expected[:, fit.present.any(axis=1)].max(axis=1, keepdims=True)
    return Outcome(
        crossed(validation, test, present, rule, lost, fit.settings),
        targets,
        plain,
        plain_error,
        int(seeds.min()),
        chosen / seeds.size,
        max(float((best - targets).mean()), 0.0),
        None if failed is None else (failed & present).sum(axis=-1),
        None if diverged is None else _of_as_many(diverged.sum(axis=-1), (diverged | present).sum(axis=-1), fit),
    )


def _of_as_many(diverged: Array, ran: Array, fit: Fit) -> Array:
    """Return numbers of diverged runs, of as many as the study itself has at each rate, [..., R]."""
    return diverged * (fit.lost + fit.present.sum(axis=1)) / np.maximum(ran, 1)
