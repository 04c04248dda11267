"""The sentences say what the numbers allow, and numbers are written as people read them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from analysis_study import TASKS, cell, synthetic_results
from scipy import stats

from mlmclm.analysis.analyse import Analysis, analyse
from mlmclm.analysis.results import records
from mlmclm.analysis.selection import best_rates
from mlmclm.reports import text
from mlmclm.reports.cautions import cautions, limits
from mlmclm.reports.wording import baseline_sentence, claim_reason, headline
from mlmclm.results.chance import Chance, above_chance
from mlmclm.seeds import Seeds, seed_value


def single(scores: dict[str, float | None]) -> list[dict[str, Any]]:
    return [cell(model, task, 1e-3, 0, score, score) for model, score in scores.items() for task in TASKS]


def test_a_clear_winner_is_called_one_with_its_difference() -> None:
    found = headline(analyse(synthetic_results({"a": 0.8, "b": 0.7, "c": 0.6})))
    assert found.clear and found.best == ("a",) and found.tied == ()
    assert found.verdict == "Best on the mean over 4 tasks: a."
    assert "the next, b, scores" in found.detail and "a difference of +" in found.detail


def test_models_without_a_clear_difference_are_not_ranked() -> None:
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
    assert "no interval: one seed" in found.detail


def test_a_baseline_on_top_is_said_and_not_celebrated() -> None:
    found = headline(analyse(synthetic_results({"a": 0.5, "untrained": 0.8}), "untrained"))
    assert not found.clear
    assert found.verdict.startswith("Nothing beats the baseline")


def test_the_baseline_sentence_has_every_outcome() -> None:
    def say(models: dict[str, float], **more: Any) -> str:
        return baseline_sentence(analyse(synthetic_results(models, **more), "untrained"))

    assert say({"a": 0.8, "untrained": 0.5}).startswith("a beats the baseline by more than the interval")
    mixed = say({"a": 0.8, "b": 0.4, "untrained": 0.5})
    assert mixed.startswith(
        "a beats the baseline by more than the interval on the mean over tasks, and scores higher on at"
    )
    assert "Task by task, the lead is larger than its interval on 4 of 4. This isn't shown for b (not clearly" in mixed
    worse = say({"a": 0.4, "untrained": 0.5})
    assert worse.startswith("No model is shown to beat the baseline by more than the interval on the mean over tasks")
    assert "Reasons: a (not clearly ahead on the mean, ahead on 0 of 4 tasks" in worse
    done = baseline_sentence(analyse(single({"a": 0.8, "untrained": 0.5}), "untrained"))
    assert "cannot be told: scores" in done, "no cell is still to be run"
    late = synthetic_results({"a": 0.8, "untrained": 0.5}) + single({"late": 0.8})
    assert "cannot be told yet for late" in baseline_sentence(analyse(late, "untrained"))
    assert baseline_sentence(analyse(synthetic_results({"a": 0.8}))) == ""


def scored(models: dict[str, list[list[float]]]) -> list[dict[str, Any]]:
    """Results at one rate, given each model's scores by task and seed."""
    return [
        cell(model, task, 1e-3, seed, score, score)
        for model, tasks in models.items()
        for task, scores in zip(TASKS, tasks, strict=False)
        for seed, score in enumerate(scores)
    ]


