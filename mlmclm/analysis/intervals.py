"""Intervals and corrections: the statistics that the rest of the analysis is made of.

A group is the scores of one (model, task) at its chosen learning rate, one score a fine-tuning seed; groups count as
independent. Sums are exact (`math.fsum`), so the order of the values never changes a bit of a result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from scipy import special

NAN = math.nan


@dataclass(frozen=True)
class Estimate:
    """A weighted sum of group means with its interval.

    Attributes:
        value: the weighted sum; NaN if a group is empty.
        error: its standard error; NaN if a group has fewer than two values.
        freedom: Welch-Satterthwaite degrees of freedom; NaN where `error` is NaN or 0.
        low, high: the two-sided interval; NaN where `error` is NaN.
        p: two-sided p value of "the value is 0"; NaN where `error` is NaN.
    """

    value: float
    error: float
    freedom: float
    low: float
    high: float
    p: float


def mean(values: Sequence[float]) -> float:
    """The mean, NaN if there are no values; the order of the values does not change a bit of it."""
    return math.fsum(values) / len(values) if values else NAN


def deviation(values: Sequence[float]) -> float:
    """The sample standard deviation (n - 1); NaN for fewer than two values."""
    if len(values) < 2:
        return NAN
    centre = mean(values)
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1))


def contrast(groups: Sequence[Sequence[float]], weights: Sequence[float], *, confidence: float = 0.95) -> Estimate:
    """A weighted sum of the means of independent groups, with unequal variances allowed.

    With group means m_i, sample variances s_i^2 and sizes n_i the value is sum w_i m_i, its variance sum v_i with v_i
    = w_i^2 s_i^2 / n_i, and its degrees of freedom (sum v_i)^2 / sum v_i^2 / (n_i - 1) (Satterthwaite 1946, Welch
    1947). It is exactly Student's interval for one group, and Welch's for two groups with weights 1 and -1. Where
    every group is constant the interval is the point itself.

    Args:
        groups: the values of each group.
        weights: one weight a group.
        confidence: of the two-sided interval, in (0, 1).

    Raises:
        ValueError: groups and weights differ in number.
    """
    value = math.fsum(weight * mean(group) for weight, group in zip(weights, groups, strict=True))
    if any(len(group) < 2 for group in groups) or not groups:
        return Estimate(value if groups else NAN, NAN, NAN, NAN, NAN, NAN)
    parts = [(weight * deviation(group)) ** 2 / len(group) for weight, group in zip(weights, groups, strict=True)]
    variance = math.fsum(parts)
    if variance == 0.0:
        return Estimate(value, 0.0, NAN, value, value, 1.0 if value == 0.0 else 0.0)
    # Shares, not squares of the parts: the squares of tiny variances would underflow.
    freedom = 1.0 / math.fsum(
        (part / variance) ** 2 / (len(group) - 1) for part, group in zip(parts, groups, strict=True)
    )
    error = math.sqrt(variance)
    half = error * float(special.stdtrit(freedom, 0.5 + confidence / 2))
    p = 2.0 * float(special.stdtr(freedom, -abs(value) / error))
    return Estimate(value, error, freedom, value - half, value + half, p)


def student(values: Sequence[float], *, confidence: float = 0.95) -> Estimate:
    """The mean with Student's t interval; one value has no interval (NaN), no value has no mean."""
    return contrast([values], [1.0], confidence=confidence)


def within(estimate: Estimate, lowest: float, highest: float) -> Estimate:
    """The estimate with an interval that stays within the range of the score.

    Student's interval is symmetric, and near a limit of the score it can pass it; then scores are skewed, and it also covers the
    truth too seldom. There the interval is taken on the logit scale and turned back, with the standard error of the delta method:
    u = (value - lowest) / (highest - lowest), logit(u) +- half / ((highest - lowest) u (1 - u)), with `half` Student's half
    width. For a correlation, whose range is -1 to 1, that is Fisher's z (1915). An interval that is within the range stays as it
    is.

    Source: Agresti, Categorical Data Analysis (2013), 1.4 and 3.1, for the logit of a proportion and the delta method.
    """
    if math.isnan(estimate.low) or (lowest <= estimate.low and estimate.high <= highest):
        return estimate
    width = highest - lowest
    share = (estimate.value - lowest) / width
    if not 0 < share < 1:  # every value is the limit, but for rounding
        return replace(estimate, low=estimate.value, high=estimate.value)
    half = (estimate.high - estimate.value) / (width * share * (1 - share))
    centre = math.log(share / (1 - share))
    low, high = (lowest + width * float(special.expit(end)) for end in (centre - half, centre + half))
    return replace(estimate, low=low, high=high)


def deviation_interval(sd: float, freedom: float, *, confidence: float = 0.95) -> tuple[float, float]:
    """The chi-square interval of a standard deviation with `freedom` degrees of freedom (normal values); NaN where
    there is none.

    With few seeds it is wide: for three seeds it spans from about half to six times the estimate.
    """
    if math.isnan(sd) or freedom < 1:
        return NAN, NAN
    tail = (1 - confidence) / 2
    return (
        sd * math.sqrt(freedom / float(special.chdtri(freedom, tail))),
        sd * math.sqrt(freedom / float(special.chdtri(freedom, 1 - tail))),
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment (Holm 1979) in the given order; NaN values stay NaN and are not counted as tests."""
    order = sorted((index for index, p in enumerate(p_values) if not math.isnan(p)), key=lambda index: p_values[index])
    adjusted = [NAN] * len(p_values)
    running = 0.0
    for rank, index in enumerate(order):
        running = max(running, min(1.0, (len(order) - rank) * p_values[index]))
        adjusted[index] = running
    return adjusted
