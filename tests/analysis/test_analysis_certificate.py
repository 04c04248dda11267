"""The certificate of a study, and advice, on studies whose truth is known."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from analysis_study import synthetic_results

from mlmclm.analysis.analyse import Analysis, analyse
from mlmclm.analysis.comparison import ALL_TASKS
from mlmclm.analysis.results import records
from mlmclm.reports.advice import advise
from mlmclm.reports.certificate_words import coverage
from mlmclm.results.intervals import NAN

TASKS = ("pydocs-kind", "pydocs-fields", "pydocs-qa")


def studied(levels: dict[str, float], noise: float = 0.01, **more: Any) -> Analysis:
    return analyse(
        synthetic_results(levels, tasks=TASKS, noise=noise, **more), ranges=dict.fromkeys(TASKS, (-9.0, 9.0))
    )


def test_intervals_cover_and_equal_models_are_seldom_told_apart() -> None:
    found = studied({"a": 0.7, "b": 0.7, "c": 0.7}).certificate
    assert 0.93 <= found.covered <= 0.99
    assert found.false_claims <= 0.07
    assert found == studied({"a": 0.7, "b": 0.7, "c": 0.7}).certificate, "the same study gives the same numbers"


def test_a_difference_of_the_smallest_size_is_found_as_often_as_is_said() -> None:
    """Studies are drawn anew with the difference on all tasks; the mean over tasks tells them apart in about 80 %."""
    draws = np.random.default_rng(0)

    def drawn(lead: float) -> Analysis:
        made = synthetic_results({"a": 0.7 + lead, "b": 0.7}, tasks=TASKS, noise=0.0)
        for result in made:
            for split in result["scores"].values():
                for name in split:
                    split[name] += 0.01 * draws.standard_normal()
        return analyse(made, ranges=dict.fromkeys(TASKS, (-9.0, 9.0)))

    lead = float(np.mean([drawn(0.0).certificate.smallest[ALL_TASKS] for _ in range(10)]))
    rows = [next(row for row in records(drawn(lead).comparisons) if row["kind"] == "all") for _ in range(60)]
    assert 0.65 <= np.mean([row["p_holm"] < 0.05 for row in rows]) <= 0.97


def test_the_certificate_counts_claims_as_the_comparisons_do() -> None:
    """With noise that is half of what the fit takes it for, equal models are never told apart."""
    found = studied({"a": 0.7, "b": 0.7})
    assert found.certificate.false_claims <= 0.08
    assert set(found.certificate.smallest) == {*TASKS, ALL_TASKS}
    assert all(
        value > found.certificate.smallest[ALL_TASKS]
        for name, value in found.certificate.smallest.items()
        if name in TASKS
    )


def test_coverage_is_said_beside_intervals_only_where_it_is_not_what_they_are_called() -> None:
    found = studied({"a": 0.7, "b": 0.7})
    sound = replace(found.certificate, covered=0.96, covered_differences=0.94)
    for own, said in ((sound, ""), (replace(sound, covered=0.98), "98 % (scores)"), (replace(sound, covered=NAN), "")):
        vars(found)["certificate"] = own
        assert said in coverage(found) and bool(said) == bool(coverage(found))
        assert coverage(found) in advise(found).answer.detail


def test_one_seed_has_no_certificate() -> None:
    found = studied({"a": 0.7, "b": 0.6}, seeds=1).certificate
    assert np.isnan(found.covered) and np.isnan(found.false_claims) and all(map(np.isnan, found.smallest.values()))


def test_a_clear_winner_is_advised_and_an_open_question_says_what_would_settle_it() -> None:
    clear = advise(studied({"a": 0.8, "b": 0.6}))
    assert clear.answer.clear and clear.answer.best == ("a",) and clear.open == ()
    assert clear.answer.verdict == "Best on the mean over 3 tasks: a."
    close = advise(studied({"a": 0.703, "b": 0.70}, noise=0.02))
    assert not close.answer.clear
    assert any("more cells" in line or "More seeds would not" in line for line in close.open)
    assert any("one pretraining run each" in line for line in close.rests_on)
    assert len(close.lines()) == 2 + len(close.parts())
    begun = synthetic_results({"a": 0.8, "b": 0.6}, tasks=TASKS)[:-1]
    assert "still to be run" in advise(analyse(begun)).open[0]


@pytest.mark.parametrize("rule", ["mean", "per_seed", "on_test"])
def test_every_rule_is_advised_on(rule: str) -> None:
    found = analyse(synthetic_results({"a": 0.8, "b": 0.6}, tasks=TASKS), rule=rule)
    rows = [len(found.effects), len(list(itertools.product("ab", TASKS)))]
    assert rows[0] == rows[1] and advise(found).answer.best == ("a",)
