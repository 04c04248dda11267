"""Advice on learning rates: which were chosen, how surely, and whether test scores agree."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
from advised_study import KINDS, advised, results
from analysis_study import cell

from mlmclm.analysis.analyse import analyse
from mlmclm.analysis.results import observed_grid, records
from mlmclm.reports.advice import advise


def test_a_rate_is_named_with_its_setting_and_not_said_to_be_chosen_without_it() -> None:
    """With eight equal settings, "other seeds would choose it in 5 % of cases" was said of the rate alone, and no setting was named."""
    plain = results({"a": 0.8}, tasks=KINDS[:1], noise=0.01)
    draws = np.random.default_rng(0)
    made = [
        each
        | {"setting": point, "key": f"{each['key']}{point}"}
        | {
            "scores": {
                split: {name: float(draws.normal(0.8, 0.01)) for name in own} for split, own in each["scores"].items()
            }
        }
        for each in plain
        for point in ("epochs=1", "epochs=2")
    ]
    grid = replace(observed_grid(analyse(plain).cells), settings={KINDS[0]: ("epochs=1", "epochs=2")})
    words = (
        r"for a, \S+ with epochs=[12] on pydocs-kind \(other seeds would choose this setting and rate in \d+ % of cases"
    )
    assert re.fullmatch(
        rf"{words}: at this setting, all 4 rates, .* are not clearly different from the best\)\.",
        advised(made, grid=grid).rates[0],
    )
    (found,) = advised(made, grid=grid, rule="per_seed").rates
    assert " with epochs=" in found and "(other seeds would choose this setting and rate in " in found


def test_that_another_model_lost_runs_at_a_rate_makes_no_choice_unsure() -> None:
    """The best rate by five points was said to be unsure "on validation scores", because another model had lost runs there."""
    draws = np.random.default_rng(0)
    made = [
        cell(model, KINDS[0], rate, seed, *(0.7 + 0.05 * place + 0.005 * draws.normal() for _ in range(2)))
        for model in ("a", "b")
        for place, rate in enumerate((1e-4, 3e-4, 1e-3))
        for seed in range(3)
    ]
    for each in made:
        if (each["model"], each["learning_rate"]) == ("b", 1e-3) and each["seed"] < 2:
            each |= {"status": "diverged", "scores": None, "diverged_step": 1}
    (found,) = advise(analyse(made)).rates
    assert found == (
        "for a, 1e-3 on pydocs-kind (other seeds would choose it in 100 % of cases; test scores show it to be better than all others)."
    )


def test_rates_of_every_pretraining_run_are_named_where_they_differ() -> None:
    """The published study-small-1k named those of the first run alone, as if they were the model's."""
    made = results({"a": 0.8, "a-r2": 0.8, "b": 0.6}, tasks=KINDS[:2], noise=0.001)
    higher = {1e-4: 3e-4, 3e-4: 1e-3, 1e-3: 3e-3, 3e-3: 1e-4}
    for each in made:
        if each["model"] == "a-r2" and each["task"] == KINDS[0]:
            each["learning_rate"] = higher[each["learning_rate"]]
    found = analyse(made, replicate_of={"a-r2": "a"})
    rates = {(row["model"], row["task"]): row["learning_rates"] for row in records(found.best)}
    own, other = rates["a", KINDS[0]], rates["a-r2", KINDS[0]]
    assert own != other and rates["a", KINDS[1]] == rates["a-r2", KINDS[1]]
    assert advise(found).rates == (
        f"for a, {rates['a', KINDS[1]]} on {KINDS[1]} in each pretraining run.",
        f"{own} for a and {other} for a-r2 on {KINDS[0]}.",
    )


def test_a_rate_that_is_surely_chosen_is_not_called_better_where_test_scores_do_not_show_it() -> None:
    """It was ">99 % of cases" beside "100 % of the rates are not clearly different from the best"."""
    draws, rates = np.random.default_rng(1), (1e-4, 3e-4, 1e-3)

    def said(validation: float, test: float) -> str:
        made = [
            cell(
                "a",
                KINDS[0],
                rate,
                seed,
                *(0.6 + (rate == 1e-3) * up + 0.02 * draws.normal() for up in (validation, test)),
            )
            for rate in rates
            for seed in range(4)
        ]
        (found,) = advise(analyse(made)).rates
        return found.removeprefix("for a, 1e-3 on pydocs-kind ")

    assert said(0.3, 0.0) == (
        "(other seeds would choose it in 100 % of cases, yet it is not shown to be better: on test scores, all 3 rates, from 1e-4 to "
        "1e-3, are not clearly different from the best)."
    )
    assert (
        said(0.3, 0.3)
        == "(other seeds would choose it in 100 % of cases; test scores show it to be better than all others)."
    )
    assert re.fullmatch(
        r"for a, 1e-4 on pydocs-kind \(other seeds would choose it in \d\d % of cases; test scores show 1e-3 to be better\)\.",
        said(0.005, 0.3),
    )
    assert re.fullmatch(
        r"\(other seeds would choose it in \d\d % of cases on validation scores, although test scores show it to be better than all others\)\.",
        said(0.006, 0.3),
    )


def test_of_a_grid_that_extended_itself_no_band_of_its_list_is_taken_for_one_of_all_rates() -> None:
    """It said "2 of 5 rates, from 1e-3 to 1e-3, are not clearly different from the best" of a best rate that was added."""
    draws = np.random.default_rng(0)
    made = [
        cell("a", KINDS[0], rate, seed, *(0.7 + 0.05 * place + 0.005 * draws.normal() for _ in range(2)))
        for place, rate in enumerate((1e-4, 3e-4, 1e-3, 3e-3))
        for seed in range(3)
    ]
    listed = replace(observed_grid(analyse(made[:9]).cells), added={("a", KINDS[0], ""): (3e-3,)})
    found = advise(analyse(made, grid=listed)).rates
    assert re.fullmatch(r"for a, 3e-3 on pydocs-kind \(other seeds would choose it in \d+ % of cases\)\.", *found)
    (whole,) = advise(analyse(made)).rates
    assert "test scores show it to be better than all others" in whole
