"""Variances of single learning rates, which rest on few seeds, moderated by those of like runs.

A variance s^2 with d degrees of freedom is moderated by a mean s0^2 of several, which counts as d0 degrees of freedom:
s~^2 = (d0 s0^2 + d s^2) / (d0 + d). d0 is estimated from how much the variances differ beyond what their degrees of freedom
explain (Smyth 2004, *Linear models and empirical Bayes methods for assessing differential expression*, section 6.2). It is
infinite where they differ no more, and then they are pooled.

That is done twice. High rates are often noisier for all models of a task, so the ratios of the rates' variances are taken over
the models, and moderated by 1 (`pattern`). The variance of a model at a rate, divided by the rate's ratio, is moderated by the
mean over the model's rates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from mlmclm.results.measures import Array

Variances = tuple[Array, Array]
"""Variances of one model at each rate and their degrees of freedom, each [R]."""


@dataclass(frozen=True)
class Alike:
    """How alike variances are, as degrees of freedom; infinite where they are equal.

    Attributes:
        rates: those of the means of the rates' variances over models.
        runs: those of the means of the models' variances over rates.
    """

    rates: float
    runs: float


def alike(tasks: Sequence[Sequence[Variances]]) -> Alike:
    """Estimate how alike the variances of the models on some tasks are."""
    rates = _prior_freedom([_ratios(models) for models in tasks])
    runs = []
    for models in tasks:
        ratios = moderate(*_ratios(models), rates)
        runs += [(variances / ratios, freedom) for variances, freedom in models]
    return Alike(rates, _prior_freedom(runs))


def pattern(models: Sequence[Variances], like: Alike) -> Variances:
    """Return the moderated ratios of the rates' variances over the models of one task, and their degrees of freedom."""
    ratios, freedom = _ratios(models)
    return moderate(ratios, freedom, like.rates), like.rates + freedom


def _ratios(models: Sequence[Variances]) -> Variances:
    """Return each rate's variance relative to the mean over rates, averaged over models, and its degrees of freedom."""
    shape = models[0][0].shape
    total, weights = np.zeros(shape), np.zeros(shape)
    for variances, freedom in models:
        mean = float((freedom * np.nan_to_num(variances)).sum() / max(1.0, freedom.sum()))
        if mean > 0:
            total += freedom * np.nan_to_num(variances) / mean
            weights += freedom
    if not weights.any():
        return np.ones(shape), np.ones(shape)
    return total / np.maximum(weights, 1), weights


def moderate(variances: Array, freedom: Array, prior: float) -> Array:
    """Return moderated variances, [R], from variances with their degrees of freedom and d0; NaN if there are none.

    A rate with no degrees of freedom has the mean of the others.
    """
    total = float(freedom.sum())
    own = np.where(freedom > 0, np.nan_to_num(variances), 0.0)
    pooled = float((freedom * own).sum() / total) if total else math.nan
    if math.isinf(prior):
        return np.full(own.shape, pooled)
    return np.asarray((prior * pooled + freedom * own) / (prior + freedom))


def _prior_freedom(samples: Sequence[Variances]) -> float:
    """Estimate d0; infinite if variances differ no more than chance explains.

    Each variance is taken relative to the mean of its sample, to which it is moderated.
    """
    logs, expected = [], []
    for variances, freedom in samples:
        use = (freedom > 0) & (variances > 0)
        if use.sum() < 2:
            continue
        half = freedom[use] / 2
        own = np.log(variances[use]) - special.digamma(half) + np.log(half)
        logs.append(((own - own.mean()) ** 2).sum())
        expected.append((float(use.sum() - 1), float(special.polygamma(1, half).mean())))
    total = sum(number for number, _ in expected)
    if not total:
        return math.inf
    excess = sum(logs) / total - sum(number * value for number, value in expected) / total
    return math.inf if excess <= 0 else 2 * _inverse_trigamma(excess)


def _inverse_trigamma(value: float) -> float:
    x = 0.5 + 1 / value
    for _ in range(50):
        trigamma = float(special.polygamma(1, x))
        x += trigamma * (1 - trigamma / value) / float(special.polygamma(2, x))
    return x
