"""Two models of a study, compared as its report does; and what is said where the report has no answer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from analysis_study import TASKS, cell, synthetic_results

from mlmclm.analysis.analyse import Analysis, analyse
from mlmclm.analysis.comparison import against
from mlmclm.analysis.results import observed_grid, records, results_table
from mlmclm.analysis.summary import chosen_results
from mlmclm.answers.comparison_of_models import Comparison, compare_models
from mlmclm.cli.compare import _show
from mlmclm.errors import UserError
from mlmclm.reports.advice import advise
from mlmclm.reports.cautions import limits
from mlmclm.results.chance import Chance
from mlmclm.sweeps.results_store import ResultsStore

NUMBERS = ("difference", "low", "high", "p", "p_holm", "p_verdict", "tests")
KINDS = tuple(TASKS)
EXAMPLES = 0.001


def compared(
    made: list[dict[str, Any]], store: Path, first: str = "b", second: str = "a", **more: Any
) -> tuple[Analysis, Comparison]:
    found = analyse(made, **more)
    chosen = chosen_results(found, made)
    tasks = sorted(found.grid.tasks)
    return found, compare_models((first, second), found, chosen, ResultsStore(store), tasks, whole=True)


def test_every_difference_is_that_of_the_report_to_the_last_digit(tmp_path: Path) -> None:
    made = synthetic_results({"a": 0.8, "b": 0.7, "c": 0.69})
    for first, second in (("b", "a"), ("b", "c")):
        found, told = compared(made, tmp_path, first, second)
        reported = {row["scope"]: row for row in against(found.comparisons, first) if row["model_b"] == second}
        rows = [*told.over, *told.rows]
        assert {row["task"] for row in rows} == reported.keys() and told.over[-1]["kind"] == "all"
        for row in rows:
            assert [row[name] for name in NUMBERS] == [reported[row["task"]][name] for name in NUMBERS]
            assert row["difference"] == pytest.approx(row["first"] - row["second"])
            assert row["covers"] == "seeds", "these results have no examples"
        assert not told.left_out and not told.notes
    scores = {(row["model"], row["task"]): row["score"] for row in records(found.best)}
    assert [row["first"] for row in told.rows] == [scores["b", row["task"]] for row in told.rows]


def test_what_does_not_differ_clearly_comes_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = synthetic_results({"a": 0.8, "b": 0.7})
    for each in made:
        if each["task"] == "pydocs-qa" and each["model"] == "a":
            for split in each["scores"].values():
                split.update({name: value - 0.1 for name, value in split.items()})
    _show("b", "a", compared(made, tmp_path)[1])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "No clear difference on pydocs-qa."
    assert lines[3].startswith("a scores higher on the mean over tasks, pydocs-fields, pydocs-kind")
    assert any(line.startswith("the interval covers other seeds; the examples are not kept") for line in lines)
    assert any("Based on one pretraining run of each model." in line for line in lines)


def test_missing_cells_and_lost_tasks_are_named_and_the_rest_is_shown(tmp_path: Path) -> None:
    whole = synthetic_results({"a": 0.8, "b": 0.7})
    grid = observed_grid(results_table(whole))
    made = [each for each in whole if not (each["model"] == "b" and each["task"] == "pydocs-qa")][:-1]
    found, told = compared(made, tmp_path, grid=grid)
    assert found.missing == 13
    assert [row["task"] for row in told.rows] == [task for task in sorted(KINDS) if task != "pydocs-qa"]
    assert told.left_out["pydocs-qa"] == "no cell of b has a score there"
    assert told.left_out["all tasks"] == "not both models have a score on each of its tasks"
    assert told.notes == (
        "Not final: 13 of 96 cells have no result yet (12 of b on pydocs-qa and 1 of b on pydocs-retrieval).",
    )
    with pytest.raises(UserError, match="pydocs-kind: no cell of a has a score there"):
        one = [each for each in made if each["model"] == "b" and each["task"] == "pydocs-kind"]
        other = cell("a", "pydocs-kind", 1e-3, 0, None, None)
        compared([*one, other], tmp_path)


@pytest.mark.parametrize("made", [{"seeds": 1}, {"noise": 0.0}])
def test_without_the_noise_of_seeds_examples_are_asked_and_their_lack_is_said(
    made: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="has no examples beside it"):
        compared(synthetic_results({"a": 0.8, "b": 0.7}, tasks=KINDS[:1], **made), tmp_path)


def test_a_model_is_not_compared_with_itself(tmp_path: Path) -> None:
    made = synthetic_results({"a": 0.8, "b": 0.7}, tasks=KINDS[:1])
    found = analyse(made)
    with pytest.raises(UserError, match="a is named twice; name two models"):
        compare_models(("a", "a"), found, chosen_results(found, made), ResultsStore(tmp_path), KINDS[:1], whole=True)


def test_scores_at_chance_and_models_that_were_computed_elsewhere_are_said(tmp_path: Path) -> None:
    made = synthetic_results({"a": 0.8, "b": 0.7}, tasks=KINDS[:1])
    for each in made:
        each |= {
            "engine": "4" if each["model"] == "a" else "3",
            "protocol": {"batch_size": 8 if each["model"] == "a" else 16},
        }
    _, told = compared(made, tmp_path, chances={KINDS[0]: Chance(0.75, "always the same")})
    (row,) = told.rows
    assert row["at_chance"] == ["b"] and told.over == []
    assert told.notes[0].startswith("Not computed alike: the engine is 3 for b, 4 for a on pydocs-kind.")
    assert told.notes[1].startswith("Fine-tuning differs: batch_size is 16 for b, 8 for a on pydocs-kind.")
    assert math.isfinite(row["low"])


def test_the_best_setting_is_named_beside_the_rate(tmp_path: Path) -> None:
    plain = synthetic_results({"a": 0.8, "b": 0.7}, tasks=KINDS[:1])
    made = [each | {"setting": point, "key": f"{each['key']}{point}"} for each in plain for point in ("x", "y")]
    _, told = compared(made, tmp_path)
    (row,) = told.rows
    assert row["first_settings"] == row["second_settings"] == ["x"], "the first of equal settings"
    _, told = compared(plain, tmp_path)
    assert "first_settings" not in told.rows[0]


def test_models_with_replicates_are_compared_over_their_pretraining_runs(tmp_path: Path) -> None:
    made = synthetic_results({"a": 0.8, "a-r2": 0.81, "b": 0.7, "b-r2": 0.69}, tasks=KINDS[:2])
    found = analyse(made, replicate_of={"a-r2": "a", "b-r2": "b"})
    chosen = chosen_results(found, made)
    told = compare_models(("b", "a"), found, chosen, ResultsStore(tmp_path), KINDS[:2], whole=True)
    assert told.pretraining == "2 pretraining runs" and len(told.rows[0]["first_rates"]) == 6
    (row,) = [row for row in against(found.comparisons, "b") if row["scope"] == KINDS[0]]
    own = next(each for each in told.rows if each["task"] == KINDS[0])
    assert [own[name] for name in NUMBERS] == [row[name] for name in NUMBERS]
    with pytest.raises(
        UserError, match="a-r2 is a pretraining run of a, and models are compared over their runs; name a"
    ):
        compare_models(("b", "a-r2"), found, chosen, ResultsStore(tmp_path), KINDS[:2], whole=True)
    assert advise(found).rests_on[0].startswith("2 models, 2 pretraining runs each;")
    assert any("compared over 2 pretraining runs each" in line for line in limits(found))
    noisy = synthetic_results({"a": 0.74, "a-r2": 0.82, "b": 0.72, "b-r2": 0.66}, tasks=KINDS[:2])
    (line, *_) = advise(analyse(noisy, replicate_of={"a-r2": "a", "b-r2": "b"})).open
    assert "pretraining runs of each model find them" in line and "More fine-tuning seeds alone would not" in line
