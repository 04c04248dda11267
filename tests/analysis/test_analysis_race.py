"""The race between learning rates, against other computations of the same numbers and against simulated full grids."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from analysis_study import cell
from scipy import stats

from mlmclm.analysis.analyse import analyse
from mlmclm.analysis.race import Standing, cannot_win, standing
from mlmclm.analysis.results import Grid, records
from mlmclm.errors import UserError
from mlmclm.reports.cautions import cautions

TASK = "pydocs-kind"
NONE = math.nan


def whole_race(full: np.ndarray, error: float) -> tuple[Standing, dict[Any, Any]]:
    """Race the rates 0, 1, ... of a full grid (rates x seeds); returns the end and the scores that it asked for."""
    rates, seeds = range(full.shape[0]), range(full.shape[1])
    scores: dict[Any, Any] = {}
    while (now := standing(scores, [float(rate) for rate in rates], seeds, error)).asked:
        assert not set(now.asked) & set(scores)
        scores |= {(rate, seed): full[int(rate), int(str(seed))] for rate, seed in now.asked}
    return now, scores


def chance_of(table: np.ndarray, given: list[int], row: int) -> float:
    """The probability at which a rate is cut, found by bisection of the error; all others must be out of the running."""
    low, high = 1e-9, 0.5
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if cannot_win(table, given, middle)[row] else (middle, high)
    return high


def test_two_rates_are_compared_by_the_paired_t_test_with_the_finite_population_correction() -> None:
    first, second = np.array([0.71, 0.74, 0.72]), np.array([0.70, 0.70, 0.71])
    table = np.full((2, 5), NONE)
    table[0, :3], table[1, :3] = first, second
    t = stats.ttest_rel(first, second).statistic / math.sqrt(1 - 3 / 5)
    assert chance_of(table, [3, 3], 1) == pytest.approx(stats.t.sf(t, 2), rel=1e-6)


def test_the_chance_is_the_share_of_futures_in_which_the_rate_overtakes_the_leader() -> None:
    # Bayes' prediction under the flat prior: draw the noise, then the true lead, then the seeds to come.
    draw = np.random.default_rng(0)
    scores = np.array([[0.80, 0.83, 0.82], [0.79, 0.82, 0.80]])
    table = np.hstack([scores, np.full((2, 3), NONE)])
    lead = scores[0] - scores[1]
    noise = np.sqrt(((lead - lead.mean()) ** 2).sum() / draw.chisquare(2, 400_000))
    truth = lead.mean() + noise * draw.standard_normal(noise.size) / math.sqrt(3)
    future = truth[:, None] + noise[:, None] * draw.standard_normal((noise.size, 3))
    overtaken = ((lead.sum() + future.sum(1)) < 0).mean()
    assert chance_of(table, [3, 3], 1) == pytest.approx(overtaken, abs=0.001)
    assert 0.01 < overtaken < 0.4


def fitted(values: np.ndarray, rows: np.ndarray, columns: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Least squares of rates and seeds, by turns; seeds without a score have the mean effect."""
    rate, seed = np.zeros(shape[0]), np.zeros(shape[1])
    for _ in range(300):
        rate = np.bincount(rows, values - seed[columns], shape[0]) / np.bincount(rows)
        seed = np.bincount(columns, values - rate[rows], shape[1]) / np.maximum(
            np.bincount(columns, minlength=shape[1]), 1
        )
    begun = np.unique(columns)
    seed[np.setdiff1d(np.arange(shape[1]), begun)] = seed[begun].mean()
    return rate[:, None] + seed


