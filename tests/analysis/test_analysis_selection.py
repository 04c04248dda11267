"""Which learning rate is best: the rules, and what decides in doubt."""

from __future__ import annotations

import io
import itertools
import math
import random
import statistics
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from analysis_study import cell, synthetic_results
from scipy import stats

from mlmclm.analysis.analyse import analyse
from mlmclm.analysis.model_runs import runs_of
from mlmclm.analysis.results import Grid, cells_by_pair, coverage_table, observed_grid, records, results_table
from mlmclm.analysis.selection import best_setting, best_table, picked_cells, with_settings
from mlmclm.errors import UserError
from mlmclm.results.intervals import student
from mlmclm.results.metrics import Rule
from mlmclm.seeds import Seed, Seeds, seed_value
from mlmclm.studies.follower import TrackedStudy, summary_of
from mlmclm.studies.study_sweep import setting_of
from mlmclm.sweeps.results_store import ResultsStore
from mlmclm.sweeps.space import Space
from small_results import make_result

TASK = "pydocs-kind"
Scores = dict[float, list[tuple[float, float] | None]]


def results(scores: Scores) -> list[dict[str, Any]]:
    """Results of one model on one task: by rate, a (validation, test) a seed, None for a diverged one."""
    return [
        cell("m", TASK, rate, seed, *(pair or (None, None)))
        for rate, pairs in scores.items()
        for seed, pair in enumerate(pairs)
    ]


def best_rows(cells: pd.DataFrame, grid: Grid | None = None, rule: Rule = "mean") -> list[dict[str, Any]]:
    """The rows of the table of best rates, where no run failed."""
    pairs = cells_by_pair(cells)
    runs = {pair: runs_of(group) for pair, group in pairs.items()}
    picked = {pair: picked_cells(group, rule) for pair, group in pairs.items()}
    return records(best_table(pairs, runs, picked, grid or observed_grid(cells), rule=rule))


def best(scores: Scores, rule: Rule = "mean") -> dict[str, Any]:
    return best_rows(results_table(results(scores)), rule=rule)[0]


def missing(cells: pd.DataFrame, grid: Grid | None = None) -> list[int]:
    return list(coverage_table(cells_by_pair(cells), grid or observed_grid(cells))["missing"])


def test_the_best_rate_is_the_one_with_the_highest_validation_mean_whatever_the_test_says() -> None:
    row = best({1e-4: [(0.5, 0.99), (0.5, 0.99)], 1e-3: [(0.7, 0.6), (0.6, 0.5)], 1e-2: [(0.9, 0.9), (0.3, 0.9)]})
    assert row["learning_rate"] == 1e-3
    assert row["test_mean"] == pytest.approx(0.55)
    assert row["validation_mean"] == pytest.approx(0.65)


def test_the_choice_agrees_with_brute_force_on_random_grids() -> None:
    generator = random.Random(3)
    for _ in range(50):
        scores: Scores = {
            rate: [(generator.random(), 0.5 + generator.random() / 20) for _ in range(3)] for rate in (1e-5, 1e-4, 1e-3)
        }
        winner = max(scores, key=lambda rate: statistics.fmean(pair[0] for pair in scores[rate] if pair))
        row = best(scores)
        test = [pair[1] for pair in scores[winner] if pair]
        assert row["learning_rate"] == winner
        assert row["test_mean"] == pytest.approx(statistics.fmean(test))
        assert row["test_sd"] == pytest.approx(statistics.stdev(test))


