"""Chance levels: the scores that can be reached on a task's test examples without a model, and which scores are above them.

A family computes the level of a task from its test examples, with the task's metric (`PreparedTask.blind`). A score over
seeds is above chance if its whole interval is. A score whose interval contains the level or lies below it is not. A model
that predicts the same for every test example is not above chance either, however high its score. No verdict is based on a
score at chance: see `comparison.comparison_table`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mlmclm.errors import unknown
from mlmclm.results.intervals import NAN, TIE, mean

Above = Literal["yes", "no", "unknown", ""]
"""Whether a score is above chance. It is unknown if the chance level is, or if a higher score has no interval; empty
without a score."""


@dataclass(frozen=True)
class Chance:
    """The chance level of a task: a main score, as a fraction of 1, and how it was computed, in words."""

    score: float
    how: str


Chances = Mapping[str, Chance]
"""Chance levels by task; those of absent tasks are not known."""
NO_CHANCES: Chances = {}


def stated_chances(levels: Mapping[str, float], tasks: Collection[str]) -> Chances:
    """Return chance levels that a user states for results of another tool, which don't have them.

    Raises:
        UserError: a level is of none of the `tasks`.
    """
    for task in levels:
        if task not in tasks:
            raise unknown("task", task, sorted(tasks), where="chance level")
    return {task: Chance(level, "as stated") for task, level in levels.items()}


def chance_of(chances: Chances, tasks: Sequence[str]) -> float:
    """Return the mean chance level of some tasks; NaN if that of one is not known."""
    return mean([chances[task].score if task in chances else NAN for task in tasks])


def above_chance(value: float, low: float, chance: float, *, constant: bool = False) -> Above:
    """Return whether a score is above chance.

    Args:
        low: the lower end of its interval; NaN if there is none.
        chance: the chance level; NaN if it is not known.
        constant: whether the model predicts the same for every example.
    """
    if math.isnan(value):
        return ""
    if constant or value <= chance + TIE or low <= chance:
        return "no"
    return "yes" if low > chance else "unknown"
