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
- **Lost runs.** Runs that diverged, failed (`failed_runs`) or have no score are left out before the choice: the score is that of runs that
  learn. A rate at which more than half are lost does not compete, unless no rate loses fewer (`simulated_choices.competes`). If every cell is
  lost there is no best rate, and the table says so. Cells that were not run yet are not lost: the mean is over those that have a result.
- **Settings.** If a grid varies other settings too (weight decay, epochs), the best setting of each (model, task) is that of
  the best combination of setting and rate. Under `per_seed`, it is the one with the most scored seeds, then the one with the highest
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
from mlmclm.analysis.model_runs import Runs, runs_of
from mlmclm.analysis.results import (
    ANY_SCORE,
    NO_RANGES,
    SEED_COLUMNS,
    Grid,
    Pairs,
    Ranges,
    Record,
    all_pairs,
    columns,
    scored,
    seeds_of,
    table,
    wanted_seeds,
)
from mlmclm.analysis.simulated_choices import choose, rate_means
from mlmclm.errors import unknown
from mlmclm.numbers import rate_text
from mlmclm.results.chance import NO_CHANCES, Above, Chances, above_chance, chance_of
from mlmclm.results.intervals import NAN, TIE, all_equal, deviation, mean, student, within
from mlmclm.results.measures import Array
from mlmclm.results.metrics import Rule
from mlmclm.seeds import Seeds

RULES: tuple[Rule, ...] = get_args(Rule)

CHOSEN_COLUMNS = {
    **columns("object: model task family metric setting"),
    **SEED_COLUMNS,
    **columns("float64: learning_rate validation test"),
}
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
    for name in RULES:
        if rule == name:
            return name
    raise unknown("rule for the best learning rate", rule, RULES)


def of_both_splits(cells: Sequence[Record], limits: tuple[float, float], confidence: float) -> Record:
    """Return mean, interval and standard deviation of the cells' scores on both splits, by column.

    The interval stays within the score's range, `limits` (`intervals.within`).
    """
    row: Record = {}
    for split in ("validation", "test"):
        scores = [cell[split] for cell in cells]
        interval = within(student(scores, confidence=confidence), *limits)
        row |= {f"{split}_mean": interval.value, f"{split}_low": interval.low, f"{split}_high": interval.high}
        row[f"{split}_sd"] = deviation(scores)
    return row


def with_settings(pairs: Pairs, grid: Grid) -> Pairs:
    """Return the cells with a number added to each setting's learning rates, so that settings don't share rates.

    Setting and rate are chosen together, on the same scores, so intervals must cover the choice among all combinations.
    Settings are numbered in the grid's order; those that the grid no longer has follow. Where no (model, task) has several
    settings, the cells are returned unchanged.
    """
    if all(len({cell["setting"] for cell in group}) == 1 for group in pairs.values()):
        return pairs
    cells = [cell for group in pairs.values() for cell in group]
    beyond = 1 + max(cell["learning_rate"] for cell in cells)
    orders = {task: list(grid.settings_of(task)) for _, task in pairs}
    for task, setting in sorted({(cell["task"], cell["setting"]) for cell in cells}):
        orders[task] += [] if setting in orders[task] else [setting]

    def numbered(cell: Record) -> Record:
        number = orders[cell["task"]].index(cell["setting"])
        return cell | {"learning_rate": cell["learning_rate"] + beyond * number, "setting": f"{number:06d}"}

    return {pair: list(map(numbered, group)) for pair, group in pairs.items()}


def best_setting(runs: Runs, rule: Rule) -> Array:
    """Return which rates of a model on a task are those of its best setting, [R], given the runs of the cells from `with_settings`."""
    if runs.settings is None:
        return np.ones(len(runs.rates), bool)
    picked, counts = choose(runs.validation, runs.test, runs.counting(rule), rule, runs.settings)
    best = runs.settings[picked[counts][0]] if counts.any() else 0
    return np.asarray(runs.settings == best)


def picked_cells(group: Sequence[Record], rule: Rule, runs: Runs | None = None) -> list[Record]:
    """Return the cells of one (model, task) at the chosen learning rates that count, one per seed, in the order of the seeds.

    Args:
        runs: the cells as arrays, with failed runs marked; by default none has failed.
    """
    if not group:
        return []
    runs = runs or runs_of(group)
    picked, counts = choose(runs.validation, runs.test, runs.counting(rule), rule)
    rates = {seeds: runs.rates[index] for seeds, index, use in zip(runs.seeds, picked, counts, strict=True) if use}
    return sorted((cell for cell in group if cell["learning_rate"] == rates.get(seeds_of(cell))), key=seeds_of)


def chosen_table(picked: Pairs) -> pd.DataFrame:
    """Return the cells at the chosen learning rates (`picked_cells`), one row per (model, task, seed).

    All later comparisons use these cells only.
    """
    return table([cell for _, cells in sorted(picked.items()) for cell in cells], CHOSEN_COLUMNS)


