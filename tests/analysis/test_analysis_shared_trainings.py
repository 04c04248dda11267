"""Tasks scored on the same trainings: how they are recognised, and that their seeds count once in means over tasks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from mlmclm.analysis.analyse import analyse
from mlmclm.analysis.contrasts import weighted_sum
from mlmclm.analysis.effects import Effect
from mlmclm.analysis.model_runs import Runs
from mlmclm.analysis.results import records
from mlmclm.analysis.shared_trainings import in_common, seed_correlations, tasks_by_training
from mlmclm.results.intervals import estimate
from mlmclm.seeds import Seeds

TASKS = ("mldr", "msmarco", "nq")


def result(task: str, seed: int, scores: tuple[float, float], curve: list[list[float]] | None, model: str = "m") -> Any:
    return {
        "key": f"{model}/{task}/{seed}",
        "model": model,
        "task": task,
        "family": "retrieval",
        "metric": "ndcg@10",
        "learning_rate": 1e-4,
        "seed": seed,
        "status": "ok",
        "scores": {split: {"ndcg@10": score} for split, score in zip(("validation", "test"), scores, strict=True)},
        **({} if curve is None else {"curve": curve}),
    }


def test_tasks_share_a_training_where_most_of_their_runs_have_equal_losses() -> None:
    results = [
        result(task, seed, (0.5, 0.5), [[1, seed + 0.5], [2, 0.1]]) for task in ("nq", "msmarco") for seed in range(3)
    ]
    results += [result("rte", seed, (0.5, 0.5), [[1, seed + 0.7]]) for seed in range(3)]
    results += [result("mldr", seed, (0.5, 0.5), [[1, seed + (0.5 if seed else 9)], [2, 0.1]]) for seed in range(3)]
    assert tasks_by_training(results) == [{"nq", "msmarco", "mldr"}]
    assert tasks_by_training([result(task, 0, (0.5, 0.5), None) for task in TASKS]) == [], "no losses are no evidence"


def runs(scores: list[list[float]]) -> Runs:
    test = np.asarray(scores)
    seeds = [Seeds.of(number) for number in range(test.shape[1])]
    return Runs([1e-5 * 2**row for row in range(len(test))], test, test, np.zeros(test.shape, bool), seeds)


def test_the_correlation_is_that_of_deviations_over_seeds_of_all_models_and_rates() -> None:
    draws = np.random.default_rng(0)
    one = {model: draws.normal(0.6, 0.01, (2, 4)) for model in ("a", "b")}
    other = {model: scores + draws.normal(0.1, 0.01, (2, 4)) for model, scores in one.items()}
    every = {("a", "nq"): one["a"], ("b", "nq"): one["b"], ("a", "mldr"): other["a"], ("b", "mldr"): other["b"]}
    found = seed_correlations({pair: runs(each.tolist()) for pair, each in every.items()}, [frozenset(("nq", "mldr"))])
    deviations = [
        np.concatenate([(own - own.mean(axis=1, keepdims=True)).ravel() for own in side.values()])
        for side in (one, other)
    ]
    expected = np.corrcoef(*deviations)[0, 1]  # each row's mean is 0 already
    assert found == {"nq": {"mldr": pytest.approx(expected)}, "mldr": {"nq": pytest.approx(expected)}}
    few = {pair: runs(each[:1, :2].tolist()) for pair, each in every.items()}
    assert seed_correlations(few, [frozenset(("nq", "mldr"))])["nq"]["mldr"] == 1.0


def test_tasks_have_in_common_the_trainings_at_the_rates_that_both_took() -> None:
    draws = np.random.default_rng(0)
    noise = draws.standard_normal(
        (2, 4, 100_000)
    )  # of trainings at two rates with four seeds, half of which is the seed's own
    noise = math.sqrt(0.5) * noise + math.sqrt(0.5) * draws.standard_normal((1, 4, 100_000))
    for rates in ((0, 0, 0, 0), (1, 1, 1, 1), (0, 1, 1, 0)):
        one = [results_cell(seed, rate=0) for seed in range(4)]
        other = [results_cell(seed, rate) for seed, rate in enumerate(rates)][:3]
        expected = np.corrcoef(noise[0].mean(axis=0), noise[rates[:3], range(3)].mean(axis=0))[0, 1]
        assert in_common(one, other, 0.5) == pytest.approx(expected, abs=0.01)
    assert in_common([], one, 0.5) == 0.0


def results_cell(seed: int, rate: int) -> dict[str, Any]:
    return {
        **dict.fromkeys(("seed", "seed_head", "seed_order", "seed_dropout"), seed),
        "learning_rate": rate,
        "setting": "",
    }


def test_the_variance_of_a_sum_is_that_of_its_covariance_matrix() -> None:
    deviations, correlation = np.asarray([0.01, 0.02, 0.03, 0.04]), 0.6
    alike = {task: {other: correlation for other in TASKS if other != task} for task in TASKS}
    effects = {
        ("m", task): Effect(estimate(0.5, error, freedom), 0.0, np.ones(1), 0.0, alike=alike.get(task, {}))
        for task, error, freedom in zip((*TASKS, "rte"), deviations, (8.0, 6.0, 7.0, 5.0), strict=True)
    }
    weights = np.asarray([0.25, 0.25, 0.25, -0.5])
    found = weighted_sum(effects, {task: {"m": weight} for (_, task), weight in zip(effects, weights, strict=True)})
    matrix = np.full((4, 4), correlation)
    matrix[3], matrix[:, 3] = 0.0, 0.0
    np.fill_diagonal(matrix, 1.0)
    covariance = matrix * np.outer(deviations, deviations)
    assert found.whole.error == pytest.approx(math.sqrt(weights @ covariance @ weights))
    shared, single = weights[:3] @ covariance[:3, :3] @ weights[:3], (0.5 * 0.04) ** 2
    assert found.seeds == (pytest.approx((shared, 6.0)), pytest.approx((single, 5.0)))


def equal_models(number: int, *, known: bool) -> list[Any]:
    """Two equal models on three tasks of one training, whose runs share nine tenths of their seeds' noise."""
    draws, found = np.random.default_rng(number), []
    for model in ("a", "b"):
        for seed in range(5):
            common = draws.standard_normal(2)
            for task in TASKS:
                noise = math.sqrt(0.9) * common + math.sqrt(0.1) * draws.standard_normal(2)
                scores = float(0.7 + 0.01 * noise[0]), float(0.7 + 0.01 * noise[1])
                found.append(result(task, seed, scores, [[1, float(common[0])]] if known else None, model))
    return found


def test_equal_models_are_found_different_in_a_twentieth_of_studies_whose_tasks_share_their_trainings() -> None:
    counts = {}
    for known in (True, False):
        tables = [records(analyse(equal_models(number, known=known)).comparisons) for number in range(40)]
        counts[known] = sum(any(row["p_holm"] < 0.05 for row in rows) for rows in tables)
    assert counts[True] <= 3 < counts[False], "the means of the same runs as independent ones would claim"
