"""The sentences say what the numbers allow, and numbers are written as people read them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from analysis_study import TASKS, cell, synthetic_results

from mlmclm.analysis.analyse import analyse
from mlmclm.reports import text
from mlmclm.reports.wording import baseline_sentence, cautions, headline, limits
from mlmclm.seeds import Seeds, seed_value


def single(scores: dict[str, float | None]) -> list[dict[str, Any]]:
    return [cell(model, task, 1e-3, 0, score, score) for model, score in scores.items() for task in TASKS]


def test_a_clear_winner_is_called_one_with_its_difference() -> None:
    found = headline(analyse(synthetic_results({"a": 0.8, "b": 0.7, "c": 0.6})))
    assert found.clear and found.best == "a" and found.tied == ()
    assert found.verdict == "Best on the mean over 4 tasks: a."
    assert "the next, b, scores" in found.detail and "a difference of +" in found.detail


def test_models_that_cannot_be_told_apart_are_not_ranked() -> None:
    scores = {"a": (0.70, 0.72, 0.74), "b": (0.69, 0.72, 0.73), "c": (0.2, 0.21, 0.22)}
    made = [
        cell(model, task, 1e-3, seed, score, score)
        for model, own in scores.items()
        for task in TASKS
        for seed, score in enumerate(own)
    ]
    found = headline(analyse(made))
    assert not found.clear and len(found.tied) == 1 and "c" not in found.tied
    assert found.verdict.startswith("No clear winner")


def test_one_seed_makes_no_winner() -> None:
    found = headline(analyse(single({"a": 0.9, "b": 0.1})))
    assert not found.clear and found.tied == ("b",)
    assert "no interval" in found.detail


def test_a_baseline_on_top_is_said_and_not_celebrated() -> None:
    found = headline(analyse(synthetic_results({"a": 0.5, "untrained": 0.8}), "untrained"))
    assert not found.clear
    assert found.verdict.startswith("Nothing beats the baseline")


def test_the_baseline_sentence_has_every_outcome() -> None:
    def say(models: dict[str, float], **more: Any) -> str:
        return baseline_sentence(analyse(synthetic_results(models, **more), "untrained"))

    assert say({"a": 0.8, "untrained": 0.5}).startswith("a beats the baseline by more than the interval")
    assert "It is so for a. It is not the case for b (not clearly ahead" in say({"a": 0.8, "b": 0.4, "untrained": 0.5})
    assert "cannot be told yet" in baseline_sentence(analyse(single({"a": 0.8, "untrained": 0.5}), "untrained"))
    mixed = synthetic_results({"a": 0.8, "untrained": 0.5}) + single({"late": 0.8})
    assert "cannot be told yet for late" in baseline_sentence(analyse(mixed, "untrained"))
    assert baseline_sentence(analyse(synthetic_results({"a": 0.8}))) == ""


def test_nothing_to_be_careful_about_is_an_empty_list() -> None:
    assert cautions(analyse(synthetic_results({"a": 0.8, "b": 0.7}))) == []


def test_limits_say_which_streams_the_seeds_vary() -> None:
    def say(*seeds: Any) -> str:
        made = synthetic_results({"a": 0.8, "b": 0.7}, seeds=len(seeds))
        return limits(analyse([result | {"seed": seed_value(seeds[result["seed"]])} for result in made]))[0]

    assert say(0, 1) == "The 95 % intervals cover the noise of fine-tuning seeds only."
    order = "the order of the data only; the head's initial weights and dropout were held"
    assert say(0, Seeds(0, 1, 0), Seeds(0, 2, 0)) == f"The 95 % intervals cover the noise of {order}."
    crossed = say(0, Seeds(0, 1, 0), Seeds(1, 0, 0), Seeds(1, 1, 0))
    assert "the head's initial weights and the order of the data only; dropout was held" in crossed
    assert crossed.endswith("their scores are not independent and intervals are too narrow.")


def test_every_weakness_of_the_grid_is_a_caution() -> None:
    lost = cautions(analyse([*single({"a": None}), *synthetic_results({"b": 0.7})]))
    assert any("Every cell diverged for a on" in note for note in lost)
    few = cautions(analyse(single({"a": 0.8})))
    assert any("one seed" in note for note in few) and any("only one learning rate" in note.lower() for note in few)
    hurt = [
        cell("a", "pydocs-kind", rate, seed, *scores)
        for rate in (1e-4, 1e-3, 1e-2)
        for seed, scores in enumerate([(0.5, 0.5), (0.5, 0.5), (None, None)])
    ]
    assert any("diverged even at the chosen rate for a on pydocs-kind" in note for note in cautions(analyse(hurt)))
    loose = cautions(analyse(synthetic_results({"a": 0.8}), rule="per_seed"))
    assert any("optimistic" in note for note in loose)
    seen = cautions(analyse(synthetic_results({"a": 0.8}), rule="on_test"))
    assert any("chosen on the test scores that are reported, which is optimistic" in note for note in seen)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (text.points(0.61234), "61.23"),
        (text.points(math.nan), "–"),
        (text.difference(0.0132), "+1.32"),
        (text.difference(-0.004), "−0.40"),
        (text.difference(-0.00001), "0.00"),
        (text.interval(0.5, 0.6), "[50.00, 60.00]"),
        (text.interval(math.nan, 0.6), ""),
        (text.interval(-0.1, 0.1, sign=True), "[−10.00, +10.00]"),
        (text.percent(0.004), "<1 %"),
        (text.percent(0.0), "0 %"),
        (text.percent(0.999), ">99 %"),
        (text.percent(0.25), "25 %"),
        (text.count(4_915_200), "4.92 M"),
        (text.count(999_999), "1.00 M"),
        (text.count(9_999), "9,999"),
        (text.count(99_090_432_000), "99.1 B"),
        (text.count(2_359_296_000_000), "2.36 T"),
        (text.count(None), "–"),
        (text.scientific(6.3e13), "6.30 × 10¹³"),
        (text.scientific(None), "–"),
        (text.probability(0.0004), "<0.001"),
        (text.probability(0.036), "0.036"),
        (text.plain(True), "yes"),
        (text.plain(5e-4), "5e-4"),
        (text.plain(0.1), "0.1"),
        (text.plain(81234), "81,234"),
        (text.metric("study.f1"), "study's F1"),
        (text.metric("accuracy+f1"), "mean of accuracy and F1"),
        (text.listing(["a", "b", "c"]), "a, b and c"),
        (text.listing(["a", "b", "c"], most=1), "a and 2 more"),
        (text.plural(1, "cell"), "1 cell"),
        (text.plural(2, "family", "families"), "2 families"),
    ],
)
def test_numbers_are_written_as_people_read_them(written: str, expected: str) -> None:
    assert written == expected
