"""Percentile bootstraps cover as much with few values as the documentation says, which is less than they are called."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from mlmclm.analysis.across_tasks import across_table, typical_table
from mlmclm.analysis.effects import Effect
from mlmclm.results.chance import Chance
from mlmclm.results.intervals import estimate

PAGE = Path(__file__).parents[2] / "docs" / "statistics.md"
STATED = {
    int(number): tuple(float(share) for share in re.findall(r"\.\d\d", rest))
    for number, rest in re.findall(r"(?m)^  \| (\d+) \| (\.\d\d .*)$", PAGE.read_text())
}
"""By the number of values: probability of improvement on 1 and 4 tasks; interquartile mean on 1 and 4."""
DRAWS = 300
NEAR = 0.07
"""Three standard errors of a share in that many draws, at the lowest of them."""


def test_the_page_states_coverage_for_four_numbers() -> None:
    assert list(STATED) == [3, 5, 10, 30] and {len(own) for own in STATED.values()} == {4}


@pytest.mark.parametrize("tasks", [1, 4])
def test_probability_of_improvement_and_interquartile_mean_are_covered_as_is_stated(tasks: int) -> None:
    number, names = 3, [f"t{place}" for place in range(tasks)]
    draws = np.random.default_rng(tasks)
    effects = {(model, task): Effect(estimate(0.5, 0.1, 4.0), 0.0, np.ones(1), 0.0) for model in "ab" for task in names}
    better, middle = [], []
    for _ in range(DRAWS):
        runs = {pair: [list(draws.standard_normal(number))] for pair in effects}
        row = typical_table(effects, runs, ["a", "b"], names).iloc[0]
        if row["probability_low"] == row["probability_low"]:
            better.append(row["probability_low"] <= 0.5 <= row["probability_high"])
        # A second model fixes the scale: 0 is in the middle between the chance level and its score.
        fixed = {("top", task): [[1e3] * number] for task in names}
        every = effects | {("top", task): effects["a", task] for task in names}
        levels = {task: Chance(-1e3, "") for task in names}
        table = across_table(every, runs | fixed, ["a", "top"], names, chances=levels).set_index("model").loc["a"]
        middle.append(table["iqm_low"] <= 0.5 <= table["iqm_high"])
    place = 0 if tasks == 1 else 1
    assert np.mean(better) == pytest.approx(STATED[number][place], abs=NEAR)
    assert np.mean(middle) == pytest.approx(STATED[number][2 + place], abs=NEAR)