def test_the_sentence_does_not_claim_wins_on_single_tasks_that_are_within_the_noise() -> None:
    """It read as if each of three models had won three tasks, where one had won one."""
    near = [[0.60, 0.64, 0.62], [0.60, 0.65, 0.61], [0.60, 0.63, 0.62]]
    base = [[0.59, 0.62, 0.60]] * 3 + [[0.20, 0.21, 0.20]]
    models = {"a": [[0.9, 0.91, 0.92]] * 4, "b": [*near, [0.8, 0.81, 0.82]], "untrained": base}
    found = analyse(scored(models), "untrained")
    clear = {
        name: sum(
            stats.ttest_ind(own, theirs, equal_var=False).confidence_interval().low > 0
            for own, theirs in zip(models[name], base, strict=True)
        )
        for name in ("a", "b")
    }
    assert clear == {"a": 4, "b": 1} and list(found.claims["verdict"]) == ["holds", "holds"]
    assert baseline_sentence(found) == (
        "All 2 models beat the baseline by more than the interval on the mean over tasks, and each scores higher on at least 3 of "
        "the 4 tasks. Task by task, the lead is larger than its interval on 4 of 4 (a) and 1 of 4 (b)."
    )


def test_equal_scores_of_seeds_make_no_winner_and_it_is_said_why() -> None:
    """Two models one example of 71 apart were "+1.41 points [+1.41, +1.41], Holm-corrected p < 0.001", a clear winner."""
    made = [
        cell(model, "sst2", 1e-3, seed, right / 71, right / 71)
        for model, right in (("a", 51), ("b", 50), ("untrained", 40))
        for seed in (0, 1)
    ]
    found = analyse(made, "untrained")
    said = headline(found)
    assert not said.clear and said.tied == ("b", "untrained")
    assert said.verdict == (
        "No clear winner on sst2: a scores highest, but its difference to b and untrained has no interval."
    )
    assert said.detail == (
        "It scores 71.83; the next, b, scores 70.42: a difference of +1.41 points (no interval: the seeds give equal scores; their "
        "noise is not known)."
    )
    assert found.comparisons[["low", "high", "p", "p_holm"]].isna().all(axis=None)
    assert set(found.claims["verdict"]) == {"unknown"} and set(found.comparisons["tests"]) == {0}
    (note,) = [note for note in cautions(found) if "equal scores" in note]
    assert note.startswith(
        "The seeds give equal scores for a on sst2, b on sst2 and untrained on sst2; their noise is not"
    )
    assert set(found.best["note"]) == {"equal scores: no interval"}


def test_a_pair_that_is_not_tested_is_not_counted_by_holm_and_this_is_said() -> None:
    found = analyse(scored({"a": [[0.8, 0.81, 0.83]], "b": [[0.7]], "c": [[0.6, 0.61, 0.62]]}))
    tested = stats.ttest_ind([0.8, 0.81, 0.83], [0.6, 0.61, 0.62]).pvalue
    rows = [row for row in records(found.comparisons) if row["kind"] == "all"]
    assert [row["tests"] for row in rows] == [1, 1, 1]
    assert [row["p_holm"] for row in rows] == pytest.approx([math.nan, tested, math.nan], nan_ok=True)
    assert "Holm's correction counts 1 of 3 pairs of models, as the others have no interval." in headline(found).detail


def test_the_answer_says_of_how_many_models_the_best_was_chosen_with_an_interval_that_knows_it() -> None:
    noise = np.asarray([0.0, 0.03, 0.06])
    found = analyse(scored({"a": [0.70 + noise], "b": [0.69 + noise], "c": [0.68 + noise], "d": [0.2 + noise]}))
    (row,) = [row for row in records(found.overall) if row["kind"] == "all" and row["model"] == "a"]
    low, high = (
        row["mean"] + sign * row["error"] * float(stats.t.ppf(1 - 0.025 / count, row["freedom"]))
        for sign, count in ((-1, 3), (1, 1))
    )
    expected = (
        f"It scores 73.00 [{100 * low:.2f}, {100 * high:.2f}] as the best of 3 without a clear difference; the next, b,"
    )
    assert headline(found).detail.startswith(expected)


