"""Comparison of models on single tasks, task families and the mean over tasks.

Every model is taken at its own best learning rate. The models of a study are fine-tuned with the same seeds, which fix
the data order and the initial weights of the new head, but they start from different weights. Whether this correlates
their scores is unknown, so scores are not paired: the interval of a difference is Welch's. Pairing would narrow the
interval if the scores were correlated, and mislead if they were not.

The mean over tasks gives every task the same weight; `contrasts` computes its variance. These intervals cover the noise of
fine-tuning seeds and of the choice of the rate, and that of the finite test sets where the predictions are known (`effects`).
They cover the noise of pretraining where models were pretrained several times (`replicates`).

**Order of the tests.** The error of 5 % is divided among the pairs of models. Within a pair, the mean over tasks is tested first, at nine tenths
of the pair's level. Once it is shown to differ, single tasks and families are tested at the pair's full level, with Holm's method. Before
that they are tested at the last tenth, so that two models of equal means that differ greatly on single tasks are found too. A pair of which
all tests show a difference passes its level on to the others (`gatekept`). So at most 5 % of studies of equal models show any difference.

Two models whose scores differ by less than half a hundredth of a point, which is shown as 0.00, are tied: neither is ahead. A verdict
is never based on scores at chance (`chance`): if a model leads on a task, but is not above chance there, its lead counts as 0.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence, Set

import numpy as np
import pandas as pd
from scipy import special

from mlmclm.analysis.contrasts import Effects, mean_difference, weighted_sum
from mlmclm.analysis.effects import NO_EFFECT
from mlmclm.analysis.results import ANY_SCORE, NO_RANGES, Ranges, Record, columns, records, table
from mlmclm.results.chance import NO_CHANCES, Chances, above_chance, chance_of
from mlmclm.results.intervals import NAN, Estimate, within

ALL_TASKS = "all tasks"
OF_TASKS = 0.1
"""Share of a pair's level at which its single tasks and families are tested before its means over tasks are shown to differ."""
SHOWN = 5e-5
"""Smallest difference that is not shown as 0.00 points."""

OVERALL_COLUMNS = columns(
    "object: kind scope model",
    "int64: tasks tasks_scored",
    "float64: mean low high error freedom chance",
    "object: above_chance",
)
COMPARISON_COLUMNS = columns(
    "object: kind scope model_a model_b",
    "int64: tasks tasks_scored",
    "float64: difference low high error freedom p p_holm p_verdict",
    "int64: tests",
    "bool: above_chance",
)

Pairs = Set[tuple[str, str]]
"""Some (model, task) pairs."""


def tied(difference: float) -> bool:
    """Return whether a difference of scores is shown as 0.00 points; False if it is unknown."""
    return abs(difference) < SHOWN


def scopes(families: dict[str, str]) -> list[tuple[str, str, list[str]]]:
    """List what models are compared on as (kind, scope, tasks): every task, every family with several, all together.

    Args:
        families: the family of each task, by task name.
    """
    entries = [("task", task, [task]) for task in sorted(families)]
    for family in sorted(set(families.values())):
        members = sorted(task for task, task_family in families.items() if task_family == family)
        # A family of one task would repeat that task, and a family of all tasks the overall mean.
        if 1 < len(members) < len(families):
            entries.append(("family", family, members))
    return [*entries, ("all", ALL_TASKS, sorted(families))]


def holm_level(kind: str, families: dict[str, str], models: int, confidence: float) -> float:
    """Return the level of the first step of the correction (`gatekept`) for one pair of models on a scope of this kind.

    For a task or family, it is the level once the pair's means over tasks are shown to differ.
    """
    counts = Counter(scope_kind for scope_kind, _, _ in scopes(families))
    level = (1 - confidence) / max(1, math.comb(models, 2))
    if len(families) == 1:
        return level
    return level * (1 - OF_TASKS) if kind == "all" else level / (counts["task"] + counts["family"])


def gatekept(pairs: Sequence[tuple[float, Sequence[float]]]) -> list[tuple[float, list[float]]]:
    """Adjust the p values of pairs of models: for each pair, that of the mean over tasks, and those of single tasks and families.

    It is a graphical procedure (Bretz et al. 2009), which is valid however the tests depend on each other. NaN values stay NaN and
    don't count as tests.
    """
    in_pair = [_within(p_all, p_rest) for p_all, p_rest in pairs]
    last = sorted(max(ps) for p_all, p_rest in in_pair if (ps := [p for p in (p_all, *p_rest) if not math.isnan(p)]))
    pairs_left = np.arange(len(last), 0, -1)
    levels = np.maximum.accumulate([0.0, *pairs_left * last])[:-1]  # at which all tests of 0, 1, ... pairs reject

    def over_pairs(p: float) -> float:
        return p if math.isnan(p) else float(np.maximum(levels, pairs_left * p).min(initial=1.0))

    return [(over_pairs(p_all), [over_pairs(p) for p in p_rest]) for p_all, p_rest in in_pair]