def best_table(
    pairs: Pairs,
    runs: Mapping[tuple[str, str], Runs],
    picked_of: Pairs,
    grid: Grid,
    *,
    effects: Mapping[tuple[str, str], Effect] = MappingProxyType({}),
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

    `score` is what the procedure delivers: the mean test score of the chosen runs that learn, with its interval `score_low` to `score_high`.
    `fresh` is the score of a fresh run at the chosen rate, with its interval (`effects.effect`). Both intervals cover the noise of the choice.
    `p_chosen` is the probability that other seeds would choose the same rate, on average over seeds under
    `per_seed`, and `regret` how much higher the best rate is expected to score.

    `chance` is the task's chance level, and `above_chance` says whether the score is above it (`chance.above_chance`).
    `constant` is the number of seeds that predict the same for every test example. `final` is False if the choice may still
    change: cells of the (model, task) are still to be run, or cells of any model on a task whose grid grows.

    Args:
        pairs, runs: the cells, and the same as arrays, with failed runs marked.
        picked_of: the cells at the chosen rates (`picked_cells`).
        constant: whether a cell is that of a run that predicts the same for every test example.
        effects: the scores; those of absent pairs are NaN.
        not_run: number of the grid's cells without a result, by (model, task).
    """
    # A model without results on a task takes the family and metric from other models' results.
    labels = {task: (group[0]["family"], group[0]["metric"]) for (_, task), group in pairs.items()}
    unfinished = {task for (_, task), number in not_run.items() if number}
    rows = []
    for model, task in all_pairs(pairs, grid):
        group, picked = pairs.get((model, task), []), picked_of.get((model, task), [])
        family, metric = labels.get(task, ("", ""))
        taken = {cell["learning_rate"] for cell in picked}
        splits = of_both_splits(picked, ranges.get(task, ANY_SCORE), confidence)
        effect = effects.get((model, task), NO_EFFECT)
        limits = ranges.get(task, ANY_SCORE)
        delivered, fresh = (within(effect.score(confidence, fresh=is_fresh), *limits) for is_fresh in (False, True))
        score, low, level = delivered.value, delivered.low, chance_of(chances, [task])
        indices = [runs[model, task].rates.index(cell["learning_rate"]) for cell in picked]
        probabilities = effect.chosen[indices].tolist() if len(effect.chosen) else []
        same = sum(map(constant, picked))
        above = above_chance(score, low, level, constant=bool(picked) and same == len(picked))
        to_run = not_run.get((model, task), 0)
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
                "edge": _edge(runs[model, task], rule) if group else "",
                "n": len(picked),
                "diverged": diverged,
                "missing": missing,
                **{name: splits[name] for name in ("validation_mean", "test_mean", "test_sd")},
                "score": score,
                "score_low": low,
                "score_high": delivered.high,
                "fresh": fresh.value,
                "fresh_low": fresh.low,
                "fresh_high": fresh.high,
                "p_chosen": mean(probabilities),
                "regret": effect.regret,
                "chance": level,
                "above_chance": above,
                "constant": same,
                "final": not to_run and not grows,
                "note": "; ".join(
                    (
                        *_notes(group, picked, low, above_chance(score, low, level), same, to_run, grows),
                        *_tie(runs.get((model, task)), taken, rule),
                    )
                ),
            }
        )
    return table(rows, BEST_COLUMNS)


def best_rates(row: Record) -> str:
    """Return the best learning rates of a row of `best_table` as text, with the setting, and marked if they are not final."""
    rates = str(row["learning_rates"])
    text = f"{rates} (not final)" if rates and not row["final"] else rates
    return ", ".join(filter(None, (text, row["setting"])))


def _lost_seeds(group: Sequence[Record], picked: Sequence[Record], seeds: set[Seeds], rule: Rule) -> tuple[int, int]:
    """Count the seeds without a score at the chosen rate (under `per_seed`: at any rate) as (diverged, not run)."""
    rates = {cell["learning_rate"] for cell in (picked if rule != "per_seed" and picked else group)}
    at_rates = [cell for cell in group if cell["learning_rate"] in rates]
    lost = (seeds | {seeds_of(cell) for cell in group}) - {seeds_of(cell) for cell in at_rates if scored(cell)}
    diverged = lost & {seeds_of(cell) for cell in at_rates if cell["status"] == "diverged"}
    return len(diverged), len(lost - diverged)


def _edge(runs: Runs, rule: Rule) -> str:
    if not runs.present.any():
        return ""
    if len(runs.rates) == 1:
        return "only"
    scores, counted = runs.test if rule == "on_test" else runs.validation, runs.counting(rule)
    best_ends = ends(
        {
            (runs.rates[rate], runs.seeds[seed]): float(scores[rate, seed]) if counted[rate, seed] else None
            for rate, seed in np.argwhere(runs.every).tolist()
        },
        runs.rates,
        rule,
    )
    return next((end for end in (HIGHEST, LOWEST) if end in best_ends), "")


def _tie(runs: Runs | None, taken: set[float], rule: Rule) -> Iterator[str]:
    """Yield a note if other rates have the same mean as the chosen one on the split that chooses; the lowest is taken."""
    if runs is None or rule == "per_seed" or not taken:
        return
    means = rate_means(runs.test if rule == "on_test" else runs.validation, runs.counting(rule))
    tied = [runs.rates[index] for index in np.flatnonzero(means >= means.max() - TIE).tolist()]
    if rates := [rate_text(rate) for rate in tied if rate not in taken]:
        yield f"level on {'test' if rule == 'on_test' else 'validation'} with {', '.join(rates)}, the lowest is taken"


def rates_text(rates: Sequence[float]) -> str:
    """Format the learning rates of a model's seeds: 1e-4, or 1e-4 (4), 2e-4 (1) with seed counts if they differ."""
    taken = Counter(rates)
    if len(taken) == 1:
        return rate_text(next(iter(taken)))
    return ", ".join(f"{rate_text(rate)} ({count})" for rate, count in sorted(taken.items()))


def _notes(
    group: Sequence[Record], picked: Sequence[Record], low: float, above: Above, same: int, to_run: int, grows: bool
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
    if same:
        seeds = "" if same == len(picked) else f" with {same} of {len(picked)} seeds"
        yield f"predicts the same for every example{seeds}"
    if above == "no":
        yield "not above chance"
    if to_run:
        yield f"not final: {to_run} {'cell' if to_run == 1 else 'cells'} not run"
    elif grows:
        yield "not final: cells of other models, not run, may add learning rates"