def test_a_difference_that_is_shown_as_0_00_is_a_tie() -> None:
    level = [0.70, 0.72, 0.74]
    for shift, is_tied in ((0.0, True), (4e-5, True), (6e-5, False)):
        models = {"a": [level], "b": [[score + shift for score in level]], "c": [[0.5, 0.51, 0.52]]}
        found = analyse(scored(models), "c")
        said = headline(found)
        if is_tied:
            names = "b and a" if shift else "a and b"
            assert said.verdict == f"Tied on pydocs-kind: {names} score 72.00."
            assert not said.clear and set(said.best) == {"a", "b"} and said.tied == ()
            assert "a difference of 0.00 points" in said.detail
        else:
            assert said.best == ("b",) and "b scores highest, but a is not clearly different" in said.verdict
    same = analyse(scored({"a": [level], "untrained": [level]}), "untrained")
    assert headline(same).verdict.startswith("Tied on pydocs-kind: a and untrained")
    assert list(same.claims["tasks_ahead"]) == [0] and list(same.claims["verdict"]) == ["not shown"]


def test_a_choice_with_cells_to_come_is_not_final() -> None:
    made = synthetic_results({"a": 0.8, "b": 0.7})
    whole, part = analyse(made), analyse(made[:-3], grid=analyse(made).grid)
    assert whole.best["final"].all() and "so far" not in headline(whole).verdict
    assert list(part.best["final"]) == [True] * 7 + [False]
    row = records(part.best)[-1]
    assert row["note"] == "not final: 3 cells not run" and best_rates(row) == "1e-3 (not final)"
    said = headline(part)
    assert said.verdict == "No winner yet on the mean over 4 tasks: a scores highest so far." and not said.clear
    assert said.detail.endswith("Not final: 3 of 96 cells have no result yet.")
    (note,) = [note for note in cautions(part) if note.startswith("Not final: 3 of 96 cells")]
    assert note.endswith("Until then, rates compete by the mean of the seeds that were run.")


def test_the_caution_about_missing_cells_says_how_rates_were_chosen() -> None:
    """It said that a rate that lost seeds is chosen only where no other kept more, of a rate with fewer seeds than others."""
    made = synthetic_results({"a": 0.8, "b": 0.7}, tasks=("pydocs-kind",))
    (rate,) = {row["learning_rate"] for row in records(analyse(made).best) if row["model"] == "a"}
    lost = next(each for each in made if each["model"] == "a" and each["learning_rate"] == rate)
    found = analyse([each for each in made if each is not lost])
    row = next(row for row in records(found.best) if row["model"] == "a")
    assert (row["learning_rate"], row["missing"]) == (rate, 1), "the other rates have all their seeds"
    assert not any("kept more" in note for note in cautions(found))
    diverged = analyse(
        [lost | {"status": "diverged", "scores": None, "diverged_step": 1} if each is lost else each for each in made]
    )
    assert any(note.endswith("is chosen only where no other kept more.") for note in cautions(diverged))


CHANCE = {"pydocs-kind": Chance(0.60, "the most frequent class")}


def test_a_score_at_chance_wins_nothing_and_holds_no_claim() -> None:
    """A model that predicted class 0 in all cells was ranked first, with `holds`."""
    models = {"a": [[0.60, 0.60, 0.60]], "b": [[0.60, 0.595, 0.611]], "untrained": [[0.40, 0.41, 0.42]]}
    made = scored(models)
    found = analyse(made, "untrained", chances=CHANCE, constant=lambda row: row["model"] == "a")
    assert list(found.best["above_chance"]) == ["no"] * 3 and list(found.best["constant"]) == [3, 0, 0]
    assert set(found.claims["verdict"]) <= {"not shown", "unknown"} and not found.claims["holds"].any()
    assert list(found.claims["tasks_at_chance"]) == [1, 1] and list(found.claims["tasks_ahead"]) == [0, 0]
    assert not headline(found).clear
    assert headline(found).verdict == "No winner on pydocs-kind: b scores highest, but is not above chance."
    assert "Reasons: a (higher, but not above chance) and b (higher, but not above chance)." in baseline_sentence(found)
    said = " ".join(cautions(found))
    assert "The same prediction for every test example: a on pydocs-kind." in said
    assert (
        "Not above chance: a on pydocs-kind and b on pydocs-kind. No lead of such a score counts in a verdict." in said
    )
    without = analyse(scored({"a": [[0.6, 0.61, 0.6]], "untrained": models["untrained"]}), "untrained")
    assert list(without.claims["verdict"]) == ["holds"], "as where chance is not known"


