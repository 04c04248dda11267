"""The groups of figures: what each draws, from which numbers, and where it is left out."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from analysis_study import TASKS, synthetic_results
from report_study import facts

import mlmclm
from mlmclm.analysis.analyse import analyse
from mlmclm.answers.named_facts import continuation, phase_facts
from mlmclm.plans.names import parse_name
from mlmclm.plans.suite import find_suite
from mlmclm.reports.charts import HeatCell, Stripe, Whisker
from mlmclm.reports.drawing import FIGURES, Figure, FigureGroup, ReportInput, draw_all, drawn, styles
from mlmclm.reports.figures.choices import crossing, native_of
from mlmclm.reports.study_facts import Continuation, ModelFacts, StudyFacts, TaskFacts
from mlmclm.reports.view import report_input

PARAMETERS = {"2m": 2_000_000, "7m": 7_000_000}


def model(name: str) -> ModelFacts:
    parsed = parse_name(name)
    return ModelFacts(
        name,
        "pretrained" if parsed.phases else "untrained",
        tokens=8192 * parsed.steps,
        steps=parsed.steps,
        size=parsed.size,
        parameters=PARAMETERS[parsed.size],
        phases=phase_facts(parsed),
        continued=continuation(parsed),
        finished="" if parsed.checkpoint is None else str(replace(parsed, checkpoint=None)),
    )


def study(*names: str, **more: Any) -> ReportInput:
    levels = {name: 0.5 + 0.01 * number for number, name in enumerate(names)}
    tasks = tuple(TaskFacts(task, task, family, metric) for task, (family, metric) in TASKS.items())
    about: StudyFacts = replace(facts(), models=tuple(map(model, names)), tasks=tasks)
    return report_input(analyse(synthetic_results(levels, **more)), about)


def rows(study: ReportInput, group: str) -> list[dict[str, Any]]:
    """The data of a group's figures."""
    return [row for figure in FIGURES[group]().draw(study) for row in figure.data]


def series(study: ReportInput, group: str) -> dict[str, list[tuple[float, str]]]:
    """The points of the panel of the mean by series: the quantity, and the model."""
    found: dict[str, list[tuple[float, str]]] = {}
    for row in rows(study, group):
        if row["scope"] == "Mean over tasks":
            x = next(
                row[name] for name in ("mask_percent", "clm_percent", "since", "tokens", "parameters") if name in row
            )
            found.setdefault(row["series"], []).append((x, row["model"]))
    return found


def marks(figure: Figure, kind: type) -> list[Any]:
    return [mark for each in figure.chart.drawn for mark in each.marks if isinstance(mark, kind)]


def test_each_file_of_the_folder_has_groups_that_register_themselves() -> None:
    folder = Path(mlmclm.__file__).parent / "reports" / "figures"
    modules = {f"mlmclm.reports.figures.{path.stem}" for path in folder.glob("[a-z]*.py")}
    built_in = FIGURES.built_in()
    assert {group.__module__ for group in built_in} == modules and len(built_in) == 18


def test_a_model_s_phases_are_those_that_it_was_trained_in() -> None:
    (phase,) = phase_facts(parse_name("2m-mlm40-600-300"))
    assert (phase.objective, phase.kind, phase.causal, phase.steps, phase.hidden_share) == (
        "mlm40",
        "mlm",
        False,
        300,
        0.4,
    )
    first, second = phase_facts(parse_name("2m-clm-dec150-mlm40-600"))
    assert (first.causal, first.steps, first.hidden_share, first.decayed) == (True, 150, None, True)
    assert (second.steps, second.decayed) == (450, False)
    assert model("2m-clm-150-mlm40-600").objective == "CLM then MLM"
    assert model("2m-mlm30-600-mlm15-800").objective == "MLM"
    assert model("2m-untrained").objective == "untrained" and ModelFacts("x", "external").objective == ""


