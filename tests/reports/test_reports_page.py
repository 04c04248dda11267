"""The HTML page and the files beside it."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pandas as pd
import pytest
from analysis_study import TASKS, cell, synthetic_results
from report_study import MODELS, facts

import mlmclm
from mlmclm.analysis.additions import Verdict
from mlmclm.analysis.analyse import Analysis, analyse
from mlmclm.analysis.results import Grid
from mlmclm.errors import EnvironmentFault, UserError
from mlmclm.plans.names import parse
from mlmclm.reports.charts import Axis, Chart
from mlmclm.reports.drawing import Figure, FigureGroup, ReportInput
from mlmclm.reports.figures.loss_curves import thinned
from mlmclm.reports.scores_page import task_verdicts
from mlmclm.reports.study_facts import ModelFacts, RecordedRuns, TaskFacts
from mlmclm.reports.text import estimate
from mlmclm.reports.write_report import render_report, write_report
from mlmclm.results.chance import Chance
from mlmclm.studies.report_facts import phase_facts

VOID = {"meta", "br", "link", "img", "hr", "input"}


class Page(HTMLParser):
    """Reads a page into elements, ids, links and text, and checks that elements nest."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self.attributes: list[dict[str, str | None]] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.tags.append(tag)
        self.attributes.append(named)
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def study(**more: Any) -> Analysis:
    return analyse(synthetic_results(MODELS, **more), "2m-untrained")


def read(analysis: Analysis, about: Any = None) -> tuple[str, Page]:
    source = render_report(analysis, about or facts())
    return source, Page(source)


def charts(source: str) -> dict[str, ElementTree.Element]:
    """The page's charts by id."""
    found = re.findall(r'<div class="plot[^>]*>(<svg id="([^"]+)".*?</svg>)</div>', source, re.DOTALL)
    return {name: ElementTree.fromstring(text) for text, name in found}


def of_model(chart: ElementTree.Element, number: str) -> list[ElementTree.Element]:
    return [each for group in chart.iter("g") if group.get("data-m") == number for each in group]


def numbers(source: str) -> dict[str, str]:
    """Each model's number in the figures, from the legend."""
    return {name: number for number, name in re.findall(r'<button [^>]*data-m="(\d+)"[^>]*>.*?</span>(.*?)</button>', source)}  # fmt: skip


def labels(chart: ElementTree.Element) -> list[str]:
    """The labels of the vertical axis, from top to bottom."""
    own = [each for each in chart.iter("text") if each.get("class") == "y"]
    return ["".join(each.itertext()) for each in sorted(own, key=lambda each: float(each.attrib["y"]))]


def test_the_page_is_well_formed_and_names_every_id_once() -> None:
    _, page = read(study())
    assert len(page.ids) == len(set(page.ids))
    assert page.tags.count("h1") == 1


def test_the_page_asks_the_network_for_nothing() -> None:
    source, page = read(study())
    assert page.addresses and all(address.startswith("#") for address in page.addresses)
    assert {address[1:] for address in page.addresses} <= set(page.ids)
    assert "http" not in source.replace('http-equiv="Content-Security-Policy"', "")
    policy = next(item["content"] for item in page.attributes if item.get("http-equiv") == "Content-Security-Policy")
    assert policy and policy.startswith("default-src 'none'")


def test_the_page_says_how_rates_were_chosen_and_how_many_seeds_chose_each() -> None:
    _, mean = read(study())
    assert "by the mean over seeds; the score is the mean test score over seeds at that rate" in mean.text
    grid = [cell("a", "pydocs-kind", rate, seed, 0.7 + 0.1 * (seed == best), 0.5 + 0.01 * seed)
            for best, rate in enumerate((1e-4, 1e-3)) for seed in range(3)]  # fmt: skip
    analysis = analyse(grid, rule="per_seed")
    source, page = read(analysis, replace(facts(), models=(), tasks=(), baseline=None))
    assert "by every seed for itself" in page.text
    assert "Each seed takes the rate with its own highest validation score" in page.text
    assert "at 1e-4 (2), 1e-3 (1)" in page.text
    circles = list(charts(source)["rates-0"].iter("circle"))
    rings = [each.get("cx") for each in circles if each.get("class") == "ring"]
    assert len(rings) == 2 and rings == [each.get("cx") for each in circles if each.get("class") is None]
    _, page = read(analyse(grid, rule="on_test"), replace(facts(), models=(), tasks=(), baseline=None))
    assert "chosen on test by the mean over seeds" in page.text
    assert "mean over seeds of the test score, the same that is reported, which is optimistic" in page.text