@pytest.mark.parametrize("given", [[4, 4, 2, 1], [3, 3, 3, 3], [5, 2, 2, 2]])
def test_variances_by_rate_and_predictions_agree_with_a_fit_by_turns_and_its_derivatives(given: list[int]) -> None:
    draw = np.random.default_rng(1)
    table = np.full((4, 5), NONE)
    for row, number in enumerate(given):
        table[row, :number] = draw.normal(0.5 - 0.02 * row, 0.003 * (1 + row), number)
    rows, columns = np.nonzero(np.isfinite(table))
    values = table[rows, columns]
    fit = fitted(values, rows, columns, table.shape)
    # The fit is linear, so that one more point at a cell shows its weight in everything.
    weight = [fitted(values + unit, rows, columns, table.shape) - fit for unit in np.eye(len(values))]
    left = np.array([1 - change[cell] for change, cell in zip(weight, zip(rows, columns, strict=True), strict=True)])
    freedom = np.bincount(rows, left)
    assert freedom.sum() == pytest.approx(len(values) - (4 + max(given) - 1))
    squares = np.bincount(rows, (values - fit[rows, columns]) ** 2)
    moderated = (1.5 * squares.sum() / freedom.sum() + squares) / (1.5 + freedom)
    own = np.minimum(1.5 + freedom, freedom.sum())
    means, to_come = np.nanmean(table, axis=1), np.isnan(table)
    leader = max((row for row in range(4) if given[row] == max(given)), key=lambda row: means[row])

    def tail(lead: float, factors: np.ndarray) -> float:
        parts = factors * moderated
        return float(
            stats.t.sf(lead / math.sqrt(parts.sum()), min(parts.sum() ** 2 / (parts**2 / own).sum(), freedom.sum()))
        )

    chances = {}
    for row in set(range(4)) - {leader}:
        final = np.where(to_come, fit, table).mean(axis=1)
        moved = [np.where(to_come, change, 0.0).mean(axis=1) for change in weight]
        errors = np.bincount(rows, [(each[leader] - each[row]) ** 2 for each in moved])
        apart = np.zeros(4)
        for each in (leader, row):
            errors[each] += to_come[each].sum() / 25
            apart[each] = 1 / given[each] - 1 / 5
        leads = final[leader] - final[row], means[leader] - means[row]
        chances[row] = max(
            tail(lead, factors) for lead, factors in zip(leads, (errors, apart), strict=True) if lead > 0
        )
    first, second = sorted(chances.values())[:2]
    lowest = min(chances, key=lambda row: chances[row])
    assert [row for row in range(4) if cannot_win(table, given, first * 1.0001)[row]] == [lowest]
    assert not any(cannot_win(table, given, first * 0.9999))
    if first + second < 0.9:
        assert sum(cannot_win(table, given, (first + second) * 1.0001)) == 2
        assert sum(cannot_win(table, given, (first + second) * 0.9999)) == 1


def test_seeds_that_lift_all_rates_alike_cut_none_that_lacks_them() -> None:
    draw = np.random.default_rng(5)
    table = np.full((6, 5), NONE)
    table[:3, :2] = draw.normal(0, 0.01, (3, 2)) + np.array([0.0, 10.0])
    table[3:, :1] = draw.normal(-0.005, 0.01, (3, 1))
    assert not any(cannot_win(table, [2, 2, 2, 1, 1, 1], 0.05)[3:])


def test_a_noisy_rate_keeps_its_chance_beside_quiet_ones() -> None:
    table = np.full((6, 5), NONE)
    table[:, :3] = 0.001 * np.random.default_rng(6).standard_normal((6, 3)) + np.arange(6)[:, None] * 0.01
    table[0, :3] = [0.05, -0.03, 0.06]
    losing = cannot_win(table, [3] * 6, 0.05)
    assert losing[1] and not losing[0], "the noisy rate's mean is not above the quiet one's by much"


@pytest.mark.parametrize(
    ("means", "noise"),
    [
        ([0] * 6, [1] * 6),
        ([0, 0, -50, -50, -50, -50], [1] * 6),
        ([0, 0, -50, -50, -50, -50], [1, 1, 0, 0, 0, 0]),
        ([0, -1, -2, -3, -4, -5], [1, 1, 2, 2, 3, 3]),
        ([0] * 6, [0.3, 0.5, 0.8, 1.25, 2, 3.2]),
        ([0, -0.3, -0.6, -0.9, -1.2, -1.5], [1, 0.3, 0.5, 0.8, 2, 3.2]),
    ],
    ids=[
        "equal",
        "two far ahead",
        "the last constant",
        "the last noisier",
        "tenfold noise",
        "close with tenfold noise",
    ],
)
@pytest.mark.parametrize("seeds", [3, 5])
def test_the_full_grid_is_missed_no_more_often_than_stated(means: list[float], noise: list[float], seeds: int) -> None:
    draw, error, races = np.random.default_rng(7), 0.05, 100
    missed = cells = 0
    for _ in range(races):
        common = draw.standard_normal(seeds)  # what a seed does to all rates alike
        full = np.array(means)[:, None] + np.array(noise)[:, None] * draw.standard_normal((6, seeds)) + common
        every: dict[Any, Any] = {(float(rate), seed): full[rate, seed] for rate in range(6) for seed in range(seeds)}
        cut = standing(every, [float(rate) for rate in range(6)], range(seeds), error).cut
        missed += float(full.mean(1).argmax()) in cut
        cells += sum(cut.get(float(rate), seeds) for rate in range(6))
    assert missed <= error * races
    assert cells < 0.95 * races * full.size


