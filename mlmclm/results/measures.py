"""Scores of a cell as functions of example weights, as needed to resample examples, and what families build them from.

A score is computed from the per-example columns of `PreparedTask.examples`, by the family's `measures`; the weight of an
example says how often it counts. All functions are vectorised over a first axis of weight vectors, one per resample.
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
Measures = Callable[[Mapping[str, Array], int], dict[str, Measure]]
"""Maps the columns of a cell's examples and its number of classes to its scores by name: `Family.measures`."""

CONSTANT = 1e-20
"""Relative threshold (share of the sum of squares) below which a variance counts as rounding error.

FP32 predictions that differ at all lie far above it.
"""


class WeightedMean:
    """The mean of a column over the examples that have a value, as a `Measure`."""

    def __init__(self, values: Array) -> None:
        present = ~np.isnan(values)
        self.values = values
        self._mean = ratio(np.where(present, values, 0.0), present)

    def __call__(self, weights: Array) -> Array:
        return self._mean(weights)


def measure(metric: str, known: Mapping[str, Measure]) -> Measure:
    """Return a cell's score by its name (`Family.measures`), or the mean of those that `+` joins.

    Raises:
        UserError: the cell has no such score.
    """
    for name in metric_parts(metric):
        if name not in known:
            raise unknown("metric", name, known)
    parts = [known[name] for name in metric_parts(metric)]
    if len(parts) == 1:
        return parts[0]
    return lambda weights: sum((part(weights) for part in parts), start=np.zeros(len(weights))) / len(parts)


def full_score(score: Measure, columns: Mapping[str, Array]) -> float:
    """Return a score of all examples, each counted once, given their `columns`."""
    return float(score(np.ones((1, len(next(iter(columns.values()))))))[0])


def ratio(above: Array, below: Array) -> Measure:
    """Return the ratio of two sums over examples, of values [n] each."""
    terms = np.stack((above, below), axis=1).astype(np.float64)  # [n, 2]

    def value(weights: Array) -> Array:
        total = weights @ terms
        return divided(total[:, 0], total[:, 1])

    return value


def divided(above: Array, below: Array) -> Array:
    """Divide elementwise (shapes are equal), with 0 where the denominator is not positive."""
    return np.divide(above, below, out=np.zeros_like(below), where=below > 0)


def correlation(weights: Array, x: Array, y: Array) -> Array:
    """Compute Pearson's correlation [R]; 0 where a side is constant up to rounding.

    Args:
        weights: [R, n].
        x, y: [n], or [R, n] if they differ between resamples.
    """
    total = weights.sum(axis=1)
    # The floors are taken before centring, from the magnitude of the values that rounding errors scale with.
    floors = [CONSTANT * (weights * side**2).sum(axis=1) for side in (x, y)]
    x, y = (side - ((weights * side).sum(axis=1) / total)[:, None] for side in (x, y))
    spread = [(weights * side**2).sum(axis=1) for side in (x, y)]
    spread = [np.where(variance > floor, variance, 0.0) for variance, floor in zip(spread, floors, strict=True)]
    return divided((weights * x * y).sum(axis=1), np.sqrt(spread[0] * spread[1]))


def resampled_ranks(weights: Array, values: Array) -> Array:
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
