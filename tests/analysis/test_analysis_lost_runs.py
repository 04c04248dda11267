"""Shares of lost runs, against exact tests and counts of what can happen."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats

from mlmclm.analysis.lost_runs import SAFE, Losses, divergences_on, failures_on, few_or_many, losses, pooling_of
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
def test_the_exact_test_counts_the_ways_in_which_as_few_runs_are_lost(lost: list[tuple[int, int]]) -> None:
    """In each stratum 2 of 5 runs are the model's own, and all sets of lost runs are as likely."""
    ways = [list(itertools.combinations(range(5), number)) for _, number in lost]
    own = sum(each for each, _ in lost)
    fewest = [sum(sum(run < 2 for run in sets) for sets in way) <= own for way in itertools.product(*ways)]
    numbers = np.asarray([[each for each, _ in lost], [2] * len(lost)])
    total = np.asarray([[number for _, number in lost], [5] * len(lost)])
    assert few_or_many(numbers, total)[0] == pytest.approx(np.mean(fewest))
    if len(lost) == 1:
        table = [[own, 2 - own], [lost[0][1] - own, 3 - lost[0][1] + own]]
        assert few_or_many(numbers, total)[0] == pytest.approx(stats.fisher_exact(table, alternative="less").pvalue)


def test_models_are_compared_at_the_rates_that_both_were_tried_at() -> None:
    """Most runs at a rate are lost, of whatever model. One that was not tried there loses fewer of all, and isn't safer."""
    failed = np.zeros((3, 4, 10), bool)
    failed[1:, 3, :8] = True
    scores = np.where(failed, 0.3, 0.7)
    models = {name: Runs(RATES, own, own, its) for name, own, its in zip("abc", scores, failed, strict=True)}
    everywhere = losses([models], failures_on)
    assert everywhere.safe == {"a"}
    models["a"] = models["a"].at(RATES[:3])
    assert losses([models], failures_on).safe == set()
    assert stats.hypergeom.cdf(0, 110, 16, 30) < SAFE, "of all runs it loses fewer"


def test_a_model_whose_runs_diverge_on_other_tasks_may_lose_some_where_it_has_lost_none() -> None:
    tasks = [[[1, 0, 1, 1], *[[0] * 4] * 3], [[0, 1, 1, 0], *[[0] * 4] * 3], [[0] * 4] * 4]
    studied, found = of_divergence(tasks)
    shares = found.shares(studied[2])
    assert shares["a"] is not None and 0.02 < shares["a"].expected().mean() < 0.2, "5 of 36 runs"


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


def test_places_with_one_share_each_say_nothing_about_how_alike_shares_are() -> None:
    """15 of 22 was rounded so that a sample of one place seemed to differ from itself."""
    assert {pooling_of(np.asarray([[[lost], [ran]]])) for ran in range(1, 60) for lost in range(ran + 1)} == {200.0}
