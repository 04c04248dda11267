"""Scores over several pretraining runs: intervals that hold the noise of pretraining, against simulation and by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from analysis_study import cell
from statsmodels.formula.api import ols
from statsmodels.stats.anova import anova_lm

from mlmclm.analysis.analyse import analyse
from mlmclm.analysis.comparison import ALL_TASKS, comparison_table, overall_table
from mlmclm.analysis.contrasts import mean_difference, weighted_sum
from mlmclm.analysis.effects import NO_EFFECT, Effect
from mlmclm.analysis.power import runs_or_obstacle, seeds_or_obstacle, smallest_difference
from mlmclm.analysis.replicates import over_replicates, runs_by_model
from mlmclm.analysis.results import records
from mlmclm.analysis.statistics.typical import typical
from mlmclm.results.intervals import NAN, estimate, satterthwaite
from small_results import make_result


def run(value: float, error: float = 0.001, freedom: float = 8.0) -> Effect:
    own = estimate(value, error, freedom)
    return Effect(own, own, np.ones(1), 0.0)


def test_runs_are_grouped_by_the_model_that_they_are_runs_of() -> None:
    models = ["b-r2", "a", "b", "a-r3", "a-r2", "a-r10"]
    replicate_of = {"b-r2": "b", "a-r2": "a", "a-r3": "a", "a-r10": "a"}
    assert runs_by_model(models, replicate_of) == {"a": ["a", "a-r10", "a-r2", "a-r3"], "b": ["b", "b-r2"]}


def test_the_variance_is_pooled_over_models_and_borrowed_by_one_with_a_single_run() -> None:
    scores = {"a": [0.70, 0.72, 0.74], "b": [0.60, 0.60], "c": [0.5]}
    effects = {(f"{name}{place}", "t"): run(value) for name, own in scores.items() for place, value in enumerate(own)}
    groups = {name: [f"{name}{place}" for place in range(len(own))] for name, own in scores.items()}
    found = over_replicates(effects, groups)
    variance = (0.02**2 + 0.02**2) / 3  # three degrees of freedom: two of a, one of b
    for name, own in scores.items():
        each = found[name, "t"].seeds
        assert each.value == pytest.approx(np.mean(own))
        assert each.error == pytest.approx(math.sqrt(variance / len(own))) and each.freedom == 3
    difference = mean_difference(found, ("a", "c"), ["t"]).whole
    assert difference.error == pytest.approx(math.sqrt(variance * (1 / 3 + 1)))
    assert difference.freedom == pytest.approx(3), "one variance for both"


def test_a_model_of_one_run_borrows_what_pretraining_adds_and_keeps_the_noise_of_its_own_seeds() -> None:
    scores = {"a": [0.70, 0.72, 0.74], "b": [0.60, 0.62]}
    effects = {
        (f"{name}{place}", "t"): run(value, 0.01) for name, own in scores.items() for place, value in enumerate(own)
    }
    effects |= {("quiet0", "t"): run(0.5, 0.002), ("noisy0", "t"): run(0.5, 0.03)}
    groups = {"a": ["a0", "a1", "a2"], "b": ["b0", "b1"], "quiet": ["quiet0"], "noisy": ["noisy0"]}
    found = over_replicates(effects, groups)
    between = (2 * 0.02**2 + 2 * 0.01**2) / 3
    quiet, noisy = (found[name, "t"].seeds.error ** 2 for name in ("quiet", "noisy"))
    assert quiet == pytest.approx(between), "no less than what runs vary by"
    assert noisy == pytest.approx(between - 0.01**2 + 0.03**2)
    assert found["a", "t"].seeds.error ** 2 == pytest.approx(between / 3)


def test_replicates_that_agree_by_accident_keep_the_noise_of_their_seeds() -> None:
    effects = {("a", "t"): run(0.7, 0.02), ("a-r2", "t"): run(0.7, 0.02)}
    found = over_replicates(effects, {"a": ["a", "a-r2"]})["a", "t"].seeds
    assert found.error == pytest.approx(0.02 / math.sqrt(2)) and found.freedom == 1, "it is based on two runs"


def test_without_replicates_on_a_task_nothing_changes() -> None:
    effects = {("a", "t"): run(0.7), ("b", "t"): run(0.6), ("a", "u"): run(0.7, NAN, NAN)}
    assert over_replicates(effects, {"a": ["a", "a-r2"], "b": ["b"]}) == effects


@pytest.mark.parametrize("counts", [(3, 3), (2, 2, 2), (3, 1), (5, 1, 1), (2, 1), (2, 1, 1)])
def test_intervals_of_differences_cover_with_noise_of_pretraining_and_of_seeds(counts: tuple[int, ...]) -> None:
    chance = np.random.default_rng(0)
    groups = {f"m{place}": [f"m{place}-{number}" for number in range(count)] for place, count in enumerate(counts)}
    covered = []
    for _ in range(1500):
        effects = {}
        for name in (each for own in groups.values() for each in own):
            value = chance.normal(0.5, 0.02) + chance.normal(0, 0.01 / math.sqrt(3))
            error = 0.01 / math.sqrt(3) * math.sqrt(chance.chisquare(8) / 8)
            effects[name, "t"] = run(value, error)
        found = over_replicates(effects, groups)
        first, *_, last = groups
        difference = mean_difference(found, (first, last), ["t"]).whole
        covered.append(difference.low <= 0 <= difference.high)
    assert 0.935 < np.mean(covered) < 0.985


def grid_of_replicates(chance: np.random.Generator, *, pretraining: float, gap: float = 0.0) -> list[dict[str, object]]:
    """Results of two models of three pretraining runs each, and of one of a single run, on one task."""
    runs = {"a": gap, "a-r2": gap, "a-r3": gap, "b": 0.0, "b-r2": 0.0, "b-r3": 0.0, "c": 0.0}
    rows = []
    for model, ahead in runs.items():
        centre = 0.7 + ahead + chance.normal(0, pretraining)
        for rate, seed in itertools.product((1e-4, 2e-4), range(3)):
            test = centre + chance.normal(0, 0.005)
            scores = {"validation": {"accuracy": test + chance.normal(0, 0.005)}, "test": {"accuracy": test}}
            key = f"{model}-{rate}-{seed}"
            rows.append(make_result(key=key, model=model, task="t", learning_rate=rate, seed=seed, scores=scores))
    return rows


REPLICATE_OF = {"a-r2": "a", "a-r3": "a", "b-r2": "b", "b-r3": "b"}


def test_models_are_compared_over_their_replicates_and_runs_keep_their_own_rows() -> None:
    rows = grid_of_replicates(np.random.default_rng(1), pretraining=0.02)
    analysis = analyse(rows, replicate_of=REPLICATE_OF)
    assert set(analysis.best["model"]) == {"a", "a-r2", "a-r3", "b", "b-r2", "b-r3", "c"}
    assert set(analysis.comparisons["model_a"]) | set(analysis.comparisons["model_b"]) == {"a", "b", "c"}
    scores = analysis.best.set_index("model")["score"]
    between = analysis.comparisons.query("model_a == 'a' and model_b == 'b' and scope == 't'").iloc[0]
    assert between["difference"] == pytest.approx(
        scores[["a", "a-r2", "a-r3"]].mean() - scores[["b", "b-r2", "b-r3"]].mean()
    )
    alone = analyse(rows).comparisons.query("model_a == 'a' and model_b == 'b' and scope == 't'").iloc[0]
    assert between["error"] > 1.5 * alone["error"], "seeds alone don't show what another pretraining run would score"


def test_equal_models_whose_pretraining_varies_are_seldom_found_different() -> None:
    chance = np.random.default_rng(2)
    claimed = {True: 0, False: 0}
    for _ in range(24):
        rows = grid_of_replicates(chance, pretraining=0.02)
        for known in (True, False):
            analysis = analyse(rows, replicate_of=REPLICATE_OF if known else {})
            claimed[known] += bool((analysis.comparisons["p_verdict"] < 0.05).any())
    assert claimed[True] <= 3 and claimed[False] > 12


def test_runs_that_a_difference_needs_count_the_pooled_degrees_of_freedom_once() -> None:
    groups = {name: [f"{name}{place}" for place in range(2)] for name in "ab"}
    spread = dict(zip((run for runs in groups.values() for run in runs), (-0.02, 0.02, -0.02, 0.02), strict=True))
    effects = over_replicates({(name, "t"): run(value, NAN, NAN) for name, value in spread.items()}, groups)
    between = mean_difference(effects, ("a", "b"), ["t"])
    variance = 2 * 0.02**2 * 2 / 2  # of the runs of a model, for two models of two runs
    assert between.whole.error == pytest.approx(math.sqrt(variance)) and between.whole.freedom == 2
    needed = runs_or_obstacle(0.05, [between], 2, 0.005)
    asked = next(
        number
        for number in itertools.count(3)
        if smallest_difference(math.sqrt(variance * 2 / number), 2 * (number - 1), 0.005) <= 0.05
    )
    assert needed == asked


TASKS = ("t0", "t1", "t2", "t3")


def runs_on_tasks(
    chance: np.random.Generator, groups: Mapping[str, Sequence[str]], *, shared: float, own: float, seeds: float
) -> dict[tuple[str, str], Effect]:
    """Scores of the runs of equal models, which pretraining moves on all tasks together, and on each by itself."""
    found = {}
    for name in (each for runs in groups.values() for each in runs):
        together = chance.normal(0, shared)
        for task in TASKS:
            value = 0.5 + together + chance.normal(0, own) + chance.normal(0, seeds)
            found[name, task] = run(value, seeds * math.sqrt(chance.chisquare(8) / 8))
    return found


@pytest.mark.parametrize("counts", [(3, 3), (4, 1, 1)])
def test_means_over_tasks_cover_where_a_run_moves_all_tasks_together(counts: tuple[int, ...]) -> None:
    chance = np.random.default_rng(0)
    groups = {f"m{place}": [f"m{place}-{number}" for number in range(count)] for place, count in enumerate(counts)}
    first, *_, last = groups
    covered, before = [], []
    for _ in range(250):
        found = over_replicates(runs_on_tasks(chance, groups, shared=0.02, own=0.005, seeds=0.004), groups)
        ends = [mean_difference(found, (first, last), tasks).whole for tasks in (TASKS, TASKS[:2])]
        mean = weighted_sum(found, {task: {last: 1 / len(TASKS)} for task in TASKS}).whole
        covered.append([*(own.low <= 0 <= own.high for own in ends), mean.low <= 0.5 <= mean.high])
        parts = [mean_difference(found, (first, last), [task]).whole for task in TASKS]
        shares = [(own.error**2 / len(TASKS) ** 2, own.freedom) for own in parts]
        independent = satterthwaite(float(np.mean([own.value for own in parts])), shares)
        before.append(independent.low <= 0 <= independent.high)
    assert all(0.91 < share < 0.99 for share in np.mean(covered, axis=0))
    assert np.mean(before) < 0.8, "tasks are not independent"


def test_the_tables_take_a_run_s_tasks_together() -> None:
    groups = {name: [f"{name}{place}" for place in range(3)] for name in "ab"}
    found = over_replicates(
        runs_on_tasks(np.random.default_rng(5), groups, shared=0.02, own=0.001, seeds=0.001), groups
    )
    families = dict.fromkeys(TASKS[:2], "one") | dict.fromkeys(TASKS[2:], "other")
    for scope, tasks in (("one", TASKS[:2]), (ALL_TASKS, TASKS)):
        row = comparison_table(found, ["a", "b"], families).set_index("scope").loc[scope]
        assert row["error"] == mean_difference(found, ("a", "b"), tasks).whole.error > 0.01
        overall = overall_table(found, ["a", "b"], families).set_index(["scope", "model"]).loc[(scope, "a")]
        assert overall["error"] == pytest.approx(row["error"] / math.sqrt(2))


def test_the_variance_of_a_mean_over_tasks_is_that_of_a_nested_analysis_of_variance() -> None:
    """statsmodels fits score ~ model * task + run within model; the mean square of runs is that of their means over tasks."""
    groups = {name: [f"{name}{place}" for place in range(3)] for name in "abc"}
    runs = runs_on_tasks(np.random.default_rng(3), groups, shared=0.02, own=0.005, seeds=1e-6)
    rows = [
        {"model": name[0], "run": name[1], "task": task, "score": each.seeds.value}
        for (name, task), each in runs.items()
    ]
    table = anova_lm(ols("score ~ C(model) * C(task) + C(model):C(run)", pd.DataFrame(rows)).fit())
    square, freedom = table.loc["C(model):C(run)", ["mean_sq", "df"]]
    found = mean_difference(over_replicates(runs, groups), ("a", "c"), TASKS).whole
    assert freedom == found.freedom == 6
    assert found.error == pytest.approx(math.sqrt(square / len(TASKS) * 2 / 3), rel=1e-9)


def test_the_typical_difference_has_what_runs_do_to_all_tasks() -> None:
    groups = {name: [f"{name}{place}" for place in range(3)] for name in "ab"}
    runs = runs_on_tasks(np.random.default_rng(6), groups, shared=0.02, own=0.001, seeds=0.001)
    found = over_replicates(runs, groups)
    analysis: Any = SimpleNamespace(effects=found, groups=groups, families=dict.fromkeys(TASKS, ""), confidence=0.95)
    (row,) = records(typical(analysis))
    whole = mean_difference(found, ("a", "b"), TASKS).whole
    # All tasks have nearly the same difference, so the typical one is about as precise as the mean.
    assert row["typical_high"] - row["typical_low"] == pytest.approx(whole.high - whole.low, rel=0.15)


def test_seeds_take_nothing_from_the_noise_of_pretraining() -> None:
    groups = {name: [f"{name}{place}" for place in range(3)] for name in "ab"}
    spread = dict(zip((run for runs in groups.values() for run in runs), (-1, 0, 1, -1, 0, 1), strict=True))
    found = over_replicates({(name, "t"): run(0.02 * value, 0.01) for name, value in spread.items()}, groups)
    between = mean_difference(found, ("a", "b"), ["t"])
    added = 2 * (0.02**2 - 0.01**2) / 3  # of the variance of the difference, by pretraining alone
    assert between.within == pytest.approx(2 * 0.01**2 / 3)
    least = smallest_difference(math.sqrt(added), 4, 0.05)
    assert seeds_or_obstacle(0.99 * least, [between], 3, 0.05) == "pretraining"
    needed = seeds_or_obstacle(1.05 * least, [between], 3, 0.05)
    assert isinstance(needed, int)
    for seeds, enough in ((needed, True), (needed - 1, False)):
        error = math.sqrt(added + 2 * 0.01**2 / 3 * 3 / seeds)
        assert (smallest_difference(error, 4, 0.05) <= 1.05 * least) == enough


@pytest.mark.parametrize("seeds", [(1, 1, 1, 1), (1, 3, 1, 3)])
def test_runs_of_one_fine_tuning_seed_are_compared(seeds: tuple[int, ...]) -> None:
    """All of their noise is in that between pretraining runs."""
    draws = np.random.default_rng(8)
    levels = dict(zip(("a", "a-r2", "b", "b-r2"), 0.7 + 0.02 * draws.standard_normal(4), strict=True))
    results = [
        cell(model, "t", 1e-4, seed, *(level + 0.005 * draws.standard_normal(2)))
        for (model, level), number in zip(levels.items(), seeds, strict=True)
        for seed in range(number)
    ]
    found = analyse(results, replicate_of={"a-r2": "a", "b-r2": "b"})
    assert all(own.seeds.freedom == 2 for own in found.effects.values())
    assert found.smallest["t"] > 0


def test_a_model_whose_first_run_has_no_score_has_that_of_its_other_run() -> None:
    effects = {("a", "t"): NO_EFFECT, ("a-r2", "t"): run(0.7)}
    assert over_replicates(effects, {"a": ["a", "a-r2"]}) == {("a", "t"): effects["a-r2", "t"]}
