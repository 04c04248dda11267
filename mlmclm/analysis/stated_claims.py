"""Claims about models in a line of text, and whether the results show them.

`A > B` says that model A scores higher than model B, and `A steadier than B` that its score depends less on the learning
rate. `on SCOPE` after it names a task or a family of tasks; without it, `A > B` is about the mean over tasks, and
`A steadier than B` about every task.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from functools import partial
from itertools import product
from typing import Literal, NamedTuple

from mlmclm.analysis.analyse import Analysis
from mlmclm.analysis.claim_sensitivities import RateVariance, rate_variance, sensitivity_test
from mlmclm.analysis.comparison import ALL_TASKS, against
from mlmclm.analysis.contrasts import PairOnTask
from mlmclm.analysis.results import Record, records
from mlmclm.errors import UserError, unknown
from mlmclm.numbers import rate_text
from mlmclm.results.intervals import holm

_FORM = re.compile(r"\s*(?P<first>\S+)\s+(?P<how>>|steadier than)\s+(?P<second>\S+?)(\s+on\s+(?P<scope>.+?))?\s*")


class Verdict(NamedTuple):
    """A claim's verdict by the results."""

    verdict: Literal["holds", "in part", "does not hold", "unknown"]
    reason: str


def stated_claim(claim: str, analysis: Analysis) -> Verdict:
    """Return the verdict on a claim such as `1m-mlm40-1k > 1m-clm-1k on sst2`.

    A higher score is shown if Holm's p value over all comparisons of the study is below 1 - confidence; leads at chance don't count.
    A steadier score is shown by a test against simulated studies (`claim_sensitivities`), with Holm's correction over tasks. Both models need scores at the
    same learning rates, with several runs at each. Models with several pretraining runs are compared run by run, in all pairs.

    Raises:
        UserError: the claim has another form, names a model, task or family that the study lacks, or one pretraining run of a model.
    """
    match = _FORM.fullmatch(claim)
    if match is None:
        raise UserError(
            f"claim {claim!r}: expected `A > B` or `A steadier than B`, with `on TASK` after it where it is about one task."
        )
    first, second, scope = match["first"], match["second"], match["scope"]
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
    judge = _higher if match["how"] == ">" else _steadier
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
    text = f"{100 * row['difference']:+.2f} points"
    if math.isnan(row["low"]):
        return Verdict("unknown", f"{text}, but the noise of seeds is not known")
    p = max(row["p_holm"], row["p_verdict"])
    tasks = [task for task, family in analysis.families.items() if scope in (ALL_TASKS, family, task)]
    text += f" [{100 * row['low']:+.2f}, {100 * row['high']:+.2f}], p {p:.2g} after Holm's correction"
    text += so_far(analysis, (first, second), tasks)
    if p >= 1 - analysis.confidence:
        return Verdict("unknown", f"{text}: no clear difference")
    return Verdict("holds" if row["difference"] > 0 else "does not hold", text)


def _steadier(first: str, second: str, scope: str | None, claim: str, analysis: Analysis) -> Verdict:
    tasks = sorted(analysis.families)
    if scope is not None:
        tasks = [task for task in tasks if scope in (task, analysis.families[task])]
        if not tasks:
            scopes = sorted({*analysis.families, *analysis.families.values()})
            raise unknown("task or family", scope, scopes, where=f"claim {claim!r}")
    rows = {(row["model"], row["task"]): row for row in records(analysis.stability)}
    tests: list[tuple[str, float, bool]] = []
    runs = list(product(analysis.groups[first], analysis.groups[second]))
    for task, pair in product(tasks, runs):
        where = task if len(runs) == 1 else f"{pair[0]} and {pair[1]} on {task}"
        variances = [variance for name in pair if (variance := _variance(analysis, name, task)) is not None]
        unlike = _scored_rates(analysis, pair[0], task) != _scored_rates(analysis, pair[1], task)
        single = sorted({rate for variance in variances for rate in variance.single})
        if unlike or len(variances) < 2 or single or any(math.isnan(rows[name, task]["sd_rates"]) for name in pair):
            note = f"no verdict, as a rate has one run ({', '.join(map(rate_text, single))})" if single else "not known"
            tests.append((f"{where}: {'they have scores at different rates' if unlike else note}", math.nan, False))
            continue
        test = sensitivity_test(partial(_variance, analysis), [PairOnTask(*pair, task, 1.0)])
        spreads = " against ".join(_spread(rows[name, task]) for name in pair)
        tests.append((f"{where}: {spreads} points", test.p, test.first < test.second))
    corrected = holm([p for _, p, _ in tests])
    signs = [
        0 if not p < 1 - analysis.confidence else 1 if lower else -1
        for p, (_, _, lower) in zip(corrected, tests, strict=True)
    ]
    reasons = [
        text + ("" if math.isnan(p) else f", p {p:.2g}{'' if sign else ', no clear difference'}")
        for (text, _, _), p, sign in zip(tests, corrected, signs, strict=True)
    ]
    reason = f"deviation over learning rates: {'; '.join(reasons)}{so_far(analysis, (first, second), tasks)}"
    if -1 in signs:
        return Verdict("in part" if 1 in signs else "does not hold", reason)
    if 1 in signs:
        return Verdict("holds" if 0 not in signs else "in part", reason)
    return Verdict("unknown", reason)


def _variance(analysis: Analysis, model: str, task: str) -> RateVariance | None:
    runs, fit = analysis.runs.get((model, task)), analysis.fits.get((model, task))
    return None if runs is None or fit is None else rate_variance(runs, fit)


def so_far(analysis: Analysis, models: Collection[str], tasks: Collection[str]) -> str:
    """Return the end of a clause that says how many cells of some models on some tasks have no result yet; empty if there are none."""
    runs = {run for model in models for run in analysis.groups[model]}
    rows = [row for row in records(analysis.coverage) if row["model"] in runs and row["task"] in tasks]
    number = sum(row["missing"] for row in rows)
    return f", so far ({number:,} {'cell has' if number == 1 else 'cells have'} no result yet)" if number else ""


def _scored_rates(analysis: Analysis, model: str, task: str) -> list[float]:
    """Return the learning rates at which a model has a score; empty if it has no cell."""
    runs = analysis.runs.get((model, task))
    return [] if runs is None else [rate for rate, scored in zip(runs.rates, runs.present, strict=True) if scored.any()]


def _spread(row: Record) -> str:
    return f"{100 * row['sd_rates']:.2f} [{100 * row['sd_rates_low']:.2f}, {100 * row['sd_rates_high']:.2f}]"