MANY = {f"{size}-mlm{ratio}-40k": 0.5 + ratio / 400 for size in ("210m", "610m", "1b") for ratio in range(10, 24)}


def test_the_page_of_a_few_models_is_small_and_that_of_a_large_study_loads() -> None:
    assert len(read(study())[0].encode()) < 250_000
    tasks = tuple(f"task-{number}" for number in range(12))
    found = analyse(synthetic_results(MANY, tasks=tasks, rates=(1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4), seeds=5))
    assert len(found.cells) == 15_120
    curve = tuple((step, 9 - step / 10_000) for step in range(0, 40_000, 5))
    models = tuple(
        ModelFacts(name, "pretrained", curve=curve, size=name.partition("-")[0], phases=phase_facts(parse(name)))
        for name in MANY
    )
    source, _ = read(found, replace(facts(baseline=None), models=models))
    assert "Score against mask ratio" in source and len(source.encode()) < 5_000_000


def test_a_long_curve_keeps_its_ends_and_extremes() -> None:
    curve = [(step, 5 + (step * 7919 % 1000) / 1000) for step in range(10_000)] + [(10_000, 99.0), (10_001, 0.1)]
    drawn = thinned(curve)
    assert len(drawn) <= 402 and drawn == sorted(drawn) and set(drawn) <= set(curve)
    assert drawn[0] == curve[0] and {(10_000, 99.0), (10_001, 0.1)} <= set(drawn)
    assert thinned(curve[:300]) == curve[:300]


def test_every_figure_has_a_place_a_description_and_words_for_its_points() -> None:
    found = charts(read(study())[0])
    # Four tasks: four figures each, gains with the mean, the mean itself, ranks, heat map, two losses.
    assert len(found) == 4 * 4 + 5 + 1 + 2 + 2
    for chart in found.values():
        assert chart.get("role") == "img" and chart.get("aria-label") and chart.get("tabindex") == "0"
        told = [each for each in chart.iter() if each.tag in ("circle", "rect") and each.get("class") != "ring"]
        assert told and all(any(name in (each.findtext("title") or "") for name in MODELS) for each in told)


def test_figures_are_as_wide_as_the_page_on_any_screen_and_paper() -> None:
    for chart in charts(read(study())[0]).values():
        assert chart.get("width") == "100%"
        for each in chart.iter():
            across = {each.get(name) for name in ("cx", "x1", "x2", "width")} - {None, "0"}
            assert all(place.endswith("%") and 0 <= float(place[:-1]) <= 100 for place in across if place), each.attrib
        for inner in chart.iter("svg"):
            if inner.get("viewBox"):  # stretched to the width of the chart
                assert inner.get("preserveAspectRatio") == "none"
                for path in inner.iter("path"):
                    points = re.findall(r"([-\d.]+) ([-\d.]+)", path.attrib["d"])
                    assert all(0 <= float(x) <= 1000 for x, _ in points)


def test_a_model_has_one_look_in_every_figure_and_table() -> None:
    source, _ = read(study())
    looks: dict[str | None, set[str | None]] = {}
    for chart in charts(source).values():
        for group in chart.iter("g"):
            if group.get("data-m"):
                looks.setdefault(group.get("data-m"), set()).add(group.get("class"))
    legend = numbers(source)
    assert set(looks) == set(legend.values()) and set(legend) == set(MODELS)
    assert all(len(own) == 1 for own in looks.values())
    assert len({look for own in looks.values() for look in own}) == len(MODELS)
    for name, number in legend.items():
        assert f'<span class="dot {looks[number].copy().pop()}"></span>{name}' in source


def test_the_chance_level_is_drawn_where_it_is_near_and_said_where_it_is_far() -> None:
    chances = {"pydocs-kind": Chance(0.5, "majority"), "pydocs-qa": Chance(0.01, "empty answers")}
    found = charts(read(analyse(synthetic_results(MODELS), "2m-untrained", chances=chances))[0])
    for name, lines, words in (("rates-0", 1, "chance 50.00"), ("rates-1", 0, ""), ("rates-2", 0, "↓ chance 1.00")):
        levels = [each for each in found[name].iter() if (each.get("class") or "").startswith("level")]
        assert [each.tag for each in levels] == ["line"] * lines + ["text"] * bool(words)
        assert "".join("".join(each.itertext()) for each in levels) == words


