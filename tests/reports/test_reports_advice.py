"""Advice: never a winner that the results don't show, what it is based on, and what settling an open question costs."""

from __future__ import annotations

import html
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from analysis_study import TASKS, cell, synthetic_results
from report_study import facts
from scipy import stats

from benchmarks.calibration import Scenario
from benchmarks.claims import BEST, Kind, led, measured
from mlmclm.analysis import power
from mlmclm.analysis.analyse import Analysis, analyse
from mlmclm.analysis.contrasts import mean_difference
from mlmclm.analysis.effects import Effect
from mlmclm.analysis.power import examples_for, seeds_or_obstacle
from mlmclm.analysis.results import Grid, observed_grid, records
from mlmclm.reports import text
from mlmclm.reports.advice import Advice, More, advise
from mlmclm.reports.provenance import Basis, ComputedWork, asked_for, worker_time
from mlmclm.reports.wording import clearly_different, detectable_difference, level_groups
from mlmclm.reports.write_report import render_report
from mlmclm.results.chance import Chance
from mlmclm.results.intervals import estimate

KINDS = tuple(TASKS)
SECONDS = 90.0


def results(levels: dict[str, float], **more: Any) -> list[dict[str, Any]]:
    rows = synthetic_results(levels, **more)
    for row in rows:
        row["cost"] = {"seconds": SECONDS, "device": "A GPU"}
    return rows


def advised(made: Sequence[dict[str, Any]], command: str = "mlmclm study own.yaml", **more: Any) -> Advice:
    basis = asked_for(command, ("quickstart", "paper")).with_costs(made, test_examples=dict.fromkeys(KINDS, 300))
    return advise(analyse(made, ranges=dict.fromkeys(KINDS, (-9.0, 9.0)), **more), basis)


def test_an_open_question_has_its_price_in_cells_and_hours_with_the_device_and_the_command() -> None:
    made = results({"a": 0.702, "b": 0.70, "c": 0.5}, noise=0.01)
    found = advised(made, command="mlmclm study own.yaml --data there")
    first, edit = found.open
    seeds = int(first.partition(" seeds a rate")[0].rpartition(" ")[2].replace(",", ""))
    # Seeds are the study's, so all three models get them: 4 tasks at 4 rates.
    cells = (seeds - 3) * 3 * 4 * 4
    assert first.startswith("If +") and f"with 80 % power: {cells:,} more cells of all 3 models" in first
    assert f", about {cells * SECONDS / 3600:,.1f} worker hours on A GPU." in first
    listed = ", ".join(map(str, range(seeds)))
    assert edit == (
        f"To have {seeds} seeds, write `seeds: [{listed}]` into own.yaml, and run `mlmclm study own.yaml --data there`; what is "
        "there is not computed again."
    )
    packaged = advised(made, command="mlmclm study quickstart --data there").open[-1]
    assert "run `mlmclm init my-quickstart`, write `seeds: [0" in packaged
    assert "into my-quickstart/study.yaml, and run `mlmclm study my-quickstart/study.yaml --data there`" in packaged
    assert "into a copy of the packaged paper.yaml" in advised(made, command="mlmclm study paper").open[-1]
    assert len(advised(made, command="mlmclm.study(...).run()").open) == 1, "no file, no edit"


def test_further_pretraining_runs_have_their_price_their_line_and_their_command() -> None:
    noisy = {"a": 0.72, "a-r2": 0.80, "b": 0.68, "b-r2": 0.70}
    made = results(noisy, tasks=KINDS[:2])
    found = analyse(made, replicate_of={"a-r2": "a", "b-r2": "b"})
    stages = [ComputedWork(0.0, 0.0, 600.0, 2, "A CPU"), ComputedWork(0.0, 0.0, 1200.0, 1, "A CPU")]
    line, edit = advise(found, asked_for("mlmclm study own.yaml").with_costs(made, pretraining=stages)).open
    runs = int(line.partition(" pretraining runs of each model find them")[0].rpartition(" ")[2].replace(",", ""))
    # Of two models: two tasks at four rates and three seeds each.
    cells = (runs - 2) * 2 * 2 * 4 * 3
    assert f"{cells:,} more cells of both models, about {cells * SECONDS / 3600:,.1f} worker hours on A GPU" in line
    assert f", and their pretraining, about {(runs - 2) * 2400 / 3600:,.1f} worker hours on A CPU." in line
    assert line.endswith("More fine-tuning seeds alone would not: the noise of pretraining is too large.")
    assert edit == (
        f"To have {runs:,} pretraining runs of each model, write `replicates: {runs}` into own.yaml, and run `mlmclm study own.yaml`; "
        "what is there is not computed again."
    )
    given = advise(found, asked_for("mlmclm sweep own.yaml").with_costs(made)).open[-1]
    assert given.endswith(f"`replicates: {runs}` belongs into the file of the study that trains the models.")


