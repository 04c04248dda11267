"""Models against models, means over tasks, and the claim that pretraining helps."""

from __future__ import annotations

import math
import statistics
from typing import Any

import numpy as np
import pytest
from analysis_study import TASKS, cell, synthetic_results
from scipy import stats

from mlmclm.analysis.analyse import Analysis, analyse
from mlmclm.analysis.comparison import against, gatekept, low_of_best
from mlmclm.analysis.results import Grid, records
from mlmclm.analysis.summary import summary, task_metrics
from mlmclm.errors import UserError
from mlmclm.registry import KINDS
from mlmclm.reports.wording import clearly_different, headline
from mlmclm.results.chance import Chance
from mlmclm.storage.files import canonical_json


def one_rate(scores: dict[str, dict[str, list[float | None]]]) -> list[dict[str, Any]]:
    return [
        cell(model, task, 1e-3, seed, value, value)
        for model, tasks in scores.items()
        for task, values in tasks.items()
        for seed, value in enumerate(values)
    ]


def claim(scores: dict[str, dict[str, list[float | None]]], baseline: str = "untrained") -> dict[str, Any]:
    return records(analyse(one_rate(scores), baseline).claims)[0]


def test_a_difference_on_a_task_is_students_with_the_pooled_variance() -> None:
    a, b = [0.71, 0.74, 0.69], [0.61, 0.68, 0.66]
    found = analyse(one_rate({"a": {"pydocs-kind": list(a)}, "b": {"pydocs-kind": list(b)}}))
    row = records(found.comparisons)[0]
    expected = stats.ttest_ind(a, b)
    interval = expected.confidence_interval()
    assert (row["difference"], row["low"], row["high"], row["p"]) == pytest.approx(
        (statistics.fmean(a) - statistics.fmean(b), interval.low, interval.high, expected.pvalue)
    )


def test_the_mean_over_tasks_is_that_of_the_best_rates_with_variances_summed() -> None:
    found = analyse(synthetic_results({"a": 0.8, "b": 0.7}))
    row = next(row for row in records(found.overall) if row["model"] == "a" and row["kind"] == "all")
    best = [row for row in records(found.best) if row["model"] == "a"]
    assert row["mean"] == pytest.approx(statistics.fmean(item["score"] for item in best))
    parts = [(own.seeds.error / 4, own.seeds.freedom) for (model, _), own in found.effects.items() if model == "a"]
    variance = sum(error**2 for error, _ in parts)
    freedom = variance**2 / sum(error**4 / own for error, own in parts)
    half = stats.t.ppf(0.975, freedom) * math.sqrt(variance)
    assert (row["low"], row["high"]) == pytest.approx((row["mean"] - half, row["mean"] + half))
    assert row["freedom"] == pytest.approx(freedom)


def test_the_difference_of_means_over_tasks_is_the_mean_of_the_differences() -> None:
    found = records(analyse(synthetic_results({"a": 0.8, "b": 0.7})).comparisons)
    by_task = [row["difference"] for row in found if row["kind"] == "task"]
    overall = next(row for row in found if row["kind"] == "all")
    assert len(by_task) == 4
    assert overall["difference"] == pytest.approx(statistics.fmean(by_task))


def test_families_with_several_tasks_have_a_mean_of_their_own() -> None:
    scores = {
        model: {"pydocs-kind": [level, level + 0.01], "sst2": [level, level], "pydocs-qa": [level, level]}
        for model, level in (("a", 0.8), ("b", 0.6))
    }
    found = analyse(one_rate(scores))  # type: ignore[arg-type]
    rows = {(row["kind"], row["scope"], row["model"]): row for row in records(found.overall)}
    assert rows["family", "sequence-classification", "a"]["mean"] == pytest.approx((0.805 + 0.8) / 2)
    assert ("family", "question-answering", "a") not in rows


