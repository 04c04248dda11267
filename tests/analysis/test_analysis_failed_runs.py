"""Failed runs: which they are, what they say about other runs, and how often models fail."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from analysis_study import cells_of, synthetic_results
from scipy import stats

from mlmclm.analysis.analyse import Analysis, analyse
from mlmclm.analysis.contrasts import mean_difference
from mlmclm.analysis.effects import effect
from mlmclm.analysis.failed_runs import HOPELESS, unlike, with_failures, with_unseen
from mlmclm.analysis.model_runs import Runs, runs_of
from mlmclm.analysis.results import records
from mlmclm.analysis.seed_noise import fit_tasks
from mlmclm.analysis.simulated_choices import choose
from mlmclm.analysis.statistics.failure_counts import failures
from mlmclm.results.chance import Chance
from mlmclm.results.intervals import Estimate
from mlmclm.results.measures import Array
from mlmclm.results.metrics import Rule

RATES = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4)
CHANCE = 0.5


def flat_task(draws: np.random.Generator, seeds: int, models: int = 4) -> dict[str, Runs]:
    """Models with a flat curve at 0 and a deviation of 1, whose validation and test noise have a correlation of .5."""
    shape = (models, len(RATES), seeds)
    common, *own = draws.standard_normal((3, *shape)) * math.sqrt(0.5)
    return {
        f"m{n}": Runs(RATES, common[n] + own[0][n], common[n] + own[1][n], np.zeros(shape[1:], bool))
        for n in range(models)
    }


def test_a_run_far_below_the_others_or_at_chance_failed_and_a_noisy_one_did_not() -> None:
    def failed(rows: list[list[float]], chance: float = math.nan) -> Array:
        return with_failures({"m": runs_of(cells_of(RATES, rows))}, chance)["m"].failed

    near = [[0.70, 0.71, 0.69], [0.72, 0.70, 0.71]]
    assert not failed(near).any()
    assert failed([*near, [0.70, 0.31, 0.71]]).tolist() == [[False] * 3, [False] * 3, [False, True, False]]
    assert not failed([*near, [0.70, 0.66, 0.71]]).any(), "five points are needed"
    assert failed([*near, [0.70, 0.69, 0.52]], chance=0.53)[2].tolist() == [False, False, True]
    assert not failed([[0.5, 0.52, 0.49], [0.5, 0.5, 0.51]], chance=0.53).any(), "nothing is learned, so nothing failed"
    draws = np.random.default_rng(5)
    found = [failed((0.7 + 0.02 * draws.standard_normal((6, 5))).tolist()).any() for _ in range(300)]
    assert np.mean(found) < 0.01


@pytest.mark.parametrize("seeds", [3, 5])
def test_runs_at_a_noisy_rate_did_not_fail(seeds: int) -> None:
    draws, spread = np.random.default_rng(16), np.asarray([0.01] * 5 + [0.08])[:, None]
    noisy, failing = [], []
    for _ in range(100):
        noise = draws.standard_normal((2, 2, 6, seeds))
        models = {f"m{n}": runs_of(cells_of(RATES, (0.7 + spread * own).tolist())) for n, own in enumerate(noise[0])}
        noisy += [own.failed.any() for own in with_failures(models).values()]
        fails = draws.random(noise[1].shape) < 0.2
        fails[:, :, 0] = False  # one run learns at each rate
        scores = np.where(fails, 0.3, 0.7 + 0.01 * noise[1])
        models = {f"m{n}": runs_of(cells_of(RATES, own.tolist())) for n, own in enumerate(scores)}
        failing += [(own.failed == fails[n]).all() for n, own in enumerate(with_failures(models).values())]
    assert np.mean(noisy) < 0.15 and np.mean(failing) > 0.8


def test_a_model_that_lost_most_of_its_runs_is_told_by_the_gap_of_the_others() -> None:
    """Of a model alone, the few runs that learned may as well be the strange ones."""
    draws = np.random.default_rng(17)
    scores = 0.7 + 0.01 * draws.standard_normal((3, 5, 3))
    lost = np.zeros(scores.shape, bool)
    lost[0] = [
        [False, True, False],
        [True, True, False],
        [True, True, False],
        [True, True, False],
        [False, False, True],
    ]
    scores[lost] -= 0.4
    models = {f"m{n}": runs_of(cells_of(RATES[:5], own.tolist())) for n, own in enumerate(scores)}
    assert not with_failures({"m0": models["m0"]})["m0"].failed.any()
    found = with_failures(models)
    assert [own.failed.tolist() for own in found.values()] == lost.tolist()
    noisy = models | {"m0": runs_of(cells_of(RATES[:5], (0.5 + 0.1 * draws.standard_normal((5, 3))).tolist()))}
    assert not with_failures(noisy)["m0"].failed.any(), "the others lost none, so there is no gap"
    noisy["m1"] = runs_of(cells_of(RATES[:5], np.where(np.eye(5, 3), 0.3, scores[1]).tolist()))
    assert not with_failures(noisy)["m0"].failed.any(), "the others' gap is none of its own"


@pytest.mark.parametrize("rule", ["mean", "per_seed"])
def test_scores_of_runs_that_learn_are_covered_where_a_fifth_fails(rule: Rule) -> None:
    """Ten seeds of which each chooses a rate where it learned, and a fifth of all runs fails."""
    draws, covered = np.random.default_rng(11), []
    curve, gap = -1.0 * abs(np.arange(6) - 3)[:, None], -40.0
    for _ in range(25):
        runs = flat_task(draws, 10)
        for name, own in runs.items():
            failed = draws.random((6, 10)) < 0.2
            level = gap + 0.3 * draws.standard_normal((2, 6, 10))
            scores = [np.where(failed, level[n], curve + each) for n, each in enumerate((own.validation, own.test))]
            runs[name] = Runs(RATES, scores[0], scores[1], failed)
        for name, fit in fit_tasks([runs])[0].items():
            picked, _ = choose(runs[name].validation, runs[name].test, runs[name].counting(rule), rule)
            found = effect(runs[name], fit, rule, studies=320).score(fresh=True)
            covered.append(found.low <= curve[picked, 0].mean() <= found.high)
    assert np.mean(covered) >= 0.92


def too_high(draws: np.random.Generator, dead: Sequence[bool], seeds: int = 3) -> dict[str, Runs]:
    """Models that learn at all rates but the highest, at which some of them are at chance with every seed."""
    found = {}
    for number, lost in enumerate(dead):
        scores = 0.7 + 0.01 * draws.standard_normal((2, len(RATES), seeds))
        if lost:
            scores[:, -1] = CHANCE + 0.004 * draws.standard_normal((2, seeds))
            scores[1, -1, 0] = CHANCE - 0.002
        found[f"m{number}"] = runs_of(cells_of(RATES, scores[1].tolist()))
        found[f"m{number}"] = replace(found[f"m{number}"], validation=scores[0])
    return found


@pytest.mark.parametrize("dead", [(True, True), (True, False)])
def test_a_rate_that_is_too_high_says_nothing_about_failures_at_the_others(dead: tuple[bool, ...]) -> None:
    """With its failures counted for the other rates, the error would be several times as large."""
    for seed in range(5):
        runs = with_failures(too_high(np.random.default_rng(seed), dead), CHANCE)
        lower = {name: own.at(RATES[:-1]) for name, own in runs.items()}
        assert (
            runs["m0"].failed.any()
            and runs["m0"].hopeless is not None
            and runs["m0"].hopeless.tolist() == [False] * 5 + [True]
        )
        fits, others = fit_tasks([runs])[0], fit_tasks([lower])[0]
        found, without = (effect(own["m0"], fit["m0"], "mean") for own, fit in ((runs, fits), (lower, others)))
        assert found.seeds.value == pytest.approx(without.seeds.value, abs=0.003)
        assert found.seeds.error == pytest.approx(without.seeds.error, rel=0.25)


def test_a_rate_is_hopeless_exactly_where_chance_does_not_explain_its_failures() -> None:
    draws, seen = np.random.default_rng(3), set()
    for _ in range(300):
        seeds, rates = int(draws.integers(2, 5)), int(draws.integers(3, 6))
        fails = draws.random((rates, seeds)) < draws.choice([0.05, 0.2])
        fails[0] = True
        if 2 * fails.sum() >= fails.size:  # then nothing is learned, and no run failed
            continue
        scores = np.where(fails, 0.3, 0.7) + 1e-3 * draws.standard_normal((rates, seeds))
        found = with_failures({"m": runs_of(cells_of(RATES, scores.tolist()))}, 0.35)["m"]
        assert (found.failed == fails).all()
        lost = fails.all(axis=1)
        rest, failures = int((~lost).sum()) * seeds, int(fails[~lost].sum())
        p = stats.fisher_exact([[seeds, 0], [failures, rest - failures]], alternative="greater").pvalue
        hopeless = np.zeros(rates, bool) if found.hopeless is None else found.hopeless
        assert (hopeless == (lost & (p < HOPELESS))).all()
        seen |= set(hopeless[lost].tolist())
    assert seen == {True, False}


def test_few_runs_of_one_model_may_all_fail_by_chance_and_those_of_all_models_do_not() -> None:
    near, gone = [0.70, 0.71], [0.50, 0.49]
    several = {f"m{number}": runs_of(cells_of(RATES, [near, near, gone])) for number in range(3)}
    found = with_failures(several, CHANCE)
    assert all(own.failed[2].all() and own.hopeless is not None for own in found.values())
    several["m3"] = runs_of(cells_of(RATES, [near, near, near]))
    assert all(own.hopeless is None for own in with_failures(several, CHANCE).values()), "a model learns there"


def failing_study(seed: int, share: float, diverging: float = 0.0) -> Analysis:
    """Three equal models on three tasks, whose runs fail with this probability, and learn nothing at the highest rate.

    On the first task, runs diverge with a probability of `diverging` at the rate before it, which scores best.
    """
    draws, tasks = np.random.default_rng(seed), ("a", "b", "c")
    made = synthetic_results(dict.fromkeys(("x", "y", "z"), 0.8), tasks=tasks, noise=0.0)
    *_, best, highest = sorted({result["learning_rate"] for result in made})
    for result in made:
        lost = draws.random() < share or result["learning_rate"] == highest
        common, *own = draws.standard_normal(3) * math.sqrt(0.5)
        for split, each in zip(("validation", "test"), own, strict=True):
            for name, score in result["scores"][split].items():
                level = score + 0.03 * (diverging > 0 and result["learning_rate"] == best)
                result["scores"][split][name] = CHANCE + 0.004 * each if lost else level + 0.01 * (common + each)
        if result["task"] == "a" and result["learning_rate"] == best and draws.random() < diverging:
            result |= {"status": "diverged", "scores": None, "diverged_step": 1}
    limits = dict.fromkeys(tasks, (-9.0, 9.0))
    return analyse(made, ranges=limits, chances=dict.fromkeys(tasks, Chance(CHANCE, "by hand")))


@pytest.mark.parametrize(("share", "diverging"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.5)])
def test_equal_models_whose_runs_fail_are_seldom_found_different(share: float, diverging: float) -> None:
    studies = [failing_study(seed, share, diverging) for seed in range(10)]
    claims = [any(row["p_holm"] < 0.05 for row in records(each.comparisons)) for each in studies]
    assert sum(claims) <= 1


def lost_runs(tasks: Sequence[tuple[Sequence[int], ...]], rates: int = 5, seeds: int = 3) -> list[dict[str, Runs]]:
    """Models of which so many runs failed on each task: the first ones, one at each rate in turn."""
    draws, found = np.random.default_rng(0), []
    for numbers in tasks:
        models = {}
        for name, number in zip("abcd", numbers, strict=True):
            failed = number > np.arange(rates * seeds).reshape(seeds, rates).T
            scores = np.where(failed, 0.3, 0.7 + 0.01 * draws.standard_normal((2, rates, seeds)))
            models[name] = Runs(RATES[:rates], scores[0], scores[1], failed)
        found.append(models)
    return found


@pytest.mark.parametrize("diverged", [False, True])
def test_a_lost_run_of_one_model_changes_nothing_for_the_others_nor_on_other_tasks(diverged: bool) -> None:
    """One failed run on one task had widened the other models' scores there from 5.7 to 7.5 points."""

    def scores(lost: int) -> dict[tuple[str, str], Estimate]:
        made = synthetic_results(dict.fromkeys("xyz", 0.8), tasks=("a", "b"), noise=0.01)
        for each in [own for own in made if (own["model"], own["task"]) == ("x", "a")][:lost]:
            if diverged:
                each |= {"status": "diverged", "scores": None, "diverged_step": 1}
            else:
                each["scores"] = {split: dict.fromkeys(own, 0.3) for split, own in each["scores"].items()}
        return {pair: own.seeds for pair, own in analyse(made).run_effects.items()}

    without, found = scores(0), scores(1)
    for pair, own in found.items():
        if pair == ("x", "a"):
            assert own.error < 1.5 * without[pair].error
        elif pair[1] == "a":
            assert own.error == pytest.approx(without[pair].error, rel=0.1)
        else:
            assert own == without[pair]


