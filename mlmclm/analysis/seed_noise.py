"""The noise of fine-tuning seeds in the scores of one task, fitted per model.

**Model.** A run of a model at learning rate r with seed s either fails, with probability p_r, or learns. Scores of runs that
learn are normal, with a mean and a standard deviation for each rate and split, one correlation of validation and test
score, and one correlation of the runs of a seed at different rates. Failed runs score at one level.

**Variances** of single rates rest on few seeds, so they are moderated (`moderated_variances`): equal variances are pooled, and
unequal ones stay apart. How unequal they are, and how much the runs of a seed have in common, is estimated over all tasks.

**Failed runs** are told from noisy ones in `failed_runs`. Their share at a rate is shrunk to the model's share over all rates, and
to that of the other models at the rate; the share over all rates is shrunk to that of the other models, and to its own on the other
tasks: the more, the less the rates, the models or the tasks differ. A model that is shown to fail less often than the others takes
nothing from them. Where no run failed on a task, one would score below those that learn by as much as on the other tasks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import special

from mlmclm.analysis.failure_shares import (
    OverTasks,
    failures_at,
    failures_of,
    over_tasks,
    pooling_of,
    shares_of_failures,
    spread_of,
    totals_of,
)
from mlmclm.analysis.model_runs import Runs
from mlmclm.analysis.moderated_variances import Alike, alike, moderated, pattern
from mlmclm.results.intervals import SINGLE, TIE
from mlmclm.results.measures import Array

MAY_BE_NOISIER = 0.8
"""Level of the F test from which on intervals of scores take a rate for noisier than its moderated variance (`Fit.cautious`)."""
MOST_SHARED = 0.9
"""Highest correlation of a seed's runs at different rates; a few seeds can show 1 by accident."""