def test_comparisons_turn_around_with_their_intervals() -> None:
    found = analyse(synthetic_results({"a": 0.8, "b": 0.7, "c": 0.6}))
    forward = {(row["scope"], row["model_b"]): row for row in against(found.comparisons, "a")}
    backward = {(row["scope"], row["model_a"], row["model_b"]): row for row in against(found.comparisons, "b")}
    for scope in (*TASKS, "all tasks"):
        ahead, behind = forward[scope, "b"], backward[scope, "b", "a"]
        assert (behind["difference"], behind["low"], behind["high"]) == (
            -ahead["difference"],
            -ahead["high"],
            -ahead["low"],
        )
    assert ("all tasks", "b", "c") in backward


def step_by_step(pairs: list[tuple[float, list[float]]]) -> dict[tuple[int, int], float]:
    """Adjusted p values by (pair, scope), the mean over tasks being scope -1: the graphical procedure, one claim after the other."""
    left = {(pair, scope) for pair, (_, others) in enumerate(pairs) for scope in range(-1, len(others))}
    found, highest = {}, 0.0

    def needed(pair: int, scope: int) -> float:
        active = len({one for one, _ in left})
        tasks = sum(one == pair and other >= 0 for one, other in left)
        is_open = (pair, -1) in left
        if scope < 0:
            return pairs[pair][0] * active / (0.9 if tasks else 1.0)
        return pairs[pair][1][scope] * active * tasks / (0.1 if is_open else 1.0)

    while left:
        first = min(left, key=lambda place: needed(*place))
        highest = min(1.0, max(highest, needed(*first)))
        found[first] = highest
        left.remove(first)
    return found


def test_the_mean_is_tested_first_and_the_tasks_with_its_error() -> None:
    draws = np.random.default_rng(0)
    for _ in range(100):
        pairs = [(draws.random() ** 4, list(draws.random(3) ** 5)) for _ in range(draws.integers(1, 5))]
        expected = step_by_step(pairs)
        for pair, (mean, others) in enumerate(gatekept(pairs)):
            assert [mean, *others] == pytest.approx([expected[pair, scope] for scope in range(-1, 3)])
    assert gatekept([(math.nan, [0.01, math.nan, 0.04])])[0][1] == pytest.approx([0.02, math.nan, 0.04], nan_ok=True)


def test_equal_models_are_claimed_to_differ_in_five_percent_of_studies_and_strong_effects_of_opposite_sign_are_found() -> (
    None
):
    """z tests of two models on four tasks, with a mean over tasks of its own."""
    draws = np.random.default_rng(1)

    def claims(lead: list[float]) -> float:
        z = draws.standard_normal((2_000, 4)) + lead
        p, mean = 2 * stats.norm.sf(abs(z)), 2 * stats.norm.sf(abs(z.sum(axis=1)) / 2)
        adjusted = [gatekept([(float(whole), own.tolist())])[0] for whole, own in zip(mean, p, strict=True)]
        return float(np.mean([min(whole, *others) < 0.05 for whole, others in adjusted]))

    assert claims([0, 0, 0, 0]) == pytest.approx(0.05, abs=0.015)
    assert claims([6, -6, 0, 0]) > 0.97


def test_a_model_without_a_score_on_a_task_has_no_mean_over_tasks() -> None:
    full = synthetic_results({"a": 0.8, "b": 0.7})
    found = analyse([row for row in full if (row["model"], row["task"]) != ("a", "pydocs-qa")])
    rows = {row["model"]: row for row in records(found.overall)}
    assert math.isnan(rows["a"]["mean"]) and rows["a"]["tasks_scored"] == 3
    assert not math.isnan(rows["b"]["mean"])
    overall = next(row for row in records(found.comparisons) if row["kind"] == "all")
    assert math.isnan(overall["difference"]) and overall["tasks_scored"] == 3
    assert found.missing == 12