def losing(draws: np.random.Generator, share: float, seeds: int = 3) -> dict[str, Runs]:
    """Two equal models whose best rate is ten points ahead, at which runs of the first diverge with this probability."""
    found = {}
    for name, own in (("m0", share), ("m1", 0.0)):
        noise = draws.standard_normal((2, 5, seeds)) * 0.01
        diverged = (draws.random((5, seeds)) < own) & (np.arange(5) == 3)[:, None]
        validation, test = np.where(diverged, math.nan, 0.8 - 0.1 * abs(np.arange(5) - 3)[:, None] + noise)
        found[name] = Runs(RATES[:5], validation, test, diverged & False, diverged=diverged)
    return found


@pytest.mark.parametrize("share", [0.1, 0.3])
def test_a_model_that_may_lose_a_best_rate_far_ahead_is_not_told_from_an_equal_one(share: float) -> None:
    """It was in 29 of 40 studies of three tasks."""
    draws, told, covered = np.random.default_rng(0), [], []
    for _ in range(150):
        runs = with_failures(losing(draws, share))
        one, other = (effect(runs[name], fit, "mean", studies=240) for name, fit in fit_tasks([runs])[0].items())
        if runs["m0"].present[3].any():  # a rate without any run that learned has no score
            told.append(
                mean_difference({("one", ""): one, ("other", ""): other}, ("one", "other"), [""]).whole.p < 0.05
            )
            covered.append(one.score().low <= 0.8 <= one.score().high)
    assert np.mean(told) < 0.08 and np.mean(covered) > 0.92


