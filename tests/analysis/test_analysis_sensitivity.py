"""Sensitivity to the learning rate corrected for seed noise, and what a study can find, against other libraries and simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.meta_analysis import combine_effects
from statsmodels.stats.power import TTestIndPower

from mlmclm.analysis.contrasts import mean_difference
from mlmclm.analysis.effects import Effect
from mlmclm.analysis.model_runs import Runs
from mlmclm.analysis.power import seeds_or_obstacle, smallest_difference
from mlmclm.analysis.seed_noise import fit_tasks
from mlmclm.analysis.sensitivity import _noncentral, degrees_between, sensitivity, spread_interval
from mlmclm.analysis.statistics.typical import _typical_difference
from mlmclm.results.intervals import NAN, estimate

RATES = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4)


def drawn(draws: np.random.Generator, means: np.ndarray, seeds: int) -> list[dict[str, float]]:
    """The sensitivities of four models with these means and noise of standard deviation 1."""
    runs = {}
    for number in range(4):
        test = means[:, None] + draws.standard_normal((len(RATES), seeds))
        runs[str(number)] = Runs(RATES, test, test, np.zeros(test.shape, bool))
    return [sensitivity(runs[name], fit, draws=200) for name, fit in fit_tasks([runs])[0].items()]


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_a_flat_curve_is_not_told_from_0_and_its_range_is_that_of_noise(seeds: int) -> None:
    draws = np.random.default_rng(seeds)
    found = [row for _ in range(40) for row in drawn(draws, np.zeros(6), seeds)]
    assert np.mean([row["sd_rates_low"] == 0 for row in found]) >= 0.95
    assert np.mean([row["share_level"] == 1 for row in found]) >= 0.87
    expected = np.mean(np.ptp(draws.standard_normal((4_000, 6, seeds)).mean(axis=2), axis=1))
    assert np.median([row["range_flat"] for row in found]) == pytest.approx(expected, rel=0.15)


def test_a_flat_curve_whose_noise_grows_with_the_rate_is_not_told_from_0() -> None:
    draws, found = np.random.default_rng(3), []
    for _ in range(50):
        noise = draws.standard_normal((4, len(RATES), 3)) * np.linspace(0.3, 2.0, 6)[:, None]
        runs = {str(number): Runs(RATES, own, own, np.zeros(own.shape, bool)) for number, own in enumerate(noise)}
        found += [sensitivity(runs[name], fit, draws=50) for name, fit in fit_tasks([runs])[0].items()]
    assert np.mean([row["sd_rates_low"] == 0 for row in found]) >= 0.95


def test_the_degrees_of_freedom_between_noisy_means_are_those_of_box() -> None:
    assert degrees_between(np.ones(6)) == pytest.approx(5)
    assert degrees_between(np.asarray([1e6, 1, 1, 1])) == pytest.approx(1, rel=1e-3)
    variances = np.asarray([0.5, 1.0, 4.0])
    drawn = (np.random.default_rng(0).standard_normal((200_000, 3)) * np.sqrt(variances)).var(axis=1, ddof=1)
    assert degrees_between(variances) == pytest.approx(2 * drawn.mean() ** 2 / drawn.var(), rel=0.03)


def test_failed_runs_do_not_hide_which_rates_are_below_the_best() -> None:
    """Three runs failed; those that learned show rates 20 deviations below the best."""
    draws = np.random.default_rng(4)
    scores = -0.2 * abs(np.arange(6) - 3)[:, None] + 0.01 * draws.standard_normal((6, 5))
    failed = np.zeros((6, 5), bool)
    failed[[0, 2, 5], [1, 3, 0]] = True
    runs = Runs(RATES, np.where(failed, -2.0, scores), np.where(failed, -2.0, scores), failed)
    assert sensitivity(runs, fit_tasks([{"m": runs}])[0]["m"])["share_level"] == pytest.approx(1 / 6)


def test_the_interval_of_a_curve_s_deviation_covers_it() -> None:
    draws, means = np.random.default_rng(9), np.asarray([-2.0, -1, 0, 1, 0, -1])
    found = [row for _ in range(40) for row in drawn(draws, means, 3)]
    true = means.std(ddof=1)
    assert np.mean([row["sd_rates_low"] <= true <= row["sd_rates_high"] for row in found]) >= 0.93
    assert np.mean([row["sd_rates"] for row in found]) == pytest.approx(true, rel=0.1)


@pytest.mark.parametrize("size", [20.0, 1e5])
def test_the_interval_of_a_spread_covers_it_and_not_more(size: float) -> None:
    draws = np.random.default_rng(0)
    noise = draws.chisquare(12, 300) / 12
    ratios = draws.noncentral_chisquare(5, size, 300) / 5 / noise
    ends = np.asarray([spread_interval(ratio, 5, 12) for ratio in ratios])
    inside = (ends[:, 0] <= size / noise) & (size / noise <= ends[:, 1])
    assert 0.92 <= inside.mean() <= 0.98, "the noncentrality's own interval in units of the estimated noise covers .99"


def test_a_spread_s_interval_begins_at_0_where_an_f_test_does_not_reject() -> None:
    edge = stats.f.isf(0.025, 5, 12)
    assert spread_interval(0.98 * edge, 5, 12)[0] == 0 < spread_interval(1.02 * edge, 5, 12)[0]
    lucky, usual = (spread_interval(ratio, 5, 12) for ratio in (0.01, stats.f.ppf(0.16, 5, 12)))
    assert lucky == usual and lucky[0] == 0 < lucky[1], "means that are closer than their noise show no equality"
    assert spread_interval(stats.f.ppf(0.3, 5, 12), 5, 12)[1] > lucky[1]
    sizes = np.asarray([900.0, 1100.0])
    for value in (850.0, 1000.0, 1150.0):
        found = _noncentral(np.full(2, value), 5, sizes)
        assert found == pytest.approx(stats.ncx2.cdf(value, 5, sizes), abs=2e-3)


@pytest.mark.parametrize("values", [[0.3, 0.1, 0.5, -0.2], [0.3, 0.31, 0.29, 0.3]])
def test_the_typical_difference_is_a_meta_analysis(values: list[float]) -> None:
    errors = [0.05, 0.1, 0.08, 0.07]
    found, between = _typical_difference(
        [estimate(value, error, 10) for value, error in zip(values, errors, strict=True)]
    )
    other = combine_effects(np.asarray(values), np.asarray(errors) ** 2, method_re="iterated", use_t=True)
    table = other.summary_frame().loc["random effect wls"]
    assert found.value == pytest.approx(table["eff"], rel=1e-6) and between**2 == pytest.approx(other.tau2, abs=1e-6)
    if between > 0:
        assert (found.low, found.high) == pytest.approx((table["ci_low"], table["ci_upp"]), rel=1e-4)
    else:
        assert found.error == pytest.approx(1 / math.sqrt(sum(error**-2 for error in errors))), "never below the errors"


def test_one_task_has_no_typical_difference() -> None:
    assert _typical_difference([estimate(0.1, 0.1, 3)])[1] is NAN


def test_the_smallest_difference_has_the_power_of_a_t_test() -> None:
    for seeds in (3, 5, 10):
        found = smallest_difference(math.sqrt(2 / seeds), 2 * (seeds - 1), 0.05)
        assert found == pytest.approx(TTestIndPower().solve_power(nobs1=seeds, alpha=0.05, power=0.8), rel=1e-4)


def test_the_smallest_difference_with_hardly_any_degrees_of_freedom_is_large_or_not_known() -> None:
    ordinary = smallest_difference(1.0, 4, 1e-4)
    for freedom in (2.0, 1.0, 0.7, 0.3, 0.05):
        found = smallest_difference(1.0, freedom, 1e-4)
        assert math.isnan(found) or found > ordinary


def test_more_seeds_find_a_difference_unless_the_test_set_is_too_small() -> None:
    first, second = (Effect(estimate(0.5, math.sqrt(1 / 3), 2), 0.0, np.ones(1), 0.0) for _ in range(2))

    def needed(one: Effect, other: Effect) -> int | str:
        between = mean_difference({("a", "t"): one, ("b", "t"): other}, ("a", "b"), ["t"])
        return seeds_or_obstacle(1.5, [between], 3, 0.05)

    asked = math.ceil(TTestIndPower().solve_power(effect_size=1.5, alpha=0.05, power=0.8))
    assert needed(first, second) == asked
    folds = np.random.default_rng(0).standard_normal(100)
    both = [Effect(first.seeds, 0.0, np.ones(1), 0.0, own) for own in (folds, -folds)]
    assert needed(both[0], both[1]) == "test sets"
    silent = Effect(estimate(0.5, NAN, NAN), NAN, np.ones(1), NAN)
    assert needed(first, silent) == "noise"
