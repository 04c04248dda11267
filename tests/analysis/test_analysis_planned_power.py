"""Differences that a planned grid can find, and the seeds that a difference takes: against statsmodels, scipy and planted noise."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from analysis_study import cell, synthetic_results
from scipy import stats
from statsmodels.stats.power import TTestIndPower

from mlmclm.analysis.analyse import Analysis, analyse
from mlmclm.analysis.comparison import ALL_TASKS, holm_level
from mlmclm.analysis.effects import Effect
from mlmclm.analysis.planned_power import (
    PlannedPower,
    TaskNoise,
    noise_of,
    planned_effects,
    planned_power,
    pretraining_noise,
)
from mlmclm.analysis.power import (
    POWER,
    Obstacle,
    differences,
    seeds_or_obstacle,
    smallest_difference,
    smallest_differences,
)
from mlmclm.analysis.replicates import over_replicates
from mlmclm.results.intervals import estimate

FAMILIES = {"rte": "classification", "mnli": "classification", "squad": "qa"}


def seeds_needed(
    noise: TaskNoise, difference: float, *, level: float, rates: int, power: float = POWER
) -> int | Obstacle:
    studies, names = planned_effects({"": noise}, 2, rates, 2)
    return seeds_or_obstacle(difference, differences(studies, names, [""]), 2, level, power)


@pytest.mark.parametrize(("noise", "power", "level"), [(0.01, 0.8, 0.05), (0.03, 0.9, 0.05), (0.02, 0.8, 0.05 / 18)])
def test_with_one_rate_the_seeds_are_those_of_statsmodels_t_test(noise: float, power: float, level: float) -> None:
    found = seeds_needed(TaskNoise(noise), 0.01, level=level, rates=1, power=power)
    asked = TTestIndPower().solve_power(effect_size=0.01 / noise, alpha=level, power=power)
    assert found == math.ceil(asked)


def test_with_a_test_set_and_several_rates_the_power_is_that_of_the_noncentral_t() -> None:
    noise, level = TaskNoise(0.02, test_set=0.004), 0.01
    found = seeds_needed(noise, 0.03, level=level, rates=4)
    assert isinstance(found, int)

    def power(seeds: int) -> float:
        own, fixed = 2 * 0.02**2 / seeds, 0.004**2
        freedom = (own + fixed) ** 2 / (own**2 / (2 * 4 * (seeds - 1)) + fixed**2 / 99)
        critical = stats.t.ppf(1 - level / 2, freedom)
        return float(stats.nct.sf(critical, freedom, 0.03 / math.sqrt(own + fixed)))

    assert power(found) >= 0.8 > power(found - 1)
    assert seeds_needed(TaskNoise(0.02, test_set=0.02), 0.03, level=level, rates=4) == "test sets", (
        "the test set alone hides it"
    )


def test_few_degrees_of_freedom_have_a_smallest_difference_too() -> None:
    level, freedom = 1e-5, 2.0
    found = smallest_difference(1.0, freedom, level)
    assert stats.nct.sf(stats.t.ppf(1 - level / 2, freedom), freedom, found) == pytest.approx(0.8, abs=1e-3)


def test_the_seeds_needed_and_the_smallest_difference_agree() -> None:
    noise = {"rte": TaskNoise(0.027, 0.002), "mnli": TaskNoise(0.008), "squad": TaskNoise(0.012, 0.001)}
    needed = planned_power(noise, FAMILIES, ("a", "b", "c"), 2, 2, 0.015).needed
    for task, number in needed.items():
        assert number is not None
        for seeds, found in ((number, True), (number - 1, False)):
            made = planned_power(noise, FAMILIES, ("a", "b", "c"), seeds, 2, 0.015)
            assert (made.smallest[task] <= 0.015) == found or seeds == 1
    most = max(number for number in needed.values() if number is not None)
    assert planned_power(noise, FAMILIES, ("a", "b", "c"), most, 2, 0.015).smallest[ALL_TASKS] < 0.015


def test_the_first_step_shares_the_error_among_pairs_and_gives_the_mean_nine_tenths() -> None:
    assert holm_level("task", FAMILIES, 4, 0.95) == pytest.approx(0.05 / (4 * 6)), "three tasks and a family"
    assert holm_level("all", FAMILIES, 4, 0.95) == pytest.approx(0.045 / 6)
    assert holm_level("task", {"rte": "classification"}, 2, 0.95) == pytest.approx(0.05)


def test_a_planted_difference_is_found_with_the_power_that_the_seeds_are_for() -> None:
    """2,000 studies of two models at one rate, whose noise is planted, by Student's test."""
    noise, difference, level = TaskNoise(0.02), 0.02, holm_level("task", FAMILIES, 3, 0.95)
    seeds = seeds_needed(noise, difference, level=level, rates=1)
    assert isinstance(seeds, int)
    one, other = np.random.default_rng(0).normal(0, noise.seeds, (2, 2000, seeds))
    power = float((stats.ttest_ind(one + difference, other, axis=1).pvalue < level).mean())
    assert 0.77 <= power <= 0.84


