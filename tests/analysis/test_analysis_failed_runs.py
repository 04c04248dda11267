"""Failed runs: which they are, what they say about other runs, and how often models fail."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from analysis_study import cells_of, synthetic_results
from scipy import stats

from mlmclm.analysis.analyse import Analysis, analyse
from mlmclm.analysis.effects import effect
from mlmclm.analysis.failed_runs import failure_table, with_failures
from mlmclm.analysis.lost_runs import HOPELESS, UNLIKE, unlike
from mlmclm.analysis.model_runs import Runs, runs_of
from mlmclm.analysis.results import records
from mlmclm.analysis.seed_noise import fit_task, likeness
from mlmclm.analysis.simulated_choices import choose
from mlmclm.results.chance import Chance
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
        for name, fit in fit_task(runs).items():
            picked, _ = choose(runs[name].validation, runs[name].test, runs[name].present, rule)
            found = effect(runs[name], fit, rule, truths=40).score(fresh=True)
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
        fits, others = fit_task(runs), fit_task(lower)
        assert fits["m0"].failing is None
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


def with_failing(seeds: int, share: float) -> tuple[dict[str, Runs], dict[str, Array]]:
    """Four models of which the first loses no run, and the others this share; and which runs failed."""
    draws = np.random.default_rng(5)
    models = flat_task(draws, seeds)
    failed = {name: draws.random((6, seeds)) < share for name in models}
    failed["m0"][:] = False
    return {name: replace(own, failed=failed[name]) for name, own in models.items()}, failed


def test_a_model_that_lost_no_run_by_luck_is_not_taken_for_safe() -> None:
    """The other models' failures at the same rate count; where a model is alone, there is nothing to count."""
    models, failed = with_failing(3, 0.1)
    fits = fit_task(models)
    safe, other = fits["m0"].failing, fits["m1"].failing
    assert safe is not None and other is not None
    assert (safe.expected() > 0).all() and safe.expected().max() < other.expected().max()
    assert fit_task({"m0": models["m0"]})["m0"].failing is None
    numbers = safe.alike.sum(axis=0)
    assert (numbers <= 9).all(), "never more than the runs that there are"
    shares = np.stack([failed[name].sum(axis=1) for name in ("m1", "m2", "m3")]).sum(axis=0) / 9
    assert safe.alike[0] / numbers == pytest.approx(shares)
    like, lost = likeness([models]), sum(int(own.sum()) for own in failed.values())
    weight = min(like.failing.others, 54)  # the others have 54 runs
    assert safe.usual == pytest.approx((weight * lost / 54 + lost / 72, weight * (1 - lost / 54) + 1 - lost / 72))


def test_a_model_that_fails_less_often_than_the_others_takes_nothing_from_them() -> None:
    models, failed = with_failing(5, 0.3)
    table = [
        [0, 30],
        [sum(int(own.sum()) for own in failed.values()), 90 - sum(int(own.sum()) for own in failed.values())],
    ]
    assert stats.fisher_exact(table).pvalue < UNLIKE
    fits = fit_task(models)
    assert fits["m0"].failing is None and fits["m1"].failing is not None
    found, alone = (effect(models["m0"], fit["m0"], "mean").seeds for fit in (fits, fit_task({"m0": models["m0"]})))
    assert found.error == pytest.approx(alone.error, rel=0.3)


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


def expected_shares(tasks: Sequence[tuple[Sequence[int], ...]]) -> list[dict[str, float]]:
    """Return the mean expected share of failed runs of each model on each task."""
    studied = lost_runs(tasks)
    like = likeness(studied)
    return [
        {name: 0.0 if fit.failing is None else float(fit.failing.expected().mean()) for name, fit in found.items()}
        for found in (fit_task(models, like) for models in studied)
    ]


def test_runs_lost_on_other_tasks_count_only_where_losing_them_is_shown_to_be_the_models() -> None:
    one = expected_shares([(1, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0)])
    assert all(share == 0 for task in one[1:] for share in task.values()), (
        "one failed run says nothing about other tasks"
    )
    lost = [(3, 0, 0, 0), (2, 0, 0, 0), (0, 0, 0, 0)]
    own, total = np.asarray([[5], [45]]), np.asarray([[5], [180]])
    expected = stats.fisher_exact([[5, 40], [0, 135]]).pvalue
    assert unlike(own, total) == pytest.approx(expected) and expected < UNLIKE
    shares = expected_shares(lost)
    assert 0.02 < shares[2]["a"] < 0.12, "5 of 45 runs"
    assert all(share < 0.03 for task in shares for name, share in task.items() if name != "a")
    studied = lost_runs(lost)
    fit = fit_task(studied[2], likeness(studied))["a"]
    assert fit.floor == pytest.approx([0.3, 0.3], abs=0.02), "by as much below the others as on the other tasks"


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
    found = records(failure_table(runs, {name: [name] for name in "abcd"}))
    assert [(row["failed_a"], row["runs_a"], row["failed_b"]) for row in found[:1]] == [(12, 45, 0)]
    assert [row["p_holm"] < 0.05 for row in found] == [True, True, True, False, False, False]
    assert math.isnan(found[-1]["p"]), "none of their runs failed"


def test_the_score_is_of_runs_that_learn() -> None:
    """The failed run is at the best rate, whose mean is the highest all the same."""
    rows = [[0.50, 0.51, 0.52, 0.50, 0.51], [0.80, 0.81, 0.40, 0.79, 0.80], [0.52, 0.50, 0.51, 0.52, 0.50]]
    made = [each | {"key": str(place)} for place, each in enumerate(cells_of(RATES, rows))]
    runs = with_failures({"m": runs_of(made)})
    found = effect(runs["m"], fit_task(runs)["m"], "mean").seeds
    assert runs["m"].failed.sum() == 1 and found.value == pytest.approx(0.80)
    assert found.high - found.low < 0.05, "nothing of the failed run's distance is in the interval"