def test_a_main_metric_that_is_a_mean_of_two_scores_is_taken_from_what_results_hold() -> None:
    """GLUE's rule; another choice of metric can choose another rate, from the same results."""

    def result(rate: float, accuracy: float, f1: float) -> dict[str, Any]:
        split = {"accuracy": accuracy, "f1": f1}
        return {**cell("m", "mrpc", rate, 0, 0.0, 0.0), "scores": {"validation": split, "test": split}}

    filed = [result(1e-4, 0.8, 0.7), result(1e-3, 0.78, 0.76)]
    found = {}
    for metric in ("accuracy", "accuracy+f1"):
        cells = results_table([{**one, "metric": metric} for one in filed])
        (row,) = best_rows(cells)
        found[metric] = (row["learning_rate"], row["metric"], row["test_mean"])
    assert found["accuracy"] == (1e-4, "accuracy", pytest.approx(0.8))
    assert found["accuracy+f1"] == (1e-3, "accuracy+f1", pytest.approx(0.77))


POINTS = ("epochs 1", "epochs 3", "epochs 2")


def at_points(scores: dict[str, Scores]) -> tuple[pd.DataFrame, Grid]:
    """Results of a grid with another axis, and the grid."""
    rows = [
        {**row, "setting": point, "key": f"{point}/{row['key']}"}
        for point, own in scores.items()
        for row in results(own)
    ]
    cells = results_table(rows)
    rates = tuple(sorted(set(cells["learning_rate"])))
    return cells, Grid(("m",), (TASK,), rates, (0, 1), {TASK: POINTS})


def resolved(cells: pd.DataFrame, grid: Grid, rule: Rule = "mean") -> pd.DataFrame:
    """The cells of the best setting."""
    choices = with_settings(cells_by_pair(cells), grid)["m", TASK]
    runs = runs_of(choices)
    rates = {*itertools.compress(runs.rates, best_setting(runs, rule))}
    return cells[[choice["learning_rate"] in rates for choice in choices]]


def best_of(scores: dict[str, Scores], rule: Rule = "mean") -> dict[str, Any]:
    cells, grid = at_points(scores)
    return best_rows(resolved(cells, grid, rule), grid, rule)[0]


def test_the_best_setting_is_the_one_whose_best_rate_validates_best_and_all_is_said_of_it() -> None:
    scores: dict[str, Scores] = {
        "epochs 1": {1e-4: [(0.6, 0.9), (0.6, 0.9)], 1e-3: [(0.7, 0.95), (0.7, 0.95)]},
        "epochs 3": {1e-4: [(0.5, 0.3), (0.5, 0.3)], 1e-3: [(0.8, 0.5), (0.8, 0.7)]},
        "epochs 2": {1e-4: [(0.1, 0.3), (0.1, 0.3)], 1e-3: [(0.79, 0.9), (0.79, 0.9)]},
    }
    row = best_of(scores)
    assert (row["setting"], row["learning_rate"], row["n"]) == ("epochs 3", 1e-3, 2)
    assert row["test_mean"] == pytest.approx(0.6)
    cells, grid = at_points(scores)
    assert resolved(cells, grid).groupby("learning_rate")["test"].mean().tolist() == pytest.approx([0.3, 0.6])
    (coverage,) = records(coverage_table(cells_by_pair(cells), grid))
    assert (coverage["expected"], coverage["present"], coverage["missing"]) == (12, 12, 0)


def test_per_seed_the_best_setting_is_the_one_that_is_best_at_each_seed_s_own_rate() -> None:
    scores: dict[str, Scores] = {
        "epochs 1": {1e-4: [(0.9, 0.9), (0.1, 0.1)], 1e-3: [(0.1, 0.1), (0.9, 0.9)]},
        "epochs 2": {1e-4: [(0.6, 0.6), (0.6, 0.6)]},
    }
    cells, grid = at_points(scores)
    assert set(resolved(cells, grid)["setting"]) == {"epochs 2"}
    assert set(resolved(cells, grid, rule="per_seed")["setting"]) == {"epochs 1"}


