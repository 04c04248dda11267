"""Paired comparisons of two models: intervals and tests equal independent computations, and nothing else is paired."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
import statsmodels.api
import statsmodels.stats.contingency_tables

from mlmclm.analysis import pairs
from mlmclm.analysis.pairs import PairedComparison, mcnemar, paired_interval
from mlmclm.errors import UserError
from mlmclm.results.examples import KeptExamples
from mlmclm.tasks.family import family_of

Column = np.ndarray[Any, Any]
RESULT = {
    "key": "a", "task": "t", "family": "question-answering", "task_data": "d",
    "protocol": {"max_evaluation_examples": None, "max_evaluation_documents": None},
}  # fmt: skip


def kept(columns: dict[str, Column], classes: int = 0, **changes: Any) -> KeptExamples:
    return KeptExamples({**RESULT, **changes}, columns, tuple(map(str, range(classes))))


def classified(gold: Column, right: Column) -> KeptExamples:
    return kept(
        {"gold": gold, "prediction": np.where(right, gold, 1 - gold), "correct": right},
        2,
        family="sequence-classification",
    )


def compare(first: list[KeptExamples], second: list[KeptExamples], **options: Any) -> PairedComparison:
    family = family_of(first[0].result)
    return pairs.compare_sides(first, second, measures=family.measures, gold=family.gold_columns, **options)


def pair_of(seeds: int, rows: int, chance: np.random.Generator, *, skill: float = 0.1) -> tuple[Any, Any]:
    """Two classifiers of several seeds; the first is better, and both find the same examples hard."""
    gold, hard = chance.integers(0, 2, rows), chance.random(rows)
    sides = [
        [classified(gold, chance.random(rows) > 0.6 * hard - better) for _ in range(seeds)] for better in (skill, 0.0)
    ]
    return sides[0], sides[1]


def mid_p(only_first: int, only_second: int) -> float:
    """Half of the probability of the observed split, and all of the less likely ones, on both sides."""
    total = only_first + only_second
    ways = [math.comb(total, k) / 2**total for k in range(total + 1)]
    return sum(
        way if way < ways[only_first] * (1 - 1e-9) else way / 2 for way in ways if way <= ways[only_first] * (1 + 1e-9)
    )


def test_one_seed_of_right_or_wrong_is_mcnemars_mid_p_test() -> None:
    chance = np.random.default_rng(0)
    for rows in (3, 40, 400):
        first, second = pair_of(1, rows, chance)
        right = [side[0].columns["correct"] for side in (first, second)]
        ours = compare(first, second, metric="accuracy")
        b, c = int((right[0] & ~right[1]).sum()), int((right[1] & ~right[0]).sum())
        assert (ours.test, ours.only_first, ours.only_second) == ("mcnemar", b, c)
        assert ours.p == pytest.approx(mid_p(b, c) if b != c else 1.0)
        assert ours.difference == pytest.approx(right[0].mean() - right[1].mean())
        exact = statsmodels.stats.contingency_tables.mcnemar([[0, b], [c, 0]], exact=True).pvalue
        assert ours.p <= exact, "mid-p is never above the exact test's"
    assert mcnemar(0, 0) == 1.0


def restricted(difference: float, b: int, c: int, total: int) -> float:
    """Tango's score statistic, from the likelihood's maximum over the share of one side by a search."""

    def loss(share: float) -> float:
        cells = (share + difference, share, 1 - 2 * share - difference)
        return -sum(
            count * math.log(max(cell, 1e-300))
            for cell, count in zip(cells, (b, c, total - b - c), strict=True)
            if count
        )

    ends = max(0.0, -difference), (1 - difference) / 2
    share = scipy.optimize.minimize_scalar(loss, bounds=ends, method="bounded", options={"xatol": 1e-12}).x
    return float((b - c - total * difference) / math.sqrt(total * (2 * share + difference - difference**2)))


def test_the_interval_of_right_or_wrong_answers_is_tangos() -> None:
    # Airway hyper-responsiveness before and after a transplantation, as in Fagerland, Lydersen and Laake (2014).
    assert paired_interval(1, 7, 21) == pytest.approx((-0.517, -0.026), abs=5e-4)
    for b, c, total in ((3, 12, 60), (30, 22, 200), (5, 1, 71), (40, 9, 300)):
        for end, wanted in zip(paired_interval(b, c, total), (1.96, -1.96), strict=True):
            assert restricted(end, b, c, total) == pytest.approx(wanted, abs=2e-3)


def test_interval_and_p_value_never_contradict_each_other_and_are_there_for_perfect_models() -> None:
    for total, step in ((10, 1), (71, 2), (300, 13)):
        for b in range(0, total + 1, step):
            for c in range(min(total - b, 40) + 1):
                low, high = paired_interval(b, c, total)
                assert -1 <= low <= (b - c) / total <= high <= 1 and low < high
                assert (mcnemar(b, c) < 0.05) == (low > 0 or high < 0), (b, c, total)
    perfect = classified(np.zeros(71, int), np.ones(71, bool))
    same = compare([perfect], [perfect], metric="accuracy")
    assert (same.p, same.difference) == (1.0, 0.0)
    assert same.low == pytest.approx(-same.high) and 0.04 < same.high < 0.06, "about 3.84 of 71"


def test_a_mean_over_examples_is_compared_by_the_paired_t_test() -> None:
    chance = np.random.default_rng(1)
    for seeds, rows in ((1, 2), (1, 8), (3, 100)):
        sides = [[kept({"f1": chance.random(rows)}) for _ in range(seeds)] for _ in range(2)]
        means = [np.mean([cell.columns["f1"] for cell in side], axis=0) for side in sides]
        wanted = scipy.stats.ttest_rel(*means)
        ours = compare(*sides, metric="f1")
        assert (ours.test, ours.only_first) == ("t", None)
        assert ours.p == pytest.approx(wanted.pvalue)
        assert (ours.low, ours.high) == pytest.approx(tuple(wanted.confidence_interval(0.95)))


@pytest.mark.parametrize("size", [5, 20])
def test_equal_models_differ_on_examples_in_groups_no_more_often_than_the_level_says(size: int) -> None:
    """Taken one by one, such examples showed a difference in up to half of the comparisons."""
    chance = np.random.default_rng(size)
    groups, studies, found, alone, beside = 60, 800, 0, 0, 0
    of = np.repeat(np.arange(groups), size)
    for _ in range(studies):
        # Differences of 0 on average whose correlation within a group is about .25, of answers that are right or wrong.
        hard, moved = chance.normal(0, 1, groups * size), chance.normal(0, 0.8, groups)[of]
        right = [hard + side * moved + chance.normal(0, 0.8, groups * size) > 0 for side in (0.5, -0.5)]
        columns = [{"accuracy": each.astype(float)} for each in right]
        found += compare(*([kept(own | {"group": of})] for own in columns), metric="accuracy").p < 0.05
        alone += compare(*([kept(own)] for own in columns), metric="accuracy").p < 0.05
        means = (right[0].astype(float) - right[1]).reshape(groups, size).mean(axis=1)
        beside += scipy.stats.ttest_1samp(means, 0).pvalue < 0.05
    assert found / studies <= 0.06
    assert abs(found - beside) <= 0.01 * studies, "as a t test of the groups' means"
    assert alone / studies > 0.1


def test_groups_of_unlike_size_have_the_variance_of_clustered_regression() -> None:
    chance = np.random.default_rng(3)
    of = np.repeat(np.arange(80), chance.integers(1, 9, 80))
    difference = chance.normal(0.02, 0.2, 80)[of] + chance.normal(0, 0.1, len(of))
    sides = [[kept({"f1": values, "group": of})] for values in (difference, np.zeros(len(of)))]
    ours = compare(*sides, metric="f1")
    fitted = statsmodels.api.OLS(difference, np.ones(len(of))).fit(cov_type="cluster", cov_kwds={"groups": of})
    assert (ours.groups, ours.examples) == (80, len(of))
    assert (ours.high - ours.low) / 2 == pytest.approx(scipy.stats.t.ppf(0.975, 79) * fitted.bse[0], rel=0.05)
    once = compare(
        *([kept({"f1": values, "group": np.arange(len(of))})] for values in (difference, difference * 0)), metric="f1"
    )
    assert once.groups is None, "groups of one example each are none"


def test_the_interval_of_a_mean_is_that_of_its_paired_differences() -> None:
    chance = np.random.default_rng(3)
    first, second = pair_of(4, 3000, chance)
    ours = compare(first, second, metric="accuracy")
    differences = np.mean(
        [a.columns["correct"] * 1.0 - b.columns["correct"] for a, b in zip(first, second, strict=True)], axis=0
    )
    error = differences.std() / math.sqrt(3000)
    assert ours.low == pytest.approx(differences.mean() - 1.96 * error, abs=0.15 * error)
    assert ours.high == pytest.approx(differences.mean() + 1.96 * error, abs=0.15 * error)
    assert ours.seeds == 4
    unpaired = math.sqrt(
        sum(np.mean([c.columns["correct"] for c in side], axis=0).var() / 3000 for side in (first, second))
    )
    assert error < 0.9 * unpaired, "the sides find the same examples hard, so pairing must narrow the interval"


def entities(chance: np.random.Generator, gold: Column, found: float) -> dict[str, Column]:
    correct = chance.binomial(gold, found)
    return {
        "words": 5 * gold + 3, "words_correct": 5 * gold + 1, "entities_gold": gold,
        "entities_predicted": correct + chance.binomial(gold, 0.2), "entities_correct": correct,
        "study.f1": chance.random(len(gold)),
    }  # fmt: skip


def numbers(gold: Column, noise: Column) -> dict[str, Column]:
    return {"gold": gold, "prediction": (gold + noise).astype(np.float32)}


def micro_f1(columns: dict[str, Column], rows: Column) -> float:
    gold, predicted, correct = (columns[f"entities_{name}"][rows].sum() for name in ("gold", "predicted", "correct"))
    return float(2 * correct / (gold + predicted))


def spearman(columns: dict[str, Column], rows: Column) -> float:
    return float(scipy.stats.spearmanr(columns["gold"][rows], columns["prediction"][rows]).statistic)


def pearson(columns: dict[str, Column], rows: Column) -> float:
    """Of two classes also Matthews'."""
    return float(np.corrcoef(columns["gold"][rows], columns["prediction"][rows])[0, 1])