def test_further_cells_count_added_rates() -> None:
    made = results({"a": 0.7, "b": 0.7}, tasks=KINDS[:1])
    kept = [*made] + [cell("a", KINDS[0], 1e-2, seed, 0.5, 0.5) for seed in range(3)]
    grid = Grid(("a", "b"), KINDS[:1], (1e-4, 3e-4, 1e-3, 3e-3), (0, 1, 2), added={("a", KINDS[0], ""): (1e-2,)})
    found = analyse(kept, grid=grid)
    assert found.missing == 0
    # a has four rates and an added one.
    assert More(5).cells(found) == {("a", KINDS[0]): 2 * 5, ("b", KINDS[0]): 2 * 4}


def test_cells_still_to_be_run_are_named_with_their_price() -> None:
    made = results({"a": 0.8, "b": 0.6})[:-2]
    grid = observed_grid(analyse(made).cells)
    (line,) = advised(made, grid=grid).open
    assert line == (
        "2 cells are still to be run (2 of b on pydocs-retrieval), about 3 worker minutes on A GPU; run `mlmclm study own.yaml` again."
    )
    (line,) = advised(made + results({"a": 0.8, "b": 0.6})[-2:-1], grid=grid).open
    assert line.startswith("1 cell is still to be run (1 of b on pydocs-retrieval), about ")


def test_every_number_of_runs_that_has_a_price_has_its_line_too() -> None:
    """The published study-small-1k priced 19 and 5 pretraining runs, and gave the line for 5."""
    noisy = {"a": 0.72, "a-r2": 0.80, "b": 0.68, "b-r2": 0.70, "c": 0.60, "c-r2": 0.62}
    replicate_of = {f"{model}-r2": model for model in "abc"}
    made = results(noisy, tasks=KINDS[:2])
    found = analyse(made, replicate_of=replicate_of)
    stages = [ComputedWork(0.0, 0.0, 600.0, 2, "A CPU")]
    *prices, edit = advise(found, asked_for("mlmclm study own.yaml").with_costs(made, pretraining=stages)).open
    numbers = sorted(int(each) for each in re.findall(r"(\d+) pretraining runs of each model find", " ".join(prices)))
    assert len(set(numbers)) == 2
    assert edit == (
        f"To have {numbers[0]} pretraining runs of each model, write `replicates: {numbers[0]}` into own.yaml, and run `mlmclm study "
        f"own.yaml`; for {numbers[1]}, `replicates: {numbers[1]}`; what is there is not computed again."
    )
    assert " ".join(prices).count("More fine-tuning seeds alone") == 1, "once for both"
    *_, given = advise(found, asked_for("mlmclm sweep own.yaml").with_costs(made)).open
    assert given.endswith(f"the study that trains the models; for {numbers[1]}, `replicates: {numbers[1]}`.")


def test_every_number_of_seeds_that_has_a_price_has_its_line_too() -> None:
    *prices, edit = advised(results({"a": 0.72, "b": 0.69, "c": 0.68}, noise=0.03)).open
    few, many = sorted({int(each) for each in re.findall(r"([\d,]+) seeds a rate find", " ".join(prices))})
    listed = [f"`seeds: [{', '.join(map(str, range(number)))}]`" for number in (few, many)]
    assert edit == (
        f"To have {few} seeds, write {listed[0]} into own.yaml, and run `mlmclm study own.yaml`; for {many}, {listed[1]}; what is there "
        "is not computed again."
    )


def test_a_lead_that_may_well_be_chance_begets_no_cells_and_many_seeds_are_not_written_out() -> None:
    chance, price, edit = advised(results({"a": 0.72, "b": 0.69, "c": 0.68}, noise=0.09, seeds=8)).open
    assert re.fullmatch(
        r"The lead over b may well be chance, within one standard error \(p 0\.\d\d\): no reason for more runs\.",
        chance,
    )
    (seeds,) = re.findall(r"to c are true, (\d+) seeds a rate find them", price)
    assert f"write `seeds: [0, 1, 2, ...]` with {seeds} numbers into own.yaml" in edit
    (chance,) = advised(results({"a": 0.72, "b": 0.69, "c": 0.68}, noise=0.04)).open
    assert chance.startswith("The leads over b and c may well be chance, within one standard error (p 0.")