def test_the_claim_holds_where_the_model_is_clearly_ahead() -> None:
    found = analyse(synthetic_results({"a": 0.8, "b": 0.75, "untrained": 0.6}), "untrained")
    rows = records(found.claims)
    assert [row["model"] for row in rows] == ["a", "b"]
    for row, gap in zip(rows, (0.2, 0.15), strict=True):
        assert row["verdict"] == "holds" and row["holds"]
        assert (row["tasks_clear"], row["tasks_required"]) == (4, 3)
        assert row["low"] < gap < row["high"] and row["low"] > 0
        direct = against(found.comparisons, row["model"])
        expected = next(item for item in direct if item["kind"] == "all" and item["model_b"] == "untrained")
        assert row["difference"] == pytest.approx(expected["difference"])
        assert (row["low"], row["high"]) == pytest.approx((expected["low"], expected["high"]))


def test_the_claim_holds_on_three_tasks_of_four_but_not_on_two() -> None:
    low: list[float | None] = [0.50, 0.51]
    high: list[float | None] = [0.90, 0.91]
    tasks = list(TASKS)
    untrained = dict.fromkeys(tasks, low)
    three = claim({"a": dict.fromkeys(tasks, high) | {tasks[0]: low}, "untrained": untrained})
    assert (three["verdict"], three["tasks_ahead"], three["tasks_clear"]) == ("holds", 3, 3)
    two = claim({"a": dict.fromkeys(tasks, high) | {tasks[0]: low, tasks[1]: low}, "untrained": untrained})
    assert (two["verdict"], two["holds"], two["on_mean"]) == ("in part", False, True)
    none = claim({"a": untrained, "untrained": dict.fromkeys(tasks, high)})
    assert (none["verdict"], none["tasks_ahead"]) == ("does not hold", 0)


def test_a_difference_within_the_interval_is_not_a_win() -> None:
    close = claim({"a": {"pydocs-kind": [0.50, 0.60, 0.55]}, "untrained": {"pydocs-kind": [0.49, 0.58, 0.56]}})
    assert (close["verdict"], close["tasks_ahead"], close["tasks_clear"]) == ("not shown", 1, 0)


def test_a_lead_over_the_baseline_that_many_comparisons_explain_is_no_claim() -> None:
    """One of ten equal models is often ahead of the baseline by more than an interval that knows of this one pair only."""
    base: list[float | None] = [0.50, 0.52, 0.51]
    ahead: list[float | None] = [0.53, 0.55, 0.54]
    alone = {"a": {"pydocs-kind": ahead}, "untrained": {"pydocs-kind": base}}
    assert claim(alone)["verdict"] == "holds"
    crowd = {f"m{number}": {"pydocs-kind": base} for number in range(8)}
    row = claim(alone | crowd)
    assert row["low"] > 0 and (row["verdict"], row["on_mean"], row["tasks_clear"]) == ("not shown", False, 1)


def test_one_seed_on_a_task_leaves_the_mean_over_tasks_without_an_interval() -> None:
    """Its noise may be ten times that of the other tasks."""
    scores: dict[str, dict[str, list[float | None]]] = {
        name: {
            "pydocs-kind": [level, level + 0.01],
            "pydocs-fields": [level, level + 0.02],
            "pydocs-qa": [level + 0.3],
        }
        for name, level in (("a", 0.6), ("b", 0.5))
    }
    found = analyse(one_rate(scores))
    assert all(math.isnan(row["low"]) for row in records(found.overall) if row["kind"] == "all")
    row = next(row for row in records(found.comparisons) if row["kind"] == "all")
    assert math.isnan(row["p"]) and not headline(found).clear


def test_the_claim_is_unknown_without_intervals_or_scores() -> None:
    tasks = list(TASKS)
    single = claim({"a": {key: [0.9] for key in tasks}, "untrained": {key: [0.5] for key in tasks}})
    assert single["verdict"] == "unknown" and not single["holds"]
    lost = claim({"a": {key: [None, None] for key in tasks}, "untrained": {key: [0.5, 0.5] for key in tasks}})
    assert lost["verdict"] == "diverged" and math.isnan(lost["difference"])