@pytest.mark.parametrize("metric", ["f1", "matthews", "spearman", "pearson"])
def test_a_score_that_is_no_mean_is_computed_again_without_each_fold(metric: str) -> None:
    chance = np.random.default_rng(4)
    rows, seeds, resamples = 120, 2, 600
    score = {"f1": micro_f1, "matthews": pearson, "spearman": spearman, "pearson": pearson}[metric]
    if metric == "f1":
        gold = chance.integers(0, 4, rows)
        sides = [
            [kept(entities(chance, gold, skill), family="token-classification") for _ in range(seeds)]
            for skill in (0.8, 0.7)
        ]
    elif metric == "matthews":
        sides = list(pair_of(seeds, rows, chance, skill=0.1))
    else:
        gold = chance.integers(0, 11, rows) / 2
        sides = [
            [kept(numbers(gold, chance.normal(0, noise, rows)), family="sequence-regression") for _ in range(seeds)]
            for noise in (1.5, 2.2)
        ]
    ours = compare(*sides, metric=metric)

    def difference(a: list[dict[str, Column]], b: list[dict[str, Column]], chosen: Column) -> float:
        return float(np.mean([score(x, chosen) - score(y, chosen) for x, y in zip(a, b, strict=True)]))

    one, other = ([cell.columns for cell in side] for side in sides)
    assert ours.difference == pytest.approx(difference(one, other, np.arange(rows)))
    drawn = [difference(one, other, chance.integers(0, rows, rows)) for _ in range(resamples)]
    half = scipy.stats.t.ppf(0.975, 99) * np.std(drawn)
    assert (ours.high - ours.low) / 2 == pytest.approx(half, rel=0.25), "as by a bootstrap over examples"
    assert ours.p == pytest.approx(
        2 * scipy.stats.t.sf(abs(ours.difference) / ((ours.high - ours.low) / 2 / 1.984), 99), abs=0.002
    )