def test_a_constant_prediction_is_no_evidence_even_where_chance_is_not_known() -> None:
    made = scored({"a": [[0.60, 0.61, 0.60]], "untrained": [[0.40, 0.41, 0.42]]})
    found = analyse(made, "untrained", constant=lambda row: row["model"] == "a")
    assert list(found.claims["verdict"]) == ["not shown"] and not headline(found).clear


def test_a_constant_prediction_above_the_chance_level_is_said_and_wins_nothing() -> None:
    made = scored({"a": [[0.60, 0.61, 0.62]], "b": [[0.40, 0.41, 0.42]], "untrained": [[0.30, 0.31, 0.32]]})
    chances = {"pydocs-kind": Chance(0.1, "any order")}
    assert headline(analyse(made, "untrained", chances=chances)).clear
    found = analyse(made, "untrained", chances=chances, constant=lambda row: row["model"] == "a")
    first = records(found.best)[0]
    assert (first["constant"], first["above_chance"]) == (3, "no")
    assert first["note"] == "predicts the same for every example"
    assert not headline(found).clear
    said = "No winner on pydocs-kind: a scores highest, but predicts the same for every example."
    assert headline(found).verdict == said
    assert list(found.claims["verdict"]) == ["not shown", "holds"]
    notes = " ".join(cautions(found))
    assert "The same prediction for every test example: a on pydocs-kind. No lead of a model" in notes
    assert "Not above chance" not in notes


def test_a_verdict_on_the_mean_stands_only_without_the_tasks_led_at_chance() -> None:
    chances = CHANCE | {task: Chance(0.1, "") for task in TASKS if task != "pydocs-kind"}
    noise = (0.0, 0.01, -0.01)

    def found(lead: float) -> Analysis:
        """`a` leads by far on the first task, where it is below chance, and by `lead` on the second."""
        levels = {"a": (0.50, 0.70 + lead), "b": (0.30, 0.70)}
        made = scored({name: [[level + shift for shift in noise] for level in own] for name, own in levels.items()})
        return analyse(made, chances=chances)

    assert headline(found(0.2)).clear
    same = headline(found(0.0))
    assert not same.clear
    assert same.verdict.endswith(
        "a scores highest, but its lead over b is based on tasks where it is not above chance."
    )
    # By hand: with the first task counted as level, the difference of the means is half of that on the second.
    lead, error = 0.2 / 2, math.sqrt(2 * 0.01**2 / 3) / 2
    assert lead > stats.t.ppf(0.975, 4) * error


@pytest.mark.parametrize(
    ("value", "low", "chance", "said"),
    [
        (0.7, 0.65, 0.6, "yes"), (0.7, 0.6, 0.6, "no"), (0.7, 0.55, 0.6, "no"), (0.5, 0.45, 0.6, "no"),
        (0.6, math.nan, 0.6, "no"), (0.7, math.nan, 0.6, "unknown"), (0.7, 0.65, math.nan, "unknown"),
        (math.nan, math.nan, 0.6, ""),
    ],
)  # fmt: skip
def test_a_score_is_above_chance_if_its_whole_interval_is(value: float, low: float, chance: float, said: str) -> None:
    assert above_chance(value, low, chance) == said
    assert above_chance(value, low, chance, constant=True) == (said and "no")


