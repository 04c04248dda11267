"""Invariants of verdicts over random small studies: no verdict without noise, on constants or by uncorrected p values."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from analysis_study import cell
from scipy import stats

from mlmclm.analysis.analyse import Analysis, analyse
from mlmclm.analysis.results import Record, records
from mlmclm.reports.wording import clearly_different, headline
from mlmclm.results.chance import Chance

TASKS = ("pydocs-kind", "pydocs-qa", "sst2")


def random_study(draws: np.random.Generator) -> tuple[Analysis, set[tuple[str, str]]]:
    """A study of up to four models, with pairs that predict the same, have equal scores, few seeds or diverged cells."""
    models, tasks = ["a", "b", "c", "untrained"][-int(draws.integers(2, 5)) :], TASKS[: draws.integers(1, 4)]
    seeds, results, alike = int(draws.integers(1, 4)), [], set()
    for model, task in itertools.product(models, tasks):
        level, kind = (
            draws.uniform(0.3, 0.9),
            draws.choice(["noise", "equal", "rounded", "constant", "diverged"], p=(0.6, 0.1, 0.1, 0.15, 0.05)),
        )
        alike |= {(model, task)} if kind == "constant" else set()
        for seed in range(seeds):
            noise = {"equal": 0.0, "rounded": 1e-9 * seed}.get(kind, draws.normal(0, 0.02))
            score = None if kind == "diverged" else float(np.clip(level + noise, 0, 1))
            results.append(cell(model, task, 1e-3, seed, score, score))
    chances = {task: Chance(float(draws.uniform(0.1, 0.7)), "") for task in tasks if draws.random() < 0.8}
    return analyse(
        results, "untrained", chances=chances, constant=lambda row: (row["model"], row["task"]) in alike
    ), alike


def scores_of(found: Analysis, model: str, task: str) -> list[float]:
    return [row["test"] for row in records(found.chosen) if (row["model"], row["task"]) == (model, task)]


def noisy(scores: list[float]) -> bool:
    return len(scores) > 1 and np.ptp(scores) > 1e-6


def check_pair(found: Analysis, alike: set[tuple[str, str]], row: Record) -> None:
    """Check one comparison on one task."""
    sides = [scores_of(found, row[name], row["scope"]) for name in ("model_a", "model_b")]
    fits = [found.fits.get((row[name], row["scope"])) for name in ("model_a", "model_b")]
    every = [own for model in found.groups if noisy(own := scores_of(found, model, row["scope"]))]
    if every and all(len(own) > 1 for own in sides):  # a side of equal scores counts as noisy as the others
        total = sum(len(own) - 1 for own in every)
        if all(fit is not None and fit.pooled and fit.freedom == total for fit in fits):
            error = math.sqrt(
                sum((len(own) - 1) * np.var(own, ddof=1) for own in every) / total * sum(1 / len(own) for own in sides)
            )
            assert row["p"] == pytest.approx(2 * stats.t.sf(abs(row["difference"]) / error, total), rel=1e-6)
        elif all(map(noisy, sides)) and not any(fit is None or fit.pooled for fit in fits):
            assert row["p"] == pytest.approx(stats.ttest_ind(*sides, equal_var=False).pvalue, rel=1e-9)
    else:
        assert math.isnan(row["p"]) and math.isnan(row["low"]) and not clearly_different(row, 0.95)
    ahead = row["model_a"] if row["difference"] > 0 else row["model_b"]
    if clearly_different(row, 0.95):
        assert (ahead, row["scope"]) not in alike
        chance = found.chances.get(row["scope"])
        assert chance is None or np.mean(scores_of(found, ahead, row["scope"])) > chance.score


def check_mean(found: Analysis, row: Record) -> None:
    """Check that a lead on the mean over tasks is there without the tasks on which it is one at chance."""
    if not clearly_different(row, 0.95):
        return
    pair = (row["model_a"], row["model_b"])
    ahead, behind = pair if row["difference"] > 0 else pair[::-1]
    at_chance = {row["task"] for row in records(found.best) if row["model"] == ahead and row["above_chance"] == "no"}
    leads = {
        task: np.mean(scores_of(found, ahead, task)) - np.mean(scores_of(found, behind, task))
        for task in found.grid.tasks
    }
    assert sum(lead for task, lead in leads.items() if lead <= 0 or task not in at_chance) > 0


@pytest.mark.parametrize("studies", [20, pytest.param(80, marks=pytest.mark.slow)])
def test_no_verdict_rests_on_constants_on_equal_scores_or_on_uncorrected_p_values(studies: int) -> None:
    draws = np.random.default_rng(7)
    clear = checked = 0
    for _ in range(studies):
        found, alike = random_study(draws)
        rows = records(found.comparisons)
        for row in rows:
            if row["kind"] == "task":
                check_pair(found, alike, row)
            if row["kind"] == "all":
                check_mean(found, row)
        assert all(math.isnan(row["p_verdict"]) == math.isnan(row["p"]) for row in rows)
        # With one task, the mean over tasks repeats it, and is no further test.
        own = rows if len(found.grid.tasks) > 1 else [row for row in rows if row["kind"] == "task"]
        tested = [row for row in own if not math.isnan(row["p"])]
        kinds = Counter(row["kind"] for row in tested)
        assert all(row["tests"] == kinds[row["kind"]] for row in tested)
        # A correction never lowers a p value, and the mean over tasks is corrected over the pairs alone.
        assert all(row["p_holm"] >= row["p"] for row in tested)
        checked += bool(tested)
        said = headline(found)
        clear += said.clear
        if said.clear:
            (best,) = said.best
            assert not all((best, task) in alike for task in found.grid.tasks)
        for row in records(found.best):
            assert (row["constant"] == row["n"] > 0) == ((row["model"], row["task"]) in alike)
        for row in records(found.claims):
            own = [each for each in records(found.best) if each["model"] == row["model"]]
            constant = sum((row["model"], each["task"]) in alike for each in own)
            assert row["tasks_ahead"] <= len(own) - constant - row["tasks_diverged"]
            assert not (row["holds"] and (constant + row["tasks_diverged"] == len(own)))
            assert row["tasks_diverged"] == sum(each["n"] == 0 for each in own)
            assert row["verdict"] != "unknown" or row["tasks_diverged"] == 0
    assert checked > studies / 4
    assert clear > studies / 16, "the simulation has clear winners too"