@pytest.mark.parametrize("best", [0.80, 0.72])
def test_where_most_runs_of_the_best_rate_are_lost_the_error_reaches_to_its_score(best: float) -> None:
    """And no further: a distance of two scores has their noise in it."""
    scores = np.asarray([[0.70, 0.71, 0.69], [best, math.nan, math.nan], [0.60, 0.61, 0.62]])
    runs = Runs(RATES[:3], scores, scores, np.zeros(scores.shape, bool), diverged=np.isnan(scores))
    found = effect(runs, fit_tasks([{"m": runs}])[0]["m"], "mean")
    assert runs.counting("mean").sum(axis=1).tolist() == [3, 0, 3] and found.chosen[1] == 0
    assert found.seeds.value == pytest.approx(0.70) and found.seeds.error == pytest.approx(best - 0.70, rel=0.01)


def test_at_a_rate_that_lost_all_runs_a_weak_model_is_not_thought_to_score_as_a_strong_one() -> None:
    """In a published study a model of 15 points was given an interval from 0 to 75, as others had 40 points at that rate."""
    strong = np.asarray([[0.70, 0.71, 0.69], [0.80, 0.79, 0.81], [0.75, 0.74, 0.76]])
    lost = np.zeros(strong.shape, bool)
    lost[2] = True
    weak = np.where(lost, math.nan, strong - 0.5)
    models = {
        "weak": Runs(RATES[:3], weak, weak, lost & False, diverged=lost),
        "strong": Runs(RATES[:3], strong, strong, lost & False),
    }
    (found,) = with_unseen([models])
    assert found["weak"].unseen == pytest.approx([math.nan, math.nan, 0.25], nan_ok=True)
    own = effect(found["weak"], fit_tasks([found])[0]["weak"], "mean").score()
    assert 0.25 < own.low < 0.30 < own.high < 0.35