def test_seeds_by_a_pilot_find_the_difference_and_keep_the_error_of_the_test() -> None:
    """Three seeds first, then as many as their noise asks for, and one test over all: 1,000 studies with and without a lead."""
    rng, rates, sd, lead, level = np.random.default_rng(1), 3, 0.02, 0.03, 0.05
    asked = {}
    for shift, low, high in ((lead, 0.75, 0.88), (0.0, 0.03, 0.07)):
        claims = []
        for scores in rng.normal(0, sd, (1000, 2, rates, 20)):
            pilot = math.sqrt(scores[..., :3].var(axis=-1, ddof=1).mean())
            key = round(pilot, 3)
            if key not in asked:
                asked[key] = int(seeds_needed(TaskNoise(key), lead, level=level, rates=rates))
            seeds = min(20, max(3, asked[key]))
            used = scores[..., :seeds]
            variance = used.var(axis=-1, ddof=1).mean(axis=1)
            gap = used[0, 0].mean() - used[1, 0].mean() + shift
            t = gap / math.sqrt(variance.sum() / seeds)
            claims.append(2 * stats.t.sf(abs(t), 2 * rates * (seeds - 1)) < level)
        assert low <= np.mean(claims) <= high


def noisy(rates: tuple[float, ...]) -> dict[str, TaskNoise]:
    """Return the noise found where that of pydocs-kind is 1 point, and that of pydocs-qa 3 points."""
    tasks = ("pydocs-kind", "pydocs-qa")
    results = synthetic_results(dict.fromkeys("abcdef", 0.7), tasks=tasks, noise=0.0, seeds=6, rates=rates)
    draws = np.random.default_rng(0)
    for result in results:
        for split in result["scores"].values():
            for name in split:
                split[name] += (0.03 if result["task"] == "pydocs-qa" else 0.01) * draws.standard_normal()
    return noise_of(analyse(results))


def test_noise_is_found_again_in_results_that_have_it() -> None:
    found = noisy((1e-3,))
    assert found["pydocs-kind"].seeds == pytest.approx(0.01, rel=0.2)
    assert found["pydocs-qa"].seeds == pytest.approx(0.03, rel=0.2)
    assert found["pydocs-qa"].models == 6 and found["pydocs-qa"].runs == 36 and found["pydocs-qa"].test_set == 0
    assert all(effect.pooled for effect in found["pydocs-kind"].drawn[0].values()), "noise is alike for all models"
    assert noisy((1e-4, 1e-3, 1e-2))["pydocs-qa"].seeds > 0.03, "rates two points apart are chosen by accident"
    assert noise_of(analyse(synthetic_results({"a": 0.7, "b": 0.6}, tasks=("pydocs-kind",), seeds=1))) == {}


