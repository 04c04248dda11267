"""Sensitivity to seed and learning rate, against direct computation."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
from analysis_study import cell, synthetic_results
from scipy import stats

from mlmclm.analysis.analyse import analyse
from mlmclm.analysis.results import records
from mlmclm.results.chance import Chance

TASK = "pydocs-kind"


def stability(results: list[dict[str, Any]], baseline: str | None = None) -> dict[str, dict[str, Any]]:
    return {row["model"]: row for row in records(analyse(results, baseline).stability) if row["task"] == TASK}


def grid(model: str, scores: dict[float, list[float | None]]) -> list[dict[str, Any]]:
    return [
        cell(model, TASK, rate, seed, score, score) for rate, row in scores.items() for seed, score in enumerate(row)
    ]


SCORES: dict[float, list[float | None]] = {1e-4: [0.50, 0.54], 1e-3: [0.70, 0.74], 1e-2: [0.60, 0.50]}


def test_deviations_over_seeds_and_rates_are_what_they_say() -> None:
    row = stability(grid("m", SCORES))["m"]
    assert row["sd_seeds"] == pytest.approx(statistics.stdev([0.70, 0.74]))
    means = [0.52, 0.72, 0.55]
    # The seeds' variance, pooled over rates, moves each mean of two seeds by half of it.
    noise = statistics.fmean(statistics.variance(own) for own in SCORES.values())  # type: ignore[type-var]
    net = math.sqrt(statistics.variance(means) - noise / 2)
    assert row["sd_rates"] == pytest.approx(net)
    assert row["p_flat"] == pytest.approx(stats.f_oneway(*SCORES.values()).pvalue)
    assert row["range_rates"] == pytest.approx(0.20)
    assert row["regret"] == pytest.approx(0.72 - statistics.fmean(means))
    assert row["share_failed"] == row["failed"] == 0


def test_the_pooled_deviation_weighs_rates_by_their_degrees_of_freedom() -> None:
    uneven = {1e-4: [0.50, 0.54, 0.52], 1e-3: [0.70, None, 0.74], 1e-2: [0.6, None, None]}
    row = stability(grid("m", uneven))["m"]
    pooled = math.sqrt((2 * statistics.variance([0.50, 0.54, 0.52]) + statistics.variance([0.70, 0.74])) / 3)
    assert row["sd_seeds_pooled"] == pytest.approx(pooled)
    assert row["sd_seeds_pooled_low"] == pytest.approx(pooled * math.sqrt(3 / stats.chi2.ppf(0.975, 3)))
    assert row["sd_seeds_pooled_high"] == pytest.approx(pooled * math.sqrt(3 / stats.chi2.ppf(0.025, 3)))


def test_divergence_counts_as_a_score_of_zero_where_a_rate_is_picked_blindly() -> None:
    row = stability(grid("m", SCORES | {1e-1: [None, None]}))["m"]
    assert row["share_failed"] == pytest.approx(2 / 8) and row["diverged"] == 2
    low, high = stats.beta.ppf([0.025, 0.975], [2, 3], [7, 6])
    assert (row["share_failed_low"], row["share_failed_high"]) == pytest.approx((low, high))
    assert row["regret"] == pytest.approx(0.72 - (0.52 + 0.72 + 0.55 + 0.0) / 4)
    assert row["sd_rates"] == stability(grid("m", SCORES))["m"]["sd_rates"]


def test_what_is_at_stake_is_relative_to_the_gain_over_the_baseline() -> None:
    flat = {1e-4: [0.40, 0.40], 1e-3: [0.42, 0.42], 1e-2: [0.38, 0.38]}
    made = grid("m", SCORES) + grid("untrained", flat)
    table = stability(made, "untrained")
    (gain,) = (row["difference"] for row in records(analyse(made, "untrained").claims))
    assert table["m"]["gain_at_stake"] == pytest.approx(table["m"]["sd_rates"] / gain)
    assert gain == pytest.approx(0.72 - 0.42, abs=0.02)
    assert math.isnan(table["untrained"]["gain_at_stake"])
    assert math.isnan(stability(grid("m", flat) + grid("untrained", SCORES), "untrained")["m"]["gain_at_stake"])


def test_one_seed_one_rate_or_nothing_but_divergence_leave_deviations_unknown() -> None:
    row = stability(grid("m", {1e-4: [0.5]}))["m"]
    assert math.isnan(row["sd_seeds"]) and math.isnan(row["sd_rates"]) and math.isnan(row["sd_seeds_pooled"])
    assert row["range_rates"] == 0
    lost = stability(grid("m", {1e-4: [None], 1e-3: [None]}))["m"]
    assert lost["share_failed"] == 1
    unknown = ("sd_rates", "range_rates", "regret")
    assert all(math.isnan(lost[name]) for name in unknown), "the regret of a model without any score was 0"


def test_equal_scores_over_seeds_do_not_show_how_large_the_deviation_is() -> None:
    row = stability(grid("m", {1e-4: [0.5, 0.5, 0.5], 1e-3: [0.6, 0.6, 0.6]}))["m"]
    assert row["sd_seeds"] == row["sd_seeds_pooled"] == 0
    ends = [f"sd_seeds{pooled}_{end}" for pooled in ("", "_pooled") for end in ("low", "high")]
    assert all(math.isnan(row[name]) for name in ends)


def test_a_rate_with_one_seed_shows_no_noise_beside_scores_that_differ_by_rounding() -> None:
    row = stability(grid("m", {1e-4: [0.5, None], 1e-3: [0.7, 0.7 + 1e-8]}))["m"]
    assert math.isnan(row["sd_seeds_pooled_low"]) and math.isnan(row["sd_seeds_pooled_high"])


def test_known_noise_is_found_again() -> None:
    made = synthetic_results({"a": 0.8}, seeds=200, noise=0.01)
    row = stability(made)["a"]
    assert row["sd_seeds_pooled_low"] < 0.01 < row["sd_seeds_pooled_high"]
    assert row["sd_rates"] == pytest.approx(statistics.stdev([0.76, 0.78, 0.80, 0.78]), abs=0.002)


def test_where_each_seed_has_its_own_rate_the_deviation_is_that_of_the_picked_runs() -> None:
    """Rates were taken with other seeds' runs, and a seed whose runs had all failed ended the analysis."""
    scores: dict[float, list[float | None]] = {1e-4: [0.70, 0.80, 0.74, 0.30], 1e-3: [0.76, 0.73, 0.75, 0.31]}
    (row,) = records(analyse(grid("m", scores), rule="per_seed", chances={TASK: Chance(0.4, "")}).stability)
    assert row["failed"] == 2 and row["sd_seeds"] == pytest.approx(statistics.stdev([0.76, 0.80, 0.75]))