def test_score_against_mask_ratio_joins_models_that_differ_in_it_alone() -> None:
    names = [
        "2m-mlm20-600",
        "2m-mlm40-600",
        "2m-mlm40-900",
        "2m-mlm60-900",
        "2m-mlm50-400",
        "2m-clm-150-mlm40-600",
        "2m-clm-600",
    ]
    found = series(study(*names), "mask-ratios")
    assert found == {
        "4.92 M tokens": [(20, "2m-mlm20-600"), (40, "2m-mlm40-600")],
        "7.37 M tokens": [(40, "2m-mlm40-900"), (60, "2m-mlm60-900")],
    }
    assert rows(study("2m-mlm40-600", "2m-mlm40-900", "2m-clm-600"), "mask-ratios") == []


def test_score_against_tokens_joins_budgets_of_one_plan() -> None:
    names = [
        "2m-mlm40-600",
        "2m-mlm40-300",
        "2m-clm-600",
        "2m-clm-300",
        "2m-clm-75-mlm40-300",
        "2m-clm-150-mlm40-600",
        "2m-clm-150-mlm40-900",
    ]
    found = series(study(*names), "budgets")
    assert found == {
        "MLM40": [(8192 * 300, "2m-mlm40-300"), (8192 * 600, "2m-mlm40-600")],
        "CLM": [(8192 * 300, "2m-clm-300"), (8192 * 600, "2m-clm-600")],
        "CLM 25 % then MLM40": [(8192 * 300, "2m-clm-75-mlm40-300"), (8192 * 600, "2m-clm-150-mlm40-600")],
    }


def test_checkpoints_of_a_run_are_a_line_that_ends_in_the_finished_model() -> None:
    run = ["2m-clm-150-mlm40-600-100", "2m-clm-150-mlm40-600-300", "2m-clm-150-mlm40-600"]
    found = series(study(*run, "2m-mlm40-600-300", "2m-mlm40-600", "2m-mlm40-900"), "budgets")
    assert found == {
        "CLM 25 % then MLM40, run of 600 steps": [
            (8192 * x, name) for x, name in zip((100, 300, 600), run, strict=True)
        ],
        "MLM40, run of 600 steps": [(8192 * 300, "2m-mlm40-600-300"), (8192 * 600, "2m-mlm40-600")],
        "MLM40": [(8192 * 600, "2m-mlm40-600"), (8192 * 900, "2m-mlm40-900")],
    }
    assert series(study("2m-clm-600-100", "2m-clm-600-300"), "budgets") == {
        "2m, 2m-clm-600, run": [(8192 * 100, "2m-clm-600-100"), (8192 * 300, "2m-clm-600-300")]
    }, "the finished model is not in the study"


def test_score_against_the_share_of_clm_goes_from_one_objective_to_the_other_at_each_budget() -> None:
    names = [
        "2m-mlm40-600",
        "2m-clm-150-mlm40-600",
        "2m-clm-300-mlm40-600",
        "2m-clm-600",
        "2m-clm-900",
        "2m-mlm40-900",
        "2m-mlm40-300-clm-600",
    ]
    found = series(study(*names), "clm-shares")
    (points,) = found.values()
    assert points == [
        (0, "2m-mlm40-600"),
        (25, "2m-clm-150-mlm40-600"),
        (50, "2m-clm-300-mlm40-600"),
        (100, "2m-clm-600"),
    ]
    assert rows(study("2m-mlm40-600", "2m-clm-600"), "clm-shares") == [], "no model has both"
    dec = series(study("2m-mlm40-600", "2m-clm-dec150-mlm40-600", "2m-clm-150-mlm40-600", "2m-clm-600"), "clm-shares")
    assert [[x for x, _ in points] for points in dec.values()] == [[0, 25, 100]] * 2, "with and without a decay apart"


def test_encoder_against_decoder_needs_both_at_two_sizes() -> None:
    names = ("2m-mlm40-600", "2m-clm-600", "7m-mlm40-600", "7m-clm-600", "7m-mlm40-900")
    found = series(study(*names), "sizes")
    assert found == {
        "encoder": [(2_000_000, "2m-mlm40-600"), (7_000_000, "7m-mlm40-900")],
        "decoder": [(2_000_000, "2m-clm-600"), (7_000_000, "7m-clm-600")],
    }
    assert rows(study("2m-mlm40-600", "2m-clm-600", "7m-mlm40-600"), "sizes") == []


