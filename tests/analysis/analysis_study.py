"""Made-up results of cells for the tests of the analysis."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

TASKS = {
    "pydocs-kind": ("sequence-classification", "accuracy"),
    "pydocs-fields": ("token-classification", "f1"),
    "pydocs-qa": ("question-answering", "f1"),
    "pydocs-retrieval": ("retrieval", "ndcg_at_10"),
}


def cell(model: str, task: str, rate: float, seed: int, validation: float | None, test: float | None) -> dict[str, Any]:
    """One result as a worker writes it; scores of None make it a diverged one."""
    family, metric = TASKS.get(task, ("sequence-classification", "accuracy"))
    diverged = validation is None
    return {
        "schema": 1,
        "key": f"{model}/{task}/{rate!r}/{seed}",
        "model": model,
        "weights": model,
        "task": task,
        "family": family,
        "task_data": task,
        "protocol": {},
        "learning_rate": rate,
        "seed": seed,
        "engine": "1",
        "status": "diverged" if diverged else "ok",
        "metric": metric,
        "scores": None if diverged else {"validation": {metric: validation}, "test": {metric: test}},
        "diverged_step": 7 if diverged else None,
        "curve": [[1, f"{model}/{task}/{rate!r}/{seed}"]],  # each has a training of its own
        "steps": 100,
        "examples": 3200,
        "tokens": 100_000,
        "parameters": 2_000_000,
        "cost": {"seconds": random.random()},
    }


def synthetic_results(
    models: dict[str, float],
    *,
    tasks: tuple[str, ...] = tuple(TASKS),
    rates: tuple[float, ...] = (1e-4, 3e-4, 1e-3, 3e-3),
    seeds: int = 3,
    noise: float = 0.004,
    diverge: frozenset[tuple[str, float]] = frozenset(),
) -> list[dict[str, Any]]:
    """A full grid: score = the model's level, lower away from the third rate, plus noise; the same on every call."""
    generator = random.Random(0)
    results = []
    for model, level in models.items():
        for number, task in enumerate(tasks):
            for place, rate in enumerate(rates):
                for seed in range(seeds):
                    centre = level - 0.03 * number - 0.02 * abs(place - 2)
                    scores = [centre + generator.gauss(0, noise) for _ in range(2)]
                    lost = (model, rate) in diverge
                    results.append(cell(model, task, rate, seed, *((None, None) if lost else scores)))
    return results


def cells_of(rates: Sequence[float], rows: Sequence[Sequence[float]]) -> list[dict[str, Any]]:
    """Return cells of one model and task whose validation and test scores are equal, given a row of seeds for each rate."""
    return [
        {"model": "m", "task": "t", "setting": "", "learning_rate": rates[rate], "status": "ok"}
        | {"validation": score, "test": score, "seed_head": seed, "seed_order": seed, "seed_dropout": seed}
        for rate, row in enumerate(rows)
        for seed, score in enumerate(row)
    ]