def test_every_colour_has_another_on_a_dark_page() -> None:
    source, _ = read(study())
    light, dark = source.partition("<style>")[2].split("@media screen and (prefers-color-scheme:dark)")[:2]
    for name in re.findall(r"\.(c[0-9]|c-base)\{--c:", light):
        before, after = (re.search(rf"\.{name}\{{--c:(#\w+)", style) for style in (light, dark))
        assert before and after and before[1] != after[1]


def test_models_come_in_one_order_from_the_best_on() -> None:
    levels = {"2m-clm-600": 0.66, "2m-untrained": 0.52, "2m-mlm40-600": 0.70, "2m-clm-150-mlm40-600": 0.715}
    source, _ = read(analyse(synthetic_results(levels), "2m-untrained"))
    order = sorted(levels, key=lambda name: -levels[name])
    assert list(numbers(source)) == order
    found = charts(source)
    assert labels(found["overall"]) == order and labels(found["gain-0"]) == order[:-1]
    tables = re.findall(r"<tbody>(.*?)</tbody>", source, re.DOTALL)
    for table in tables:
        names = [name for name in re.findall(r'(?:class="left"|scope="row")>(?:<span[^>]*></span>)?([\w-]+)', table) if name in levels]  # fmt: skip
        assert names == [name for name in order if name in names] * (len(names) // len(order) or 1), table


def test_tasks_have_short_names_with_their_sentences_beneath() -> None:
    source, _ = read(study())
    assert "<figcaption>pydocs-qa<small>What does parameter x do?</small></figcaption>" in source
    assert '<th title="What does parameter x do?">pydocs-qa<small>' in source


def test_the_numbers_of_the_figures_are_in_the_tables_too() -> None:
    found = study()
    _, page = read(found)
    for name in ("best", "curves"):
        for score in getattr(found, name)["test_mean"]:
            assert f"{score * 100:.2f}" in page.text
    for score in found.overall["mean"]:
        assert f"{score * 100:.2f}" in page.text


def test_correlations_below_zero_are_compared_and_shown_as_any_score() -> None:
    """A made-up task whose untrained model is worse than chance: the same study, moved down by 0.6."""
    made = synthetic_results(MODELS, tasks=("pydocs-kind",))
    for result in made:
        result["metric"] = "matthews"
        result["scores"] = {split: {"matthews": score["accuracy"] - 0.6} for split, score in result["scores"].items()}
    found = analyse(made, "2m-untrained", ranges={"pydocs-kind": (-1.0, 1.0)})
    assert (found.best["score_low"] < found.best["score"]).all(), "also below 0"
    before = analyse(synthetic_results(MODELS, tasks=("pydocs-kind",)), "2m-untrained")
    assert found.best["learning_rates"].tolist() == before.best["learning_rates"].tolist()
    assert found.best["test_mean"].tolist() == pytest.approx((before.best["test_mean"] - 0.6).tolist())
    assert found.best["test_mean"].min() < 0 < found.best["test_mean"].max()
    for column in ("sd_seeds", "sd_rates", "range_rates", "regret", "share_near_best", "gain_at_stake"):
        same = pytest.approx(before.stability[column].tolist(), nan_ok=True, abs=1e-9)
        assert found.stability[column].tolist() == same, column
    # A coefficient of variation means nothing around 0 and below.
    negative = found.stability["model"] == "2m-untrained"
    assert found.stability["relative_sd_rates"][negative].isna().all()
    tasks = (TaskFacts("pydocs-kind", "Kind of definition", "sequence-classification", "matthews", {}, "pydocs"),)
    _, page = read(found, replace(facts(), tasks=tasks))
    assert "Matthews correlation" in page.text
    for score in found.best["test_mean"]:
        assert f"{score * 100:.2f}".replace("-", "\N{MINUS SIGN}") in page.text


def test_the_page_says_which_model_is_best_and_that_pretraining_helps() -> None:
    _, page = read(study())
    assert "Best on the mean over 4 tasks: 2m-clm-150-mlm40-600" in page.text
    assert "All 3 models beat the baseline by more than the interval" in page.text
    assert "Each model is one pretraining run" in page.text


def test_the_page_says_where_the_baseline_is_not_beaten() -> None:
    weak = synthetic_results(MODELS | {"2m-clm-600": 0.50})
    _, page = read(analyse(weak, "2m-untrained"))
    assert "Not every model is shown to beat the baseline" in page.text
    assert "It does not hold for 2m-clm-600 (not clearly ahead on the mean, ahead on 0 of 4 tasks" in page.text
    assert "does not hold" in page.text


def test_missing_diverged_and_edge_are_said_at_the_top() -> None:
    made = synthetic_results(MODELS, rates=(1e-4, 3e-4, 1e-3), diverge=frozenset({("2m-clm-600", 1e-4)}))[:-4]
    _, page = read(analyse(made, "2m-untrained"))
    assert "The grid is incomplete: 4 of 144 cells have no result" in page.text
    assert "12 cells of 140 diverged (9 %)" in page.text
    assert "The best learning rate is the highest one tried for" in page.text


def test_warnings_call_tasks_what_the_tables_call_them() -> None:
    _, page = read(analyse(synthetic_results(MODELS, rates=(1e-4, 3e-4, 1e-3), tasks=("pydocs-kind",)), "2m-untrained"))
    (edge,) = re.findall(r"The best learning rate is the highest one tried for .*? may understate", page.text)
    assert "on pydocs-kind (" in edge and "Kind of definition" not in edge


def test_no_line_joins_the_losses_of_two_objectives() -> None:
    source, _ = read(study())
    model = next(model for model in facts().models if model.switches)
    number = numbers(source)[model.name]
    for figure, points in (("loss-curve", model.curve), ("loss-validation-curve", model.validation_curve)):
        (line,) = [each for each in of_model(charts(source)[figure], number) if each.get("class") == "line"]
        before, after = line.attrib["d"].removeprefix("M").split("M")
        assert before.count("L") + 1 == sum(step <= model.switches[0] for step, _ in points)
        assert after.count("L") + 1 == sum(step > model.switches[0] for step, _ in points)


def test_the_page_ends_with_where_its_numbers_come_from() -> None:
    source, page = read(study())
    footer = source.partition('<dl id="provenance">')[2].partition("</dl>")[0]
    assert "2026-01-02 03:04 to 2026-01-03 04:05 UTC" in footer and "0123abcd" in footer
    assert page.ids.count("provenance") == 1
    assert "provenance" not in read(study(), replace(facts(), provenance={}))[0].partition("<body>")[2]


def test_a_study_in_which_everything_diverged_still_has_a_page() -> None:
    made = [cell(model, task, 1e-3, 0, None, None) for model in MODELS for task in TASKS]
    _, page = read(analyse(made, "2m-untrained"))
    assert "No answer yet: no model has a score on every task." in page.text
    assert "every cell diverged" in page.text


def test_one_model_one_task_one_seed_without_a_baseline_still_has_a_page() -> None:
    _, page = read(analyse([cell("m", "pydocs-kind", 1e-3, 0, 0.5, 0.5)]), facts(baseline=None))
    assert "It is the only model" in page.text
    assert "Do the models beat" not in page.text


def test_models_and_tasks_without_facts_or_results_are_shown() -> None:
    made = synthetic_results({"surprise": 0.7, "2m-clm-600": 0.6})
    grid = Grid(("2m-clm-600", "2m-mlm40-600", "surprise"), ("pydocs-kind", "later"), (1e-4,), (0,))
    _, page = read(analyse(made, grid=grid), facts(baseline=None))
    for word in ("surprise", "2m-mlm40-600", "later", "no cell was run"):
        assert word in page.text


def test_the_page_says_which_rates_a_grid_added_and_warns_of_an_end_that_is_still_the_best() -> None:
    rates = (1e-4, 3e-4, 1e-3)

    def page_of(best: dict[str, float]) -> str:
        made = [
            cell(model, task, rate, seed, level, level)
            for model in best
            for task in TASKS
            for rate in (*rates, *((3e-3,) if best[model] == 3e-3 else ()))
            for seed in (0, 1)
            for level in [0.6 - abs(rate - best[model]) * 10 + seed / 100]
        ]
        added = {(model, task, ""): (3e-3,) for model, rate in best.items() if rate == 3e-3 for task in TASKS}
        grid = Grid(tuple(best), tuple(TASKS), rates, (0, 1), added=added)
        return read(analyse(made, grid=grid), facts(baseline=None))[1].text

    inside = page_of(dict.fromkeys(MODELS, 3e-4))
    assert "was added" not in inside and "added" not in inside.partition("one tried")[0]
    models = list(MODELS)
    extended = page_of({**dict.fromkeys(MODELS, 3e-4), models[0]: 3e-3})
    assert f"the next one was added (3e-3; {2 * len(TASKS)} runs of {len(TASKS)} model-task pairs)" in extended
    assert "3 rates × 2 seeds" in extended and f"{2 * len(TASKS)} added" in extended
    assert "to which as many were added as the grid allows: a higher one may be better" in extended


def test_what_comes_from_outside_is_escaped() -> None:
    evil = "</script><script>alert(1)</script><b x='"
    about = replace(facts(), name=evil, command=evil, corpus={evil: evil}, models=(ModelFacts(evil, "pretrained"),))
    found = analyse([cell(evil, task, 1e-3, seed, 0.5, 0.5) for task in TASKS for seed in (0, 1)])
    source, page = read(found, replace(about, baseline=None))
    assert "<script>alert" not in source
    assert page.tags.count("script") == 1
    assert evil in " ".join(page.words)


def test_of_many_models_the_best_have_colours_and_the_others_share_a_grey() -> None:
    source, page = read(analyse(synthetic_results(MANY, seeds=2, noise=1e-4)), facts(baseline=None))
    chart, legend = charts(source)["deviation-0"], numbers(source)
    looks = {group.get("data-m"): group.attrib["class"] for group in chart.iter("g") if group.get("data-m")}
    ranked = sorted(MANY, key=lambda name: (-MANY[name], name))
    assert [looks[legend[name]] for name in list(legend)[:7]] == [f"c{number}" for number in range(7)]
    assert {looks[legend[name]] for name in list(legend)[7:]} == {"c-base quiet"}
    assert {MANY[name] for name in list(legend)[:3]} == {MANY[name] for name in ranked[:3]}
    assert list(looks.values())[-1] != "c-base quiet", "colours are drawn over the grey"
    assert labels(charts(source)["overall"]) == list(legend)
    assert "model-task pairs" in page.text or "highest one tried" not in page.text


def test_the_page_says_how_much_variance_each_source_adds_by_stream_where_the_grid_varies_them() -> None:
    seeds = [{"head": head, "order": order, "dropout": 0} for head in (0, 1) for order in (0, 1)]
    results = [row | {"seed": seeds[row["seed"]]} for row in synthetic_results(MODELS, seeds=4)]
    found = analyse(results, "2m-untrained")
    _, page = read(found)
    words = ["learning rate", "fine-tuning seed", "the head's initial weights", "the order of the data", "streams together"]  # fmt: skip
    assert all(f" {each} " in page.text for each in words)
    row = found.components.query("model_family == '2m-clm-600' and task == 'pydocs-qa' and source == 'head'").iloc[0]
    assert estimate(row["sd"], row["sd_low"], row["sd_high"]) in page.text
    _, page = read(study())
    assert " fine-tuning seed " in page.text and " streams together " not in page.text


def test_numbers_lead_to_their_runs_in_mlflow() -> None:
    pages = {(model, task): f"https://host/#/experiments/7/runs?{model}{task}" for model in MODELS for task in ("", *TASKS)}  # fmt: skip
    recorded = RecordedRuns("They are at https://host.", "params.model = 'MODEL'", pages)
    _, page = read(study(), replace(facts(), recorded=recorded))
    found = Counter(address for address in page.addresses if not address.startswith("#"))
    assert set(found) == set(pages.values())
    for (_, task), address in pages.items():
        # A score, its curve, its stability and its components; or the mean twice.
        assert found[address] >= (4 if task else 2)
    assert "They are at https://host." in page.text and "params.model = 'MODEL'" in page.text
    _, page = read(study(), replace(facts(), recorded=replace(recorded, pages={})))
    assert all(address.startswith("#") for address in page.addresses) and "They are at https://host." in page.text


def test_every_model_s_place_on_a_task_is_said_in_words() -> None:
    lead = {"a": 0.60, "b": 0.70, "c": 0.7005, "untrained": 0.40}
    found = task_verdicts(analyse(synthetic_results(lead, tasks=("pydocs-kind",)), "untrained"))
    said = {model: words for (model, _), words in found.items()}
    top, near = ("b", "c") if said["b"].startswith("Highest") else ("c", "b")
    assert said[top] == f"Highest score on this task, not told apart from {near}."
    assert said[near] == f"Not told apart on this task from the best, {top}."
    assert re.fullmatch(rf"Below the best on this task, {top}: −\d+\.\d\d \[.*\] points\.", said["a"])
    clear = task_verdicts(analyse(synthetic_results({"a": 0.60, "b": 0.80}, tasks=("pydocs-kind",))))
    assert clear["b", "pydocs-kind"] == "Best of 2 models on this task."
    low = analyse(synthetic_results(lead, tasks=("pydocs-kind",)), chances={"pydocs-kind": Chance(0.9, "always")})
    assert set(task_verdicts(low).values()) == {"No model is shown to be above chance on this task."}
    unfinished = analyse(synthetic_results({"a": 0.60, "b": 0.80}, tasks=("pydocs-kind",))[1:])
    assert task_verdicts(unfinished)["b", "pydocs-kind"] == "Best of 2 models on this task so far."
    assert task_verdicts(analyse(synthetic_results({"a": 0.6}))) == {}, "nothing to compare with"


def test_the_tables_beside_the_page_hold_the_analysis(tmp_path: Path) -> None:
    found = study(diverge=frozenset({("2m-clm-600", 3e-3)}))
    paths = write_report(found, facts(), tmp_path / "studies" / "quickstart")
    assert set(paths) >= {"report", "parquet", "results", "best", "stability", "comparisons"}
    assert sorted(path.name for path in paths.values()) == sorted(
        path.name for path in paths["report"].parent.iterdir()
    )
    pd.testing.assert_frame_equal(
        pd.read_parquet(paths["parquet"]), found.cells, check_dtype=False, check_index_type=False
    )
    for name in ("best", "stability", "comparisons"):
        read_back = pd.read_csv(paths[name])
        assert list(read_back.columns) == list(getattr(found, name).columns)
        numbers = getattr(found, name).select_dtypes("float")
        pd.testing.assert_frame_equal(read_back[numbers.columns], numbers, check_dtype=False, rtol=1e-15)


SCRIPT = """
import sys, hashlib, pathlib
sys.path[:0] = sys.argv[2:]
from analysis_study import synthetic_results
from report_study import MODELS, facts
from mlmclm.analysis.analyse import analyse
from mlmclm.reports.write_report import write_report
paths = write_report(analyse(synthetic_results(MODELS), "2m-untrained"), facts(), pathlib.Path(sys.argv[1]))
for name, path in sorted(paths.items()):
    print(name, hashlib.sha256(path.read_bytes()).hexdigest())
"""


def test_every_byte_is_a_function_of_results_and_facts(tmp_path: Path) -> None:
    # Another process, another hash seed, another time zone, another order of the results.
    paths = write_report(analyse(synthetic_results(MODELS)[::-1], "2m-untrained"), facts(), tmp_path / "here")
    here = "".join(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n" for name, path in sorted(paths.items()))
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "analysis")]
    surroundings = os.environ | {"PYTHONHASHSEED": "77", "TZ": "Asia/Tokyo"}
    there = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "there"), *folders],
        env=surroundings,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert here == there


