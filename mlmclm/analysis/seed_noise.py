"""The noise of fine-tuning seeds in the scores of one task, fitted per model.

**Model.** Scores of runs that learn are normal, with a mean and a standard deviation for each rate and split, one correlation of
validation and test score, and one correlation of the runs of a seed at different rates. Runs that failed or diverged are left out
(`failed_runs`).

**Variances** of single rates are based on few seeds, so they are pooled over the models and rates of a task unless a test over all tasks shows
them to be unequal (`pooled_variances`). The correlation of a seed's runs at different rates is estimated over all tasks too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mlmclm.analysis.model_runs import Runs
from mlmclm.analysis.pooled_variances import Variances, pooled, unequal
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
        pooled: whether the variances are those of all models of the task.
    """

    present: Array
    means: Array
    deviations: Array
    freedom: float
    degrees: Array
    correlation: float
    shared: float
    pooled: bool = False

    @property
    def scored(self) -> Array:
        """Whether each rate has any `present` run, [R]."""
        return np.asarray(self.present.any(axis=1))

    @property
    def known(self) -> bool:
        """Whether the noise of seeds is known."""
        return self.freedom > 0

    def at(self, keep: Array) -> Fit:
        """Return the fit at some of the learning rates, given by a mask, [R]."""
        return replace(
            self,
            present=self.present[keep],
            means=self.means[:, keep],
            deviations=self.deviations[:, keep],
            degrees=self.degrees[keep],
        )

    def between(self, keep: Array) -> tuple[float, float]:
        """Return the variance between the mean test scores of some rates, given by a mask, and the part that seeds' noise adds."""
        # Noise that a seed's runs share moves all means equally, so it adds nothing.
        noise = (1 - self.shared) * (self.deviations[1, keep] ** 2 / self.present.sum(axis=1)[keep]).mean()
        return float(self.means[1, keep].var(ddof=1)), float(noise)

    @property
    def likely(self) -> Array:
        """Mean scores of the rates, shrunk so that their variance no longer includes the part that seeds' noise adds, [2, R] (Louis 1984).

        The highest of several observed means is above the best rate's true mean, and observed means differ more than true ones. Half the sum
        of validation and test scores and half their difference are shrunk separately.
        """
        validation, test = self.shrunk(1.0) - (centre := self.shrunk(0.0))
        twice_covariance = 2 * self.correlation * self.deviations.prod(axis=0)
        shrunken = []
        for sign, half in ((1, (validation + test) / 2), (-1, (validation - test) / 2)):
            variances = ((self.deviations**2).sum(axis=0) + sign * twice_covariance)[self.scored] / 4
            noise = (1 - self.shared) * (variances / self.present.sum(axis=1)[self.scored]).mean()
            shrunken.append(half * math.sqrt(max(0.0, 1 - noise / max(half[self.scored].var(ddof=1), 1e-300))))
        return np.asarray(centre + np.stack((shrunken[0] + shrunken[1], shrunken[0] - shrunken[1])))

    def shrunk(self, by: Array | float) -> Array:
        """Return the mean scores, [2, R], shrunk towards their mean over rates by factors, [2, 1]."""
        centre = self.means[:, self.scored].mean(axis=1, keepdims=True)
        return np.asarray(centre + by * (self.means - centre))

    def simulate(self, means: Array, studies: int, generator: np.random.Generator) -> tuple[Array, Array]:
        """Draw validation and test scores of studies whose runs all learn, [studies, R, S], around mean scores, [2, R]."""
        rates, seeds = self.present.shape
        shape = (studies, rates, seeds)
        unshared = math.sqrt(1 - self.shared) * generator.standard_normal((2, *shape))
        validation, independent = unshared + math.sqrt(self.shared) * generator.standard_normal((2, studies, 1, seeds))
        noise = np.stack((validation, self.correlation * validation + math.sqrt(1 - self.correlation**2) * independent))
        scores = means[:, None, :, None] + noise * self.deviations[:, None, :, None]
        return scores[0], scores[1]