def test_two_scores_joined_are_their_mean() -> None:
    first, second = pair_of(2, 60, np.random.default_rng(5))
    both = compare(first, second, metric="accuracy+f1")
    apart = [compare(first, second, metric=name) for name in ("accuracy", "f1")]
    assert both.difference == pytest.approx(sum(one.difference for one in apart) / 2)


def test_a_model_does_not_differ_from_itself() -> None:
    for seeds in (1, 2):
        first, _ = pair_of(seeds, 100, np.random.default_rng(6))
        for metric in ("accuracy", "matthews"):
            same = compare(first, first, metric=metric)
            assert (same.difference, same.p) == (0.0, 1.0)
            shown = seeds == 1 and metric == "accuracy"
            assert math.isnan(same.low) != shown, "no example shows a difference, which is no certainty"
            assert not same.equal_seeds


def test_equal_scores_over_seeds_are_noted_beside_the_interval_over_examples() -> None:
    gold, right = np.zeros(71, int), np.arange(71) < 51
    alike = [classified(gold, np.roll(right, shift)) for shift in (0, 7)]
    apart = [classified(gold, right), classified(gold, np.arange(71) < 53)]
    found = compare(alike, apart, metric="accuracy")
    assert found.equal_seeds and found.low < found.difference < found.high
    assert not compare(apart, apart[::-1], metric="accuracy").equal_seeds
    assert not compare(alike[:1], apart[:1], metric="accuracy").equal_seeds