def test_no_object_prints_itself_into_the_page() -> None:
    source, _ = read(study())
    assert " object at 0x" not in source and "built-in method" not in source
    assert not re.search(r"\bnan\b|\bNone\b|\bNaN\b", Page(source).text)


def test_a_folder_that_cannot_be_written_is_the_environments_fault(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(EnvironmentFault, match="cannot write"):
        write_report(study(), facts(), tmp_path / "taken")


def test_added_statistics_figures_and_claims_are_in_the_report(registers: None, tmp_path: Path) -> None:
    analysis = study()

    @mlmclm.register("statistic", "cells-a-task")
    def cells_a_task(analysis: Analysis) -> pd.DataFrame:
        return analysis.cells.groupby("task", as_index=False)["model"].count()

    @mlmclm.register("claim", "all-above-chance")
    def all_above_chance(analysis: Analysis) -> Verdict:
        return Verdict("unknown", "no chance levels here")

    @mlmclm.register("figure")
    class Empty(FigureGroup):
        name = "empty"
        title = "Nothing"

        def draw(self, study: ReportInput) -> list[Figure]:
            chart = Chart(Axis.numbers([0, 1], ""), Axis.names([]), 10)
            return [Figure("mine", f"{len(study.looks)} models", chart, "nothing")]

    source, page = read(analysis)
    assert "all-above-chance" in page.text and "no chance levels here" in page.text
    assert '<svg id="mine"' in source and "Nothing" in page.text and "4 models" in page.text
    paths = write_report(analysis, facts(), tmp_path)
    assert list(pd.read_csv(paths["cells-a-task"])["task"]) == sorted(TASKS)
    assert paths["verdicts"].read_text() == "claim,verdict,reason\nall-above-chance,unknown,no chance levels here\n"
    mlmclm.register("statistic", "best", lambda analysis: analysis.best)
    with pytest.raises(UserError, match="statistic 'best': returns a pandas DataFrame, under a name that no other"):
        write_report(analysis, facts(), tmp_path)