def test_on_test_is_the_rule_mean_where_validation_is_the_test() -> None:
    chance = random.Random(4)
    for _ in range(50):
        drawn = {
            point: {rate: [(chance.random(), chance.random()) for _ in range(2)] for rate in (1e-4, 3e-4, 1e-3)}
            for point in POINTS
        }
        same = {
            point: {rate: [(test, test) for _, test in pairs] for rate, pairs in own.items()}
            for point, own in drawn.items()
        }
        found, wanted = best_of(drawn, "on_test"), best_of(same)
        chosen = ("setting", "learning_rate", "test_mean", "test_sd", "edge", "n")
        assert [found[name] for name in chosen] == [wanted[name] for name in chosen]


def test_settings_tie_to_the_earlier_in_the_grid_and_lost_seeds_decide_where_most_are_lost() -> None:
    same: Scores = {1e-4: [(0.7, 0.5), (0.7, 0.5)]}
    assert best_of({"epochs 2": same, "epochs 3": same})["setting"] == "epochs 3"
    broken: Scores = {1e-4: [(0.9, 0.9), None, None]}
    assert best_of({"epochs 1": broken, "epochs 2": same})["setting"] == "epochs 2"
    assert best_of({"epochs 1": {1e-4: [None, None]}, "epochs 2": broken})["setting"] == "epochs 2"
    nothing: dict[str, Scores] = {"epochs 1": {1e-4: [None, None]}, "epochs 2": {1e-4: [None, None]}}
    assert best_of(nothing)["note"] == "every cell diverged"
    cells, grid = at_points({"epochs 1": broken})
    assert missing(cells, grid) == [4]


def test_the_choice_of_setting_agrees_with_brute_force() -> None:
    generator = random.Random(5)
    for _ in range(30):
        scores: dict[str, Scores] = {
            point: {rate: [(generator.random(), generator.random()) for _ in range(2)] for rate in (1e-4, 1e-3)}
            for point in POINTS
        }
        means = {
            (point, rate): statistics.fmean(pair[0] for pair in pairs if pair)
            for point, own in scores.items()
            for rate, pairs in own.items()
        }
        row = best_of(scores)
        assert (row["setting"], row["learning_rate"]) == max(means, key=lambda place: means[place])


def test_ties_go_to_the_smaller_rate() -> None:
    assert best({1e-4: [(0.7, 0.1)] * 2, 1e-3: [(0.7, 0.9)] * 2})["learning_rate"] == 1e-4
    # 0.1 + 0.2 is not 0.3 in binary: rounding must not decide a tie.
    assert best({1e-4: [(0.15, 0.1), (0.15, 0.1)], 1e-3: [(0.1, 0.9), (0.2, 0.9)]})["learning_rate"] == 1e-4


def test_a_rate_at_which_most_seeds_diverged_is_chosen_only_when_no_other_kept_more() -> None:
    clean = {1e-4: [(0.5, 0.5), (0.5, 0.5)], 1e-3: [(0.9, 0.9), None]}
    assert best(clean)["learning_rate"] == 1e-3, "half of its runs learned"
    broken = {1e-4: [None, None, (0.9, 0.9)], 1e-3: [(0.6, 0.6), (0.6, 0.6), None], 1e-2: [(0.8, 0.8), None, None]}
    row = best(broken)
    assert (row["learning_rate"], row["n"], row["diverged"], row["missing"]) == (1e-3, 2, 1, 0)


def test_where_everything_diverged_there_is_no_best_rate_and_the_table_says_so() -> None:
    for rule in ("mean", "per_seed", "on_test"):
        row = best({1e-4: [None, None], 1e-3: [None, None]}, rule)
        assert math.isnan(row["learning_rate"]) and math.isnan(row["test_mean"])
        assert (row["n"], row["diverged"], row["note"], row["edge"]) == (0, 2, "every cell diverged", "")