def test_the_sides_turned_round_give_the_opposite_difference_and_the_same_cells_the_same_numbers() -> None:
    first, second = pair_of(2, 300, np.random.default_rng(7))

    def numbers(pair: PairedComparison) -> tuple[float, ...]:
        return pair.difference, pair.low, pair.high, pair.p

    ours = compare(first, second, metric="accuracy")
    assert compare(first, second, metric="accuracy") == ours
    turned = compare(second, first, metric="accuracy")
    assert numbers(turned) == pytest.approx((-ours.difference, -ours.high, -ours.low, ours.p))
    assert ours.first == turned.second


def test_the_interval_covers_a_true_difference_as_often_as_it_says() -> None:
    chance = np.random.default_rng(8)
    covered, rejected, rounds = 0, 0, 150
    for _ in range(rounds):
        gold = chance.integers(0, 2, 150)
        hard = chance.random(150)
        sides = [[classified(gold, chance.random(150) > 0.5 * hard)] for _ in range(2)]
        ours = compare(*sides, metric="accuracy")
        covered += ours.low <= 0 <= ours.high
        rejected += ours.p < 0.05
    assert covered / rounds >= 0.88
    assert rejected / rounds <= 0.09


def test_cells_that_were_tested_on_other_examples_are_refused() -> None:
    gold = np.array([0, 1, 1, 0])
    right = np.array([True, True, False, True])
    one = classified(gold, right)
    limited = {"max_evaluation_examples": 4, "max_evaluation_documents": None}
    changed = {
        "task data": {"task_data": "other"},
        "families": {"family": "retrieval"},
        "max_evaluation_examples": {"protocol": limited},
    }
    others = {
        **{what: dataclasses.replace(one, result={**one.result, **change}) for what, change in changed.items()},
        "numbers of examples": classified(gold[:3], right[:3]),
        "column gold": classified(1 - gold, right),
    }
    for what, other in others.items():
        for sides in (([one], [other]), ([one, one], [one, other]), ([one, other], [one, one])):
            with pytest.raises(UserError, match=f"cannot be paired: they were tested on different examples .*{what}"):
                compare(*sides, metric="accuracy")
    with pytest.raises(UserError, match=r"unknown metric 'acuracy'\. Did you mean 'accuracy'"):
        compare([one], [one], metric="acuracy")
    with pytest.raises(UserError, match="one test example is too little"):
        compare([classified(gold[:1], right[:1])], [classified(gold[:1], right[:1])], metric="accuracy")