def unequally_noisy(number: int) -> Analysis:
    """Analyse a study of four equal models; its noise grows with the rate, and the middle rate is the best."""
    draws, rates, results = np.random.default_rng(number), {1e-4: 0.3, 3e-4: 0.7, 1e-3: 1.1, 3e-3: 1.5, 1e-2: 1.9}, []
    for model, task, place, seed in itertools.product("abcd", FAMILIES, range(5), range(3)):
        rate, deviation = list(rates.items())[place]
        scores = 0.7 - 0.01 * abs(place - 2) + 0.01 * deviation * draws.standard_normal(2)
        results.append(cell(model, task, rate, seed, *map(float, scores)))
    return analyse(results)


def test_a_plan_says_what_repeated_studies_find_where_rates_are_unequally_noisy() -> None:
    """It said a fifth less on tasks: the studies find their noise unequal, and then base it on fewer runs than the plan took."""
    found: dict[str, list[float]] = {"task": [], "all": []}
    planned: dict[str, list[float]] = {"task": [], "all": []}
    for number in range(20):
        analysis = unequally_noisy(number)
        for row in analysis.comparisons[analysis.comparisons["kind"] != "family"].to_dict("records"):
            level = holm_level(row["kind"], FAMILIES, 4, 0.95)
            claimed = row["error"] * float(stats.t.ppf(1 - level / 2, row["freedom"]))
            found[row["kind"]] += [claimed - row["difference"], claimed + row["difference"]]
        smallest = planned_power(noise_of(analysis), FAMILIES, "abcd", 3, 5, 0.1).smallest
        for scope, value in smallest.items():
            planned["all" if scope == ALL_TASKS else "task"].append(value)
    for kind, leads in found.items():
        assert np.median(planned[kind]) == pytest.approx(np.quantile(leads, 0.8), rel=0.1), kind


def losing(lost: bool) -> Analysis:
    """Analyse a study of four models, each of which may have lost one of its three runs at the best of two rates."""
    results = synthetic_results(dict.fromkeys("abcd", 0.7), tasks=("rte",), rates=(1e-4, 1e-3), noise=0.01)
    for result in results:
        if result["learning_rate"] == 1e-4:
            result["scores"]["validation"]["accuracy"] -= 0.03
            result["scores"]["test"]["accuracy"] -= 0.03
        elif lost and result["seed"] == "abcd".index(result["model"]) % 3:
            result |= {"status": "diverged", "scores": None, "diverged_step": 7}
    return analyse(results)


def test_a_plan_of_the_same_study_is_its_report_except_that_other_runs_may_be_lost() -> None:
    """No model lost its choice, but each may by losing two of three runs at its best rate; three points are then at stake."""
    for lost in (False, True):
        analysis = losing(lost)
        plans = [
            planned_power(noise_of(analysis), {"rte": ""}, "abcd", 3, 2, 0.1).smallest["rte"] / analysis.smallest["rte"]
            for _ in range(2)
        ]
        assert plans[0] == plans[1] and (1.2 < plans[0] < 5 if lost else plans[0] == pytest.approx(1.0))


