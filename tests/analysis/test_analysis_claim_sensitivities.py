"""Tests of the sensitivity to the learning rate, against simulation with equal curves whose runs fail at high rates."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from mlmclm.analysis.claim_sensitivities import RateVariance, _permuted, sensitivity_test
from mlmclm.analysis.contrasts import PairOnTask
from mlmclm.analysis.model_runs import Runs
from mlmclm.results.measures import Array

RATES = (1e-5, 2e-5, 4e-5, 8e-5, 1.6e-4)
PEAK = -abs(np.arange(5) - 2.0)[:, None]


def variance(scores: Array) -> RateVariance:
    runs = Runs(RATES[: len(scores)], scores, scores, np.zeros(scores.shape, bool))
    noise = scores.var(axis=1, ddof=1).mean() / scores.shape[1]
    return RateVariance(tuple(runs.rates), float(scores.mean(axis=1).var(ddof=1) - noise), runs)


def p_of(one: Array, other: Array, draws: int = 400) -> float:
    known = {"a": variance(one), "b": variance(other)}
    return sensitivity_test(lambda model, _: known[model], [PairOnTask("a", "b", "t", 1.0)], draws).p


@pytest.mark.parametrize(("seeds", "drop"), [(3, 0.0), (3, 4.0), (5, 15.0)])
def test_equal_curves_whose_runs_fail_at_high_rates_are_seldom_told_apart(seeds: int, drop: float) -> None:
    draws, fails = np.random.default_rng(0), np.linspace(0, 0.3, 5)[:, None]
    claims = []
    for _ in range(200):
        shape = (2, 5, seeds)
        scores = PEAK + draws.standard_normal(shape) - drop * (draws.random(shape) < fails)
        claims.append(p_of(scores[0], scores[1] + 7, draws=200) < 0.05)
    assert np.mean(claims) <= 0.08, "at most 6 % of many studies"


def test_a_steep_curve_is_told_from_a_flat_one_and_the_deviations_are_those_of_the_curves() -> None:
    noise = np.random.default_rng(1).standard_normal((2, 5, 3))
    known = {"a": variance(4 * PEAK + noise[0]), "b": variance(noise[1])}
    found = sensitivity_test(lambda model, _: known[model], [PairOnTask("a", "b", "t", 1.0)])
    assert found.p < 0.05 and found.first == pytest.approx((4 * PEAK).std(ddof=1), rel=0.2) and found.second < 1


def test_permutations_are_those_of_all_ways_to_deal_the_runs_at_a_rate() -> None:
    """Two models of two runs at one of two rates: the variances over all 6 x 6 ways, up to the factor of the levels' estimates."""
    scores = np.asarray([[[0.0, 1.0], [5.0, 4.0]], [[2.0, 3.0], [1.0, 2.0]]])
    runs = [Runs(RATES[:2], own, own, np.zeros(own.shape, bool)) for own in scores]
    found = _permuted(runs, 3_000)
    centred = (scores - scores.mean(axis=(1, 2), keepdims=True)) * math.sqrt(8 / 6)
    ways = []
    for picks in itertools.product(*([list(itertools.combinations(range(4), 2))] * 2)):
        means = []
        for rate, pick in enumerate(picks):
            values = centred[:, rate].ravel()
            own = np.isin(np.arange(4), pick)
            means.append((values[own].mean(), values[~own].mean()))
        ways.append(float(np.var([each[0] for each in means], ddof=1) - np.var([each[1] for each in means], ddof=1)))
    # The part that is taken off for noise has the mean 0 in the difference of the two models.
    assert np.mean(found[0, 1:] - found[1, 1:]) == pytest.approx(np.mean(ways), abs=0.3)
    assert found[:, 0] == pytest.approx([np.var([0.5, 4.5], ddof=1) - 0.25, np.var([2.5, 1.5], ddof=1) - 0.25])


def test_a_rate_with_one_run_is_named() -> None:
    scores = np.asarray([[0.5, 0.6], [0.7, math.nan]])
    runs = Runs(RATES[:2], scores, scores, np.zeros(scores.shape, bool))
    assert RateVariance(RATES[:2], 0.0, runs).single == (RATES[1],)
    assert RateVariance(RATES[:1], 0.0, runs.at(RATES[:1])).single == ()