def test_a_model_whose_cells_all_diverged_is_said_to_have_diverged_once_none_is_left_to_run() -> None:
    tasks = list(TASKS)
    good: list[float | None] = [0.8, 0.81, 0.79]
    low: list[float | None] = [0.5, 0.51, 0.49]
    base, none = dict.fromkeys(tasks, low), [None] * 3
    everywhere = claim({"a": dict.fromkeys(tasks, none), "untrained": base})
    assert (everywhere["verdict"], everywhere["tasks_diverged"], everywhere["holds"]) == ("diverged", 4, False)
    half = claim({"a": dict.fromkeys(tasks, good) | dict.fromkeys(tasks[:2], none), "untrained": base})
    assert (half["verdict"], half["tasks_diverged"], half["tasks_clear"]) == ("diverged", 2, 2)
    one = claim({"a": dict.fromkeys(tasks, good) | {tasks[0]: none}, "untrained": base})
    assert (one["verdict"], one["tasks_diverged"], one["tasks_clear"]) == ("in part", 1, 3)
    begun = one_rate({"a": {key: [None] for key in tasks}, "untrained": base})
    (open_,) = records(analyse(begun, "untrained").claims)
    assert (open_["verdict"], open_["tasks_diverged"]) == ("unknown", 0), "seeds are still to be run"
    gone = claim({"a": dict.fromkeys(tasks, good), "untrained": base | {tasks[0]: none}})
    assert (gone["verdict"], gone["tasks_diverged"]) == ("unknown", 0), "the baseline has no score"


def test_a_lead_without_the_tasks_at_chance_is_judged_by_its_own_p() -> None:
    """Its interval excludes 0, but over all tests its corrected p is above 5 %."""
    tasks = ("pydocs-kind", "pydocs-qa")
    shifts = (0.0, 0.01, -0.01)
    levels = {"a": (0.50, 0.722), "b": (0.30, 0.70), "c": (0.29, 0.699)}
    made = one_rate(
        {
            model: {task: [level + shift for shift in shifts] for task, level in zip(tasks, own, strict=True)}
            for model, own in levels.items()
        }
    )
    found = analyse(made, chances={"pydocs-kind": Chance(0.6, ""), "pydocs-qa": Chance(0.1, "")})
    rows = {(row["model_a"], row["model_b"]): row for row in records(found.comparisons) if row["kind"] == "all"}
    # Each pair's p on the second task alone: the first counts as level, which halves difference and error alike.
    alone = 2 * stats.t.sf(0.022 / (0.01 * math.sqrt(2 / 3)), 6)
    first = rows["a", "b"]
    assert first["p_holm"] < 0.001 and first["above_chance"]
    assert first["p_verdict"] == pytest.approx(3 * alone / 0.9), (
        "nine tenths of the error are for the mean, for three pairs"
    )
    assert first["p_verdict"] > 0.05
    assert not clearly_different(first, 0.95) and not headline(found).clear
    sure = analyse(made, chances={"pydocs-kind": Chance(0.1, ""), "pydocs-qa": Chance(0.1, "")})
    assert (sure.comparisons["p_verdict"] == sure.comparisons["p_holm"]).all() and headline(sure).clear


def test_a_study_that_is_only_begun_counts_what_is_missing() -> None:
    made = synthetic_results({"a": 0.8, "untrained": 0.6})
    grid = Grid(("a", "later", "untrained"), tuple(TASKS), (1e-4, 3e-4, 1e-3, 3e-3), (0, 1, 2))
    found = analyse(made[:10], "untrained", grid=grid)
    assert found.missing == 3 * 4 * 12 - 10
    assert set(found.claims["verdict"]) == {"unknown"}
    assert len(found.best) == 12