def _within(p_all: float, p_rest: Sequence[float]) -> tuple[float, list[float]]:
    """Adjust the p values of one pair as if it were the only one."""
    untested = sorted((p, index) for index, p in enumerate(p_rest) if not math.isnan(p))
    adjusted, adjusted_all, running = [NAN] * len(p_rest), NAN, 0.0
    is_open = not math.isnan(p_all)
    while untested or is_open:
        of_mean = p_all / (1 - OF_TASKS if untested else 1.0) if is_open else math.inf
        of_task = untested[0][0] * len(untested) / (OF_TASKS if is_open else 1.0) if untested else math.inf
        running = min(1.0, max(running, min(of_mean, of_task)))
        if of_mean <= of_task:
            adjusted_all, is_open = running, False
        else:
            adjusted[untested.pop(0)[1]] = running
    return adjusted_all, adjusted


def overall_table(
    effects: Effects,
    models: Sequence[str],
    families: dict[str, str],
    *,
    ranges: Ranges = NO_RANGES,
    chances: Chances = NO_CHANCES,
    confidence: float = 0.95,
) -> pd.DataFrame:
    """Compute every model's mean over all tasks (kind "all") and over every family with several tasks (kind "family").

    Each interval stays within the range of the tasks' scores (`intervals.within`). A model without a score on some task
    of the scope has no mean there (NaN), because a mean over fewer tasks would not be comparable. `chance` is the mean
    of the tasks' chance levels, and `above_chance` says whether the mean is above it.
    """
    rows = []
    for kind, scope, tasks in scopes(families):
        if kind == "task":
            continue
        level = chance_of(chances, tasks)
        for model in sorted(models):
            scored = sum(not math.isnan(effects.get((model, task), NO_EFFECT).seeds.value) for task in tasks)
            limits = [ranges.get(task, ANY_SCORE) for task in tasks]
            # The mean of scores with different ranges ranges between the means of their limits.
            lowest, highest = (sum(ends) / len(tasks) for ends in zip(*limits, strict=True))
            overall = weighted_sum(effects, {task: {model: 1 / len(tasks)} for task in tasks}, confidence).whole
            estimate = within(overall, lowest, highest)
            rows.append(
                {
                    "kind": kind,
                    "scope": scope,
                    "model": model,
                    "tasks": len(tasks),
                    "tasks_scored": scored,
                    "mean": estimate.value,
                    **vars(estimate),
                    "chance": level,
                    "above_chance": above_chance(estimate.value, estimate.low, level),
                }
            )
    return table(rows, OVERALL_COLUMNS)


def comparison_table(
    effects: Effects,
    models: Sequence[str],
    families: dict[str, str],
    *,
    at_chance: Pairs = frozenset(),
    confidence: float = 0.95,
) -> pd.DataFrame:
    """Compare every pair of models on every scope: model_a minus model_b, where model_a comes first alphabetically.

    `low` and `high` bound Welch's interval, and `p` is its two-sided p value; they are NaN where the noise is not known
    (one seed, or seeds with equal scores). `p_holm` is that value corrected over all pairs of models and
    scopes, the mean over tasks first (`gatekept`); `tests` is the number of tests of the row's kind. The difference is
    NaN unless both models have a score on every task of the scope.

    A verdict must not depend on tasks on which the model that is ahead leads without being above chance, so for verdicts
    the difference on these tasks counts as 0. `above_chance` says whether there are no such tasks, or the interval still
    excludes 0 then. `p_verdict` is `p_holm` for the differences that are reduced in this way, corrected over as many tests; it is 1
    if no lead is left.

    Args:
        at_chance: the (model, task) pairs whose scores are not above chance.
    """
    rows: list[Record] = []
    tested: list[float] = []
    for kind, scope, tasks in scopes(families):
        for a, b in itertools.combinations(sorted(models), 2):
            difference = mean_difference(effects, (a, b), tasks, confidence).whole
            sound = _sound(effects, (a, b), tasks, difference, at_chance, confidence)
            rows.append(
                {
                    "kind": kind,
                    "scope": scope,
                    "model_a": a,
                    "model_b": b,
                    "tasks": len(tasks),
                    "tasks_scored": sum(not math.isnan(_lead(effects, (a, b), task)) for task in tasks),
                    "difference": difference.value,
                    **vars(difference),
                    "above_chance": sound is difference or sound.low > 0,
                }
            )
            tested.append(_p_of_verdict(difference, sound))
    p_holm, p_verdict = _adjusted(rows, [row["p"] for row in rows]), _adjusted(rows, tested)
    counts = Counter(row["kind"] for row in rows if not math.isnan(row["p"]))
    rows = [
        row | {"p_holm": holm, "p_verdict": verdict, "tests": counts[row["kind"]]}
        for row, holm, verdict in zip(rows, p_holm, p_verdict, strict=True)
    ]
    return table(rows, COMPARISON_COLUMNS)