def test_a_rate_whose_seeds_were_not_all_run_may_be_the_best_and_one_that_mostly_diverged_not() -> None:
    full = results({1e-4: [(0.5, 0.5)] * 3, 1e-3: [(0.6, 0.6)] * 3, 1e-2: [(0.9, 0.9)] * 3})
    cells = results_table(full[:-1])
    (row,) = best_rows(cells)
    assert (row["learning_rate"], row["n"], row["missing"], row["edge"]) == (1e-2, 2, 1, "highest")
    assert missing(cells) == [1]
    row = best({1e-4: [(0.5, 0.5)] * 3, 1e-3: [(0.6, 0.6)] * 3, 1e-2: [(0.9, 0.9), None, None]})
    assert (row["learning_rate"], row["n"], row["edge"]) == (1e-3, 3, "")


def test_one_seed_has_a_score_but_no_interval() -> None:
    row = best({1e-4: [(0.5, 0.4)], 1e-3: [(0.4, 0.4)], 1e-2: [(0.3, 0.4)]})
    assert row["test_mean"] == 0.4 and row["note"] == "one seed: no interval"
    (row,) = records(analyse(results({1e-4: [(0.5, 0.4)], 1e-3: [(0.4, 0.4)], 1e-2: [(0.3, 0.4)]})).best)
    assert row["score"] == 0.4 and math.isnan(row["score_low"])


def test_a_best_rate_at_the_edge_of_what_was_tried_is_flagged() -> None:
    low, middle, high = ([(score, score)] * 2 for score in (0.5, 0.6, 0.7))
    assert best({1e-4: low, 1e-3: middle, 1e-2: high})["edge"] == "highest"
    assert best({1e-4: high, 1e-3: middle, 1e-2: low})["edge"] == "lowest"
    assert best({1e-4: low, 1e-3: high, 1e-2: middle})["edge"] == ""
    assert best({1e-4: low})["edge"] == "only"
    # A higher rate that diverged bounds the optimum.
    assert best({1e-4: low, 1e-3: high, 1e-2: [None, None]})["edge"] == ""


def test_a_combination_of_the_streams_seeds_counts_as_a_seed() -> None:
    streams: list[Seed] = [0, Seeds(0, 1, 0), Seeds(0, 2, 0)]
    scores = {1e-4: (0.5, 0.6, 0.7), 1e-3: (0.8, 0.9)}
    made = [
        cell("m", TASK, rate, 0, score, score) | {"seed": seed_value(seed), "key": f"{rate} {seed}"}
        for rate, own in scores.items()
        for seed, score in zip(streams, own, strict=False)
    ]
    cells = results_table(reversed(made))
    assert cells["seed"].isna().tolist() == [False, True, True, False, True]
    assert cells["seed_order"].tolist() == [0, 1, 2, 0, 1]
    grid = observed_grid(cells)
    assert grid.seeds == tuple(streams)
    (row,) = best_rows(cells, grid)
    assert (row["learning_rate"], row["n"], row["missing"]) == (1e-3, 2, 1)
    assert row["test_sd"] == pytest.approx(statistics.stdev([0.8, 0.9]))
    curve = records(analyse(made).curves)
    assert [(point["n"], point["missing"]) for point in curve] == [(3, 0), (2, 1)]
    assert missing(cells, grid) == [1]
    (own,) = best_rows(cells, grid, "per_seed")
    assert own["learning_rates"] == "1e-4 (1), 1e-3 (2)"
    buffer = io.BytesIO()
    cells.to_parquet(buffer)
    assert len(pd.read_parquet(buffer)) == 5
    with pytest.raises(UserError, match="seed h0-o1-d0"):
        results_table([*made, made[1] | {"key": "another"}])
    with pytest.raises(UserError, match="seed: no seed for order, dropout"):
        results_table([made[0] | {"seed": {"head": 1}}])


