"""Shares of lost runs, against exact tests and counts of what can happen."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats

from mlmclm.analysis.lost_runs import LEAST, MOST, Losses, divergences_on, losses, unlike
from mlmclm.analysis.model_runs import Runs

RATES = (1e-5, 2e-5, 4e-5, 8e-5)


def diverged_runs(lost: Sequence[Sequence[int]], seeds: int = 3) -> Runs:
    """Return runs of which the given number at each rate have diverged."""
    diverged = np.asarray(lost)[:, None] > np.arange(seeds)
    scores = np.where(diverged, math.nan, 0.7)
    return Runs(RATES[: len(lost)], scores, scores, np.zeros(scores.shape, bool), diverged=diverged)


def of_divergence(tasks: Sequence[Sequence[Sequence[int]]], seeds: int = 3) -> tuple[list[dict[str, Runs]], Losses]:
    studied = [{name: diverged_runs(own, seeds) for name, own in zip("abcd", models, strict=False)} for models in tasks]
    return studied, losses(studied, divergences_on)


@pytest.mark.parametrize("lost", [[(1, 3)], [(0, 3), (0, 2)], [(0, 2), (1, 2), (0, 1)]])
def test_the_exact_test_counts_the_ways_that_are_at_most_as_probable(lost: list[tuple[int, int]]) -> None:
    """In each stratum 2 of 5 runs are the model's own, and all sets of lost runs are as likely."""
    ways = [list(itertools.combinations(range(5), number)) for _, number in lost]
    own = sum(each for each, _ in lost)
    counts = [sum(sum(run < 2 for run in sets) for sets in way) for way in itertools.product(*ways)]
    probable = {number: counts.count(number) / len(counts) for number in set(counts)}
    wanted = sum(chance for chance in probable.values() if chance <= probable[own] * (1 + 1e-9))
    numbers = np.asarray([[each for each, _ in lost], [2] * len(lost)])
    total = np.asarray([[number for _, number in lost], [5] * len(lost)])
    assert unlike(numbers, total) == pytest.approx(wanted)
    if len(lost) == 1:
        table = [[own, 2 - own], [lost[0][1] - own, 3 - lost[0][1] + own]]
        assert unlike(numbers, total) == pytest.approx(stats.fisher_exact(table).pvalue)


def test_models_and_rates_share_what_is_known_unless_a_test_shows_that_they_differ() -> None:
    alike = of_divergence([[[0, 1, 0, 0], [0, 0, 1, 0], [1, 0, 0, 0]]])[1]
    assert (alike.pooling, alike.others) == (MOST, MOST)
    by_model = of_divergence([[[1, 2, 1, 1], [0] * 4, [0] * 4]] * 2)[1]
    assert (by_model.pooling, by_model.others) == (MOST, LEAST)
    by_rate = of_divergence([[[0, 0, 0, 2]] * 3] * 2)[1]
    assert (by_rate.pooling, by_rate.others) == (LEAST, MOST)


def test_a_share_is_a_beta_posterior_with_runs_of_others_as_its_prior() -> None:
    studied, found = of_divergence([[[1, 0], [0, 0], [0, 0]]])
    shares = found.shares(studied[0])
    one, other = shares["a"], shares["b"]
    assert one is not None and other is not None
    # Twelve runs of the others, none of them lost, and one of each rate's own three; the usual share is 1 of 18.
    overall = (1 + 1 / 18) / (6 + 12 + 1)
    assert one.expected() == pytest.approx([(1 + MOST * overall) / (3 + MOST + 6), MOST * overall / (3 + MOST + 6)])
    assert other.expected() == pytest.approx(one.expected()), "with so few runs, all of the others' count"
    drawn = one.draw(20_000, np.random.default_rng(0))
    assert drawn.mean(axis=0) == pytest.approx(one.expected(), abs=0.003)


def test_a_task_on_which_no_run_is_lost_has_none_to_expect_whatever_happens_on_others() -> None:
    studied, found = of_divergence([[[1, 0, 1, 1], [0] * 4], [[0] * 4] * 2])
    assert found.shares(studied[1]) == {"a": None, "b": None}


def test_a_rate_at_which_every_run_diverges_says_nothing_about_the_others() -> None:
    """Unless it may be chance: one run of one that diverged is a run that diverged."""
    studied, found = of_divergence([[[0, 0, 0, 3]] * 3] * 2)
    assert found.shares(studied[0]) == dict.fromkeys("abc")
    lost, ran = divergences_on({"a": diverged_runs([0, 0, 1, 3])})["a"]
    assert lost.tolist() == [0, 0, 1, 0] and ran.tolist() == [3, 3, 3, 0]
    single = diverged_runs([0, 0, 0, 1], 1)
    assert [numbers.tolist() for numbers in divergences_on({"a": single})["a"]] == [[0, 0, 0, 1], [1, 1, 1, 1]]
    # Of four models that lose the one run that each has there, the odds of chance are 1 in 1,820.
    several = divergences_on(dict.fromkeys("abcd", single))
    assert all(ran.tolist() == [1, 1, 1, 0] for _, ran in several.values())
