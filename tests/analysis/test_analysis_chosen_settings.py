"""The choice among the settings of a grid is in scores and intervals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from analysis_study import cell

from mlmclm.analysis.analyse import analyse
from mlmclm.analysis.results import Grid, records

TASK = "pydocs-kind"


@pytest.mark.parametrize("rule", ["mean", "on_test", "per_seed"])
def test_the_score_is_that_of_the_setting_which_is_shown(rule: str) -> None:
    """In grids with missing and diverged cells, one setting was shown and another one scored."""
    draws, unlike = np.random.default_rng(7), 0
    for _ in range(12):
        scores = draws.random((2, 3, 3, 4))  # splits, settings, rates, seeds
        made = [
            cell(
                "m",
                TASK,
                10.0 ** -(2 + rate),
                seed,
                *(scores[:, point, rate, seed] if draws.random() > 0.2 else (None, None)),
            )
            | {"setting": f"epochs {3 - point}", "key": f"{point}{rate}{seed}"}
            for point, rate, seed in np.ndindex(3, 3, 4)
            if draws.random() > 0.15
        ]
        grid = Grid(("m",), (TASK,), (1e-4, 1e-3, 1e-2), (0, 1, 2, 3), {TASK: ("epochs 2", "epochs 3", "epochs 1")})
        found = analyse(made, grid=grid, rule=rule)
        (row,) = records(found.best)
        assert row["score"] == pytest.approx(row["test_mean"], abs=1e-12)
        assert len(found.run_effects["m", TASK].chosen) == len(found.runs["m", TASK].rates)
        alone = [each for each in made if each["setting"] == row["setting"]]
        (own,) = records(analyse(alone, grid=replace(grid, settings={TASK: (row["setting"],)}), rule=rule).best)
        assert [own[name] for name in ("test_mean", "learning_rates", "n")] == [
            row[name] for name in ("test_mean", "learning_rates", "n")
        ]
        unlike += row["setting"] != "epochs 2"
    assert unlike > 3


@pytest.mark.parametrize("rule", ["mean", "per_seed"])
def test_a_fresh_run_is_net_of_the_choice_of_the_setting(rule: str) -> None:
    draws, errors, plain, chosen = np.random.default_rng(17), [], [], []
    for _ in range(15):
        common, first, second = draws.standard_normal((3, 2, 4, 3, 3))  # models, settings, rates, seeds
        scores = [0.7 + 0.01 * (0.9**0.5 * common + 0.1**0.5 * own) for own in (first, second)]
        made = [
            cell("ab"[place[0]], TASK, 10.0 ** -(2 + place[2]), place[3], scores[0][place], scores[1][place])
            | {"setting": f"weight_decay={place[1]}", "key": str(place)}
            for place in np.ndindex(common.shape)
        ]
        settings = {TASK: tuple(f"weight_decay={number}" for number in range(4))}
        grid = Grid(("a", "b"), (TASK,), (1e-4, 1e-3, 1e-2), (0, 1, 2), settings)
        found = records(analyse(made, grid=grid, rule=rule).best)
        errors += [row["fresh"] - 0.7 for row in found]
        plain += [row["score"] - 0.7 for row in found]
        chosen += [row["p_chosen"] for row in found]
    assert np.mean(plain) > 0.006, "the highest of twelve means"
    assert abs(np.mean(errors)) < 3 * np.std(errors, ddof=1) / 30**0.5 and abs(np.mean(errors)) < 0.003
    assert max(chosen) < 0.7, "twelve are equally good"
