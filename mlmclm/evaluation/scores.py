"""Scores of a zero-shot task, with their intervals over examples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scipy import stats

from mlmclm.results.intervals import mean, student, within

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Scores:
    """The outcome of a task.

    Attributes:
        metrics: `score`, the ends `low` and `high` of its interval (None without one) and the number of `examples`.
        values: what the metrics are computed from, one value per example or unit.
    """

    metrics: dict[str, dict[str, float | int | None]]
    values: dict[str, list[Any]]


def over_examples(value: float, values: Sequence[Any]) -> dict[str, float | int | None]:
    """Return a score with its interval over examples, if it is the mean of their values."""
    entry: dict[str, float | int | None] = {"score": finite(value), "low": None, "high": None, "examples": len(values)}
    numbers = [float(item) for item in values if isinstance(item, bool | int | float)]
    if len(numbers) == len(values) > 1 and math.isclose(mean(numbers), value, rel_tol=1e-9, abs_tol=1e-12):
        if all(number in (0, 1) for number in numbers):
            # Student's interval would be a point if all answers are right, or all wrong.
            share = stats.binomtest(int(sum(numbers)), len(numbers)).proportion_ci(CONFIDENCE, method="wilson")
            low, high = share.low, share.high
        else:
            estimate = student(numbers, confidence=CONFIDENCE)
            if all(0 <= number <= 1 for number in numbers):
                estimate = within(estimate, 0.0, 1.0)
            low, high = estimate.low, estimate.high
        entry |= {"low": finite(low), "high": finite(high)}
    return entry


def finite(value: float) -> float | None:
    """Return a number, or None if JSON cannot represent it."""
    return float(value) if math.isfinite(value) else None
