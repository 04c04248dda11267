"""Metrics by name, and the rules by which their scores choose a learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Rule = Literal["mean", "per_seed"]
"""How the best learning rate is chosen: by the mean over seeds, or by every seed for itself (`mlmclm.analysis.selection`)."""

CORRELATIONS = frozenset({"matthews", "spearman", "pearson"})


def metric_parts(metric: str) -> list[str]:
    """The scores that a metric is the mean of: `accuracy+f1` is that of two, `accuracy` of one."""
    return metric.split("+")


def score_range(metric: str) -> tuple[float, float]:
    """The lowest and the highest value that a metric can have: -1 and 1 for a correlation, 0 and 1 for any other."""
    lows = [-1.0 if name in CORRELATIONS else 0.0 for name in metric_parts(metric)]
    return sum(lows) / len(lows), 1.0


def value_of(scores: Mapping[str, float], metric: str) -> float:
    """A metric's value.

    Raises:
        KeyError: a score isn't there.
    """
    parts = [float(scores[name]) for name in metric_parts(metric)]
    return sum(parts) / len(parts)