def test_the_grid_that_is_observed_has_the_settings_of_each_task() -> None:
    """It had none, so that a study of several settings counted as unfinished, with every cell missing."""
    plain = synthetic_results({"a": 0.8, "b": 0.7}, tasks=("pydocs-kind", "sst2"))
    made = [
        each | {"setting": point, "key": f"{each['key']}{point}"}
        for each in plain
        for point in ("epochs 2", "epochs 3")
        if each["task"] == "sst2" or point == "epochs 2"
    ]
    assert observed_grid(results_table(made)).settings == {
        "pydocs-kind": ("epochs 2",),
        "sst2": ("epochs 2", "epochs 3"),
    }
    assert observed_grid(results_table(plain)).settings == {}
    assert analyse(made).missing == 0 and analyse(made).best["final"].all()
    assert analyse(made[1:]).missing == 1


def test_per_seed_takes_each_seeds_own_best_rate() -> None:
    row = best(
        {
            1e-4: [(0.9, 0.81), (0.1, 0.1), (0.9, 0.79)],
            1e-3: [(0.2, 0.2), (0.8, 0.70), (0.9, 0.1)],
            1e-2: [(0.1, 0.1), (0.1, 0.1), None],
        },
        "per_seed",
    )
    assert row["test_mean"] == pytest.approx(statistics.fmean([0.81, 0.70, 0.79]))
    assert row["test_sd"] == pytest.approx(statistics.stdev([0.81, 0.70, 0.79]))
    assert math.isnan(row["learning_rate"])
    assert row["learning_rates"] == "1e-4 (2), 1e-3 (1)"
    assert row["edge"] == "lowest"


def test_both_rules_agree_when_all_seeds_prefer_one_rate() -> None:
    made = synthetic_results({"a": 0.8, "b": 0.7}, noise=1e-4)
    assert analyse(made).chosen.equals(analyse(made, rule="per_seed").chosen)


def test_a_diverged_seed_does_not_lose_its_other_rates_under_per_seed() -> None:
    row = best({1e-4: [(0.5, 0.5), (0.4, 0.4)], 1e-3: [(0.6, 0.6), None]}, "per_seed")
    assert (row["n"], row["diverged"]) == (2, 0)
    assert row["test_mean"] == pytest.approx(0.5)


def test_the_curve_has_a_mean_and_a_band_at_every_rate_of_either_split() -> None:
    made = results({1e-4: [(0.5, 0.39), (0.7, 0.41)], 1e-3: [(0.6, 0.6), None], 1e-2: [None, None]})
    first, second, third = records(analyse(made).curves)
    assert (first["n"], first["validation_mean"], first["test_mean"]) == (2, pytest.approx(0.6), pytest.approx(0.4))
    assert (first["test_low"], first["test_high"]) == pytest.approx(stats.t.interval(0.95, 1, loc=0.4, scale=0.01))
    assert (second["n"], second["diverged"], second["test_mean"]) == (1, 1, 0.6) and math.isnan(second["test_low"])
    assert third["diverged"] == 2 and math.isnan(third["test_mean"])


def test_rates_that_are_level_on_validation_are_named() -> None:
    made = results({1e-4: [(0.5, 0.3), (0.7, 0.4)], 5e-4: [(0.7, 0.6), (0.5, 0.5)], 1e-3: [(0.6, 0.6), (0.5, 0.5)]})
    (row,) = records(analyse(made).best)
    assert (row["learning_rate"], row["note"]) == (1e-4, "level on validation with 5e-4, the lowest is taken")
    (other,) = records(analyse(made, rule="on_test").best)
    assert other["note"] == "level on test with 1e-3, the lowest is taken" and other["learning_rate"] == 5e-4


def test_models_and_tasks_without_any_cell_are_in_the_tables() -> None:
    cells = results_table(results({1e-4: [(0.5, 0.5)]}))
    grid = Grid(("m", "later"), (TASK, "other"), (1e-4, 1e-3), (0, 1))
    table = best_rows(cells, grid)
    assert [(row["model"], row["task"], row["note"]) for row in table] == [
        ("later", "other", "no cell was run"),
        ("later", TASK, "no cell was run"),
        ("m", "other", "no cell was run"),
        ("m", TASK, "one seed: no interval"),
    ]
    assert missing(cells, grid) == [4, 4, 4, 3]


