"""Tasks that are scored on the same trainings, and how much of the noise of seeds they have in common.

MNLI's two test sets have one training, and so have all sets that a study trains on MS MARCO. A seed that learns well scores well on
all of them, so their scores are no independent evidence. Runs of one training have the same training losses, which is how they are
recognised in results from anywhere.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from mlmclm.analysis.model_runs import Runs
from mlmclm.analysis.results import Record, seeds_of
from mlmclm.results.measures import Array
from mlmclm.seeds import Seeds

FEWEST = 6
"""Degrees of freedom from which on a correlation is estimated; with fewer, it is taken to be 1."""


def tasks_by_training(results: Iterable[Record]) -> list[frozenset[str]]:
    """Return the groups of tasks, of two or more, most of whose runs are scored on the same trainings."""
    trainings: dict[tuple[object, ...], dict[str, object]] = {}
    for result in results:
        if curve := result.get("curve"):
            run = result["model"], float(result["learning_rate"]), repr(result["seed"]), result.get("setting", "")
            trainings.setdefault(run, {})[result["task"]] = curve
    counts: dict[tuple[str, str], list[bool]] = {}
    for curves in trainings.values():
        for one, other in itertools.combinations(sorted(curves), 2):
            counts.setdefault((one, other), []).append(curves[one] == curves[other])
    groups: list[frozenset[str]] = []
    for pair, equal in counts.items():
        if 2 * sum(equal) > len(equal):
            joined = [group for group in groups if group & set(pair)]
            groups = [group for group in groups if group not in joined] + [frozenset(pair).union(*joined)]
    return groups


def seed_correlations(
    runs: Mapping[tuple[str, str], Runs], groups: Iterable[frozenset[str]]
) -> dict[str, dict[str, float]]:
    """Return the correlation over seeds of the test scores of tasks that share a training: task -> other task -> at least 0.

    Each group of tasks has one correlation, over all models and learning rates, of the scores' deviations from their means over seeds.

    Args:
        runs: by (model, task).
    """
    correlations: dict[str, dict[str, float]] = {}
    for group in groups:
        pairs = list(itertools.permutations(sorted(group), 2))
        models = sorted({model for model, task in runs if task in group})
        parts = [
            part
            for model in models
            for one, other in pairs
            if one < other and (model, one) in runs and (model, other) in runs
            for part in deviations(runs[model, one], runs[model, other])
        ]
        # Each run is in as many pairs as there are other tasks, but is one observation of its seed's luck.
        freedom = sum(len(first) - 1 for first, _ in parts) / max(1, len(pairs) / 2)
        correlation = _correlation(parts) if freedom >= FEWEST else 1.0
        for one, other in pairs:
            correlations.setdefault(one, {})[other] = correlation
    return correlations


def in_common(one: Sequence[Record], other: Sequence[Record], shared: float) -> float:
    """Return the correlation of two tasks' means over their picked cells, assuming that a training's noise is the same on both tasks.

    A seed's cells have the same training if both tasks chose the same learning rate, and different trainings otherwise.

    Args:
        one, other: the picked cells of a model, one for each seed (`selection.picked_cells`).
        shared: correlation of the noise of a seed's trainings at different rates (`seed_noise`).
    """
    trainings = [{seeds_of(cell): (cell["learning_rate"], cell["setting"]) for cell in cells} for cells in (one, other)]
    seeds = trainings[0].keys() & trainings[1].keys()
    same = sum(trainings[0][seed] == trainings[1][seed] for seed in seeds)
    return (same + shared * (len(seeds) - same)) / math.sqrt(max(1, len(one) * len(other)))


def deviations(one: Runs, other: Runs) -> Iterable[tuple[Array, Array]]:
    """Yield at each rate the deviations of two tasks' test scores from their means over the seeds that learned on both."""
    column_of: Mapping[Seeds, int] = {seeds: column for column, seeds in enumerate(other.seeds)}
    common = [(column, column_of[seeds]) for column, seeds in enumerate(one.seeds) if seeds in column_of]
    for row, rate in enumerate(one.rates):
        if rate not in other.rates or not common:
            continue
        other_row, columns = list(other.rates).index(rate), np.asarray(common).T
        learned = one.learned[row, columns[0]] & other.learned[other_row, columns[1]]
        if learned.sum() > 1:
            scores = one.test[row, columns[0]][learned], other.test[other_row, columns[1]][learned]
            yield scores[0] - scores[0].mean(), scores[1] - scores[1].mean()


def _correlation(parts: Sequence[tuple[Array, Array]]) -> float:
    """Return the correlation of pairs of deviations, at least 0; 1 where one of the two sides never varies."""
    product = math.fsum(float((one * other).sum()) for one, other in parts)
    scale = math.sqrt(math.prod(math.fsum(float((side[number] ** 2).sum()) for side in parts) for number in (0, 1)))
    return min(1.0, max(0.0, product / scale)) if scale > 0 else 1.0