def fit_tasks(tasks: Sequence[Mapping[str, Runs]]) -> list[dict[str, Fit]]:
    """Fit the noise of all models on some tasks, which together decide whether variances are equal and how a seed's runs correlate."""
    moments = [{name: _moments(runs) for name, runs in models.items()} for models in tasks]
    rates = [sorted({rate for runs in models.values() for rate in runs.rates}) for models in tasks]
    splits = [_placed(*parts) for parts in zip(tasks, moments, rates, strict=True)]
    unlike = [unequal([task[split] for task in splits]) for split in (0, 1)]
    correlations = [
        _shared(runs, task_moments[name][0][1])
        for models, task_moments in zip(tasks, moments, strict=True)
        for name, runs in models.items()
    ]
    weight = sum(pairs for _, pairs in correlations)
    shared = sum(value * pairs for value, pairs in correlations) / weight if weight else 0.0
    shared = min(max(0.0, shared), MOST_SHARED)
    fits: list[dict[str, Fit]] = []
    for models, task_moments, task_rates, task in zip(tasks, moments, rates, splits, strict=True):
        variances = [pooled(*split) for split in zip(task, unlike, strict=True)]
        # All runs that a model's variances are based on. At equally noisy rates, the variance is one estimate.
        bases = task[1].freedom.sum(axis=1) if unlike[1].models else np.full(len(models), task[1].freedom.sum())
        bases = bases / unlike[1].excess if unlike[1].rates else np.zeros(len(models))
        fits.append({})
        for row, (name, runs) in enumerate(models.items()):
            at = row, [task_rates.index(rate) for rate in runs.rates]
            placed = [Variances(split.values[at], split.freedom[at]) for split in variances]
            fits[-1][name] = _fit(
                runs, task_moments[name], placed, shared, float(bases[row]), pooled=not unlike[1].models
            )
    return fits


Moments = tuple[Array, Array, Array]
"""Means and variances of the runs that learn, and degrees of freedom, each [2, R]."""


def _placed(
    models: Mapping[str, Runs], moments: Mapping[str, Moments], rates: Sequence[float]
) -> tuple[Variances, Variances]:
    """Return the models' variances at all of the task's rates, of validation and of test scores."""
    values, degrees = np.full((2, len(models), len(rates)), math.nan), np.zeros((2, len(models), len(rates)))
    for row, (name, runs) in enumerate(models.items()):
        places = [rates.index(rate) for rate in runs.rates]
        _, values[:, row, places], degrees[:, row, places] = moments[name]
    degrees[~(values > 0)] = 0.0  # a model whose scores are all equal says nothing about the others' noise
    return Variances(values[0], degrees[0]), Variances(values[1], degrees[1])


def _moments(runs: Runs) -> Moments:
    """Return means and variances of the runs that learn, and degrees of freedom, each [2, R].

    Equal scores of a rate say nothing about its noise, and must not make that of the other rates seem smaller. So they have no
    degrees of freedom, unless the scores of every rate are equal.
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
    usable = (variances > 0) | ~(variances > 0).any(axis=1, keepdims=True)
    return means, variances, np.where(usable, np.maximum(count - 1, 0), 0)


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
    runs: Runs, moments: Moments, variances: Sequence[Variances], shared: float, base: float, *, pooled: bool
) -> Fit:
    """Fit the noise of one model, given the pooled variances, [R], of validation and test scores.

    Args:
        base: degrees of freedom of the test variances at all rates together, if they are not those at a single one.
    """
    means, _, freedom = moments
    learned = runs.learned
    # Equal scores show no noise, so a model whose scores are all equal, such as a perfect one, counts as noisy as the others.
    known = bool((freedom[1] > 0).any() and np.nansum(variances[1].values) > 0)
    # Rates share seeds, so their variances are not independent: together they have fewer degrees of freedom than their sum.
    number = max(1, int((freedom[1] > 0).sum()))
    upper = float(np.max(variances[1].freedom, where=freedom[1] > 0, initial=base)) / (1 + (number - 1) * shared**2)
    residuals = [
        np.where(learned, split - mean[:, None], 0.0)
        for split, mean in zip((runs.validation, runs.test), means, strict=True)
    ]
    scale = math.sqrt(float((residuals[0] ** 2).sum() * (residuals[1] ** 2).sum()))
    return Fit(
        present=learned if learned.any() else runs.present,
        means=np.where(np.isfinite(means), means, 0.0),  # a rate at which no run learned is not chosen
        deviations=np.sqrt(np.stack([split.values for split in variances])),
        freedom=upper if known else 0.0,
        degrees=np.minimum(variances[1].freedom, upper) if known else np.zeros(len(means[1])),
        correlation=float(np.clip((residuals[0] * residuals[1]).sum() / scale, -1, 1)) if scale > 0 else 0.0,
        shared=shared,
        pooled=pooled,
    )


def freedom_of(fit: Fit, weights: Array) -> float:
    """Return the degrees of freedom of a weighted sum of the rates' variances (Satterthwaite).

    Each is a factor with `Fit.freedom` that all rates have in common, times one of the rate.

    Args:
        weights: [R].
    """
    parts = weights * np.nan_to_num(fit.deviations[1] ** 2)
    used = weights > 0
    of_rates = ((parts[used] / parts.sum()) ** 2 * (1 / fit.degrees[used] - 1 / fit.freedom)).sum()
    return float(1 / (1 / fit.freedom + of_rates))