def test_a_continuation_begins_at_the_last_decay_or_at_given_weights() -> None:
    found = continuation(parse_name("2m-clm-dec600-mlm40-900"))
    assert found == Continuation("2m-clm-600", "CLM", "MLM40", 300)
    found = continuation(parse_name("2m-clm-150-mlm40-dec600-clm-700-mlm40-900-800"))
    assert found == Continuation("2m-clm-150-mlm40-600", "CLM then MLM40", "CLM then MLM40", 200), "so far"
    assert continuation(parse_name("2m-clm-dec600-mlm40-900-300")) is None, "it has not come so far"
    found = continuation(parse_name("2m-clm-dec600-mlm40-900-r2"))
    assert found is not None and found.base == "2m-clm-600-r2"
    assert continuation(parse_name("2m-clm-150-mlm40-600")) is None and continuation(parse_name("2m-untrained")) is None
    assert continuation(parse_name("2m-clm-600"), given=True) == Continuation("2m-untrained", "2m", "CLM", 600)
    assert continuation(parse_name("2m-clm-dec600-mlm40-900"), given=True) == Continuation(
        "2m-clm-600", "CLM", "MLM40", 300
    )
    assert continuation(parse_name("2m-untrained"), given=True) is None


def test_continued_models_are_drawn_from_the_base_on_by_how_it_was_pretrained() -> None:
    bases = ("2m-clm-600", "2m-mlm40-600")
    since = [f"2m-{base}-dec600-mlm40-{steps}" for base in ("clm", "mlm40") for steps in (650, 800)]
    found = series(study(*bases, *since), "continued")
    assert found == {
        "MLM40 from CLM": [(0, "2m-clm-600"), (8192 * 50, since[0]), (8192 * 200, since[1])],
        "MLM40 from MLM40": [(0, "2m-mlm40-600"), (8192 * 50, since[2]), (8192 * 200, since[3])],
    }
    # Without a base, the tokens before it are not known.
    found = series(study("2m-clm-600", *since), "continued")
    assert found["MLM40 from MLM40"] == [(50, since[2]), (200, since[3])]
    assert rows(study(*bases, "2m-clm-150-mlm40-600"), "continued") == []
    # Given weights: two sizes, whose models start from other ones.
    given = study("2m-untrained", "7m-untrained", "2m-clm-300", "7m-clm-300")
    models = [
        replace(each, phases=(), continued=continuation(parse_name(each.name), given=True))
        for each in given.facts.models
    ]
    found = series(report_input(given.analysis, replace(given.facts, models=tuple(models))), "continued")
    assert set(found) == {"2m, CLM from 2m", "7m, CLM from 7m"}
    assert found["2m, CLM from 2m"] == [(0, "2m-untrained"), (8192 * 300, "2m-clm-300")]


def test_a_converted_model_is_compared_with_the_native_one_of_its_length() -> None:
    names = (
        "2m-mlm40-600", "2m-mlm20-600", "2m-mlm40-900", "2m-clm-600", "7m-mlm40-600",
        "2m-clm-150-mlm40-600", "2m-clm-300-mntp20-620", "2m-mlm40-300-clm-600", "2m-clm-150-mlm40-300", "7m-clm-300-mlm40-600",
    )  # fmt: skip
    given = study(*names)
    found = rows(given, "converted")
    natives = {row["model"]: row["native"] for row in found}
    assert natives == {
        "2m-clm-150-mlm40-600": "2m-mlm40-600",
        "2m-clm-300-mntp20-620": "2m-mlm20-600",  # of the same share of hidden tokens
        "2m-mlm40-300-clm-600": "2m-clm-600",
        "7m-clm-300-mlm40-600": "7m-mlm40-600",
    }, "nothing has as few steps as 300"
    best = given.analysis.best.set_index(["model", "task"])["score"]
    for row in found:
        if row["scope"] in TASKS:
            gain = best[row["model"], row["scope"]] - best[row["native"], row["scope"]]
            assert row["difference"] == pytest.approx(gain) and row["low"] < gain < row["high"]
    figure = FIGURES["converted"]().draw(given)[0]
    assert any("native: 2m-mlm20-600, 4.92 M tokens" in mark.words for mark in marks(figure, Whisker))
    assert rows(study("2m-mlm40-600", "2m-clm-600"), "converted") == []


