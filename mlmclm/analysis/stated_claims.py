"""Claims about models in a line of text, and whether the results show them.

`A > B` says that model A scores higher than model B, and `A steadier than B` that its score depends less on the learning
rate. `on SCOPE` after it names a task or a family of tasks; without it, the first is about the mean over tasks and the second
about every task.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from itertools import product
from typing import Literal, NamedTuple

from mlmclm.analysis.analyse import Analysis
from mlmclm.analysis.comparison import ALL_TASKS, against
from mlmclm.analysis.results import Record, records
from mlmclm.errors import UserError, unknown

_FORM = re.compile(r"\s*(?P<first>\S+)\s+(?P<how>>|steadier than)\s+(?P<second>\S+?)(\s+on\s+(?P<scope>.+?))?\s*")

Shown = Literal[-1, 0, 1]
"""Whether results show a claim (1), its opposite (-1), or neither."""


class Verdict(NamedTuple):
    """A claim's verdict by the results."""

    verdict: Literal["holds", "in part", "does not hold", "unknown"]
    reason: str


def stated_claim(claim: str, analysis: Analysis) -> Verdict:
    """Return the verdict on a claim such as `1m-mlm40-1k > 1m-clm-1k on sst2`.

    A higher score is shown if Holm's p value over all comparisons of the study is below 1 - confidence, above chance only.
    A steadier score is shown if the intervals of `sd_rates` don't overlap (`stability.stability_table`), for scores at the same
    learning rates; of models with several pretraining runs, those of each two runs.

    Raises:
        UserError: the claim has another form, names a model, task or family that the study lacks, or one pretraining run of a model.
    """
    found = _FORM.fullmatch(claim)
    if found is None:
        raise UserError(
            f"claim {claim!r}: expected `A > B` or `A steadier than B`, with `on TASK` after it where it is about one task."
        )
    first, second, scope = found["first"], found["second"], found["scope"]
    for name in (first, second):
        if name not in analysis.models:
            raise unknown("model", name, list(analysis.groups), where=f"claim {claim!r}")
        for model, runs in analysis.groups.items():
            if name in runs and name != model:
                raise UserError(
                    f"claim {claim!r}: {name} is a pretraining run of {model}, and models are compared over their runs; name {model}."
                )
    if first == second:
        raise UserError(f"claim {claim!r}: it compares a model with itself.")
    judge = _higher if found["how"] == ">" else _steadier
    return judge(first, second, scope, claim, analysis)


def _higher(first: str, second: str, scope: str | None, claim: str, analysis: Analysis) -> Verdict:
    rows = {row["scope"]: row for row in against(analysis.comparisons, first) if row["model_b"] == second}
    families = set(analysis.families.values())
    if scope is None or families == {scope}:  # the only family has no rows of its own: it is all tasks
        scope = ALL_TASKS if len(analysis.families) > 1 else next(iter(analysis.families))
    if scope not in rows:
        raise unknown("task or family", scope, rows, where=f"claim {claim!r}")
    row = rows[scope]
    if math.isnan(row["difference"]):
        return Verdict("unknown", f"not both have a score on {scope}")
    said = f"{100 * row['difference']:+.2f} points"
    if math.isnan(row["low"]):
        return Verdict("unknown", f"{said}, but the noise of seeds is not known")
    p = max(row["p_holm"], row["p_verdict"])
    tasks = [task for task, family in analysis.families.items() if scope in (ALL_TASKS, family, task)]
    said += f" [{100 * row['low']:+.2f}, {100 * row['high']:+.2f}], p {p:.2g} after Holm's correction"
    said += so_far(analysis, (first, second), tasks)
    if p >= 1 - analysis.confidence:
        return Verdict("unknown", f"{said}: not told apart")
    return Verdict("holds" if row["difference"] > 0 else "does not hold", said)


def _steadier(first: str, second: str, scope: str | None, claim: str, analysis: Analysis) -> Verdict:
    tasks = sorted(analysis.families)
    if scope is not None:
        tasks = [task for task in tasks if scope in (task, analysis.families[task])]
        if not tasks:
            raise unknown(
                "task or family",
                scope,
                sorted({*analysis.families, *analysis.families.values()}),
                where=f"claim {claim!r}",
            )
    rows = {(row["model"], row["task"]): row for row in records(analysis.stability)}
    verdicts, reasons = [], []
    runs = list(product(analysis.groups[first], analysis.groups[second]))
    for task, (one, other) in product(tasks, runs):
        place = task if len(runs) == 1 else f"{one} and {other} on {task}"
        pair = rows.get((one, task)), rows.get((other, task))
        unlike = _scored_rates(analysis, one, task) != _scored_rates(analysis, other, task)
        if pair[0] is None or pair[1] is None or unlike or any(math.isnan(row["sd_rates_high"]) for row in pair if row):
            reasons.append(f"{place}: {'they have scores at different rates' if unlike else 'not known'}")
            verdicts.append(0)
            continue
        verdicts.append(_apart(pair[0], pair[1]))
        spreads = " against ".join(map(_spread, (pair[0], pair[1])))
        reasons.append(f"{place}: {spreads} points{'' if verdicts[-1] else ', not told apart'}")
    reason = f"deviation over learning rates: {'; '.join(reasons)}{so_far(analysis, (first, second), tasks)}"
    if -1 in verdicts:
        return Verdict("in part" if 1 in verdicts else "does not hold", reason)
    if 1 in verdicts:
        return Verdict("holds" if 0 not in verdicts else "in part", reason)
    return Verdict("unknown", reason)


def so_far(analysis: Analysis, models: Collection[str], tasks: Collection[str]) -> str:
    """Say how many cells of some models on some tasks have no result yet, to end a clause; empty if there are none."""
    runs = {run for model in models for run in analysis.groups[model]}
    rows = [row for row in records(analysis.coverage) if row["model"] in runs and row["task"] in tasks]
    number = sum(row["missing"] for row in rows)
    return f", so far ({number:,} {'cell has' if number == 1 else 'cells have'} no result yet)" if number else ""


def _scored_rates(analysis: Analysis, model: str, task: str) -> list[float]:
    """Return the learning rates at which a model has a score; empty if it has no cell."""
    runs = analysis.runs.get((model, task))
    return [] if runs is None else [rate for rate, scored in zip(runs.rates, runs.present, strict=True) if scored.any()]


def _apart(one: Record, other: Record) -> Shown:
    """Return whether the interval of one row's sensitivity lies below (1) or above (-1) that of the other."""
    if one["sd_rates_high"] < other["sd_rates_low"]:
        return 1
    return -1 if one["sd_rates_low"] > other["sd_rates_high"] else 0


def _spread(row: Record) -> str:
    return f"{100 * row['sd_rates']:.2f} [{100 * row['sd_rates_low']:.2f}, {100 * row['sd_rates_high']:.2f}]"