def test_how_often_models_fail_is_compared_by_fishers_exact_test() -> None:
    draws = np.random.default_rng(0)
    for _ in range(50):
        one, other = draws.integers(1, 30, 2)
        first, second = draws.integers(0, one + 1), draws.integers(0, other + 1)
        table = [[first, one - first], [second, other - second]]
        p = unlike(np.asarray([[first], [one]]), np.asarray([[first + second], [one + other]]))
        assert p == pytest.approx(stats.fisher_exact(table).pvalue)
    runs = {
        (name, str(task)): own
        for task, models in enumerate(lost_runs([(4, 0, 0, 0)] * 3))
        for name, own in models.items()
    }
    names: Any = {name: name for name in "abcd"}
    found = records(failures(SimpleNamespace(runs=runs, groups=names, model_of=names)))  # type: ignore[arg-type]
    assert [(row["failed_a"], row["runs_a"], row["failed_b"]) for row in found[:1]] == [(12, 45, 0)]
    assert [row["p_holm"] < 0.05 for row in found] == [True, True, True, False, False, False]
    assert math.isnan(found[-1]["p"]), "none of their runs failed"


def test_the_score_is_of_runs_that_learn() -> None:
    """The failed run is at the best rate, whose mean is the highest all the same."""
    rows = [[0.50, 0.51, 0.52, 0.50, 0.51], [0.80, 0.81, 0.40, 0.79, 0.80], [0.52, 0.50, 0.51, 0.52, 0.50]]
    made = [each | {"key": str(place)} for place, each in enumerate(cells_of(RATES, rows))]
    runs = with_failures({"m": runs_of(made)})
    found = effect(runs["m"], fit_tasks([runs])[0]["m"], "mean").seeds
    assert runs["m"].failed.sum() == 1 and found.value == pytest.approx(0.80)
    assert found.high - found.low < 0.05, "nothing of the failed run's distance is in the interval"


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


