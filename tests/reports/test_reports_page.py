"""The words, tables and figures of the HTML page."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from analysis_study import TASKS, cell, synthetic_results
from report_page import MANY, Page, charts, labels, numbers, of_model, read, study, usual
from report_study import MODELS, facts

from mlmclm.analysis.analyse import analyse
from mlmclm.analysis.results import Grid
from mlmclm.answers.named_facts import phase_facts
from mlmclm.plans.names import parse_name
from mlmclm.reports.figures.losses import thinned
from mlmclm.reports.study_facts import ModelFacts, TaskFacts
from mlmclm.reports.trends import plain_names
from mlmclm.results.chance import Chance


def test_the_page_is_well_formed_and_names_every_id_once() -> None:
    _, page = usual()
    assert len(page.ids) == len(set(page.ids))
    assert page.tags.count("h1") == 1


def test_the_page_asks_the_network_for_nothing() -> None:
    source, page = usual()
    assert page.addresses and all(address.startswith("#") for address in page.addresses)
    assert {address[1:] for address in page.addresses} <= set(page.ids)
    assert "http" not in source.replace('http-equiv="Content-Security-Policy"', "")
    policy = next(item["content"] for item in page.attributes if item.get("http-equiv") == "Content-Security-Policy")
    assert policy and policy.startswith("default-src 'none'")


def test_the_page_says_how_rates_were_chosen_and_how_many_seeds_chose_each() -> None:
    _, mean = usual()
    assert "by the mean over seeds; the score is the mean test score over seeds at that rate" in mean.text
    assert "Seeds that were not run are not lost" in mean.text
    grid = [cell("a", "pydocs-kind", rate, seed, 0.7 + 0.1 * (seed == best), 0.5 + 0.01 * seed)
            for best, rate in enumerate((1e-4, 1e-3)) for seed in range(3)]  # fmt: skip
    analysis = analyse(grid, rule="per_seed")
    source, page = read(analysis, replace(facts(), models=(), tasks=()))
    assert "by every seed for itself" in page.text
    assert "Each seed takes the rate with its own highest validation score" in page.text
    assert "at 1e-4 (2), 1e-3 (1)" in page.text
    circles = list(charts(source)["rates-0"].iter("circle"))
    rings = [each.get("cx") for each in circles if each.get("class") == "ring"]
    assert len(rings) == 2 and rings == [each.get("cx") for each in circles if each.get("class") is None]
    _, page = read(analyse(grid, rule="on_test"), replace(facts(), models=(), tasks=()))
    assert "chosen on test by the mean over seeds" in page.text
    assert "mean over seeds of the test score, the same that is reported, which is optimistic" in page.text


@pytest.mark.slow
def test_the_page_of_a_few_models_is_small_and_that_of_a_large_study_loads() -> None:
    assert len(usual()[0].encode()) < 250_000
    tasks = tuple(f"task-{number}" for number in range(12))
    found = analyse(synthetic_results(MANY, tasks=tasks, rates=(1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4), seeds=5))
    assert len(found.cells) == 15_120
    curve = tuple((step, 9 - step / 10_000) for step in range(0, 40_000, 5))
    models = tuple(
        ModelFacts(name, "pretrained", curve=curve, size=name.partition("-")[0], phases=phase_facts(parse_name(name)))
        for name in MANY
    )
    source, _ = read(found, replace(facts(), models=models))
    assert "Score against mask ratio" in source and len(source.encode()) < 5_000_000


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
    source, _ = usual()
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
    for column in ("sd_seeds", "sd_rates", "range_rates", "regret", "gain_at_stake"):
        same = pytest.approx(before.stability[column].tolist(), nan_ok=True, abs=1e-9)
        assert found.stability[column].tolist() == same, column
    tasks = (TaskFacts("pydocs-kind", "Kind of definition", "sequence-classification", "matthews", {}, "pydocs"),)
    _, page = read(found, replace(facts(), tasks=tasks))
    assert "Matthews correlation" in page.text
    for score in found.best["test_mean"]:
        assert f"{score * 100:.2f}".replace("-", "\N{MINUS SIGN}") in page.text


def test_the_page_says_which_model_is_best_and_that_pretraining_helps() -> None:
    source, page = usual()
    assert '<span class="mark yes" aria-hidden="true">✓</span>' in source
    assert "Best on the mean over 4 tasks: 2m-clm-150-mlm40-600" in page.text
    assert "All 3 models beat the baseline by more than the interval" in page.text
    assert "Each model is one pretraining run" in page.text


def test_the_first_sentence_has_plain_words_for_models_and_their_names_stand_below() -> None:
    made = tuple(
        ModelFacts(name, "untrained" if "untrained" in name else "pretrained", phases=phase_facts(parse_name(name)), parameters=2_000_000, steps=600)
        for name in MODELS
    )  # fmt: skip
    source, page = read(study(), replace(facts(), models=made))
    assert "Best on the mean over 4 tasks: CLM then MLM" in page.text
    assert re.search(r"CLM then MLM: 2m-clm-150-mlm40-600 ?, 2(.0*)? ?M parameters, 600 steps\.", page.text), page.text[
        :900
    ]
    assert "<title>" in source and "2m-clm-150-mlm40-600" in source.partition("</title>")[0]
    words = {
        "2m-clm-150-mlm40-600": "CLM then MLM",
        "2m-clm-600": "CLM",
        "2m-mlm40-600": "MLM",
        "2m-untrained": "untrained",
    }
    assert labels(charts(source)["overall"]) == [words[name] for name in labels(charts(usual()[0])["overall"])]
    assert all(f"{words[name]}: {name}" in re.sub(r" ,", "", page.text) for name in MODELS)
    again = "2m-clm-150-mlm40-600-r2"  # a replicate, which is in no verdict, leaves the model its words
    both = analyse(
        synthetic_results(MODELS | {again: MODELS["2m-clm-150-mlm40-600"]}),
        "2m-untrained",
        replicate_of={again: "2m-clm-150-mlm40-600"},
    )
    more = replace(made[0], name=again, phases=phase_facts(parse_name(again)), kind="pretrained")
    assert "over 4 tasks: CLM then MLM" in read(both, replace(facts(), models=(*made, more)))[1].text


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("1m-untrained", "1m-clm-1k", "1m-clm-25%-mlm40-1k"), ("untrained", "CLM", "CLM then MLM")),
        (("1m-clm-1k", "1m-clm-2k", "2m-clm-1k"), ("CLM, 1m, 1,000 steps", "CLM, 1m, 2,000 steps", "CLM, 2m, 1,000 steps")),
        (("1m-mlm15-1k", "1m-mlm40-1k"), ("MLM15", "MLM40")),
        (("1m-clm-25%-mlm40-1k", "1m-clm-50%-mlm40-1k"), ("CLM 25 % then MLM40", "CLM 50 % then MLM40")),
        (("1m-clm-1k", "1m-clm-1k-r2", "1m-mlm40-1k", "elsewhere"), (None, None, "MLM", None)),
    ],
)  # fmt: skip
def test_plain_words_say_what_tells_models_apart(names: tuple[str, ...], words: tuple[str | None, ...]) -> None:
    def known(name: str) -> ModelFacts:
        if name == "elsewhere":
            return ModelFacts(name, "external")
        own = parse_name(name)
        kind = "pretrained" if own.steps else "untrained"
        return ModelFacts(name, kind, size=own.size, phases=phase_facts(own))

    found = plain_names([known(name) for name in names])
    assert tuple(found.get(name) for name in names) == words


def test_the_page_says_where_the_baseline_is_not_beaten() -> None:
    weak = synthetic_results(MODELS | {"2m-clm-600": 0.50})
    source, page = read(analyse(weak, "2m-untrained"))
    assert '<span class="mark open" aria-hidden="true">–</span>' in source, "no cross before models that beat it"
    assert "beat the baseline by more than the interval on the mean over tasks" in page.text
    assert "This isn't shown for 2m-clm-600 (not clearly ahead on the mean, ahead on 0 of 4 tasks" in page.text
    assert "does not hold" in page.text


def test_missing_diverged_and_edge_are_said_at_the_top() -> None:
    made = synthetic_results(MODELS, rates=(1e-4, 3e-4, 1e-3), diverge=frozenset({("2m-clm-600", 1e-4)}))[:-4]
    _, page = read(analyse(made, "2m-untrained"))
    assert "Not final: 4 of 144 cells have no result yet (" in page.text
    assert "12 cells of 140 diverged (9 %)" in page.text
    assert "The best learning rate is the highest one tried for" in page.text


def test_the_page_ends_with_where_its_numbers_come_from() -> None:
    source, page = usual()
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
    _, page = read(analyse([cell("m", "pydocs-kind", 1e-3, 0, 0.5, 0.5)]), facts())
    assert "It is the only model" in page.text
    assert "Do the models beat" not in page.text


def test_models_and_tasks_without_facts_or_results_are_shown() -> None:
    made = synthetic_results({"surprise": 0.7, "2m-clm-600": 0.6})
    grid = Grid(("2m-clm-600", "2m-mlm40-600", "surprise"), ("pydocs-kind", "later"), (1e-4,), (0,))
    _, page = read(analyse(made, grid=grid), facts())
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
        return read(analyse(made, grid=grid), facts())[1].text

    inside = page_of(dict.fromkeys(MODELS, 3e-4))
    assert "was added" not in inside and "added" not in inside.partition("one tried")[0]
    models = list(MODELS)
    extended = page_of({**dict.fromkeys(MODELS, 3e-4), models[0]: 3e-3})
    assert f"the next one was added (3e-3; {2 * len(TASKS)} runs on" in extended
    assert "3 rates × 2 seeds" in extended and f"{2 * len(TASKS)} added" in extended
    assert "to which as many were added as the grid allows: a higher one may be better" in extended


def test_what_comes_from_outside_is_escaped() -> None:
    evil = "</script><script>alert(1)</script><b x='"
    about = replace(facts(), name=evil, command=evil, corpus={evil: evil}, models=(ModelFacts(evil, "pretrained"),))
    found = analyse([cell(evil, task, 1e-3, seed, 0.5, 0.5) for task in TASKS for seed in (0, 1)])
    source, page = read(found, about)
    assert "<script>alert" not in source
    assert page.tags.count("script") == 1
    assert evil in " ".join(page.words)


def test_no_object_prints_itself_into_the_page() -> None:
    source, _ = usual()
    assert " object at 0x" not in source and "built-in method" not in source
    assert not re.search(r"\bnan\b|\bNone\b|\bNaN\b", Page(source).text)


def test_a_long_curve_keeps_its_ends_and_extremes() -> None:
    curve = [(step, 5 + (step * 7919 % 1000) / 1000) for step in range(10_000)] + [(10_000, 99.0), (10_001, 0.1)]
    drawn = thinned(curve)
    assert len(drawn) <= 402 and drawn == sorted(drawn) and set(drawn) <= set(curve)
    assert drawn[0] == curve[0] and {(10_000, 99.0), (10_001, 0.1)} <= set(drawn)
    assert thinned(curve[:300]) == curve[:300]


def test_every_figure_has_a_place_a_description_and_words_for_its_points() -> None:
    found = charts(usual()[0])
    # Four tasks: four figures each, gains with the mean, the mean itself, ranks, heat map, two losses.
    assert len(found) == 4 * 4 + 5 + 1 + 2 + 2
    for chart in found.values():
        assert chart.get("role") == "img" and chart.get("aria-label") and chart.get("tabindex") == "0"
        told = [each for each in chart.iter() if each.tag in ("circle", "rect") and each.get("class") != "ring"]
        assert told and all(any(name in (each.findtext("title") or "") for name in MODELS) for each in told)


def test_figures_are_as_wide_as_the_page_on_any_screen_and_paper() -> None:
    for chart in charts(usual()[0]).values():
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
    source, _ = usual()
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
    source, _ = usual()
    light, dark = source.partition("<style>")[2].split("@media screen and (prefers-color-scheme:dark)")[:2]
    for name in re.findall(r"\.(c[0-9]|c-base)\{--c:", light):
        before, after = (re.search(rf"\.{name}\{{--c:(#\w+)", style) for style in (light, dark))
        assert before and after and before[1] != after[1]


def test_no_line_joins_the_losses_of_two_objectives() -> None:
    source, _ = usual()
    model = next(model for model in facts().models if model.switches)
    number = numbers(source)[model.name]
    for figure, points in (("loss-curve", model.curve), ("loss-validation-curve", model.validation_curve)):
        (line,) = [each for each in of_model(charts(source)[figure], number) if each.get("class") == "line"]
        before, after = line.attrib["d"].removeprefix("M").split("M")
        assert before.count("L") + 1 == sum(step <= model.switches[0] for step, _ in points)
        assert after.count("L") + 1 == sum(step > model.switches[0] for step, _ in points)


def test_of_many_models_the_best_have_colours_and_the_others_share_a_grey() -> None:
    source, page = read(analyse(synthetic_results(MANY, tasks=("pydocs-kind",), seeds=2, noise=1e-4)), facts())
    chart, legend = charts(source)["deviation-0"], numbers(source)
    looks = {group.get("data-m"): group.attrib["class"] for group in chart.iter("g") if group.get("data-m")}
    ranked = sorted(MANY, key=lambda name: (-MANY[name], name))
    assert [looks[legend[name]] for name in list(legend)[:7]] == [f"c{number}" for number in range(7)]
    assert {looks[legend[name]] for name in list(legend)[7:]} == {"c-base quiet"}
    assert {MANY[name] for name in list(legend)[:3]} == {MANY[name] for name in ranked[:3]}
    assert list(looks.values())[-1] != "c-base quiet", "colours are drawn over the grey"
    assert labels(charts(source)["overall"]) == list(legend)
    assert "model-task pairs" in page.text or "highest one tried" not in page.text
