"""The typical difference of two models on tasks like those of a study, which are treated as a sample of tasks.

The mean over tasks and its interval (`comparison`) are about the study's own tasks. The difference of two models on a task is normal
around a typical difference, with a variance between tasks on top of its own standard error. The variance is Paule and Mandel's (1982),
the interval Hartung and Knapp's (2001) with T - 1 degrees of freedom, never narrower than the tasks' own errors alone make it (Röver, Knapp
and Friede 2015). The variance that tasks share, from pretraining runs, is added: the scatter between tasks doesn't show it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
from scipy import optimize

from mlmclm.analysis.analyse import Analysis
from mlmclm.analysis.contrasts import mean_difference, weighted_sum
from mlmclm.analysis.results import columns, table
from mlmclm.results.intervals import NAN, TIE, Estimate, estimate
from mlmclm.results.measures import Array

COLUMNS = columns(
    "object: model_a model_b",
    "int64: tasks",
    "float64: typical typical_low typical_high typical_p between",
)


def typical(analysis: Analysis) -> pd.DataFrame:
    """Compare every pair of models on tasks like those of the study: model_a minus model_b.

    `typical` is the typical difference with its interval and p value, and `between` the standard deviation of true differences
    between tasks.
    """
    effects, tasks, rows = analysis.effects, sorted(analysis.families), []
    for a, b in itertools.combinations(sorted(analysis.groups), 2):
        differences = [mean_difference(effects, (a, b), [task]).whole for task in tasks]

        def weighted(weights: Array, a: str = a, b: str = b) -> Estimate:
            shares = zip(tasks, map(float, weights), strict=True)
            return weighted_sum(effects, {task: {a: share, b: -share} for task, share in shares}).whole

        mean, between = _typical_difference(differences, analysis.confidence, weighted)
        rows.append(
            {"model_a": a, "model_b": b, "tasks": len(tasks), "typical": mean.value, "typical_p": mean.p}
            | {"typical_low": mean.low, "typical_high": mean.high, "between": between}
        )
    return table(rows, COLUMNS)


def _typical_difference(
    differences: Sequence[Estimate], confidence: float = 0.95, weighted: Callable[[Array], Estimate] | None = None
) -> tuple[Estimate, float]:
    """Return the typical difference on tasks like these, and the standard deviation of true differences between tasks.

    Both are NaN for one task, or where a difference or its error is not known.

    Args:
        weighted: estimates a weighted mean of the differences, with the errors that they share; None if they are independent.
    """
    values = np.asarray([difference.value for difference in differences])
    variances = np.asarray([difference.error for difference in differences]) ** 2
    if len(values) < 2 or not np.isfinite(values).all() or not np.isfinite(variances).all():
        return estimate(NAN, NAN, NAN), NAN

    def spread(between: float) -> tuple[float, float]:
        """Return the weighted mean, and the weighted sum of squares around it."""
        weights = 1 / (variances + between)
        centre = float((weights * values).sum() / weights.sum())
        return centre, float((weights * (values - centre) ** 2).sum())

    freedom, between = len(values) - 1, 0.0
    if spread(0.0)[1] > freedom:
        upper = float(values.var(ddof=1)) + float(variances.max())
        while spread(upper)[1] > freedom:
            upper *= 2
        between = float(optimize.brentq(lambda value: spread(value)[1] - freedom, 0.0, upper, xtol=1e-18))
    centre, squares = spread(between)
    inverse = 1 / (variances + between)
    variance, degrees = max(1.0, squares / freedom) / float(inverse.sum()), float(freedom)
    if weighted is not None:
        shares = inverse / inverse.sum()
        combined = weighted(shares)
        shared = combined.error**2 - float((shares**2 * variances).sum())
        if shared > TIE * variance:
            variance, degrees = variance + shared, min(degrees, combined.freedom)
    return estimate(centre, math.sqrt(variance), degrees, confidence=confidence), math.sqrt(between)
