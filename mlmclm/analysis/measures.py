"""A cell's scores from what its examples got, where each example counts so often: what resampling examples needs.

The columns are those of `Family.examples`. All is vectorised over a first axis of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mlmclm.errors import unknown
from mlmclm.results.metrics import metric_parts

Array = np.ndarray[Any, Any]
Measure = Callable[[Array], Array]
"""[R, examples], how often each example counts -> [R], the score; 0 where nothing is there to be divided by."""

CONSTANT = 1e-20
"""Share of the squares' sum below which a variance is rounding: fp32 predictions that differ at all are far above."""


def measure(metric: str, columns: Mapping[str, Array], classes: int) -> Measure:
    """The score of that name, or the mean of those that `+` joins.

    Args:
        columns: by name, each with a value an example.
        classes: of classification.

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
    """All scores that the columns give, by name."""
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
    """The column that a score is the mean of; None where it is no mean over examples."""
    if metric == "accuracy" and "correct" in columns:
        return "correct"
    return metric if metric in columns else None


def _of_classes(columns: Mapping[str, Array], classes: int) -> dict[str, Measure]:
    gold, predicted = (columns[name][:, None] == np.arange(classes) for name in ("gold", "prediction"))  # [n, classes]
    counted = np.concatenate((gold & predicted, gold, predicted), axis=1).astype(np.float64)  # [n, 3 x classes]

    def sums(weights: Array) -> list[Array]:
        """Of each class how many were right, were of it, and were predicted so: [R, classes] each."""
        return np.split(weights @ counted, 3, axis=1)

    def f1(weights: Array) -> Array:
        right, true, called = sums(weights)
        return divided(2 * right, true + called)

    def matthews(weights: Array) -> Array:
        right, true, called = sums(weights)
        n = weights.sum(axis=1)
        covariance = right.sum(axis=1) * n - (true * called).sum(axis=1)
        spread = [n**2 - (side**2).sum(axis=1) for side in (true, called)]
        return divided(covariance, np.sqrt(spread[0] * spread[1]))

    found: dict[str, Measure] = {
        "accuracy": weighted_mean(columns["correct"]),
        "f1_macro": lambda weights: f1(weights).mean(axis=1),
        "matthews": matthews,
    }
    return found | ({"f1": lambda weights: f1(weights)[:, 1]} if classes == 2 else {})


def weighted_mean(values: Array) -> Measure:
    """The mean of a column over the examples that have a value."""
    present = ~np.isnan(values)
    return _ratio(np.where(present, values, 0.0), present)


def _ratio(above: Array, below: Array) -> Measure:
    """Of two sums over examples."""
    both = np.stack((above, below), axis=1).astype(np.float64)  # [n, 2]

    def value(weights: Array) -> Array:
        total = weights @ both
        return divided(total[:, 0], total[:, 1])

    return value


def divided(above: Array, below: Array) -> Array:
    """0 where there is nothing to divide by."""
    return np.divide(above, below, out=np.zeros_like(below), where=below > 0)


def correlation(weights: Array, x: Array, y: Array) -> Array:
    """Pearson's correlation [R]; 0 where a side is constant but for rounding.

    Args:
        weights: [R, n].
        x, y: [n], or [R, n] where they differ.
    """
    total = weights.sum(axis=1)
    least = [CONSTANT * (weights * side**2).sum(axis=1) for side in (x, y)]
    x, y = (side - ((weights * side).sum(axis=1) / total)[:, None] for side in (x, y))
    spread = [(weights * side**2).sum(axis=1) for side in (x, y)]
    spread = [np.where(own > floor, own, 0.0) for own, floor in zip(spread, least, strict=True)]
    return divided((weights * x * y).sum(axis=1), np.sqrt(spread[0] * spread[1]))


def ranks(weights: Array, values: Array) -> Array:
    """[R, n]: the mid-rank of each example among all, each counted so often as its weight says; of one that isn't there it
    means nothing.

    Args:
        weights: [R, n].
        values: [n].
    """
    _, place = np.unique(values, return_inverse=True)
    order = np.argsort(place, kind="stable")
    starts = np.flatnonzero(np.diff(place[order], prepend=-1))
    together = np.add.reduceat(weights[:, order], starts, axis=1)  # [R, distinct values]
    below = np.cumsum(together, axis=1) - together
    return (below + (together + 1) / 2)[:, place]
