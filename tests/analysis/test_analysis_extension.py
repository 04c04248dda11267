"""The rates that a grid adds to its list: checked against a search that knows every score, in any order of results."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from statistics import mean

import pytest
from analysis_study import cell

from mlmclm.analysis.analyse import analyse
from mlmclm.analysis.extension import Extension, extension
from mlmclm.analysis.results import Grid, records
from mlmclm.reports.advice import advise
from mlmclm.reports.cautions import cautions, uneven_rates
from mlmclm.results.metrics import Rule
from mlmclm.seeds import Seed

RATES, LOWER, HIGHER, SEEDS = (1e-3, 2e-3, 4e-3), (5e-4, 2.5e-4), (8e-3, 1.6e-2, 3.2e-2), (0, 1, 2)
EVERY = (*RATES, *LOWER, *HIGHER)
Scores = dict[tuple[float, Seed], float | None]


def curve(peak: float, noise: float, chance: random.Random, lost: float = 0.0) -> Scores:
    """A score for each rate and seed, highest around a peak, some of them rounded to tie, some of them lost."""
    digits = chance.choice((1, 2, 6))
    return {
        (rate, seed): None
        if chance.random() < lost
        else round(0.8 - 0.05 * abs(EVERY_SORTED.index(rate) - peak) + chance.gauss(0, noise), digits)
        for rate in EVERY
        for seed in SEEDS
    }


EVERY_SORTED = sorted(EVERY)


def searched(models: list[Scores], rule: Rule) -> set[float]:
    """The rates of a search that looks at one end after the other, written down independently."""
    tried = sorted(RATES)
    while True:
        steps = []
        for end, others in ((tried[0], LOWER), (tried[-1], HIGHER)):
            left = [rate for rate in others if rate not in tried]
            if left and any(_best_at(scores, tried, end, rule) for scores in models):
                steps.append(left[0])
        if not steps:
            return set(tried) - set(RATES)
        tried = sorted([*tried, *steps])


def _best_at(scores: Scores, tried: list[float], end: float, rule: Rule) -> bool:
    """Whether a best rate is at this end: better than all inside, and than the other end, or level with that as the lowest."""
    seeds: list[tuple[Seed, ...]] = [(seed,) for seed in SEEDS] if rule == "per_seed" else [SEEDS]
    for own in seeds:
        kept = {rate: [s for seed in own if (s := scores[rate, seed]) is not None] for rate in tried}
        most = min(len(own) / 2, max(map(len, kept.values())))
        means = {rate: mean(values) for rate, values in kept.items() if len(values) >= most and values}
        if end not in means:
            continue
        inside = all(means[end] > value + 1e-12 for rate, value in means.items() if tried[0] < rate < tried[-1])
        other = means.get(tried[-1] if end == tried[0] else tried[0], -1.0)
        if inside and (means[end] > other + 1e-12 or (end == tried[0] and abs(means[end] - other) <= 1e-12)):
            return True
    return False


@pytest.mark.parametrize("rule", ["mean", "per_seed"])
def test_the_rates_are_those_of_a_search_that_knows_all_scores_in_any_order_of_results(rule: Rule) -> None:
    chance, added = random.Random(1), set()
    for trial in range(300):
        truths = [
            curve(chance.uniform(-1, 8), chance.choice((0.0, 0.01, 0.1)), chance, lost=chance.choice((0.0, 0.2)))
            for _ in range(chance.choice((1, 1, 2, 3)))
        ]
        wanted = searched(truths, rule)
        there: list[Scores] = [{} for _ in truths]
        bounds = []
        while True:
            found = extension(there, RATES, LOWER, HIGHER, SEEDS, rule=rule)
            bounds.append(len(found.added) + found.to_come)
            missing = [
                (own, (r, s))
                for own in range(len(there))
                for r in (*RATES, *found.added)
                for s in SEEDS
                if (r, s) not in there[own]
            ]
            if not missing:
                break
            # Any number of the cells that are asked for end, in any order.
            for own, place in chance.sample(missing, chance.randint(1, len(missing))):
                there[own][place] = truths[own][place]
        assert set(found.added) == wanted and found.to_come == 0, trial
        assert bounds == sorted(bounds, reverse=True) and bounds[-1] == len(wanted), "at most as many as said before"
        # Another sweep's results at rates that were not asked for change nothing.
        assert extension(truths, RATES, LOWER, HIGHER, SEEDS, rule=rule) == found
        added.add(len(wanted))
    assert added >= {0, 1, 2, 3}


def test_nothing_is_added_before_the_list_is_complete_or_where_scores_are_equal() -> None:
    scores: Scores = {(rate, seed): rate for rate in RATES for seed in SEEDS}
    assert extension([scores], RATES, LOWER, HIGHER, SEEDS) == Extension((8e-3,), 4)
    del scores[1e-3, 0]
    assert extension([scores], RATES, LOWER, HIGHER, SEEDS) == Extension((), 5)
    flat: Scores = dict.fromkeys(itertools.product(RATES, SEEDS), 0.5)
    assert extension([flat], RATES, LOWER, HIGHER, SEEDS) == Extension((), 0)
    lost: Scores = dict.fromkeys(itertools.product(RATES, SEEDS), None)
    assert extension([lost], RATES, LOWER, HIGHER, SEEDS) == Extension((), 0)


def test_higher_rates_that_lose_seeds_bound_the_best_one() -> None:
    scores: Scores = {(rate, seed): rate for rate in EVERY for seed in SEEDS}
    scores[8e-3, 1] = scores[8e-3, 2] = None
    found = extension([scores], RATES, LOWER, HIGHER, SEEDS)
    assert found == Extension((8e-3,), 0), "a rate that lost most of its seeds is not chosen"


def test_rates_that_were_not_asked_for_are_not_missing_and_those_that_were_are() -> None:
    grid = Grid(("a", "b"), ("pydocs-kind",), RATES, SEEDS, added={("a", "pydocs-kind", ""): (8e-3,)})
    results = [
        cell(model, "pydocs-kind", rate, seed, 0.5 + rate + seed / 100, 0.5 + rate)
        for model in ("a", "b")
        for rate in (*RATES, *((8e-3,) if model == "a" else ()))
        for seed in SEEDS
        if (rate, seed) != (8e-3, 2)
    ]
    found = analyse(results, grid=grid)
    rows = {row["model"]: row for row in records(found.coverage)}
    assert [(row["expected"], row["missing"]) for row in rows.values()] == [(12, 1), (9, 0)]
    best = {row["model"]: row for row in records(found.best)}
    assert (best["a"]["final"], best["b"]["final"]) == (False, True)
    (said,) = uneven_rates(found)
    assert said.startswith("On pydocs-kind, the grid added learning rates for some models only.")
    assert "`learning_rates: [1e-3, 2e-3, 4e-3, 8e-3]` tries all models" in said and said in cautions(found)
    assert said in advise(found).rests_on
    # Where results may add rates, none is final before those of all models are there.
    growing = {row["model"]: row for row in records(analyse(results, grid=replace(grid, grows=True)).best)}
    assert not growing["b"]["final"] and "may add learning rates" in growing["b"]["note"]
    # A model without any result was tried at no rate, which a longer list would not change.
    alone = [each for each in results if each["model"] == "a"]
    assert not uneven_rates(analyse(alone, grid=grid))
    both = replace(grid, added={(model, "pydocs-kind", ""): (8e-3,) for model in ("a", "b")})
    assert not uneven_rates(analyse(results, grid=both))


def test_an_end_that_scores_as_a_rate_inside_is_no_edge() -> None:
    def edge(scores: tuple[float, ...]) -> str:
        rows = [
            cell("m", "pydocs-kind", rate, seed, score, score)
            for rate, score in zip(RATES, scores, strict=True)
            for seed in SEEDS
        ]
        return str(records(analyse(rows).best)[0]["edge"])

    assert [edge(each) for each in ((0.6, 0.5, 0.4), (0.6, 0.6, 0.4), (0.5, 0.5, 0.5))] == ["lowest", "", ""]
    assert [edge(each) for each in ((0.4, 0.5, 0.6), (0.4, 0.6, 0.6), (0.6, 0.5, 0.6))] == ["highest", "", "lowest"]


def test_sensitivity_is_that_of_the_list_which_all_models_share() -> None:
    chance = random.Random(4)
    listed = [
        cell("m", "pydocs-kind", rate, seed, 0.5 + 10 * rate + chance.gauss(0, 0.01), 0.5 + chance.gauss(0, 0.02))
        for rate in RATES
        for seed in SEEDS
    ]
    added = [cell("m", "pydocs-kind", 8e-3, seed, 0.2, 0.1 + chance.gauss(0, 0.02)) for seed in SEEDS]
    grid = Grid(("m",), ("pydocs-kind",), RATES, SEEDS, added={("m", "pydocs-kind", ""): (8e-3,)})
    (alone,), (extended,) = records(analyse(listed).stability), records(analyse(listed + added, grid=grid).stability)
    names = ("range_rates", "regret")
    assert [extended[name] for name in names] == [alone[name] for name in names]
    # The noise is fitted to all runs, so the component is nearly the same.
    assert extended["sd_rates"] == pytest.approx(alone["sd_rates"], abs=0.01)
    assert extended["cells"] == 12