@dataclass(frozen=True)
class Fit:
    """The fitted noise of one model on one task; arrays over rates are [R], of validation and test [2, R].

    Attributes:
        present: which runs have a score, [R, S].
        means: mean scores of the runs that learn.
        deviations: their moderated standard deviations.
        freedom: degrees of freedom of the variances of the test scores at all rates together; 0 if the noise is not known.
        degrees: those of the moderated variance at each rate, [R].
        correlation: of the validation and the test score of a run.
        shared: correlation of the test scores of a seed's runs at different rates, at least 0.
        failing: the probability that a run fails.
        failures: the number of runs that failed at rates where some learn, and `counted`, of all runs there.
        alike: the numbers of failed runs and of others at each rate that the runs of the other models count as, [2, R].
        usual: the numbers of failed runs and of others, at all rates, that the runs of the other models count as.
        pooling: weight of the share of failed runs over all rates in `failing`, in runs.
        floor: the score of failed runs, [2].
        diverged, withheld: see `Runs`; [R, S] or None.
        settings: see `Runs`; [R] or None.
        diverging: what the models of all tasks show of the probability that a run diverges, [R].
        agreement: weight of `diverging` in this model's own probability, in runs.
    """

    present: Array
    means: Array
    deviations: Array
    freedom: float
    degrees: Array
    correlation: float
    shared: float
    failing: Array
    failures: Array
    counted: Array
    alike: Array
    usual: tuple[float, float]
    pooling: float
    floor: Array
    diverged: Array | None = None
    withheld: Array | None = None
    settings: Array | None = None
    diverging: Array | None = None
    agreement: float = 0.0

    @property
    def scored(self) -> Array:
        """Whether each rate has a score, [R]. Where all runs diverged or none was run, `means` says nothing."""
        return np.asarray(self.present.any(axis=1))

    @property
    def known(self) -> bool:
        """Whether the noise of seeds is known."""
        return self.freedom > 0

    def at(self, keep: Array) -> Fit:
        """Return the fit at some of the learning rates, given which, [R]."""
        return replace(
            self,
            present=self.present[keep],
            diverged=None if self.diverged is None else self.diverged[keep],
            withheld=None if self.withheld is None else self.withheld[keep],
            settings=None if self.settings is None else self.settings[keep],
            diverging=None if self.diverging is None else self.diverging[keep],
            means=self.means[:, keep],
            deviations=self.deviations[:, keep],
            degrees=self.degrees[keep],
            failing=self.failing[keep],
            failures=self.failures[keep],
            counted=self.counted[keep],
            alike=self.alike[:, keep],
        )

    def kept(self) -> tuple[Array, Array]:
        """Return the share of the variance of the means that is not the seeds' noise, [2, 1], and the variance of that, [2, R]."""
        # The noise that a seed's runs share moves all means alike.
        noise = (1 - self.shared) * self.deviations**2 / np.maximum(self.present.sum(axis=1) - self.failures, 1)
        spread = np.var(self.means[:, self.scored], axis=1, ddof=1, keepdims=True)
        of_seeds = noise[:, self.scored].mean(axis=1, keepdims=True)
        return np.clip(1 - of_seeds / np.maximum(spread, 1e-300), 0, None), noise

    def shrunk(self, by: Array) -> Fit:
        """Return the fit with means shrunk to their mean by factors, [2, 1]."""
        centre = self.means[:, self.scored].mean(axis=1, keepdims=True)
        return replace(self, means=centre + by * (self.means - centre))

    def cautious(self, runs: Runs) -> Fit:
        """Return the fit in which rates that may be noisier than their moderated variances say stand for themselves.

        A noisy rate that is chosen would make false claims, and a wide interval is the cheaper error: so the F test has a level
        of `MAY_BE_NOISIER` here, where the sensitivity to the rate has a stricter one (`moderated_variances.NOISIER`).
        """
        _, variances, freedom = _moments(runs)
        squares = self.deviations**2
        with np.errstate(invalid="ignore", divide="ignore"):
            noisier = variances / squares > special.fdtri(freedom, self.degrees, MAY_BE_NOISIER)
        return replace(
            self,
            deviations=np.sqrt(np.where(noisier, variances, squares)),
            degrees=np.where(noisier[1], freedom[1], self.degrees),
        )

    def spread_of_failures(self, failures: Array, weights: Array) -> Array:
        """Return the expected variance of whether a run fails, [...], in studies with these numbers of failed runs at each rate.

        Args:
            failures: [..., R].
            weights: of the rates, [R].
        """
        failures = np.where(self.counted > 0, failures, 0)
        return spread_of(weights, *shares_of_failures(failures, self.counted, self.alike, self.pooling, self.usual))

    def spread_of_divergence(self, diverged: Array, weights: Array) -> Array:
        """Return the same of whether a run diverges, given the numbers of diverged runs.

        Args:
            diverged: [..., R].
            weights: of the rates, [R].
        """
        may = np.zeros(len(weights), bool) if self.diverging is None else self.diverging > 0
        return spread_of(weights, *self.shares_of_divergence(np.where(may, diverged, 0)))

    @property
    def lost(self) -> Array:
        """The number of diverged runs at each rate, [R]."""
        none = np.zeros(len(self.failing), int)
        return none if self.diverged is None else np.asarray(self.diverged.sum(axis=1))

    def shares_of_divergence(self, diverged: Array) -> tuple[Array, Array]:
        """Return the expected share of diverged runs at each rate, [..., R], and the number of runs that it rests on, [R].

        Args:
            diverged: numbers of diverged runs at each rate, [..., R].
        """
        runs = self.lost + self.present.sum(axis=1) + self.agreement
        expected = np.zeros(len(runs)) if self.diverging is None else self.diverging
        return (diverged + self.agreement * expected) / np.maximum(runs, 1), runs

    def likely(self) -> Fit:
        """Return the fit with means shrunk so that their variance is what is left net of the seeds' noise."""
        return self.shrunk(np.sqrt(self.kept()[0])) if self.scored.sum() > 1 else self


@dataclass(frozen=True)
class Likeness:
    """How alike the noise of runs is, estimated over tasks.

    Attributes:
        alike: the likeness of variances, of validation and test scores.
        shared: correlation of the test scores of a seed's runs at different rates, at least 0.
        pooling: weight of the share of failed runs over all rates in that at one, in runs.
        models: weight of the other models' share of failed runs at a rate in that of one model, in runs; `overall`, over all rates.
        tasks: how often runs fail over all tasks.
        diverging: share of the runs that diverge, by learning rate; rates without any are absent.
        agreement: weight of that share in the probability of one model, in runs.
    """

    alike: tuple[Alike, Alike]
    shared: float
    pooling: float
    models: float
    overall: float
    tasks: OverTasks
    diverging: Mapping[float, float]
    agreement: float


def likeness(tasks: Sequence[Mapping[str, Runs]]) -> Likeness:
    """Estimate how alike the noise of the models' runs on some tasks is."""
    placed = [_placed(models) for models in tasks]
    every = [runs for models in tasks for runs in models.values()]
    correlations = [_shared(runs, _moments(runs)[0][1]) for runs in every]
    weight = sum(pairs for _, pairs in correlations)
    shared = sum(value * pairs for value, pairs in correlations) / weight if weight else 0.0
    diverged = _diverged(every)
    return Likeness(
        alike=(alike([validation for validation, _ in placed]), alike([test for _, test in placed])),
        shared=min(max(0.0, shared), MOST_SHARED),
        pooling=pooling_of([failures_of(runs) for runs in every]),
        models=pooling_of([own for models in tasks for own in failures_at(models).values()]),
        overall=pooling_of([totals_of(models) for models in tasks]),
        tasks=over_tasks(tasks),
        diverging={rate: float(lost.sum() / ran.sum()) for rate, (lost, ran) in diverged.items()},
        agreement=pooling_of(list(diverged.values())),
    )