def test_times_that_are_not_known_are_said_to_be_so_once() -> None:
    made = results({"a": 0.72, "b": 0.69, "c": 0.68}, noise=0.03)
    untimed = [each | {"cost": {}} for each in made]
    assert " ".join(advised(untimed).open).count("How long cells take is not known") == 1
    assert "not known" not in " ".join(advised(made).open)
    assert advised(untimed[:-2], grid=observed_grid(analyse(made).cells)).open[-1].startswith("How long cells take")
    nameless = [each | {"cost": {"seconds": SECONDS}} for each in made]
    assert re.search(r"about [\d.,]+ worker hours\.", " ".join(advised(nameless).open)), "no device is recorded"


def test_why_more_seeds_would_not_do_is_said_for_each_cause_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    close = {"a": 0.706, "b": 0.70}
    wide = [0.0]

    def folds(rows: Sequence[dict[str, Any]]) -> Any:
        wide[0] += 1
        return 0.7 + 0.002 * np.random.default_rng(int(wide[0])).standard_normal(100)

    (small,) = advised(results({"a": 0.735, "b": 0.70}, noise=0.01), folds=folds).open
    assert "the test sets are too small for it. At least " in small and "No number of seeds" in small
    one, edit = advised(results(close, seeds=1)).open
    assert "one seed shows no noise" in one and "3 seeds: " in one and "seeds: [0, 1, 2]" in edit
    equal, _ = advised(results(close, noise=0.0)).open
    assert "seeds give equal scores" in equal
    monkeypatch.setattr(power, "MOST", 5)
    (over,) = advised(results({"a": 0.72, "b": 0.69}, noise=0.03)).open
    assert over.startswith("Over 1,000 seeds a rate would be needed to show +") and over.endswith(": it is too small.")


def test_leads_at_chance_are_no_winner_and_seeds_would_not_make_them_one() -> None:
    made = results({"a": 0.7, "b": 0.6}, noise=0.002)
    levels = {task: Chance(0.95, "always the same") for task in KINDS}
    found = advised(made, chances=levels)
    assert not found.answer.clear and "No winner" in found.answer.verdict
    assert found.rates == () and found.families == (
        "no score is above chance on Question answering (pydocs-qa), Retrieval (pydocs-retrieval), "
        "Sequence classification (pydocs-kind) and Token classification (pydocs-fields).",
    )
    (line,) = found.open
    assert line.startswith("More seeds would not settle +")
    assert line.endswith(" points to b: the lead is based on tasks where it is not above chance.")


def test_the_best_model_of_each_kind_of_task_is_named_where_kinds_differ() -> None:
    made = results({"a": 0.7, "b": 0.7})
    for each in made:
        if (each["model"], each["task"]) in (("a", "pydocs-qa"), ("b", "pydocs-retrieval")):
            for split in each["scores"].values():
                split.update({name: value + 0.1 for name, value in split.items()})
    found = advised(made)
    assert found.families[0].startswith("Question answering (pydocs-qa): a, +")
    assert found.families[1].startswith("Retrieval (pydocs-retrieval): b, +")
    assert found.families[2].startswith("The results don't suffice for Sequence classification (pydocs-kind) and Token")
    assert advised(results({"a": 0.8})).families == (), "one model has nothing to be better than"


def test_no_power_is_stated_for_more_points_than_there_are() -> None:
    assert detectable_difference(1.0, " on a") == "A true difference of 100.00 points on a is found with 80 % power."
    assert detectable_difference(1.66) == "No difference, however large, is found with 80 % power."


def test_with_one_task_nothing_is_a_mean_over_tasks() -> None:
    made = results({"2m-mlm40-600": 0.702, "2m-clm-600": 0.70, "2m-untrained": 0.5}, tasks=KINDS[:1], noise=0.01)
    found, about = analyse(made, "2m-untrained"), facts()
    advice = advise(found, asked_for("mlmclm study own.yaml").with_costs(made))
    assert " on pydocs-kind: 2m-mlm40-600 scores highest" in advice.answer.verdict
    assert " points on pydocs-kind is found with 80 % power." in " ".join(advice.rests_on)
    page = render_report(found, replace(about, tasks=about.tasks[:1]))
    shown = html.unescape(re.sub(r"(?s)<(style|script).*?</\1>", "", page))
    for words in (
        "means over tasks",
        "mean over tasks",
        "Mean over tasks",
        "averaged over tasks",
        "on the mean",
        ">Mean<",
    ):
        assert words not in shown and words not in " ".join(advice.lines()), words
    assert "mean over tasks" in render_report(analyse(results({"a": 0.8, "b": 0.6})), facts())


