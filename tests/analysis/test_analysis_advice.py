"""The differences that a study finds, its noise, and advice, on studies whose truth is known."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from analysis_study import synthetic_results

from mlmclm.analysis.analyse import Analysis, analyse
from mlmclm.analysis.comparison import ALL_TASKS
from mlmclm.analysis.results import records
from mlmclm.reports.advice import advise
from mlmclm.reports.wording import noise_lines, warnings

TASKS = ("pydocs-kind", "pydocs-fields", "pydocs-qa")


def studied(levels: dict[str, float], noise: float = 0.01, **more: Any) -> Analysis:
    return analyse(
        synthetic_results(levels, tasks=TASKS, noise=noise, **more), ranges=dict.fromkeys(TASKS, (-9.0, 9.0))
    )


def redrawn(
    draws: np.random.Generator, lead: float = 0.0, together: float = 0.0, tails: float = 0.0, seeds: int = 5
) -> Analysis:
    """A study of two models whose noise is drawn anew: its seeds share a part over tasks, or its tails are a t distribution's."""
    made = synthetic_results({"a": 0.7 + lead, "b": 0.7}, tasks=TASKS, noise=0.0, seeds=seeds)
    luck: dict[tuple[Any, ...], float] = {}
    for result in made:
        run = result["model"], result["learning_rate"], result["seed"]
        shared = luck.setdefault(run, draws.standard_normal())
        for split in result["scores"].values():
            for name in split:
                own = draws.standard_t(tails) if tails else draws.standard_normal()
                split[name] += 0.01 * (together**0.5 * shared + (1 - together) ** 0.5 * own)
    return analyse(made, ranges=dict.fromkeys(TASKS, (-9.0, 9.0)))


def test_a_difference_of_the_smallest_size_is_found_as_often_as_is_said() -> None:
    """Studies are drawn anew with the difference on all tasks; the mean over tasks shows it in about 80 %."""
    draws = np.random.default_rng(0)
    lead = float(np.mean([redrawn(draws).smallest[ALL_TASKS] for _ in range(10)]))
    rows = [next(row for row in records(redrawn(draws, lead).comparisons) if row["kind"] == "all") for _ in range(60)]
    assert 0.65 <= np.mean([row["p_holm"] < 0.05 for row in rows]) <= 0.95


def test_the_mean_over_tasks_finds_smaller_differences_than_a_task_and_one_seed_finds_none() -> None:
    found = studied({"a": 0.7, "b": 0.7})
    assert set(found.smallest) == {*TASKS, ALL_TASKS}
    assert all(found.smallest[task] > found.smallest[ALL_TASKS] for task in TASKS)
    assert any("is found with 80 % power" in line for line in noise_lines(found))
    assert all(map(np.isnan, studied({"a": 0.7, "b": 0.6}, seeds=1).smallest.values()))


def test_seeds_that_do_well_on_all_tasks_are_noticed_and_independent_ones_are_not() -> None:
    draws = np.random.default_rng(3)
    sound = [redrawn(draws).noise for _ in range(12)]
    assert sum(each.together.fails or each.tails.fails for each in sound) <= 1
    shared = redrawn(draws, together=0.5)
    assert shared.noise.together.fails and shared.noise.together.value == pytest.approx(0.5, abs=0.15)
    assert any("does well on others" in line for line in warnings(shared))


def test_heavy_tails_are_noticed_by_the_kurtosis_of_the_residuals() -> None:
    found = redrawn(np.random.default_rng(4), tails=2.0, seeds=10)
    assert found.noise.tails.fails and any("far from the others" in line for line in warnings(found))
    assert found.noise.tails.value > 1


def test_a_clear_winner_is_advised_and_an_open_question_says_what_would_settle_it() -> None:
    clear = advise(studied({"a": 0.8, "b": 0.6}))
    assert clear.answer.clear and clear.answer.best == ("a",) and clear.open == ()
    assert clear.answer.verdict == "Best on the mean over 3 tasks: a."
    close = advise(studied({"a": 0.73, "b": 0.70}, noise=0.02))
    assert not close.answer.clear
    assert any("more cells" in line for line in close.open)
    assert any("one pretraining run each" in line for line in close.rests_on)
    assert len(close.lines()) == 2 + len(close.parts())
    begun = synthetic_results({"a": 0.8, "b": 0.6}, tasks=TASKS)[:-1]
    assert "still to be run" in advise(analyse(begun)).open[0]


@pytest.mark.parametrize("rule", ["mean", "per_seed", "on_test"])
def test_every_rule_is_advised_on(rule: str) -> None:
    found = analyse(synthetic_results({"a": 0.8, "b": 0.6}, tasks=TASKS), rule=rule)
    rows = [len(found.effects), len(list(itertools.product("ab", TASKS)))]
    assert rows[0] == rows[1] and advise(found).answer.best == ("a",)
