"""Paired comparisons of two models: intervals and tests equal independent computations, and nothing else is paired."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import scipy.stats

from mlmclm.analysis import pairs
from mlmclm.analysis.pairs import PairedComparison, mcnemar
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
    return pairs.compare(first, second, measures=family.measures, gold=family.gold_columns, **options)


def pair_of(seeds: int, rows: int, chance: np.random.Generator, *, skill: float = 0.1) -> tuple[Any, Any]:
    """Two classifiers of several seeds; the first is better, and both find the same examples hard."""
    gold, hard = chance.integers(0, 2, rows), chance.random(rows)
    sides = [
        [classified(gold, chance.random(rows) > 0.6 * hard - better) for _ in range(seeds)] for better in (skill, 0.0)
    ]
    return sides[0], sides[1]


def test_one_seed_of_right_or_wrong_is_mcnemars_exact_test() -> None:
    chance = np.random.default_rng(0)
    for rows in (3, 40, 400):
        first, second = pair_of(1, rows, chance)
        right = [side[0].columns["correct"] for side in (first, second)]
        ours = compare(first, second, metric="accuracy", resamples=200)
        b, c = int((right[0] & ~right[1]).sum()), int((right[1] & ~right[0]).sum())
        tail = sum(math.comb(b + c, k) for k in range(min(b, c) + 1)) / 2 ** (b + c)
        assert (ours.test, ours.only_first, ours.only_second) == ("mcnemar", b, c)
        assert ours.p == pytest.approx(min(1.0, 2 * tail))
        assert ours.difference == pytest.approx(right[0].mean() - right[1].mean())
    assert mcnemar(0, 0) == 1.0


def test_few_examples_are_exchanged_in_all_ways_as_scipy_does() -> None:
    chance = np.random.default_rng(1)
    for seeds, rows in ((1, 2), (1, 8), (3, 10)):
        sides = [[kept({"f1": chance.random(rows)}) for _ in range(seeds)] for _ in range(2)]
        means = [np.mean([cell.columns["f1"] for cell in side], axis=0) for side in sides]
        wanted = scipy.stats.permutation_test(
            means, lambda x, y, axis: np.mean(x - y, axis=axis), permutation_type="samples", n_resamples=np.inf
        )
        ours = compare(*sides, metric="f1", resamples=2000)
        assert (ours.test, ours.only_first) == ("permutation", None)
        assert ours.p == pytest.approx(wanted.pvalue)
        assert ours.difference == pytest.approx(wanted.statistic)


def test_many_examples_are_exchanged_at_random_and_agree_with_scipy() -> None:
    chance = np.random.default_rng(2)
    first, second = ([kept({"f1": np.clip(chance.normal(m, 0.3, 200), 0, 1)})] for m in (0.53, 0.48))
    ours = compare(first, second, metric="f1", resamples=9_999)
    columns = [side[0].columns["f1"] for side in (first, second)]
    wanted = scipy.stats.permutation_test(
        columns,
        lambda x, y, axis: np.mean(x - y, axis=axis),
        permutation_type="samples",
        n_resamples=9_999,
        rng=np.random.default_rng(5),
    ).pvalue
    assert 0.001 < wanted < 0.6
    assert abs(ours.p - wanted) < 4 * math.sqrt(2 * wanted * (1 - wanted) / 9_999)
    assert scipy.stats.ttest_rel(*columns).pvalue == pytest.approx(ours.p, abs=0.03)


def test_a_random_permutation_counts_as_one_with_what_was_seen_as_scipy_does() -> None:
    """Phipson and Smyth (2010): (b + 1) / (m + 1), so that no p value is 0."""
    chance = np.random.default_rng(8)
    columns = [chance.normal(size, 0.05, 60) for size in (1.0, 0.0)]  # so far apart that no exchange is as extreme
    for resamples in (19, 99, 500):
        wanted = scipy.stats.permutation_test(
            columns,
            lambda x, y, axis: abs(np.mean(x - y, axis=axis)),
            permutation_type="samples",
            alternative="greater",
            n_resamples=resamples,
            rng=np.random.default_rng(9),
        ).pvalue
        ours = compare(*([kept({"f1": column})] for column in columns), metric="f1", resamples=resamples)
        assert ours.p == wanted == 1 / (resamples + 1)


def test_the_interval_of_a_mean_is_that_of_its_paired_differences() -> None:
    chance = np.random.default_rng(3)
    first, second = pair_of(4, 3000, chance)
    ours = compare(first, second, metric="accuracy", resamples=4000)
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
def test_a_score_that_is_no_mean_is_computed_of_every_resample_and_exchange(metric: str) -> None:
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
    ours = compare(*sides, metric=metric, resamples=resamples)

    def difference(a: list[dict[str, Column]], b: list[dict[str, Column]], chosen: Column) -> float:
        return float(np.mean([score(x, chosen) - score(y, chosen) for x, y in zip(a, b, strict=True)]))

    one, other = ([cell.columns for cell in side] for side in sides)
    observed = difference(one, other, np.arange(rows))
    assert ours.difference == pytest.approx(observed)
    drawn = [difference(one, other, chance.integers(0, rows, rows)) for _ in range(resamples)]
    error = np.std(drawn)
    assert [ours.low, ours.high] == pytest.approx(np.quantile(drawn, (0.025, 0.975)), abs=0.45 * error)
    as_extreme = 0
    for _ in range(resamples):
        swap = chance.random(rows) < 0.5
        mixed = [
            [{name: np.where(swap, y[name], x[name]) for name in x} for x, y in zip(a, b, strict=True)]
            for a, b in ((one, other), (other, one))
        ]
        as_extreme += abs(difference(*mixed, np.arange(rows))) >= abs(observed) - 1e-12
    wanted = as_extreme / resamples
    assert abs(ours.p - wanted) < 0.02 + 4 * math.sqrt(wanted * (1 - wanted) / resamples)


def test_two_scores_joined_are_their_mean() -> None:
    first, second = pair_of(2, 60, np.random.default_rng(5))
    both = compare(first, second, metric="accuracy+f1", resamples=50)
    apart = [compare(first, second, metric=name, resamples=50) for name in ("accuracy", "f1")]
    assert both.difference == pytest.approx(sum(one.difference for one in apart) / 2)


def test_a_model_does_not_differ_from_itself() -> None:
    for seeds in (1, 2):
        first, _ = pair_of(seeds, 100, np.random.default_rng(6))
        for metric in ("accuracy", "matthews"):
            same = compare(first, first, metric=metric, resamples=100)
            assert (same.difference, same.p) == (0.0, 1.0)
            assert math.isnan(same.low) and math.isnan(same.high), (
                "no example shows a difference, which is no certainty"
            )
            assert not same.equal_seeds


def test_equal_scores_over_seeds_are_noted_beside_the_interval_over_examples() -> None:
    gold, right = np.zeros(71, int), np.arange(71) < 51
    alike = [classified(gold, np.roll(right, shift)) for shift in (0, 7)]
    apart = [classified(gold, right), classified(gold, np.arange(71) < 53)]
    found = compare(alike, apart, metric="accuracy", resamples=500)
    assert found.equal_seeds and found.low < found.difference < found.high
    assert not compare(apart, apart[::-1], metric="accuracy", resamples=50).equal_seeds
    assert not compare(alike[:1], apart[:1], metric="accuracy", resamples=50).equal_seeds


def test_the_sides_turned_round_give_the_opposite_difference_and_the_same_cells_the_same_numbers() -> None:
    first, second = pair_of(2, 300, np.random.default_rng(7))

    def numbers(pair: PairedComparison) -> tuple[float, ...]:
        return pair.difference, pair.low, pair.high, pair.p

    ours = compare(first, second, metric="accuracy", resamples=500)
    assert compare(first, second, metric="accuracy", resamples=500) == ours
    turned = compare(second, first, metric="accuracy", resamples=500)
    assert numbers(turned) == pytest.approx((-ours.difference, -ours.high, -ours.low, ours.p))
    assert ours.first == turned.second


def test_the_interval_covers_a_true_difference_as_often_as_it_says() -> None:
    chance = np.random.default_rng(8)
    covered, rejected, rounds = 0, 0, 150
    for _ in range(rounds):
        gold = chance.integers(0, 2, 150)
        hard = chance.random(150)
        sides = [[classified(gold, chance.random(150) > 0.5 * hard)] for _ in range(2)]
        ours = compare(*sides, metric="accuracy", resamples=300)
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