def test_the_order_of_the_results_changes_no_table() -> None:
    made = synthetic_results({"a": 0.8, "b": 0.7, "untrained": 0.6}, diverge=frozenset({("b", 3e-3)}))
    one, other = analyse(made, "untrained"), analyse(made[::-1], "untrained")
    for name in ("cells", "coverage", "chosen", "best", "overall", "comparisons", *KINDS["statistic"]):
        assert getattr(one, name).equals(getattr(other, name)), name


def test_what_cannot_be_analysed_is_refused() -> None:
    made = synthetic_results({"a": 0.8})
    with pytest.raises(UserError, match="no result to analyse"):
        analyse([])
    with pytest.raises(UserError, match="unknown baseline model 'untraned'"):
        analyse(made, "untraned")
    with pytest.raises(UserError, match=r"unknown rule.*'median'.*mean, per_seed, on_test"):
        analyse(made, rule="median")
    with pytest.raises(UserError, match="confidence"):
        analyse(made, confidence=95)


def measured(found: Analysis) -> dict[str, float]:
    return task_metrics(found)["a", "pydocs-kind"]


def test_metrics_for_the_tracker_are_finite_numbers() -> None:
    found = analyse(synthetic_results({"a": 0.8, "untrained": 0.6}), "untrained")
    assert measured(found)["best_learning_rate"] == 1e-3
    assert measured(found)["test_mean"] == pytest.approx(0.8, abs=0.01)
    single = analyse(one_rate({"a": {"pydocs-kind": [0.5]}}))
    assert "score_low" not in measured(single)
    assert all(math.isfinite(value) for own in task_metrics(found).values() for value in own.values())


def test_the_summary_is_json() -> None:
    text = canonical_json(summary(analyse(one_rate({"a": {"pydocs-kind": [None]}, "b": {"pydocs-kind": [0.5]}}), "b")))
    assert '"missing":0' in text and '"diverged":1' in text


def test_ranks_are_from_those_shown_better_to_those_shown_worse() -> None:
    found = analyse(synthetic_results({"a": 0.7, "b": 0.7, "c": 0.5, "d": 0.9}, noise=0.02))
    rows = {row["model"]: (row["rank_low"], row["rank_high"]) for row in records(found.ranks)}
    assert rows == {"a": (2, 3), "b": (2, 3), "c": (4, 4), "d": (1, 1)}
    assert list(found.ranks["rank"]) == [1, 2, 3, 4] and list(found.ranks["mean"]) == sorted(
        found.ranks["mean"], reverse=True
    )
    equal = analyse(synthetic_results({"a": 0.7, "b": 0.7, "c": 0.7}, noise=0.0)).ranks
    assert set(equal["rank_low"]) == {1} and set(equal["rank_high"]) == {3}, "without known noise nothing is shown"


@pytest.mark.parametrize("step", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("number", [2, 16])
def test_the_interval_of_the_best_of_several_models_knows_that_it_was_chosen(number: int, step: float) -> None:
    draws, freedom, covered, plain = np.random.default_rng(0), 12.0, [], []
    true = -step * np.arange(number)
    for _ in range(2000):
        scores = true + draws.standard_normal(number)
        error = float(np.sqrt(draws.chisquare(freedom) / freedom))
        half = error * float(stats.t.ppf(0.975, freedom))
        best = int(scores.argmax())
        apart = 2 * stats.t.sf((scores[best] - scores) / (error * math.sqrt(2)), freedom)
        open_to = int((apart >= 0.05 / math.comb(number, 2)).sum())
        row = {"mean": scores[best], "low": scores[best] - half, "freedom": freedom}
        high = scores[best] + half
        covered.append(low_of_best(row, open_to, 0.95) <= true[best] <= high)
        plain.append(row["low"] <= true[best] <= high)
    assert np.mean(covered) > 0.94
    assert number == 2 or step > 0 or np.mean(plain) < 0.75, "the interval of a model that was not chosen"
    assert low_of_best(row, 1, 0.95) == pytest.approx(row["low"])
