"""The noise of fine-tuning seeds in the scores of one task, fitted per model.

**Model.** Scores of runs that learn are normal, with a mean and a standard deviation for each rate and split, one correlation of
validation and test score, and one correlation of the runs of a seed at different rates. Runs that failed or diverged are put aside
(`failed_runs`).

**Variances** of single rates rest on few seeds, so they are pooled over the models and rates of a task unless a test over all tasks shows
them to be unequal (`pooled_variances`). How much the runs of a seed have in common is estimated over all tasks too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mlmclm.analysis.model_runs import Runs
from mlmclm.analysis.pooled_variances import Unequal, Variances, pooled, unequal
from mlmclm.results.intervals import SINGLE, TIE
from mlmclm.results.measures import Array

MOST_SHARED = 0.9
"""Highest correlation of a seed's runs at different rates; a few seeds can show 1 by accident."""


@dataclass(frozen=True)
class Fit:
    """The fitted noise of one model on one task; arrays over rates are [R], of validation and test [2, R].

    Attributes:
        present: the runs that learn, or all where none does, [R, S].
        means: mean scores of the runs that learn.
        deviations: their pooled standard deviations.
        freedom: degrees of freedom of the variances of the test scores at all rates together; 0 if the noise is not known.
        degrees: those of the pooled variance at each rate, [R].
        correlation: of the validation and the test score of a run.
        shared: correlation of the test scores of a seed's runs at different rates, at least 0.
        settings: see `Runs`; [R] or None.
        pooled: whether the variances are those of all models of the task.
    """

    present: Array
    means: Array
    deviations: Array
    freedom: float
    degrees: Array
    correlation: float
    shared: float
    settings: Array | None = None
    pooled: bool = False

    @property
    def scored(self) -> Array:
        """Whether each rate has such runs, [R]."""
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
            settings=None if self.settings is None else self.settings[keep],
            means=self.means[:, keep],
            deviations=self.deviations[:, keep],
            degrees=self.degrees[keep],
        )

    def kept(self) -> Array:
        """Return the share of the variance of the means that is not the seeds' noise, [2, 1]."""
        # The noise that a seed's runs share moves all means alike.
        noise = (1 - self.shared) * self.deviations**2 / np.maximum(self.present.sum(axis=1), 1)
        spread = np.var(self.means[:, self.scored], axis=1, ddof=1, keepdims=True)
        of_seeds = noise[:, self.scored].mean(axis=1, keepdims=True)
        return np.clip(1 - of_seeds / np.maximum(spread, 1e-300), 0, None)

    def shrunk(self, by: Array) -> Fit:
        """Return the fit with means shrunk to their mean by factors, [2, 1]."""
        centre = self.means[:, self.scored].mean(axis=1, keepdims=True)
        return replace(self, means=centre + by * (self.means - centre))


@dataclass(frozen=True)
class Likeness:
    """How alike the noise of runs is, estimated over tasks.

    Attributes:
        unequal: whether the variances of models and of rates are unequal, of validation and test scores.
        shared: correlation of the test scores of a seed's runs at different rates, at least 0.
    """

    unequal: tuple[Unequal, Unequal]
    shared: float


def likeness(tasks: Sequence[Mapping[str, Runs]]) -> Likeness:
    """Estimate how alike the noise of the models' runs on some tasks is."""
    placed = [_placed(models) for models in tasks]
    every = [runs for models in tasks for runs in models.values()]
    correlations = [_shared(runs, _moments(runs)[0][1]) for runs in every]
    weight = sum(pairs for _, pairs in correlations)
    shared = sum(value * pairs for value, pairs in correlations) / weight if weight else 0.0
    return Likeness(
        unequal=(unequal([validation for validation, _ in placed]), unequal([test for _, test in placed])),
        shared=min(max(0.0, shared), MOST_SHARED),
    )


def fit_task(models: Mapping[str, Runs], like: Likeness | None = None) -> dict[str, Fit]:
    """Fit the noise of all models on one task.

    Args:
        like: estimated over all tasks of the study; by default over this one.
    """
    like = like or likeness([models])
    rates = _rates(models)
    variances = [pooled(split, unlike) for split, unlike in zip(_placed(models), like.unequal, strict=True)]
    found = {}
    for row, (name, runs) in enumerate(models.items()):
        own = [rates.index(rate) for rate in runs.rates]
        placed = [Variances(split.values[row, own], split.freedom[row, own]) for split in variances]
        found[name] = _fit(runs, placed, like)
    return found


def _rates(models: Mapping[str, Runs]) -> list[float]:
    return sorted({rate for runs in models.values() for rate in runs.rates})


def _placed(models: Mapping[str, Runs]) -> tuple[Variances, Variances]:
    """Return the models' variances at all of the task's rates, of validation and of test scores."""
    rates = _rates(models)
    values, degrees = np.full((2, len(models), len(rates)), math.nan), np.zeros((2, len(models), len(rates)))
    for row, runs in enumerate(models.values()):
        own = [rates.index(rate) for rate in runs.rates]
        _, values[:, row, own], degrees[:, row, own] = _moments(runs)
    degrees[~(values > 0)] = 0.0  # a model whose scores are all equal says nothing about the others' noise
    return Variances(values[0], degrees[0]), Variances(values[1], degrees[1])


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


def _fit(runs: Runs, variances: Sequence[Variances], like: Likeness) -> Fit:
    """Fit the noise of one model, given the pooled variances, [R], of validation and test scores."""
    means, _, freedom = _moments(runs)
    learned = runs.learned
    # Seeds with equal scores show no noise, so a model of which all are equal, as a perfect one, counts as noisy as the others.
    known = bool((freedom[1] > 0).any() and np.nansum(variances[1].values) > 0)
    # Rates share seeds, so their variances are not independent: together they have fewer degrees of freedom than their sum.
    number = max(1, int((freedom[1] > 0).sum()))
    most = float(np.max(variances[1].freedom, where=freedom[1] > 0, initial=0.0)) / (1 + (number - 1) * like.shared**2)
    residuals = [
        np.where(learned, split - mean[:, None], 0.0)
        for split, mean in zip((runs.validation, runs.test), means, strict=True)
    ]
    scale = math.sqrt(float((residuals[0] ** 2).sum() * (residuals[1] ** 2).sum()))
    return Fit(
        present=learned if learned.any() else runs.present,
        means=np.where(np.isfinite(means), means, 0.0),  # a rate at which no run learned is not chosen
        deviations=np.sqrt(np.stack([split.values for split in variances])),
        freedom=most if known else 0.0,
        degrees=np.minimum(variances[1].freedom, most) if known else np.zeros(len(means[1])),
        correlation=float(np.clip((residuals[0] * residuals[1]).sum() / scale, -1, 1)) if scale > 0 else 0.0,
        shared=like.shared,
        settings=runs.settings,
        pooled=not like.unequal[1].models,
    )


def freedom_of(fit: Fit, weights: Array) -> float:
    """Return the degrees of freedom of a weighted sum of the rates' variances (Satterthwaite), at most `Fit.freedom`.

    Args:
        weights: [R].
    """
    parts = (weights * np.nan_to_num(fit.deviations[1] ** 2))[weights > 0]
    return float(min(fit.freedom, parts.sum() ** 2 / (parts**2 / fit.degrees[weights > 0]).sum()))