def _adjusted(rows: Sequence[Record], values: Sequence[float]) -> list[float]:
    """Return the adjusted p values of the rows, given their p values. With one task, the rows of the mean over tasks repeat those of the task."""
    indices: dict[tuple[str, str], list[int]] = {}
    for i, row in enumerate(rows):
        indices.setdefault((row["model_a"], row["model_b"]), []).append(i)
    several = len({row["scope"] for row in rows}) > 2
    pairs = [(values[index[-1]] if several else NAN, [values[i] for i in index[:-1]]) for index in indices.values()]
    adjusted = [NAN] * len(rows)
    for index, (p_all, p_rest) in zip(indices.values(), gatekept(pairs), strict=True):
        for i, value in zip(index, [*p_rest, p_all if several else p_rest[0]], strict=True):
            adjusted[i] = value
    return adjusted


def _lead(effects: Effects, pair: tuple[str, str], task: str) -> float:
    """Return the difference of two models' scores on one task."""
    first, second = (effects.get((model, task), NO_EFFECT).seeds.value for model in pair)
    return first - second


def _sound(
    effects: Effects,
    pair: tuple[str, str],
    tasks: Sequence[str],
    difference: Estimate,
    at_chance: Pairs,
    confidence: float,
) -> Estimate:
    """Return the lead of the model that is ahead, with 0 on the tasks on which it leads without being above chance.

    Without such tasks, return `difference` itself. The estimate is NaN if there are no other tasks.
    """
    ahead, behind = pair if difference.value > 0 else pair[::-1]
    doubtful = [task for task in tasks if (ahead, task) in at_chance and _lead(effects, (ahead, behind), task) > 0]
    if not doubtful:
        return difference
    sound_tasks = [task for task in tasks if task not in doubtful]
    return mean_difference(effects, (ahead, behind), sound_tasks, confidence, len(tasks)).whole


def _p_of_verdict(difference: Estimate, sound: Estimate) -> float:
    """Return the p value of `_sound`: NaN where the whole difference has none, and 1 if nothing of the lead is left."""
    if sound is difference or math.isnan(difference.p):
        return difference.p
    return sound.p if sound.value > 0 and not math.isnan(sound.p) else 1.0


def clearly_different(row: Record, confidence: float) -> bool:
    """Return whether a verdict can be based on a comparison: Holm's p is below 1 - confidence, also if leads at chance count as 0."""
    # False for NaN, which means that there is no interval.
    return bool(max(row["p_holm"], row["p_verdict"]) < 1 - confidence)


def low_of_best(row: Record, number: int, confidence: float) -> float:
    """Return the lower end of the best model's interval, corrected for its choice among `number` models.

    The highest score owes some of its height to luck. A lower end by Bonferroni's method holds for all models at once, so also for the
    one that was chosen. It is enough to count the models that may be the best: the chosen one and those not clearly different from it
    (Zrnic and Fithian 2024, locally simultaneous inference).

    Args:
        row: the best model's row of `overall_table`.
    """
    for_one, among = (float(special.stdtrit(row["freedom"], 1 - (1 - confidence) / 2 / count)) for count in (1, number))
    return float(row["mean"] - (row["mean"] - row["low"]) * among / for_one)


def against(comparisons: pd.DataFrame, model: str) -> list[Record]:
    """Return the comparisons of one model with all others, with signs flipped so that `model_a` is that model."""
    turned = []
    of_model = (comparisons["model_a"] == model) | (comparisons["model_b"] == model)
    for row in records(comparisons[of_model]):
        if row["model_b"] == model:
            signs = {"difference": -row["difference"], "low": -row["high"], "high": -row["low"]}
            turned.append(row | signs | {"model_a": model, "model_b": row["model_a"]})
        else:
            turned.append(row)
    return turned