def test_nothing_to_be_careful_about_is_an_empty_list() -> None:
    made, chances = synthetic_results({"a": 0.8, "b": 0.7}), {task: Chance(0.1, "") for task in TASKS}
    assert cautions(analyse(made, chances=chances)) == []
    (note,) = cautions(analyse(made, chances={task: chances[task] for task in list(TASKS)[1:]}))
    assert note.startswith("The chance level of pydocs-kind is not known")
    (note,) = cautions(analyse(made))
    assert "pydocs-fields, pydocs-kind, pydocs-qa and pydocs-retrieval is not known" in note


def test_cautions_count_the_seeds_that_predict_the_same() -> None:
    made = scored({"a": [[0.60, 0.50, 0.70]], "b": [[0.60, 0.60, 0.60]]})
    said = cautions(analyse(made, chances=CHANCE, constant=lambda row: row["test"] == 0.6))
    alike = "The same prediction for every test example: a on pydocs-kind (1 of 3 seeds) and b on pydocs-kind."
    assert any(note.startswith(alike) for note in said)


def test_scores_outside_the_range_that_a_family_declares_are_not_called_equal() -> None:
    found = analyse(scored({"a": [[27.1, 27.4, 27.9]]}), ranges={"pydocs-kind": (0.0, 1.0)})
    assert found.best["score_low"].isna().all() and not any("equal scores" in note for note in cautions(found))


def test_one_score_on_one_seed_is_written_in_the_singular() -> None:
    said = cautions(analyse(scored({"a": [[0.6]], "b": [[0.5, 0.51]]})))
    assert "One score is based on one seed and has no interval." in said


def test_a_baseline_whose_lead_has_no_interval_is_not_said_to_be_unbeaten() -> None:
    equal = analyse(scored({"a": [[0.6, 0.6]], "untrained": [[0.7, 0.7]]}), "untrained")
    assert headline(equal).verdict == "No model is shown to beat the baseline: untrained scores highest on pydocs-kind."


def test_a_tie_at_chance_is_said_to_be_one() -> None:
    said = headline(analyse(scored({"a": [[0.6, 0.6]], "b": [[0.6, 0.6]]}), chances=CHANCE)).verdict
    assert said == "Tied on pydocs-kind: a and b score 60.00, which is not above chance."


def test_limits_say_which_streams_the_seeds_vary() -> None:
    def say(*seeds: Any) -> str:
        made = synthetic_results({"a": 0.8, "b": 0.7}, seeds=len(seeds))
        return limits(analyse([result | {"seed": seed_value(seeds[result["seed"]])} for result in made]))[0]

    assert say(0, 1) == "The 95 % intervals cover the choice of the learning rate, and the noise of fine-tuning seeds."
    order = "the order of the data; the head's initial weights and dropout were held"
    assert (
        say(0, Seeds(0, 1, 0), Seeds(0, 2, 0))
        == f"The 95 % intervals cover the choice of the learning rate, and the noise of {order}."
    )
    crossed = say(0, Seeds(0, 1, 0), Seeds(1, 0, 0), Seeds(1, 1, 0))
    assert "the head's initial weights and the order of the data; dropout was held" in crossed
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
    assert any(
        "scores are those of the chosen runs; fresh runs at these rates are expected to score" in note for note in loose
    )
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


@pytest.mark.parametrize(
    ("ahead", "clear", "holds", "reason"),
    [
        (0, 0, False, "not ahead"),
        (1, 0, False, "ahead by less than the interval"),
        (1, 1, False, "ahead by more than the interval, but not after the correction"),
        (1, 1, True, "ahead by more than the interval"),
    ],
)
def test_on_one_task_the_reason_counts_no_tasks(ahead: int, clear: int, holds: bool, reason: str) -> None:
    verdict = "holds" if holds else "not shown"
    row = {"tasks": 1, "tasks_required": 1, "tasks_ahead": ahead, "tasks_clear": clear, "tasks_at_chance": 0}
    assert claim_reason(row | {"verdict": verdict, "holds": holds, "on_mean": holds}) == reason