def test_converted_models_of_the_published_suites_have_the_papers_counterparts() -> None:
    def natives(suite: str, size: str) -> dict[str, str]:
        plans = [plan for plan in find_suite(suite).parsed if plan.size == size]
        models = [
            ModelFacts(str(plan), "pretrained", steps=plan.steps, size=size, phases=phase_facts(plan)) for plan in plans
        ]
        found = {model.name: native_of(model, models) for model in models}
        return {name: native.name for name, native in found.items() if native is not None}

    assert natives("ettin", "ettin17m") == {
        "ettin17m-clm-423600-mntp15-434200": "ettin17m-mlm30-413k-mlm15-423600",
        "ettin17m-mlm30-413k-mlm15-423600-clm-434200": "ettin17m-clm-423600",
    }
    of_paper = natives("paper", "610m")
    assert (
        of_paper["610m-clm-40k-mlm20-42k"] == "610m-mlm20-42k" and of_paper["610m-clm-5k-mlm40-22k"] == "610m-mlm40-22k"
    )
    assert of_paper["610m-clm-dec42k-mlm40-64k"] == "610m-mlm40-dec42k-mlm40-64k" and len(of_paper) == 16


def test_a_trend_s_panels_show_the_scores_and_intervals_of_the_tables() -> None:
    given = study("2m-mlm20-600", "2m-mlm40-600")
    mean, *tasks = FIGURES["mask-ratios"]().draw(given)
    overall = given.analysis.overall.query("kind == 'all'").set_index("model")
    for mark, row in zip(marks(mean, Whisker), mean.data, strict=True):
        want = overall.loc[row["model"]]
        assert (row["score"], row["low"], row["high"]) == (want["mean"], want["low"], want["high"])
        assert (mark.value, mark.low, mark.high) == (100 * want["mean"], 100 * want["low"], 100 * want["high"])
    assert [figure.title for figure in tasks] == list(TASKS)
    best = given.analysis.best.set_index(["model", "task"])
    for figure in tasks:
        assert [row["score"] for row in figure.data] == [
            best.loc[(row["model"], figure.title), "score"] for row in figure.data
        ]


def test_families_show_models_in_the_rows_of_their_objectives() -> None:
    given = study("2m-mlm20-600", "2m-mlm40-600", "2m-clm-600", "2m-untrained")
    figures = FIGURES["families"]().draw(given)
    assert len(figures) == len({family for family, _ in TASKS.values()})
    for figure in figures:
        ticks = figure.chart.y.ticks
        assert sorted(label for _, label in ticks) == ["CLM", "MLM", "untrained"]
        for row, mark in zip(figure.data, marks(figure, Whisker), strict=True):
            nearest = min(ticks, key=lambda tick: abs(tick[0] - mark.place))
            assert nearest[1] == row["objective"] == model(row["model"]).objective
        places = [mark.place for mark in marks(figure, Whisker)]
        assert (
            len(set(places)) == len(places) == 4
            and figure.chart.y.high < min(places) < max(places) < figure.chart.y.low
        )
    assert FIGURES["families"]().draw(study("2m-mlm20-600", "2m-mlm40-600")) == []


def test_families_of_several_tasks_show_their_mean() -> None:
    names = ("2m-mlm40-600", "2m-clm-600")
    found = analyse(synthetic_results(dict.fromkeys(names, 0.6), tasks=("pydocs-qa", "one", "two")))
    given = report_input(found, replace(facts(), models=tuple(map(model, names)), tasks=()))
    means = found.overall.set_index(["scope", "model"])["mean"]
    for row in rows(given, "families"):
        if row["family"] == "sequence-classification":
            assert row["score"] == means["sequence-classification", row["model"]]
    everything = analyse(synthetic_results(dict.fromkeys(names, 0.6), tasks=("one", "two")))
    given = report_input(everything, replace(facts(), models=tuple(map(model, names)), tasks=()))
    means = everything.overall.set_index("model")["mean"]
    assert {row["model"]: row["score"] for row in rows(given, "families")} == means.to_dict()