def test_failing_runs_cost_no_more_than_the_stated_error() -> None:
    draw, missed = np.random.default_rng(8), 0
    for _ in range(100):
        full = np.where(draw.random((6, 5)) < 0.2, -40.0, 0.0) + draw.standard_normal((6, 5))
        every: dict[Any, Any] = {(float(rate), seed): full[rate, seed] for rate in range(6) for seed in range(5)}
        missed += (
            float(full.mean(1).argmax()) in standing(every, [float(rate) for rate in range(6)], range(5), 0.05).cut
        )
    assert missed <= 5


def test_cells_are_asked_for_seed_by_seed_and_of_the_rates_left_only() -> None:
    full = np.array([[0.5, 0.51, 0.5], [0.9, 0.912, 0.901], [0.1, 0.11, 0.1]])
    now = standing({}, [0.0, 1.0, 2.0], [5, 3, 4], 0.05)
    assert now.asked == ((0.0, 5), (1.0, 5), (2.0, 5))
    some: dict[Any, Any] = {(0.0, 5): 0.5, (2.0, 5): 0.1}
    assert standing(some, [0.0, 1.0, 2.0], [5, 3, 4], 0.05).asked == ((1.0, 5),)
    end, scores = whole_race(full, 0.05)
    assert end.cut == {0.0: 2, 2.0: 2}
    assert [rate for rate, seed in scores if seed == 2] == [1.0]


def test_the_better_half_has_its_second_seed_first_and_rates_far_behind_have_none() -> None:
    full = np.array([[0.1, 0.11], [0.90, 0.912], [0.2, 0.2], [0.89, 0.90], [0.3, 0.3], [0.85, 0.861]])
    full = np.hstack([full, full + 0.002])
    scores: dict[Any, Any] = {(float(rate), 0): full[rate, 0] for rate in range(6)}
    assert standing(scores, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], range(4), 0.05).asked == ((1.0, 1), (3.0, 1), (5.0, 1))
    end, _ = whole_race(full, 0.05)
    assert [end.cut[rate] for rate in (0.0, 2.0, 4.0)] == [1, 1, 1]


def test_scores_that_were_not_asked_for_change_nothing() -> None:
    full = np.array([[0.5, 0.51, 0.9, 0.5], [0.9, 0.91, 0.901, 0.9]])
    end, scores = whole_race(full, 0.2)
    every: dict[Any, Any] = {(float(rate), seed): full[rate, seed] for rate in range(2) for seed in range(4)}
    assert len(scores) < len(every)
    assert standing(every, [0.0, 1.0], range(4), 0.2) == end


def test_a_cut_is_withdrawn_when_the_leader_collapses() -> None:
    full = np.array([[0.80, 0.81, 0.80, 0.81, 0.80], [0.90, 0.911, 0.10, 0.90, 0.91], [0.1, 0.11, 0.1, 0.1, 0.1]])
    before = standing({(float(r), s): full[r, s] for r in range(3) for s in range(2)}, [0.0, 1.0, 2.0], range(5), 0.1)
    assert before.cut == {0.0: 2, 2.0: 2} and before.asked == ((1.0, 2),)
    end, _ = whole_race(full, 0.1)
    assert 0.0 not in end.cut


def test_a_rate_that_diverges_is_cut_at_once_and_races_again_if_all_others_do() -> None:
    scores: dict[Any, Any] = {(1.0, 0): None, (2.0, 0): 0.5, (3.0, 0): 0.6}
    first = standing(scores, [1.0, 2.0, 3.0], range(4), 0.05)
    # Its first run can have diverged by chance, so a second one shows what it scores.
    assert first.cut == {1.0: 2} and first.asked == ((1.0, 1), (2.0, 1), (3.0, 1))
    scores |= {(1.0, 1): 0.7, (2.0, 1): 0.5, (3.0, 1): 0.6}
    second = standing(scores, [1.0, 2.0, 3.0], range(4), 0.05)
    assert second.cut == {1.0: 2} and (1.0, 2) not in second.asked
    scores |= {(2.0, 1): NONE, (3.0, 1): None}
    later = standing(scores, [1.0, 2.0, 3.0], range(4), 0.05)
    assert later.cut == {} and later.asked[0] == (1.0, 2)
    assert standing({(1.0, 0): None, (2.0, 0): 0.5}, [1.0, 2.0], range(1), 0.05).asked == (), "there is no second seed"