def _diverged(every: Sequence[Runs]) -> dict[float, tuple[Array, Array]]:
    """Return the numbers of diverged and of all runs of each model and task, at each rate where any diverged."""
    found = defaultdict[float, list[tuple[int, int]]](list)
    for runs in every:
        diverged = np.zeros(runs.present.shape, bool) if runs.diverged is None else runs.diverged
        numbers = zip(diverged.sum(axis=1).tolist(), (diverged | runs.present).sum(axis=1).tolist(), strict=True)
        for rate, number in zip(runs.rates, numbers, strict=True):
            found[rate].append(number)
    split = {rate: np.asarray(numbers).T for rate, numbers in found.items()}
    return {rate: (lost, ran) for rate, (lost, ran) in split.items() if lost.any()}


def fit_task(models: Mapping[str, Runs], like: Likeness | None = None) -> dict[str, Fit]:
    """Fit the noise of all models on one task.

    Args:
        like: estimated over all tasks of the study; by default over this one.
    """
    like = like or likeness([models])
    rates = _rates(models)
    patterns = [pattern(split, own) for split, own in zip(_placed(models), like.alike, strict=True)]
    failures = failures_at(models)
    failed = {rate: (own[0].sum(), own[1].sum()) for rate, own in failures.items()}
    fails = any(number for number, _ in failed.values())
    scores = [np.stack((runs.validation, runs.test))[:, runs.failed] for runs in models.values()]
    level = np.concatenate(scores, axis=1).mean(axis=1) if fails else np.zeros(2)
    elsewhere = like.tasks.elsewhere(models)
    found = {}
    for name, runs in models.items():
        own = [rates.index(rate) for rate in runs.rates]
        placed = [(ratios[own], degrees[own]) for ratios, degrees in patterns]
        mine, safe = np.stack(failures_of(runs)), name in like.tasks.safe
        others = np.asarray([failed[rate] for rate in runs.rates]).T - mine
        alike, usual = _of_others(np.zeros_like(others) if safe else others, elsewhere[name], like)
        may_fail = bool(mine[0].any() or elsewhere[name][0][0] or (fails and not safe))
        own_level = level
        if may_fail and not fails:
            learned = [split[runs.learned] for split in (runs.validation, runs.test)]
            own_level = np.asarray([scores.mean() if len(scores) else 0.0 for scores in learned]) - like.tasks.drop
        found[name] = _fit(runs, placed, like, alike if may_fail else None, usual, own_level)
    return found


def _of_others(others: Array, elsewhere: tuple[Array, Array], like: Likeness) -> tuple[Array, tuple[float, float]]:
    """Return `Fit.alike` and `Fit.usual`.

    Args:
        others: the numbers of failed and of all runs of the other models at each rate, [2, R].
        elsewhere: what the model's own runs on the other tasks count as (`OverTasks.elsewhere`).
    """
    failed, runs = others
    alike = np.minimum(like.models / np.maximum(runs, 1), 1.0) * np.stack((failed, runs - failed))
    lost, count = others.sum(axis=1)
    share = min(like.overall, float(count)) / max(1, int(count))
    usual = elsewhere[0] + share * np.asarray((lost, count - lost)) + (like.tasks.usual, 1 - like.tasks.usual)
    return alike + elsewhere[1], (float(usual[0]), float(usual[1]))


def _rates(models: Mapping[str, Runs]) -> list[float]:
    return sorted({rate for runs in models.values() for rate in runs.rates})


def _placed(models: Mapping[str, Runs]) -> tuple[list[tuple[Array, Array]], list[tuple[Array, Array]]]:
    """Return the models' variances and degrees of freedom at all of the task's rates, of validation and of test scores."""
    rates = _rates(models)
    found: tuple[list[tuple[Array, Array]], list[tuple[Array, Array]]] = ([], [])
    for runs in models.values():
        _, variances, freedom = _moments(runs)
        own = [rates.index(rate) for rate in runs.rates]
        for split in (0, 1):
            values, degrees = np.full(len(rates), math.nan), np.zeros(len(rates))
            values[own], degrees[own] = variances[split], freedom[split]
            found[split].append((values, degrees))
    return found