def test_ranks_are_drawn_with_those_that_a_model_may_have() -> None:
    names = [f"2m-mlm{ratio}-600" for ratio in (10, 20, 30, 40, 50, 60)]
    given = study(*names, noise=0.02)
    (figure,) = FIGURES["ranks"]().draw(given)
    found = given.analysis.ranks.set_index("model")
    own = {row["model"]: mark for row, mark in zip(figure.data, marks(figure, Whisker), strict=True)}
    assert list(own) == list(found.index) and set(own) == set(names)
    for name, mark in own.items():
        assert (mark.low, mark.high) == (found["rank_low"][name], found["rank_high"][name])
    assert FIGURES["ranks"]().draw(study("2m-mlm40-600", "2m-clm-600")) == [], "two models have no ranks to speak of"


def test_the_heat_map_s_darkest_cell_of_each_column_is_the_best_model() -> None:
    given = study("2m-mlm20-600", "2m-mlm40-600", "2m-clm-600")
    (figure,) = FIGURES["heat-map"]().draw(given)
    tiles: list[HeatCell] = marks(figure, HeatCell)
    assert len(tiles) == 3 * (len(TASKS) + 1)
    names = [label for _, label in figure.chart.y.ticks]
    for column in range(len(TASKS) + 1):
        own = [tile for tile in tiles if tile.column == column]
        values = {
            row["model"]: row["score"] for row, tile in zip(figure.data, tiles, strict=True) if tile.column == column
        }
        assert names[max(own, key=lambda tile: tile.share).row] == max(values, key=lambda name: values[name])
        assert sorted(tile.share for tile in own)[::2] == [0, 1]


def test_sensitivity_and_the_band_of_level_rates_are_those_of_the_table() -> None:
    given = study("2m-mlm40-600", "2m-clm-600")
    stability = given.analysis.stability.set_index(["model", "task"])
    for row in rows(given, "sensitivity"):
        want = stability.loc[(row["model"], row["task"])]
        assert (row["sd_rates"], row["low"], row["high"]) == (
            want["sd_rates"],
            want["sd_rates_low"],
            want["sd_rates_high"],
        )
    bands = [
        (mark, row)
        for figure in FIGURES["level-rates"]().draw(given)
        for mark, row in zip(marks(figure, Stripe), figure.data, strict=True)
    ]
    assert len(bands) == 2 * len(TASKS)
    for mark, row in bands:
        want = stability.loc[(row["model"], row["task"])]
        assert mark.start < want["level_low"] <= want["level_high"] < mark.stop


def test_one_seed_draws_no_figure_of_noise() -> None:
    given = study("2m-mlm40-600", "2m-clm-600", seeds=1)
    assert {"sensitivity", "level-rates", "deviations"}.isdisjoint(drawn(given))


def test_what_is_not_known_of_given_models_is_not_drawn() -> None:
    about = replace(facts(), models=())
    found = drawn(report_input(analyse(synthetic_results({"a": 0.6, "b": 0.7, "c": 0.8})), about))
    assert set(found) == {"overall", "rates", "deviations", "sensitivity", "level-rates", "ranks", "heat-map"}


def test_all_figures_have_data_and_names_of_their_own() -> None:
    names = [
        "2m-mlm20-600",
        "2m-mlm40-600",
        "2m-clm-600",
        "2m-clm-300",
        "2m-clm-150-mlm40-600",
        "2m-clm-dec600-mlm40-700",
        "7m-mlm40-600",
        "7m-clm-600",
    ]
    found = drawn(study(*names))
    figures = [figure for group in found.values() for figure in group]
    assert {"families", "mask-ratios", "budgets", "clm-shares", "continued", "converted", "sizes"} <= set(found)
    assert len({figure.id for figure in figures}) == len(figures)
    assert all(figure.data and figure.alt and figure.svg for figure in figures)


