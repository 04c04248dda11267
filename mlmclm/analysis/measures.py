"""Scores of a cell as functions of example weights, as needed to resample examples.

A score is computed from the per-example columns of `Family.examples`; the weight of an example says how often it
counts. All functions are vectorised over a first axis of weight vectors, one per resample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mlmclm.errors import unknown
from mlmclm.results.metrics import metric_parts

Array = np.ndarray[Any, Any]
Measure = Callable[[Array], Array]
"""Maps weights [R, examples], which say how often each example counts, to scores [R]; 0 where a denominator is 0."""

CONSTANT = 1e-20
"""Relative threshold (share of the sum of squares) below which a variance counts as rounding error.

FP32 predictions that differ at all lie far above it.
"""


def measure(metric: str, columns: Mapping[str, Array], classes: int) -> Measure:
    """Return the named score, or the mean of the scores that `+` joins; see `measures`.

    Raises:
        UserError: these examples have no such score.
    """
    known = measures(columns, classes)
    for name in metric_parts(metric):
        if name not in known:
            raise unknown("metric", name, known)
    parts = [known[name] for name in metric_parts(metric)]
    return lambda weights: sum((part(weights) for part in parts), start=np.zeros(len(weights))) / len(parts)


def measures(columns: Mapping[str, Array], classes: int) -> dict[str, Measure]:
    """Return all scores that the columns (one value per example) allow, by name; `classes` is for classification."""
    if "correct" in columns:
        return _of_classes(columns, classes)
    if "prediction" in columns:
        x, y = (columns[name].astype(np.float64) for name in ("gold", "prediction"))
        return {
            "spearman": lambda weights: correlation(weights, ranks(weights, x), ranks(weights, y)),
            "pearson": lambda weights: correlation(weights, x, y),
        }
    if "words" in columns:
        gold, predicted, both = (columns[f"entities_{name}"] for name in ("gold", "predicted", "correct"))
        return {
            "f1": _ratio(2.0 * both, 1.0 * gold + predicted),
            "precision": _ratio(both, predicted),
            "recall": _ratio(both, gold),
            "accuracy": _ratio(columns["words_correct"], columns["words"]),
            "study.f1": weighted_mean(columns["study.f1"]),
        }
    return {name: weighted_mean(values) for name, values in columns.items()}


def outcome(metric: str, columns: Mapping[str, Array]) -> str | None:
    """Return the column of which a score is the mean, or None if the score is not a mean over examples."""
    if metric == "accuracy" and "correct" in columns:
        return "correct"
    return metric if metric in columns else None


def _of_classes(columns: Mapping[str, Array], classes: int) -> dict[str, Measure]:
    gold, predicted = (columns[name][:, None] == np.arange(classes) for name in ("gold", "prediction"))  # [n, classes]
    counted = np.concatenate((gold & predicted, gold, predicted), axis=1).astype(np.float64)  # [n, 3 x classes]

    def sums(weights: Array) -> list[Array]:
        """Count the correct predictions, the examples and the predictions of each class: [R, classes] each."""
        # One matrix product counts for all resamples and all classes at once.
        return np.split(weights @ counted, 3, axis=1)

    def f1(weights: Array) -> Array:
        right, true, called = sums(weights)
        return divided(2 * right, true + called)

    def matthews(weights: Array) -> Array:
        right, true, called = sums(weights)
        n = weights.sum(axis=1)
        covariance = right.sum(axis=1) * n - (true * called).sum(axis=1)
        # Gorodkin's multi-class form of Matthews' correlation; for two classes it is the usual one.
        spread = [n**2 - (side**2).sum(axis=1) for side in (true, called)]
        return divided(covariance, np.sqrt(spread[0] * spread[1]))

    found: dict[str, Measure] = {
        "accuracy": weighted_mean(columns["correct"]),
        "f1_macro": lambda weights: f1(weights).mean(axis=1),
        "matthews": matthews,
    }
    return found | ({"f1": lambda weights: f1(weights)[:, 1]} if classes == 2 else {})


def weighted_mean(values: Array) -> Measure:
    """Return the mean of a column over the examples that have a value."""
    present = ~np.isnan(values)
    return _ratio(np.where(present, values, 0.0), present)


def _ratio(above: Array, below: Array) -> Measure:
    """Return the ratio of two sums over examples."""
    both = np.stack((above, below), axis=1).astype(np.float64)  # [n, 2]

    def value(weights: Array) -> Array:
        total = weights @ both
        return divided(total[:, 0], total[:, 1])

    return value


def divided(above: Array, below: Array) -> Array:
    """Divide elementwise, with 0 where the denominator is not positive."""
    return np.divide(above, below, out=np.zeros_like(below), where=below > 0)


def correlation(weights: Array, x: Array, y: Array) -> Array:
    """Compute Pearson's correlation [R]; 0 where a side is constant up to rounding.

    Args:
        weights: [R, n].
        x, y: [n], or [R, n] if they differ between resamples.
    """
    total = weights.sum(axis=1)
    # The floors are taken before centring, from the magnitude of the values that rounding errors scale with.
    least = [CONSTANT * (weights * side**2).sum(axis=1) for side in (x, y)]
    x, y = (side - ((weights * side).sum(axis=1) / total)[:, None] for side in (x, y))
    spread = [(weights * side**2).sum(axis=1) for side in (x, y)]
    spread = [np.where(own > floor, own, 0.0) for own, floor in zip(spread, least, strict=True)]
    return divided((weights * x * y).sum(axis=1), np.sqrt(spread[0] * spread[1]))


def ranks(weights: Array, values: Array) -> Array:
    """Compute each example's mid-rank in every resample, [R, n]; ranks of examples with weight 0 are meaningless.

    Args:
        weights: [R, n]; an example counts as often as its weight says.
        values: [n].
    """
    # Ties share a group: the weights of equal values are summed, and the cumulative sum gives the examples below each
    # group.
    _, place = np.unique(values, return_inverse=True)
    order = np.argsort(place, kind="stable")
    starts = np.flatnonzero(np.diff(place[order], prepend=-1))
    together = np.add.reduceat(weights[:, order], starts, axis=1)  # [R, distinct values]
    below = np.cumsum(together, axis=1) - together
    return (below + (together + 1) / 2)[:, place]