def _moments(runs: Runs) -> tuple[Array, Array, Array]:
    """Return means and variances of the runs that learn, and degrees of freedom, each [2, R].

    Equal scores of a rate say nothing about its noise, and must not make that of the other rates seem smaller: they have no
    degrees of freedom, unless all rates' are equal.
    """
    learned = runs.learned
    count = learned.sum(axis=1)
    values = np.where(learned, np.stack((runs.validation, runs.test)), 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = values.sum(axis=2) / count
        centred = np.where(learned, values - means[:, :, None], 0.0)
        variances = (centred**2).sum(axis=2) / (count - 1)
    # Scores that differ by rounding alone show no noise.
    variances[np.sqrt(np.nan_to_num(variances)) <= np.maximum(TIE, SINGLE * np.abs(np.nan_to_num(means)))] = 0.0
    variances[:, count < 2] = math.nan
    shown = (variances > 0) | ~(variances > 0).any(axis=1, keepdims=True)
    return means, variances, np.where(shown, np.maximum(count - 1, 0), 0)


def _shared(runs: Runs, means: Array) -> tuple[float, int]:
    """Return the mean correlation of a seed's test scores at different rates, and the number of pairs of rates it is from."""
    residuals = np.where(runs.learned, runs.test - means[:, None], math.nan)
    total, pairs = 0.0, 0
    for first in range(len(residuals)):
        for second in range(first):
            both = np.isfinite(residuals[first]) & np.isfinite(residuals[second])
            a, b = residuals[first][both], residuals[second][both]
            scale = math.sqrt(float((a**2).sum() * (b**2).sum()))
            if both.sum() > 1 and scale > 0:
                total += float((a * b).sum()) / scale
                pairs += 1
    return (total / pairs, pairs) if pairs else (0.0, 0)


def _fit(
    runs: Runs,
    patterns: Sequence[tuple[Array, Array]],
    like: Likeness,
    alike: Array | None,
    usual: tuple[float, float],
    level: Array,
) -> Fit:
    """Fit the noise of one model.

    Args:
        patterns: the ratios of the rates' variances and their degrees of freedom (`pattern`), of validation and test scores.
        alike, usual: see `Fit`; None for the first if none of its runs may fail.
        level: the validation and test score of a failed run, where none of the model's own did.
    """
    means, variances, freedom = _moments(runs)
    learned = runs.learned
    total = float(freedom[1].sum())
    known = total > 0 and bool(np.nansum(variances[1]) > 0)
    own = [moderated(variances[split], freedom[split], patterns[split], like.alike[split]) for split in (0, 1)]
    # Rates share seeds, so their variances are not independent: together they have fewer degrees of freedom than their sum.
    number = max(1, int((freedom[1] > 0).sum()))
    most = total / (1 + (number - 1) * like.shared**2)
    residuals = [
        np.where(learned, split - mean[:, None], 0.0)
        for split, mean in zip((runs.validation, runs.test), means, strict=True)
    ]
    scale = math.sqrt(float((residuals[0] ** 2).sum() * (residuals[1] ** 2).sum()))
    failed, count = failures_of(runs)
    splits = (runs.validation, runs.test)
    floor = np.asarray([split[runs.failed].mean() for split in splits]) if failed.any() else level
    failing = np.zeros(len(count))
    if alike is not None:
        failing, _ = shares_of_failures(failed, count, alike, like.pooling, usual)
    if runs.hopeless is not None:
        own_means = [
            np.where(runs.present, split, 0.0).sum(axis=1) / np.maximum(runs.present.sum(axis=1), 1) for split in splits
        ]
        means = np.where(runs.hopeless, own_means, means)
    # Any other rate at which every run failed has no mean of its own; its runs fail in every simulated study too.
    means = np.where(np.isfinite(means), means, floor[:, None])
    return Fit(
        present=runs.present,
        means=means,
        deviations=np.sqrt(np.stack([variance for variance, _ in own])),
        freedom=most if known else 0.0,
        degrees=np.minimum(own[1][1], most) if known else np.zeros(len(means[1])),
        correlation=float(np.clip((residuals[0] * residuals[1]).sum() / scale, -1, 1)) if scale > 0 else 0.0,
        shared=like.shared,
        failing=failing,
        failures=failed,
        counted=count,
        alike=np.zeros((2, len(count))) if alike is None else alike,
        usual=usual,
        pooling=like.pooling,
        floor=floor,
        diverged=runs.diverged,
        withheld=runs.withheld,
        settings=runs.settings,
        diverging=np.asarray([like.diverging.get(rate, 0.0) for rate in runs.rates]),
        agreement=like.agreement,
    )


def freedom_of(fit: Fit, weights: Array) -> float:
    """Return the degrees of freedom of a weighted sum of the rates' variances (Satterthwaite), at most `Fit.freedom`.

    Args:
        weights: [R].
    """
    parts = (weights * np.nan_to_num(fit.deviations[1] ** 2))[weights > 0]
    return float(min(fit.freedom, parts.sum() ** 2 / (parts**2 / fit.degrees[weights > 0]).sum()))