def test_an_added_group_that_is_broken_is_left_out_and_named(registers: None) -> None:
    given = study("2m-mlm40-600", "2m-clm-600")
    whole = drawn(given)
    (overall,) = FIGURES["overall"]().draw(given)
    broken: dict[str, Any] = {
        "mine": overall,
        "odd": "a figure",
        "rowless": replace(overall, id="rowless", data=(3,)),  # type: ignore[arg-type]
        "chartless": replace(overall, id="chartless", chart=None),  # type: ignore[arg-type]
        "raises": None,
    }
    for name, figure in broken.items():

        def draw(self: FigureGroup, study: ReportInput, figure: Any = figure) -> list[Any]:
            return [{}["nothing"] if figure is None else figure]

        mlmclm.register("figure", None, type("Mine", (FigureGroup,), {"name": name, "draw": draw}))
    found, without = draw_all(given)
    assert [*found] == [*whole] and len(without) == len(broken)
    for name, said in (
        ("mine", "'overall' is the id of a figure of 'overall' too"),
        ("odd", "draws a list of mlmclm.reports.drawing.Figure, not a str"),
        ("raises", "KeyError: 'nothing'"),
    ):
        assert any(f"figure {name!r}: {said}" in reason for reason in without), without


def test_of_many_models_of_known_objectives_each_objective_has_a_colour_and_its_best_stands_out() -> None:
    names = [f"2m-{kind}{number}" for number in range(10) for kind in ("clm", "mlm")]
    kinds = {name: name[3:6] for name in names}
    ranked = names[::-1]
    looks = styles([*names, "base"], "base", ranked, kinds)
    by_kind = {
        kind: {looks[name].classes.split()[0] for name in names if kinds[name] == kind} for kind in ("clm", "mlm")
    }
    assert all(len(own) == 1 for own in by_kind.values()) and by_kind["clm"] != by_kind["mlm"]
    assert [name for name in names if not looks[name].quiet] == ["2m-clm9", "2m-mlm9"]
    assert not looks["base"].quiet


def test_the_budget_at_which_clm_and_mlm_cross_is_said() -> None:
    levels = {"2m-clm-300": 0.62, "2m-mlm40-300": 0.60, "2m-clm-1200": 0.64, "2m-mlm40-1200": 0.66}
    about = replace(facts(), models=tuple(map(model, levels)), tasks=())
    mean, *_ = FIGURES["budgets"]().draw(report_input(analyse(synthetic_results(levels, noise=1e-4)), about))
    # Half way between 2.46 M and 9.83 M tokens on a logarithmic scale.
    assert mean.subtitle.startswith("2m: CLM and MLM40 cross at 4.9") and mean.subtitle.endswith("] tokens.")


def test_the_crossing_of_two_curves_is_where_their_difference_is_0_and_its_interval_where_that_holds_0() -> None:
    rows = [(1e6, 0.04, 0.02, 0.06), (2e6, 0.03, 0.01, 0.05), (4e6, -0.01, -0.03, 0.01), (8e6, -0.05, -0.07, -0.03)]
    grid = np.geomspace(1e6, 8e6, 200_001)
    value, low, high = (
        np.interp(np.log(grid), np.log([row[0] for row in rows]), [row[k] for row in rows]) for k in (1, 2, 3)
    )
    within = grid[(low <= 0) & (high >= 0)]
    for sign in (1, -1):  # whichever model is the first
        turned = [(x, sign * d, *sorted((sign * a, sign * b))) for x, d, a, b in rows]
        found = crossing(turned)
        assert found is not None
        assert found.value == pytest.approx(grid[np.abs(value).argmin()], rel=1e-4)
        assert (found.low, found.high) == pytest.approx((within[0], within[-1]), rel=1e-4)
    assert str(crossing([(1e6, 0.01, -0.02, 0.04), (4e6, -0.01, -0.04, 0.02)])) == "2.00 M [below all, beyond all]"
    assert crossing(rows[:2]) is None and crossing([(1e6, math.nan, math.nan, math.nan), *rows[:2]]) is None
    assert crossing([*rows, (16e6, 0.02, 0.01, 0.03)]) is None, "it crosses twice"
