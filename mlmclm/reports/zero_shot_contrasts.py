"""Differences between models' zero-shot scores, over several pairs and tasks, with the noise of the examples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist, fmean

import numpy as np

from mlmclm.analysis.contrasts import PairOnTask, model_weights, weighted_sum
from mlmclm.analysis.effects import Effect
from mlmclm.reports.study_facts import ZeroShotFacts
from mlmclm.results.intervals import NAN, Estimate, estimate, student


def zero_shot_contrast(
    known: Mapping[tuple[str, str], ZeroShotFacts],
    parts: Sequence[PairOnTask],
    metric: str | None,
    confidence: float = 0.95,
) -> Estimate:
    """Estimate the weighted sum of differences of a metric, by default each task's main one.

    Models answer the same examples, so the values of examples are paired if they are known. If not, the standard errors come from
    the models' 95 % intervals, as if the scores were independent.

    Args:
        known: the results by (model, task).
    """
    effects = {}
    for task, weights in model_weights(parts).items():
        difference = _sum([(weight, known[model, task]) for model, weight in weights.items()], metric)
        effects["", task] = Effect(difference, difference, np.ones(1), 0.0)
    return weighted_sum(effects, {task: {"": 1.0} for _, task in effects}, confidence).whole


def _sum(models: Sequence[tuple[float, ZeroShotFacts]], metric: str | None) -> Estimate:
    entries = [(weight, result, result.entry(metric or result.main)) for weight, result in models]
    scores = [entry.get("score") for _, _, entry in entries]
    if any(score is None for score in scores):
        return estimate(NAN, NAN, NAN)
    value = math.fsum(
        weight * float(score) for (weight, _, _), score in zip(entries, scores, strict=True) if score is not None
    )
    lengths = {len(result.values) for _, result, _ in entries}
    paired = len(lengths) == 1 and min(lengths) > 1 and metric in (None, *(result.main for _, result, _ in entries))
    # A score that isn't the mean of its examples' values, such as a perplexity, is not paired.
    if paired and all(
        math.isclose(fmean(result.values), float(score or 0), abs_tol=1e-9)
        for (_, result, _), score in zip(entries, scores, strict=True)
    ):
        return student(np.sum([weight * np.asarray(result.values) for weight, result, _ in entries], axis=0).tolist())
    reach, shares, count = 2 * NormalDist().inv_cdf(0.975), [], math.inf
    for weight, _, entry in entries:
        low, high = entry.get("low"), entry.get("high")
        if low is None or high is None:
            return estimate(value, NAN, NAN)
        shares.append((weight * (high - low) / reach) ** 2)
        count = min(count, entry.get("examples") or math.inf)
    variance = math.fsum(shares)
    return estimate(value, math.sqrt(variance) if variance else NAN, max(1.0, count - 1))
