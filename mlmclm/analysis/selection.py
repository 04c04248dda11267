"""Selection of the best learning rate, and the score at it.

"Seed" here means a combination of seeds if a grid varies those of head, order and dropout independently.

There are three rules. All report test scores, and the first two select on validation scores:

- `mean` (default): the rate with the highest mean validation score over seeds; all seeds use it.
- `per_seed`: every seed uses the rate with its own highest validation score; mean and interval are then taken over
  seeds. This is the rule of arXiv 2507.00994: its published means follow from its published results by this rule only.
  A chosen run scores above a fresh one at its rate, because each seed benefits from its own luck.
- `on_test`: as `mean`, but the rate has the highest mean *test* score. Papers on GLUE choose and report on its dev set,
  which is the test split here. It is optimistic, because the score is the highest of several noisy ones.

Special cases:

- **Ties** (means within 1e-12) go to the smaller rate.
- **Lost runs.** Runs that diverged, failed (`failed_runs`) or have no score are put aside before the choice: the score is that of runs that
  learn. A rate at which more than half are lost does not compete, unless all do so badly (`simulated_choices.competes`). If every cell is lost
  there is no best rate, and the table says so. Cells that were not run yet are not lost: the mean is over those that are there.
- **Settings.** If a grid varies other settings too (weight decay, epochs), the best setting of each (model, task) is that of
  the best of all its settings and rates. Under `per_seed`, it is the one with the most scored seeds, then the one with the highest
  mean validation score at the seeds' own rates. Ties go to the earlier one in the grid. All further tables describe this
  setting; cells of the others appear only in the table of results.
- **Edges.** A best rate that is the lowest or highest one tried may not be the optimum; `edge` says so, unless a rate
  inside has the same score (`extension.ends`). Higher rates that were tried and diverged do bound it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import get_args

import numpy as np
import pandas as pd

from mlmclm.analysis.effects import NO_EFFECT, Effect
from mlmclm.analysis.extension import HIGHEST, LOWEST, ends
from mlmclm.analysis.model_runs import Runs
from mlmclm.analysis.results import (
    ANY_SCORE,
    NO_RANGES,
    SEED_COLUMNS,
    Grid,
    Ranges,
    Record,
    all_pairs,
    by_rate,
    cells_by_pair,
    columns,
    competing,
    grouped,
    records,
    scored,
    seeds_of,
    table,
    wanted_seeds,
)
from mlmclm.errors import unknown
from mlmclm.numbers import rate_text
from mlmclm.results.chance import NO_CHANCES, Above, Chances, above_chance, chance_of
from mlmclm.results.intervals import NAN, TIE, all_equal, deviation, mean, student, within
from mlmclm.results.metrics import Rule
from mlmclm.seeds import Seed, Seeds

RULES: tuple[Rule, ...] = get_args(Rule)

CHOSEN_COLUMNS = {
    **columns("object: model task family metric setting"),
    **SEED_COLUMNS,
    **columns("float64: learning_rate validation test"),
}
CURVE_COLUMNS = columns(
    "object: model task metric",
    "float64: learning_rate",
    "int64: n diverged missing",
    "float64: validation_mean validation_low validation_high validation_sd test_mean test_low test_high test_sd",
)
BEST_COLUMNS = columns(
    "object: model task family metric rule setting",
    "float64: learning_rate",
    "object: learning_rates edge",
    "int64: n diverged missing",
    "float64: validation_mean test_mean test_sd score score_low score_high fresh fresh_low fresh_high p_chosen regret chance",
    "object: above_chance",
    "int64: constant",
    "bool: final",
    "object: note",
)


def check_rule(rule: str) -> Rule:
    """Return the rule with this name; raise a `UserError` if there is none."""
    for known in RULES:
        if rule == known:
            return known
    raise unknown("rule for the best learning rate", rule, RULES)


def _statistics(cells: Sequence[Record], limits: tuple[float, float], confidence: float) -> Record:
    """Return mean, interval and standard deviation of the cells' scores on both splits, by column.

    The interval stays within the score's range, `limits` (`intervals.within`).
    """
    found: Record = {}
    for split in ("validation", "test"):
        scores = [cell[split] for cell in cells]
        interval = within(student(scores, confidence=confidence), *limits)
        found |= {f"{split}_mean": interval.value, f"{split}_low": interval.low, f"{split}_high": interval.high}
        found[f"{split}_sd"] = deviation(scores)
    return found


def curve_table(
    cells: pd.DataFrame, grid: Grid, *, ranges: Ranges = NO_RANGES, confidence: float = 0.95
) -> pd.DataFrame:
    """Tabulate score against learning rate, one row per (model, task, learning rate) that has any cell.

    `n` is the number of scored seeds; `diverged` and `missing` count the others. Mean, interval and standard deviation of validation
    and test scores are taken over the scored seeds.
    """
    rows = []
    for (model, task), group in cells_by_pair(cells).items():
        for rate, members in by_rate(group).items():
            good = [cell for cell in members if scored(cell)]
            rows.append(
                {
                    "model": model,
                    "task": task,
                    "metric": members[0]["metric"],
                    "learning_rate": rate,
                    "n": len(good),
                    "diverged": sum(cell["status"] == "diverged" for cell in members),
                    "missing": len(wanted_seeds(grid) - {seeds_of(cell) for cell in members}),
                    **_statistics(good, ranges.get(task, ANY_SCORE), confidence),
                }
            )
    return table(rows, CURVE_COLUMNS)


def counting(group: Sequence[Record], runs: Runs | None, rule: Rule) -> list[Record]:
    """Return the cells of one (model, task) among which a rate is chosen (`Runs.counting`); all where no failed run is known of."""
    if runs is None:
        return list(group)
    rates, seeds, kept = list(runs.rates), list(runs.seeds), runs.counting(rule)
    return [cell for cell in group if kept[rates.index(cell["learning_rate"]), seeds.index(seeds_of(cell))]]


def resolved(
    cells: pd.DataFrame,
    grid: Grid,
    *,
    rule: Rule = "mean",
    fitted: Callable[[pd.DataFrame], Mapping[tuple[str, str], Runs]] = lambda _: {},
) -> pd.DataFrame:
    """Return the cells of each (model, task)'s best setting; all cells if there is only one setting.

    Args:
        fitted: gives the runs of cells `with_settings`, with those that failed.
    """
    if cells.groupby(["model", "task"])["setting"].nunique().max() == 1:
        return cells
    numbered = with_settings(cells, grid)
    runs = fitted(numbered)
    groups = cells_by_pair(numbered)
    best = {pair: _best_setting(counting(own, runs.get(pair), rule) or own, rule) for pair, own in groups.items()}
    kept = [best[row["model"], row["task"]] == row["setting"] for row in records(numbered)]
    return cells[kept].reset_index(drop=True)


def with_settings(cells: pd.DataFrame, grid: Grid) -> pd.DataFrame:
    """Return the cells with each setting's learning rates as rates of their own, which follow those of earlier settings.

    A setting is chosen with its rate, on the same scores, so a choice among all of them is the one that intervals are for.
    Settings are numbered in the grid's order; those that the grid no longer has follow.
    """
    beyond = 1 + float(cells["learning_rate"].max())
    present = {str(task): set(group) for task, group in cells.groupby("task")["setting"]}
    orders = {
        task: [*grid.settings_of(task), *sorted(own.difference(grid.settings_of(task)))]
        for task, own in present.items()
    }
    numbers = [orders[row["task"]].index(row["setting"]) for row in records(cells)]
    rates = cells["learning_rate"] + beyond * np.asarray(numbers, dtype=float)
    return cells.assign(learning_rate=rates, setting=[f"{number:06d}" for number in numbers])


def _best_setting(group: Sequence[Record], rule: Rule) -> str:
    """Return the best of the settings of one (model, task), given its cells by `with_settings`."""
    settings = grouped(group, "setting")
    if rule != "per_seed":
        picked = picked_cells(group, rule)
        return str(picked[0]["setting"] if picked else next(iter(settings)))
    best, most, top = "", -1, -math.inf
    for setting, members in settings.items():
        picked = picked_cells(members, rule)
        average = mean([cell["validation"] for cell in picked]) if picked else -math.inf
        # `picked_cells` returns one cell per scored seed.
        if len(picked) > most or (len(picked) == most and average > top + TIE):
            best, most, top = str(setting), len(picked), average
    return best


def _basis(rule: Rule) -> str:
    """Return the split whose scores choose."""
    return "test" if rule == "on_test" else "validation"


def _first_best(scores: dict[float, float]) -> float:
    # The smaller rate wins a tie; the tolerance keeps rounding from breaking it.
    top = max(scores.values())
    return min(rate for rate, score in scores.items() if score >= top - TIE)


def picked_cells(group: Sequence[Record], rule: Rule) -> list[Record]:
    """Return the scored cells of one (model, task) at the chosen learning rates, one per seed."""
    good = [cell for cell in group if scored(cell)]
    if rule != "per_seed":
        at_rate, eligible = by_rate(good), competing(group)
        means = {
            rate: mean([cell[_basis(rule)] for cell in members])
            for rate, members in at_rate.items()
            if rate in eligible
        }
        return at_rate[_first_best(means)] if means else []
    rates: dict[Seeds, dict[float, float]] = {}
    for cell in good:
        rates.setdefault(seeds_of(cell), {})[cell["learning_rate"]] = cell["validation"]
    # A seed without a score at any rate has no entry, so it drops out.
    best_of = {own: _first_best(scores) for own, scores in rates.items()}
    return [cell for cell in good if cell["learning_rate"] == best_of[seeds_of(cell)]]


def chosen_table(
    cells: pd.DataFrame, *, rule: Rule = "mean", runs: Mapping[tuple[str, str], Runs] = MappingProxyType({})
) -> pd.DataFrame:
    """Return the cells at the chosen learning rates that count (`counting`), one row per (model, task, seed).

    All later comparisons use these cells only.
    """
    groups = cells_by_pair(cells).items()
    rows = [cell for pair, group in groups for cell in picked_cells(counting(group, runs.get(pair), rule), rule)]
    return table(sorted(rows, key=lambda cell: (cell["model"], cell["task"], seeds_of(cell))), CHOSEN_COLUMNS)


def best_table(
    cells: pd.DataFrame,
    grid: Grid,
    *,
    effects: Mapping[tuple[str, str], Effect] = MappingProxyType({}),
    runs: Mapping[tuple[str, str], Runs] = MappingProxyType({}),
    rule: Rule = "mean",
    ranges: Ranges = NO_RANGES,
    chances: Chances = NO_CHANCES,
    constant: Callable[[Record], bool] = lambda _: False,
    not_run: Mapping[tuple[str, str], int] = MappingProxyType({}),
    confidence: float = 0.95,
) -> pd.DataFrame:
    """Tabulate the best learning rate of every (model, task) of the grid and the test score at it.

    Columns: `learning_rate` (NaN if there is none, or if seeds chose different ones), `learning_rates` (the same as
    text, with counts if they differ), `edge` ("", "lowest", "highest", or "only" if one rate was tried), `n` seeds
    that count, `diverged` and `missing` seeds at that rate (`per_seed`: seeds without any score), the mean of validation,
    the mean and standard deviation of test, and `note`.

    `score` is what the procedure delivers: the mean of test of those runs that learn, and `score_low` and `score_high` are its interval.
    `fresh` is the score of a fresh run at the chosen rate, with its own (`effects.effect`); both intervals hold the noise of the choice.
    `p_chosen` is the probability that other seeds would choose the same rate, on average over seeds under
    `per_seed`, and `regret` how much higher the best rate is expected to score.

    `chance` is the task's chance level, and `above_chance` says whether the score is above it (`chance.above_chance`).
    `constant` is the number of seeds that predict the same for every test example. `final` is False if cells of the
    (model, task) are still to be run, which may change the choice, or cells of any model on a task whose grid grows.

    Args:
        constant: whether a row of `cells` is that of a run that predicts the same for every test example.
        effects: the scores; those of absent pairs are NaN.
        runs: with those that failed; of absent pairs, none did.
        not_run: number of the grid's cells without a result, by (model, task).
    """
    groups = cells_by_pair(cells)
    # A model without results on a task takes the family and metric from other models' results.
    labels = {task: (group[0]["family"], group[0]["metric"]) for (_, task), group in groups.items()}
    unfinished = {task for (_, task), number in not_run.items() if number}
    rows = []
    for model, task in all_pairs(cells, grid):
        group = groups.get((model, task), [])
        kept = counting(group, runs.get((model, task)), rule)
        picked = picked_cells(kept, rule)
        family, metric = labels.get(task, ("", ""))
        taken = {cell["learning_rate"] for cell in picked}
        found = _statistics(picked, ranges.get(task, ANY_SCORE), confidence)
        own = effects.get((model, task), NO_EFFECT)
        limits = ranges.get(task, ANY_SCORE)
        whole, fresh = (within(own.score(confidence, fresh=each), *limits) for each in (False, True))
        score, low, level = whole.value, whole.low, chance_of(chances, [task])
        tried = list(by_rate(group))
        again = [float(own.chosen[tried.index(cell["learning_rate"])]) for cell in picked if len(own.chosen)]
        alike = sum(map(constant, picked))
        above = above_chance(score, low, level, constant=bool(picked) and alike == len(picked))
        left = not_run.get((model, task), 0)
        grows = grid.grows and task in unfinished
        diverged, missing = _lost_seeds(group, picked, wanted_seeds(grid), rule)
        rows.append(
            {
                "model": model,
                "task": task,
                "family": family,
                "metric": metric,
                "rule": rule,
                "setting": group[0]["setting"] if group else "",
                "learning_rate": next(iter(taken)) if len(taken) == 1 else NAN,
                "learning_rates": rates_text([cell["learning_rate"] for cell in picked]),
                "edge": _edge(group, kept, rule),
                "n": len(picked),
                "diverged": diverged,
                "missing": missing,
                **{name: found[name] for name in ("validation_mean", "test_mean", "test_sd")},
                "score": score,
                "score_low": low,
                "score_high": whole.high,
                "fresh": fresh.value,
                "fresh_low": fresh.low,
                "fresh_high": fresh.high,
                "p_chosen": mean(again),
                "regret": own.regret,
                "chance": level,
                "above_chance": above,
                "constant": alike,
                "final": not left and not grows,
                "note": "; ".join(_notes(group, picked, low, above_chance(score, low, level), alike, left, grows)),
            }
        )
    return table(rows, BEST_COLUMNS)


def best_rates(row: Record) -> str:
    """Return the best learning rates of a row of `best_table` as text, with the setting; it says so if they are not final."""
    rates = str(row["learning_rates"])
    said = f"{rates} (not final)" if rates and not row["final"] else rates
    return ", ".join(filter(None, (said, row["setting"])))


def _lost_seeds(group: Sequence[Record], picked: Sequence[Record], seeds: set[Seeds], rule: Rule) -> tuple[int, int]:
    """Count the seeds without a score at the chosen rate (under `per_seed`: at any rate) as (diverged, not run)."""
    rates = {cell["learning_rate"] for cell in (picked if rule != "per_seed" and picked else group)}
    there = [cell for cell in group if cell["learning_rate"] in rates]
    lost = (seeds | {seeds_of(cell) for cell in group}) - {seeds_of(cell) for cell in there if scored(cell)}
    diverged = lost & {seeds_of(cell) for cell in there if cell["status"] == "diverged"}
    return len(diverged), len(lost - diverged)


def _edge(group: Sequence[Record], kept: Sequence[Record], rule: Rule) -> str:
    if not any(map(scored, group)):
        return ""
    tried = {cell["learning_rate"] for cell in group}
    if len(tried) == 1:
        return "only"
    scores: dict[tuple[float, Seed], float | None] = {
        (cell["learning_rate"], seeds_of(cell)): cell[_basis(rule)] if scored(cell) and cell in kept else None
        for cell in group
    }
    found = ends(scores, tried, rule)
    return next((end for end in (HIGHEST, LOWEST) if end in found), "")


def rates_text(rates: Sequence[float]) -> str:
    """Format the learning rates of a model's seeds: 1e-4, or 1e-4 (4), 2e-4 (1) with seed counts if they differ."""
    taken = Counter(rates)
    if len(taken) == 1:
        return rate_text(next(iter(taken)))
    return ", ".join(f"{rate_text(rate)} ({count})" for rate, count in sorted(taken.items()))


def _notes(
    group: Sequence[Record], picked: Sequence[Record], low: float, above: Above, alike: int, left: int, grows: bool
) -> Iterator[str]:
    if not group:
        yield "no cell was run"
        return
    if not picked:
        yield "every cell diverged" if all(cell["status"] == "diverged" for cell in group) else "no cell has a score"
    elif math.isnan(low) and len(picked) == 1:
        yield "one seed: no interval"
    elif math.isnan(low) and all_equal([cell["test"] for cell in picked]):
        yield "equal scores: no interval"
    if alike:
        seeds = "" if alike == len(picked) else f" with {alike} of {len(picked)} seeds"
        yield f"predicts the same for every example{seeds}"
    if above == "no":
        yield "not above chance"
    if left:
        yield f"not final: {left} {'cell' if left == 1 else 'cells'} not run"
    elif grows:
        yield "not final: cells of other models, not run, may add learning rates"