def test_advice_rests_on_pretraining_runs_seeds_tasks_and_test_examples() -> None:
    found = advised(results({"a": 0.8, "b": 0.6}))
    assert found.rests_on[0] == (
        "2 models, one pretraining run each; 3 fine-tuning seeds at each rate; 4 tasks of 300 test examples. Where test predictions are "
        "not kept, the noise of the test set is in no interval."
    )
    basis = Basis(test_examples=dict(zip(KINDS, (200, 300, 400, 300), strict=True)))
    assert "4 tasks of 200 to 400 test examples" in advise(analyse(results({"a": 0.8})), basis).rests_on[0]
    assert found.lines()[2].startswith("Groups: every two of the 2 models differ clearly")


def test_groups_are_the_longest_runs_of_models_without_a_clear_difference() -> None:
    levels = {"a": 0.75, "b": 0.748, "c": 0.72, "d": 0.717, "e": 0.6}
    found = analyse(results(levels, noise=0.006))
    apart = {
        frozenset((row["model_a"], row["model_b"]))
        for row in records(found.comparisons)
        if row["kind"] == "all" and clearly_different(row, 0.95)
    }
    means = {row["model"]: row["mean"] for row in records(found.overall) if row["kind"] == "all"}
    ranked = sorted(levels, key=lambda name: -means[name])
    runs = [ranked[i:j] for i, j in itertools.combinations(range(6), 2) if j - i > 1]
    level = [run for run in runs if not any(frozenset(pair) in apart for pair in itertools.combinations(run, 2))]
    longest = [run for run in level if not any(set(run) < set(other) for other in level)]
    assert level_groups(found) == longest and longest
    first = advise(found).groups[0]
    assert first.startswith("no clear difference on the mean over tasks: ") and " and ".join(longest[0][:2]) in first


def test_of_many_overlapping_groups_the_one_of_the_best_model_is_named() -> None:
    levels = {letter: 0.70 - 0.004 * place for place, letter in enumerate("abcdefghij")}
    found = analyse(results(levels, noise=0.006))
    groups = level_groups(found)
    assert len(groups) > 3
    pairs = [row for row in records(found.comparisons) if row["kind"] == "all"]
    apart = sum(clearly_different(row, 0.95) for row in pairs)
    best = max((row for row in records(found.overall) if row["kind"] == "all"), key=lambda row: row["mean"])["model"]
    rivals = {
        name
        for row in pairs
        if best in (row["model_a"], row["model_b"]) and not clearly_different(row, 0.95)
        for name in (row["model_a"], row["model_b"])
    }
    (line,) = advise(found).groups
    assert line.startswith(
        f"{apart} of the 45 pairs of models differ clearly on the mean over tasks. Not clearly different from {best}: "
    )
    named = line.rpartition(": ")[2].removesuffix(".").replace(" and ", ", ").split(", ")
    assert {best, *named} == set(groups[0]) and set(named) == rivals - {best} == set(advise(found).answer.tied)


def test_a_noisy_model_far_behind_is_not_told_from_the_best_although_it_is_not_of_its_group() -> None:
    few = {"a": 0.74, "b": 0.71, "h": 0.70}
    many = {letter: 0.70 - 0.004 * place for place, letter in enumerate("abcdefghij")}
    for levels, noise in ((few, 0.15), (many, 0.06)):
        _check_a_noisy_model(levels, noise)


def _check_a_noisy_model(levels: dict[str, float], noise: float) -> None:
    made = results(levels, noise=0.006)
    draws = np.random.default_rng(1)
    for each in made:
        if each["model"] == "h":
            for split in each["scores"].values():
                split[each["metric"]] += noise * draws.standard_normal()
    found = advised(made)
    assert "h" in found.answer.tied
    (line,) = found.groups
    assert "pairs of models differ clearly" in line
    assert line.endswith(f" Not clearly different from {found.answer.best[0]}: {text.listing(found.answer.tied)}.")


