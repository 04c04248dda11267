"""Metric names, and the rules for choosing a learning rate by their scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Rule = Literal["mean", "per_seed", "on_test"]
"""Rule for choosing the best learning rate: by the mean over seeds, for each seed separately, or on the reported scores
(`mlmclm.analysis.selection`)."""
MAIN_METRICS = ("acc_norm", "acc", "exact_match", "f1", "against")
"""Metrics of zero-shot tasks, by priority: where only one metric is shown, it is the first of these that the task has."""


def metric_parts(metric: str) -> list[str]:
    """Return the scores that a metric averages: two for `accuracy+f1`, one for `accuracy`."""
    return metric.split("+")


def value_of(scores: Mapping[str, float], metric: str) -> float:
    """Compute a metric's value from a split's scores.

    Raises:
        KeyError: a score is missing.
    """
    parts = [float(scores[name]) for name in metric_parts(metric)]
    return sum(parts) / len(parts)
