"""The figures of the HTML page."""

from __future__ import annotations

import re

from analysis_study import synthetic_results
from report_page import MANY, charts, labels, numbers, of_model, read, study
from report_study import MODELS, facts

from mlmclm.analysis.analyse import analyse
from mlmclm.reports.figures.loss_curves import thinned
from mlmclm.results.chance import Chance


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


def test_no_line_joins_the_losses_of_two_objectives() -> None:
    source, _ = read(study())
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