def test_the_needed_seeds_are_those_of_a_noncentral_t_test_and_the_examples_those_without_any_noise_of_seeds() -> None:
    folds = 0.001 * np.random.default_rng(0).standard_normal((2, 50))
    first, second = (Effect(estimate(0.7, 0.01, 8.0), 0.0, np.ones(1), 0.0, own) for own in folds)
    between = mean_difference({("a", "t"): first, ("b", "t"): second}, ("a", "b"), ["t"])
    tested = float(49 * (folds[0] - folds[1]).var())

    def power(lead: float, seeds: float, noise: float = 2e-4) -> float:
        moving = noise * 3 / seeds
        error, share = math.sqrt(moving + tested), moving / (moving + tested)
        # Two models' variances with 8 degrees of freedom at three seeds, and the jackknife's over 50 folds (Satterthwaite).
        freedom = 1 / (share**2 / 2 / (8.0 * (seeds - 1) / 2) + (1 - share) ** 2 / 49)
        return float(stats.nct.sf(stats.t.ppf(1 - 0.01 / 2, freedom), freedom, lead / error))

    needed = seeds_or_obstacle(0.05, [between], 3, 0.01)
    assert isinstance(needed, int)
    assert power(0.05, needed) >= 0.8 > power(0.05, needed - 1)
    assert seeds_or_obstacle(0.01, [between], 3, 0.01) == "test sets"
    times = examples_for(0.01, between, 0.01)
    assert power(0.01 * math.sqrt(times), 1000, noise=0.0) == pytest.approx(0.8, abs=0.005)
    alone = {("a", "t"): replace(first, folds=None), ("b", "t"): replace(second, folds=None)}
    assert seeds_or_obstacle(1e-5, [mean_difference(alone, ("a", "b"), ["t"])], 3, 0.01) == "seeds"
    alone["b", "t"] = replace(first, seeds=estimate(0.7, math.nan, math.nan))
    assert seeds_or_obstacle(0.01, [mean_difference(alone, ("a", "b"), ["t"])], 1, 0.01) == "noise"


def test_a_planted_winner_is_named_and_equal_models_are_not() -> None:
    """The fast version of `python -m benchmarks.claims`."""
    _, found = measured(Kind(Scenario("mean", 3, "peak", "normal", 0.5), models=2, tasks=2), 4)
    assert found.claims == found.wrong == 0 and found.named == 1
    assert found.on_mean >= 1 / 4


def test_a_lead_is_analysed_as_if_the_models_scores_had_it() -> None:
    made, lead = results({BEST: 0.7, "other": 0.7}, tasks=KINDS[:2]), 0.02
    equal: Analysis = analyse(made, ranges=dict.fromkeys(KINDS, (-9.0, 9.0)))
    for each in made:
        if each["model"] == BEST and each["task"] == KINDS[0]:
            for split in each["scores"].values():
                split.update({name: value + lead for name, value in split.items()})
    better = analyse(made, ranges=dict.fromkeys(KINDS, (-9.0, 9.0)))
    pd.testing.assert_frame_equal(led(equal, lead, [KINDS[0]]).comparisons, better.comparisons, rtol=1e-6)


def test_times_are_in_minutes_below_an_hour() -> None:
    assert [worker_time(each) for each in (5, 61, 3600, 7_200_000)] == [
        "1 worker minute",
        "2 worker minutes",
        "1.0 worker hours",
        "2,000.0 worker hours",
    ]
    assert Basis().cost({("a", "t"): 3}) == ""
    assert Basis({("a", "t"): 60.0}, ("X",)).cost({("a", "t"): 3, ("b", "t"): 2}) == ", about 5 worker minutes on X"


def test_the_first_screen_has_the_answer_one_figure_and_what_would_settle_it() -> None:
    made = results({"2m-mlm40-600": 0.702, "2m-clm-600": 0.70, "2m-untrained": 0.5}, noise=0.01)
    found = analyse(made, "2m-untrained")
    page = render_report(found, replace(facts(), basis=asked_for("mlmclm study own.yaml").with_costs(made)))
    top = page.partition('<header class="top">')[2].partition("</header>")[0]
    own = advise(found, asked_for("mlmclm study own.yaml").with_costs(made))
    assert top.count("<svg") == top.count("<figure") == 1
    assert own.answer.verdict in html.unescape(re.sub(r"<[^>]+>", "", top)).replace("\n", " ")
    (settles,) = re.findall(r"<b>What would settle it\.</b> (.*?)</p>", top)
    assert html.unescape(settles) == own.open[0] and len(own.open) > 1, "one line; the others are folded"
    assert "worker hours on A GPU" in top and "mlmclm study own.yaml" in top
    rest = page.partition("</header>")[2]
    assert rest.index("<b>Groups.</b>") < rest.index("<b>Based on.</b>") and "worker hours" not in rest
    assert "What would settle it." not in render_report(analyse(results({"a": 0.8, "b": 0.6})), facts())


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
