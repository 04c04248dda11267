"""Metrics that are added to those of a family: registered in this process, or from another package (`mlmclm.registry`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from mlmclm.registry import KINDS, Registry
from mlmclm.results.measures import Array, Measure


class Metric(ABC):
    """A score of a split, computed for the tasks whose `metric` names it. Their cells' keys include its code."""

    name: ClassVar[str]
    title: ClassVar[str]
    """Label in reports."""
    family: ClassVar[str]
    """Name of the family to whose tasks it applies."""
    signed: ClassVar[bool] = False
    """True if it lies between -1 and 1, rather than between 0 and 1. Higher is better."""

    @classmethod
    @abstractmethod
    def measure(cls, columns: Mapping[str, Array], classes: int) -> Measure:
        """Return the score as a function of example weights, as `Family.measures` does.

        Args:
            columns: the numeric columns of `PreparedTask.examples`.
            classes: the number of label names.
        """

    @classmethod
    def lacks(cls) -> list[str]:
        """Return the fault if a family has a score of this name, which would make scores and keys ambiguous."""
        taken = [family for family, kind in KINDS["family"].items() if cls.name in kind.metrics]
        return [f"has the name of a score that {', '.join(taken)} has already"] if taken else []


METRICS: Registry[type[Metric]] = KINDS["metric"]
"""The added metrics by name."""


def metrics_of(family: str) -> dict[str, type[Metric]]:
    """Return the metrics that are added to a family."""
    return {metric.name: metric for metric in METRICS.values() if metric.family == family}