def diverged_runs(lost: Sequence[Sequence[int]], seeds: int = 3) -> Runs:
    """Return runs of which the given number at each rate have diverged."""
    diverged = np.asarray(lost)[:, None] > np.arange(seeds)
    scores = np.where(diverged, math.nan, 0.7)
    return Runs(RATES[: len(lost)], scores, scores, np.zeros(scores.shape, bool), diverged=diverged)


def test_a_rate_at_which_every_run_diverges_says_nothing_about_the_others() -> None:
    """Unless it may be chance: one run of one that diverged is a run that diverged."""
    assert with_failures({"a": diverged_runs([0, 0, 1, 3])})["a"].hopeless.tolist() == [False, False, False, True]
    single = diverged_runs([0, 0, 0, 1], 1)
    assert with_failures({"a": single})["a"].hopeless is None
    # Of four models that lose the one run that each has there, the odds of chance are 1 in 1,820.
    several = with_failures(dict.fromkeys("abcd", single))
    assert all(own.hopeless.tolist() == [False, False, False, True] for own in several.values())
    runs = {(name, "task"): own for name, own in zip("ab", (several["a"], single), strict=True)}
    names: Any = {name: name for name in "ab"}
    (row,) = records(failures(SimpleNamespace(runs=runs, groups=names, model_of=names)))  # type: ignore[arg-type]
    assert (row["failed_a"], row["runs_a"], row["failed_b"], row["runs_b"]) == (0, 3, 0, 3)
