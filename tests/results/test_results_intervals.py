"""The statistics agree with scipy, with the textbook, and with simulation."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from scipy import stats

from mlmclm.analysis.contrasts import weighted_sum
from mlmclm.analysis.effects import Effect
from mlmclm.results.intervals import (
    Estimate,
    deviation,
    deviation_interval,
    estimate,
    holm,
    mean,
    student,
    within,
)
from mlmclm.tasks.declaration import FAMILIES


def contrast(groups: Sequence[Sequence[float]], weights: Sequence[float]) -> Estimate:
    """A weighted sum of the means of independent groups."""
    scores = {("m", str(place)): student(group) for place, group in enumerate(groups)}
    effects = {pair: Effect(own, own, np.ones(1), 0.0) for pair, own in scores.items()}
    return weighted_sum(effects, {str(place): {"m": weight} for place, weight in enumerate(weights)}).whole


A = [0.71, 0.74, 0.69, 0.73, 0.72]
B = [0.61, 0.68, 0.66]


def test_one_group_gives_students_interval() -> None:
    expected = stats.t.interval(0.95, len(A) - 1, loc=statistics.fmean(A), scale=stats.sem(A))
    found = student(A)
    assert (found.low, found.high) == pytest.approx(expected, rel=1e-12)
    assert found.value == pytest.approx(statistics.fmean(A))
    assert found.p == pytest.approx(stats.ttest_1samp(A, 0).pvalue, rel=1e-9)


def test_two_groups_give_welchs_test_and_interval() -> None:
    expected = stats.ttest_ind(A, B, equal_var=False)
    found = contrast([A, B], [1, -1])
    assert found.p == pytest.approx(expected.pvalue, rel=1e-9)
    assert found.freedom == pytest.approx(expected.df, rel=1e-12)
    interval = expected.confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), rel=1e-9)


def test_a_mean_over_equal_variance_groups_has_the_pooled_closed_form() -> None:
    groups = [[level + step for step in (-0.01, 0.0, 0.01)] for level in (0.2, 0.5, 0.8, 0.9)]
    found = contrast(groups, [0.25] * 4)
    # Four groups of three with the same variance: 8 degrees of freedom, variance s^2 / (4 * 3).
    half = stats.t.ppf(0.975, 8) * 0.01 / math.sqrt(12)
    assert found.freedom == pytest.approx(8)
    assert (found.low, found.high) == pytest.approx((0.6 - half, 0.6 + half))


def test_the_interval_of_a_mean_over_tasks_covers_the_truth_as_often_as_it_says() -> None:
    generator = random.Random(1)
    truth, spread = [0.4, 0.6, 0.7, 0.9], [0.002, 0.02, 0.01, 0.005]
    hits = 0
    rounds = 3000
    for _ in range(rounds):
        groups = [[generator.gauss(m, s) for _ in range(4)] for m, s in zip(truth, spread, strict=True)]
        found = contrast(groups, [0.25] * 4)
        hits += found.low <= statistics.fmean(truth) <= found.high
    assert 0.935 <= hits / rounds <= 0.975


def test_one_value_has_no_interval_and_none_has_no_mean() -> None:
    single = student([0.5])
    assert single.value == 0.5
    assert all(math.isnan(value) for value in (single.low, single.high, single.error, single.p))
    assert math.isnan(student([]).value)
    assert math.isnan(mean([])) and math.isnan(deviation([0.5]))
    assert math.isnan(contrast([A, [0.5]], [1, -1]).low)


def no_interval(found: Estimate) -> bool:
    return all(math.isnan(number) for number in (found.error, found.freedom, found.low, found.high, found.p))


def test_equal_values_have_no_interval_and_no_p() -> None:
    """Two models one example of 71 apart, with two equal seeds each, were said to differ with p < 0.001."""
    same = contrast([[51 / 71, 51 / 71], [50 / 71, 50 / 71]], [1, -1])
    assert same.value == pytest.approx(1 / 71) and no_interval(same)
    assert no_interval(student([0.5, 0.5])) and student([0.5, 0.5]).value == 0.5
    assert no_interval(contrast([[0.5, 0.5], [0.5, 0.5]], [1, -1]))


def test_values_that_are_equal_up_to_rounding_are_equal() -> None:
    assert 0.1 + 0.2 != 0.3
    assert no_interval(student([0.1 + 0.2, 0.3])) and no_interval(contrast([[0.1 + 0.2, 0.3], [0.4, 0.4]], [1, -1]))
    assert math.isnan(deviation_interval(deviation([0.1 + 0.2, 0.3]), 1)[0])
    assert no_interval(student([0.5, 0.5 + 1e-9])) and no_interval(contrast([[27.4, 27.4 + 1e-9], A], [1, -1]))
    neighbours = np.float32(0.7), np.nextafter(np.float32(0.7), np.float32(1))
    assert no_interval(student([float(score) for score in neighbours])), "the same predictions in fp32"
    assert math.isfinite(student([3e-9, 4e-9]).low), "small numbers that differ"
    assert math.isfinite(contrast([[0.5, 0.5 + 1e-6], A], [1, -1]).low), "one example of a million"


def rounded_scores(draws: np.random.Generator, rounds: int, deviations: Sequence[float], seeds: int) -> tuple[Any, Any]:
    """Scores in examples of a small test set, [rounds, groups, seeds], and the true means, [rounds, groups]."""
    truth = 40 + draws.random((rounds, len(deviations)))
    noise = np.array(deviations)[:, None] * draws.standard_normal((rounds, len(deviations), seeds))
    return np.round(truth[:, :, None] + noise), truth


def test_one_group_of_equal_values_among_several_counts_with_the_mean_variance_of_the_others() -> None:
    other = [0.2, 0.21, 0.25, 0.22]
    found = contrast([A, B, [0.5, 0.5, 0.5], other], [0.25, 0.25, -0.25, 0.25])
    variances = [statistics.variance(group) for group in (A, B, other)]
    parts = [s2 / n / 16 * 4 / 3 for s2, n in zip(variances, (5, 3, 4), strict=True)]
    assert found.error == pytest.approx(math.sqrt(sum(parts)))
    freedom = sum(parts) ** 2 / sum(part**2 / (n - 1) for part, n in zip(parts, (5, 3, 4), strict=True))
    assert found.freedom == pytest.approx(freedom)
    half = stats.t.ppf(0.975, freedom) * math.sqrt(sum(parts))
    assert (found.low, found.high) == pytest.approx((found.value - half, found.value + half))
    assert no_interval(contrast([A, B, [0.5, 0.5], [0.4, 0.4]], [1, 1, -1, -1]))


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_a_mean_over_tasks_of_which_one_has_equal_scores_covers_the_truth(seeds: int) -> None:
    scores, truth = rounded_scores(np.random.default_rng(1), 60_000, (0.8,) * 8, seeds)
    one = (np.ptp(scores, axis=2) == 0).sum(axis=1) == 1
    scores, truth = scores[one][:1500], truth[one][:1500]
    weights = [0.25] * 4 + [-0.25] * 4
    true = truth @ np.array(weights)
    found = [contrast(groups, weights) for groups in scores.tolist()]
    covered = statistics.fmean(own.low <= goal <= own.high for own, goal in zip(found, true, strict=True))
    assert len(found) > 1000 and covered > 0.94


def test_the_order_of_the_values_changes_no_bit() -> None:
    draws = random.Random(2)
    values = [draws.random() for _ in range(50)]
    assert student(values) == student(values[::-1]) and student(values).error > 0


def test_the_interval_of_a_deviation_is_the_chi_square_one() -> None:
    sd, n = 0.02, 5
    low, high = deviation_interval(sd, n - 1)
    assert low == pytest.approx(sd * math.sqrt((n - 1) / stats.chi2.ppf(0.975, n - 1)))
    assert high == pytest.approx(sd * math.sqrt((n - 1) / stats.chi2.ppf(0.025, n - 1)))
    assert math.isnan(deviation_interval(math.nan, 4)[0]) and math.isnan(deviation_interval(0.1, 0)[1])


def test_the_interval_of_a_deviation_covers_it_as_often_as_it_says() -> None:
    draws = np.random.default_rng(0).normal(0, 2.0, size=(4000, 4))
    inside = [low <= 2.0 <= high for low, high in (deviation_interval(deviation(list(row)), 3) for row in draws)]
    assert 0.935 <= statistics.fmean(inside) <= 0.965


def test_holms_correction_is_the_textbooks() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    corrected = holm([0.01, math.nan, 0.04])
    assert corrected[0] == pytest.approx(0.02) and math.isnan(corrected[1]) and corrected[2] == pytest.approx(0.04)
    assert holm([]) == []


def test_an_interval_that_would_leave_the_range_is_the_delta_method_s_on_the_logit_scale() -> None:
    """`98.50 [95.45, 101.55]` was reported."""
    values = [0.98, 0.975, 1.0]
    plain = student(values)
    assert plain.high > 1
    found = within(plain, 0, 1)
    m, error = statistics.fmean(values), stats.sem(values)
    half = stats.t.ppf(0.975, 2) * error / (m * (1 - m))
    logit = math.log(m / (1 - m))
    assert (found.low, found.high) == pytest.approx([1 / (1 + math.exp(-end)) for end in (logit - half, logit + half)])
    assert 0 < found.low < m < found.high < 1
    assert (found.value, found.error, found.p) == (plain.value, plain.error, plain.p)


def test_of_a_correlation_it_is_fisher_s_z() -> None:
    values = [-0.99, -0.93, -0.9, -0.995]
    found = within(student(values), -1, 1)
    r, error = statistics.fmean(values), stats.sem(values)
    half = stats.t.ppf(0.975, 3) * error / (1 - r * r)
    expected = (math.tanh(math.atanh(r) - half), math.tanh(math.atanh(r) + half))
    assert (found.low, found.high) == pytest.approx(expected)


def test_an_interval_within_the_range_stays_student_s_to_the_bit() -> None:
    assert within(student(A), 0, 1) == student(A)
    assert within(student([0.01, 0.02, -0.03]), -1, 1) == student([0.01, 0.02, -0.03])
    assert math.isnan(within(student([1.0]), 0, 1).low)


def test_the_same_score_of_every_seed_has_no_interval_at_the_limits_either() -> None:
    for limit in (0.0, 1.0):
        found = within(student([limit] * 3), 0, 1)
        assert found.value == limit and no_interval(found)


def test_no_interval_of_any_scores_leaves_the_range_or_misses_its_mean() -> None:
    draws = np.random.default_rng(4)
    for _ in range(500):
        values = np.round(draws.beta(5, 0.2, size=draws.integers(2, 6)), draws.integers(2, 17)).tolist()
        found = within(student(values), 0, 1)
        assert 0 <= found.low <= found.value <= found.high <= 1 or (no_interval(found) and np.ptp(values) < 1.2e-7)


def test_near_the_limit_it_covers_the_truth_more_often_than_student_s_interval_cut_there() -> None:
    draws = np.random.default_rng(0).beta(100, 1.5, size=(4000, 3))
    truth = 100 / 101.5
    plain = [student(row) for row in draws.tolist()]
    cut = statistics.fmean(one.low <= truth <= one.high for one in plain)
    found = statistics.fmean(one.low <= truth <= one.high for one in (within(one, 0, 1) for one in plain))
    assert cut < 0.925
    assert 0.93 < found < 0.96


def test_metrics_have_the_ranges_of_their_scores() -> None:
    ranges = {
        (family, metric): FAMILIES[f"sequence-{family}"].score_range(metric)
        for family, metric in (
            ("classification", "accuracy"), ("classification", "accuracy+f1"), ("classification", "matthews"),
            ("classification", "accuracy+matthews"), ("regression", "pearson+spearman"),
        )
    }  # fmt: skip
    assert list(ranges.values()) == [(0, 1), (0, 1), (-1, 1), (-0.5, 1), (-1, 1)]


def test_at_a_limit_of_the_score_value_and_interval_end_there() -> None:
    for value in (0.9999, 1.0, 1.0001):
        found = within(estimate(value, 0.002, 4), 0, 1)
        assert (found.value, found.high) == (min(value, 1), 1)
        assert found.low == pytest.approx(value - 0.002 * stats.t.ppf(0.975, 4))
    assert math.isnan(within(estimate(27.1, 0.2, 4), 0, 1).low), "a score of another range"
