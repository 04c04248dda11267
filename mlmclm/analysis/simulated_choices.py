"""The choice of the learning rate: which rates compete, and which one wins in each of many studies."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from mlmclm.results.intervals import TIE
from mlmclm.results.measures import Array
from mlmclm.results.metrics import Rule

ENOUGH = 0.5
"""Share of the runs at a rate that must have learned for the rate to compete, unless no rate reaches it."""


def competes(learned: Array, ran: Array) -> Array:
    """Return which learning rates compete, given the numbers of their runs that learned and of all, [..., R].

    Lost runs are left out before the choice, so that a rate which loses a few by chance is still judged by those that learn. But a
    rate at which most runs are lost does not compete.
    """
    share = learned / np.maximum(ran, 1)
    return np.asarray((share > 0) & (share >= np.minimum(ENOUGH, share.max(axis=-1, keepdims=True, initial=0.0))))


def competing_rates(counts: Mapping[float, tuple[int, int]]) -> set[float]:
    """Return the learning rates that compete, given the numbers of their runs that learned and of all, by rate."""
    learned, ran = np.asarray(list(counts.values())).reshape(-1, 2).T
    return {rate for rate, competing in zip(counts, competes(learned, ran), strict=True) if competing}


def choose(
    validation: Array, test: Array, present: Array, rule: Rule, settings: Array | None = None
) -> tuple[Array, Array]:
    """Choose learning rates in many studies at once, as `selection` does in one.

    Args:
        validation, test: scores [..., R, S]; any value where a run is not `present`.
        present: the runs to choose among, [R, S] or [..., R, S].
        settings: see `Runs`. Under `per_seed`, all seeds use the setting that is best at their own rates.

    Returns:
        The index of the rate chosen for each seed, [..., S], and whether the seed counts, [S] or [..., S].
    """
    if rule == "per_seed":
        if settings is not None:
            best = _best_setting(np.where(present, validation, -math.inf), settings)
            present = present & (settings == best[..., None])[..., None]
        return _first_best(np.where(present, validation, -math.inf), -2), np.asarray(present.any(axis=-2))
    best = _first_best(rate_means(test if rule == "on_test" else validation, present), -1)
    return np.repeat(best[..., None], validation.shape[-1], axis=-1), _at_rates(present, best[..., None, None])


def rate_means(scores: Array, present: Array) -> Array:
    """Return the mean score of the present runs at each rate, [..., R]; -inf where there is none. Both arguments are [..., R, S]."""
    count = present.sum(axis=-1)
    means = np.where(present, scores, 0.0).sum(axis=-1) / np.maximum(count, 1)
    return np.where(count > 0, means, -math.inf)


def _best_setting(scores: Array, settings: Array) -> Array:
    """Return the number of the setting with the most seeds and then the highest mean of their best scores, [...].

    Args:
        scores: [..., R, S]; -inf where a run has none.
    """
    tops = np.stack([scores[..., settings == number, :].max(axis=-2) for number in range(settings.max() + 1)], axis=-2)
    has = np.isfinite(tops)
    seeds = has.sum(axis=-1)
    means = np.where(has, tops, 0.0).sum(axis=-1) / np.maximum(seeds, 1)
    return _first_best(np.where(seeds == seeds.max(axis=-1, keepdims=True), means, -math.inf), -1)


def _at_rates(values: Array, rates: Array) -> Array:
    """Return the values [..., R, S] at a rate of each study, [..., 1, 1], or of each of its seeds, [..., 1, S]; [..., S]."""
    values = np.broadcast_to(values, (*rates.shape[:-2], *values.shape[-2:]))
    return np.asarray(np.take_along_axis(values, rates, axis=-2)[..., 0, :])


def _first_best(scores: Array, axis: int) -> Array:
    """Return the index of the first score that is the highest up to rounding."""
    return np.asarray((scores >= scores.max(axis=axis, keepdims=True) - TIE).argmax(axis=axis))