@pytest.mark.parametrize(
    "full",
    [
        np.array([[0.5, 0.6, 0.7]]),  # one rate
        np.array([[0.5], [0.6]]),  # one seed
        np.array([[0.5, 0.6, 0.7]] * 3),  # ties
        np.array([[0.5] * 3, [0.4] * 3]),  # scores that agree
        np.full((3, 3), NONE),  # all diverged
    ],
    ids=["one rate", "one seed", "ties", "constant scores", "all diverged"],
)
def test_where_nothing_can_be_told_every_cell_is_run(full: np.ndarray) -> None:
    end, scores = whole_race(full, 0.3)
    assert end.cut == {} and len(scores) == full.size


def test_equal_scores_of_some_rates_do_not_make_the_noise_of_others_seem_smaller() -> None:
    varying = [[0.70, 0.76], [0.71, 0.69], [0.60, 0.66]]
    alone = np.full((3, 4), NONE)
    alone[:, :2] = varying
    joined = np.full((8, 4), NONE)
    joined[:, :2] = [*varying, *([level, level] for level in (0.30, 0.31, 0.32, 0.33, 0.34))]
    # The rates far behind have next to no chance, so the sum is that of the rates that vary.
    for row in (1, 2):
        assert chance_of(joined, [2] * 8, row) == pytest.approx(chance_of(alone, [2] * 3, row), rel=0.5)
    tiny = np.full((3, 5), NONE)
    tiny[:, :2] = [[0.600, 0.600], [0.599, 0.599], [0.300, 0.3001]]
    assert cannot_win(tiny, [2] * 3, 0.3) == [False] * 3


@pytest.mark.parametrize("error", [0.0, 1.0, NONE])
def test_an_error_that_is_no_probability_is_refused(error: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        standing({}, [1.0], [0], error)


RATES = (1e-4, 1e-3, 1e-2)
FULL = np.array([[0.50, 0.51, 0.50, 0.52], [0.70, 0.72, 0.71, 0.70], [0.60, 0.62, 0.60, 0.61]])


def results_of_race(*, further: bool = False) -> list[dict[str, Any]]:
    _, scores = whole_race(FULL, 0.1)
    asked = {(RATES[int(rate)], seed): float(score) for (rate, seed), score in scores.items()}
    if further:  # a full grid of another sweep
        asked |= {(RATES[0], seed): float(FULL[0, seed]) for seed in range(4)}
    return [cell("m", TASK, rate, seed, score, score) for (rate, seed), score in asked.items()]


def test_cut_rates_are_marked_and_in_no_figure_of_stability() -> None:
    results = results_of_race()
    found = analyse(results, grid=Grid(("m",), (TASK,), RATES, (0, 1, 2, 3), race=0.1))
    assert len(results) == 8 and {row["learning_rate"]: row["cut"] for row in records(found.cells)} == {
        1e-4: True, 1e-3: False, 1e-2: True,
    }  # fmt: skip
    assert [row["cut"] for row in records(found.curves)] == [True, False, True]
    assert (found.cut, found.missing) == (4, 0)
    best = records(found.best)[0]
    assert best["learning_rate"] == 1e-3 and best["note"] == "raced: 2 of 3 rates cut" and best["edge"] == ""
    row = records(found.stability)[0]
    assert row["rates_cut"] == 2
    assert row["sd_seeds_pooled"] == pytest.approx(np.std(FULL[1], ddof=1)) == row["sd_seeds"]
    for name in ("sd_rates", "range_rates", "relative_sd_rates", "regret", "share_near_best", "share_failed"):
        assert math.isnan(row[name])
    assert "8 of 12 cells were computed" in cautions(found)[0] and "1e-4 (m on pydocs-kind)" in cautions(found)[0]


def test_the_rule_that_needs_every_cell_is_refused() -> None:
    with pytest.raises(UserError, match="per_seed needs every cell"):
        analyse(results_of_race(), grid=Grid(("m",), (TASK,), RATES, (0, 1, 2, 3), race=0.1), rule="per_seed")


def test_a_rate_with_all_seeds_is_not_marked_and_a_lost_cell_is_missing() -> None:
    grid = Grid(("m",), (TASK,), RATES, (0, 1, 2, 3), race=0.1)
    found = analyse(results_of_race(further=True), grid=grid)
    assert [row["cut"] for row in records(found.curves)] == [False, False, True]
    left = [each for each in results_of_race() if (each["learning_rate"], each["seed"]) != (1e-3, 3)]
    assert (analyse(left, grid=grid).cut, analyse(left, grid=grid).missing) == (4, 1)
    whole = analyse(results_of_race(), grid=Grid(("m",), (TASK,), RATES, (0, 1, 2, 3)))
    assert (whole.cut, whole.missing) == (0, 4)
