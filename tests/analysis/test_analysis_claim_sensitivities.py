"""Tests of the sensitivity to the learning rate, against simulation with equal curves whose runs fail at high rates."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mlmclm.analysis.claim_sensitivities import RateVariance, _variance_between, sensitivity_test
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
def test_equal_curves_whose_runs_fail_at_high_rates_are_seldom_found_different(seeds: int, drop: float) -> None:
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


def test_equally_sensitive_models_with_curves_of_unlike_shapes_are_seldom_found_different() -> None:
    draws, rising = np.random.default_rng(2), np.asarray([[0.0], [2.0]])
    claims = []
    for _ in range(200):
        noise = draws.standard_normal((2, 2, 3))
        claims.append(p_of(rising + noise[0], -rising + noise[1], draws=200) < 0.05)
    assert np.mean(claims) <= 0.08


def test_the_variance_between_rates_and_its_error_are_those_of_many_studies() -> None:
    draws, curve = np.random.default_rng(3), np.asarray([0.0, 1.0, 2.0, 1.0, 0.0])
    scores = curve[:, None, None] + draws.standard_normal((5, 4, 20_000))
    means = scores.mean(axis=1)
    squares = ((scores - means[:, None]) ** 2).sum(axis=1)
    values, errors = _variance_between(means[None], squares[None], np.full((1, 5), 4))
    assert values.mean() == pytest.approx(curve.var(ddof=1), rel=0.02)
    assert errors.mean() == pytest.approx(values.var(), rel=0.05)


def test_a_rate_with_one_run_is_named() -> None:
    scores = np.asarray([[0.5, 0.6], [0.7, math.nan]])
    runs = Runs(RATES[:2], scores, scores, np.zeros(scores.shape, bool))
    assert RateVariance(RATES[:2], 0.0, runs).single == (RATES[1],)
    assert RateVariance(RATES[:1], 0.0, runs.at(RATES[:1])).single == ()