def test_a_plan_knows_which_tasks_share_their_trainings() -> None:
    """A mean over three tasks of one training was planned to be as precise as one over three trainings."""
    results = synthetic_results(dict.fromkeys("abc", 0.7), tasks=("nq", "mldr", "rte"), noise=0.01)
    for result in results:
        if result["task"] != "rte":
            result["curve"] = [[1, f"{result['model']}/{result['learning_rate']}/{result['seed']}"]]
    assert [list(own.alike) for _, own in sorted(noise_of(analyse(results)).items())] == [["nq"], ["mldr"], []]
    noise = {
        "nq": TaskNoise(0.01, alike={"mldr": 0.8}),
        "mldr": TaskNoise(0.01, alike={"nq": 0.8}),
        "rte": TaskNoise(0.01),
    }
    families, level = dict.fromkeys(noise, "retrieval"), holm_level("all", dict.fromkeys(noise, "retrieval"), 3, 0.95)
    both, one = np.asarray([2 + 2 * 0.8, 1.0]) * 2 * 0.01**2 / 3 / 9
    freedom = (both + one) ** 2 / (both**2 / 12 + one**2 / 12)
    steady = {task: replace(own, pretraining=0.0) for task, own in noise.items()}
    for runs, own, degrees in ((1, noise, freedom), (4, steady, 9)):
        found = planned_power(own, families, "abc", 3, 2, 0.1, runs=runs).smallest[ALL_TASKS]
        shift = found / math.sqrt((both + one) / runs)
        assert stats.nct.sf(stats.t.ppf(1 - level / 2, degrees), degrees, shift) == pytest.approx(0.8, abs=1e-3)


def planned_with_runs(together: float) -> PlannedPower:
    noise = {task: TaskNoise(0.01, pretraining=0.02, together=together) for task in FAMILIES}
    return planned_power(noise, FAMILIES, ("a", "b", "c"), 3, 2, 0.1, runs=4)


def test_a_plan_of_several_pretraining_runs_finds_what_the_noncentral_t_says() -> None:
    """Three models of four runs have nine degrees of freedom."""
    variance = 2 * (0.02**2 + 0.01**2 / 3) / 4
    for together, over_tasks in ((0.0, variance / 3), (1.0, 2 * (0.02**2 + 0.01**2 / 9) / 4)):
        made = planned_with_runs(together)
        for scope, own, kind in (("rte", variance, "task"), (ALL_TASKS, over_tasks, "all")):
            level, found = holm_level(kind, FAMILIES, 3, 0.95), made.smallest[scope]
            assert stats.nct.sf(stats.t.ppf(1 - level / 2, 9), 9, found / math.sqrt(own)) == pytest.approx(
                0.8, abs=1e-3
            )
    runs, level = made.runs_needed["rte"], holm_level("task", FAMILIES, 3, 0.95)
    assert runs is not None
    for number, enough in ((runs, True), (runs - 1, False)):
        error = math.sqrt(2 * (0.02**2 + 0.01**2 / 3) / number)
        assert (smallest_difference(error, 3 * (number - 1), level) <= 0.1) == enough


def test_the_noise_of_pretraining_is_recovered_with_what_tasks_share() -> None:
    chance, groups = (
        np.random.default_rng(0),
        {f"m{place}": [f"m{place}-{run}" for run in range(3)] for place in range(400)},
    )
    effects = {}
    for own in groups.values():
        for name in own:
            together = chance.normal(0, 0.015)
            for task in ("s", "t"):
                value = 0.5 + together + chance.normal(0, 0.02) + chance.normal(0, 0.01)
                own_score = estimate(value, 0.01, 8.0)
                effects[name, task] = Effect(own_score, own_score, np.ones(1), 0.0)
    found, together = pretraining_noise(over_replicates(effects, groups), ["s", "t", "u"])
    assert found == pytest.approx({"s": 0.025, "t": 0.025}, rel=0.12)
    assert together == pytest.approx(0.015**2 / 0.025**2, abs=0.1)
    assert pretraining_noise(effects, ["s", "t"]) == ({}, 1.0)


def test_the_smallest_difference_is_that_from_the_baseline_if_there_is_one_other_model() -> None:
    """Its plan said one, and its report none."""
    results = synthetic_results({"a": 0.7, "b": 0.6, "c": 0.5}, tasks=("rte",), noise=0.01)
    two = [each for each in results if each["model"] != "c"]
    assert analyse(two, "a").smallest == analyse(two).smallest and analyse(two).smallest["rte"] > 0
    others = smallest_differences([analyse(results).effects], ["b", "c"], {"rte": ""})
    assert analyse(results, "a").smallest == others
