"""Metrics that are added to a family's own; registered, or of another package (`mlmclm.registry`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from mlmclm.registry import KINDS, Registry
from mlmclm.results.measures import Measure
from mlmclm.results.metrics import metric_parts

Array = np.ndarray[Any, Any]


class Metric(ABC):
    """A score of a split. It is computed for the tasks whose `metric` names it, whose cells' keys then say its code."""

    name: ClassVar[str]
    title: ClassVar[str]
    """Label in reports."""
    family: ClassVar[str]
    """The family whose tasks it is for."""
    signed: ClassVar[bool] = False
    """True if it lies between -1 and 1, rather than between 0 and 1. Higher is better."""

    @classmethod
    @abstractmethod
    def measure(cls, columns: Mapping[str, Array], classes: int) -> Measure:
        """Return the score as a function of example weights, as `Family.measures` does.

        Args:
            columns: the numeric columns of `Family.examples`.
            classes: the number of label names.
        """


METRICS: Registry[type[Metric]] = KINDS["metric"]
"""The added metrics by name."""


def metrics_of(family: str) -> dict[str, type[Metric]]:
    """Return the metrics that are added to a family."""
    return {metric.name: metric for metric in METRICS.values() if metric.family == family}


def added_scores(metric: str, examples: Mapping[str, Array], classes: int) -> dict[str, float]:
    """Return the added scores that enter a task's metric, of all examples of a split."""
    numbers = {name: values for name, values in examples.items() if values.dtype != object}
    weights = np.ones((1, len(next(iter(examples.values())))))
    wanted = [name for name in metric_parts(metric) if name in METRICS]
    return {name: float(METRICS[name].measure(numbers, classes)(weights)[0]) for name in wanted}