def test_the_same_result_twice_counts_once_but_two_results_for_one_cell_are_refused() -> None:
    one = cell("m", TASK, 1e-4, 0, 0.5, 0.5)
    assert len(results_table([one, dict(one)])) == 1
    with pytest.raises(UserError, match=r"two results for model 'm'.*different weights"):
        results_table([one, one | {"key": "another"}])


def test_what_is_not_a_result_is_refused_by_name() -> None:
    good = cell("m", TASK, 1e-4, 0, 0.5, 0.5)
    with pytest.raises(UserError, match="no entry 'seed'"):
        results_table([{name: value for name, value in good.items() if name != "seed"}])
    with pytest.raises(UserError, match="not a finite number"):
        results_table([good | {"scores": {"validation": {"accuracy": math.nan}, "test": {"accuracy": 0.5}}}])
    with pytest.raises(UserError, match="unknown status 'lost'"):
        results_table([good | {"status": "lost"}])


def test_cost_never_reaches_the_table() -> None:
    columns = results_table([cell("m", TASK, 1e-4, 0, 0.5, 0.5)]).columns
    assert not any("cost" in name or "second" in name for name in columns)


def test_lost_seeds_are_put_aside_unless_most_are_lost() -> None:
    for lost_a, lost_b in itertools.product(range(4), repeat=2):
        scores: Scores = {
            1e-4: [None] * lost_a + [(0.5, 0.5)] * (3 - lost_a),
            1e-3: [None] * lost_b + [(0.6, 0.6)] * (3 - lost_b),
        }
        row = best(scores)
        if lost_a == lost_b == 3:
            assert row["n"] == 0
        else:
            best_is_a = lost_b >= 2 and lost_a < lost_b
            assert row["n"] == 3 - (lost_a if best_is_a else lost_b)
            assert row["learning_rate"] == (1e-4 if best_is_a else 1e-3)


@pytest.mark.parametrize(
    ("metric", "values", "lowest"), [("matthews", [-0.99, -0.6, -0.93], -1.0), ("accuracy", [0.01, 0.4, 0.07], 0.0)]
)
def test_a_sweep_s_scores_have_the_ranges_that_their_families_declare(
    metric: str, values: list[float], lowest: float, tmp_path: Path
) -> None:
    space = Space.model_validate({"tasks": ["sst2"], "learning_rates": [1e-3], "seeds": [0, 1, 2], "protocol": {}})
    made = []
    for seed, value in enumerate(values):
        scores = {split: {metric: value} for split in ("validation", "test")}
        made.append(make_result(key=str(seed), model="m", seed=seed, metric=metric, scores=scores))
    assert student(values).low < lowest
    sweep = setting_of(["m"], None, space, {}, tasks={}).analyse(made, ResultsStore(tmp_path))
    tables = (
        (sweep.best, "score_low", "score"),
        (sweep.curves, "test_low", "test_mean"),
        (sweep.overall, "low", "mean"),
    )
    for table, *columns in tables:
        low, mean = (table[column].item() for column in columns)
        assert lowest < low < mean - 0.01
    (record,) = summary_of("study", TrackedStudy(), made)
    assert {name: value for name, value, *_ in record.metrics}["score_low"] == sweep.best["score_low"].item()


def test_no_interval_in_any_table_leaves_the_range_of_its_score() -> None:
    near: Scores = {rate: [(0.97, 0.975), (0.985, 0.98), (1.0, 1.0)] for rate in (1e-4, 1e-3)}
    analysis = analyse(results(near))
    assert student([0.975, 0.98, 1.0]).high > 1
    for table, columns in (
        (analysis.best, ["score_low", "score_high"]),
        (analysis.curves, ["test_low", "test_high", "validation_low", "validation_high"]),
        (analysis.overall, ["low", "high"]),
    ):
        bounds = table[columns].to_numpy()
        assert ((bounds > 0.5) & (bounds < 1)).all()
