"""Chance levels of tasks, and runs that predict the same for every example."""

from __future__ import annotations

import numpy as np

from mlmclm.results.chance import Chance
from mlmclm.results.examples import KeptExamples
from mlmclm.results.measures import measure
from mlmclm.tasks.family import FAMILIES, family_of
from mlmclm.tasks.prepared_task import PreparedTask
from mlmclm.tasks.settings import TaskSettings

ALIKE = 1e-6
"""Share of their size by which predicted numbers may differ and count as the same."""


def chance_level(prepared: PreparedTask, settings: TaskSettings, metric: str) -> Chance | None:
    """Return the best score that the test split gives without a model (`Family.blind`); None if the family knows none."""
    family = FAMILIES[prepared.family](prepared, settings)
    levels = []
    for how, examples in family.blind():
        numbers = {name: values for name, values in examples.items() if values.dtype != object}
        score = measure(metric, family.measured(numbers, len(prepared.label_names)))
        rows = len(next(iter(numbers.values())))
        levels.append(Chance(float(score(np.ones((1, rows)))[0]), how))
    return max(levels, key=lambda level: level.score, default=None)


def predicts_the_same(kept: KeptExamples) -> bool:
    """Return whether a cell predicted the same for every test example; False if it kept no predictions.

    Tags are the same if all words have one tag, rankings if all queries have the same documents in the same order.
    """
    name = family_of(kept.result).predicted
    values = kept.columns.get(name, kept.predictions.get(name))
    if values is None or len(values) < 2:
        return False
    if values.dtype != object:
        return bool(np.ptp(values.astype(np.float64)) <= ALIKE * np.abs(values).max())
    if isinstance(values[0], str):
        return len(set(values)) == 1
    return len(set(map(tuple, values))) == 1 or len({item for row in values for item in row}) == 1
