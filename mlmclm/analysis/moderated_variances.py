"""Variances of single learning rates, which rest on few seeds, moderated by those of like runs.

A variance s^2 with d degrees of freedom is moderated by a mean s0^2 of several, which counts as d0 degrees of freedom:
s~^2 = (d0 s0^2 + d s^2) / (d0 + d). d0 is estimated from how much the variances differ beyond what their degrees of freedom
explain (Smyth 2004, *Linear models and empirical Bayes methods for assessing differential expression*, section 6.2). It is
infinite where they differ no more, and then they are pooled.

That is done twice. High rates are often noisier for all models of a task, so the ratios of the rates' variances are taken over
the models, and moderated by 1 (`pattern`). The variance of a model at a rate, divided by the rate's ratio, is moderated by the
mean over the model's rates. Both times a rate that seems to be noisier than the others stands for itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from mlmclm.results.measures import Array

NOISIER = 0.975
"""Level of the F test from which on a rate counts as noisier than the others."""
ROUNDS = 20
"""Steps that find the factors of models and rates."""

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
        ratios, _ = _apart(*_ratios(models), rates)
        runs += [(variances / ratios, freedom) for variances, freedom in models]
    return Alike(rates, _prior_freedom(runs))


def pattern(models: Sequence[Variances], like: Alike) -> Variances:
    """Return the moderated ratios of the rates' variances over the models of one task, and their degrees of freedom."""
    ratios, freedom = _ratios(models)
    if math.isinf(like.rates):
        return np.ones(len(ratios)), np.full(len(ratios), math.inf)
    return _apart(ratios, freedom, like.rates)


def moderated(variances: Array, freedom: Array, pattern: Variances, like: Alike) -> Variances:
    """Return the moderated variances of one model, and their degrees of freedom.

    Args:
        pattern: the ratios of the rates' variances, and their degrees of freedom.
    """
    ratios, known = pattern
    found, degrees = _apart(variances / ratios, freedom, like.runs)
    # A variance that stands for itself does not rest on the ratio.
    both = degrees * known / (degrees + known) if np.isfinite(known).all() else degrees
    return ratios * found, np.where(degrees == freedom, degrees, both)


def _apart(variances: Array, freedom: Array, prior: float) -> Variances:
    """Return moderated variances, where those that are larger than the others by an F test stand for themselves.

    They would be moderated too far down, and the rate may be the best; and they would make the others seem larger.
    """
    squares, rest = freedom * np.nan_to_num(variances), np.maximum(freedom.sum() - freedom, 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        alone = squares / freedom > special.fdtri(freedom, rest, NOISIER) * (squares.sum() - squares) / rest
    others = np.where(alone, 0.0, freedom)
    found = np.where(alone, variances, moderate(variances, others, prior))
    return found, np.where(alone, freedom, np.minimum(prior + others, others.sum()))


def _ratios(models: Sequence[Variances]) -> Variances:
    """Return the ratios of the rates' variances over models, and their degrees of freedom.

    They are the maximum likelihood estimates where a variance is a factor of the model times one of the rate.
    """
    variances = np.stack([np.nan_to_num(own) for own, _ in models])
    freedom = np.stack([freedom for _, freedom in models]) * (variances > 0).any(axis=1, keepdims=True)
    weights, ratios = freedom.sum(axis=0), np.ones(variances.shape[1])
    if not weights.any():
        return ratios, np.ones(len(ratios))
    for _ in range(ROUNDS):
        levels = (freedom * variances / ratios).sum(axis=1) / np.maximum(freedom.sum(axis=1), 1)
        relative = variances / np.where(levels > 0, levels, 1.0)[:, None]
        ratios = np.where(weights > 0, (freedom * relative).sum(axis=0) / np.maximum(weights, 1), 1.0)
    return ratios, weights


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
        own = _logs(variances, freedom)
        logs.append(((own - own.mean()) ** 2).sum())
        expected.append((float(use.sum() - 1), float(special.polygamma(1, freedom[use] / 2).mean())))
    total = sum(number for number, _ in expected)
    if not total:
        return math.inf
    excess = sum(logs) / total - sum(number * value for number, value in expected) / total
    return math.inf if excess <= 0 else 2 * _inverse_trigamma(excess)


def _logs(variances: Array, freedom: Array) -> Array:
    """Return unbiased estimates of the logarithms of the variances that are known."""
    use = (freedom > 0) & (variances > 0)
    half = freedom[use] / 2
    return np.asarray(np.log(variances[use]) - special.digamma(half) + np.log(half))


def _inverse_trigamma(value: float) -> float:
    x = 0.5 + 1 / value
    for _ in range(50):
        trigamma = float(special.polygamma(1, x))
        x += trigamma * (1 - trigamma / value) / float(special.polygamma(2, x))
    return x
