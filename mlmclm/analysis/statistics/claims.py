"""The claim that pretraining helps: whether each model beats the untrained one."""

from __future__ import annotations

import math

import pandas as pd

from mlmclm.analysis.analyse import Analysis
from mlmclm.analysis.comparison import against, clearly_different, tied
from mlmclm.analysis.results import columns, records, table

COLUMNS = columns(
    "object: model verdict",
    "bool: holds",
    "float64: difference low high",
    "bool: on_mean",
    "int64: tasks tasks_required tasks_ahead tasks_clear tasks_at_chance tasks_diverged",
)
SHARE_OF_TASKS = 0.75


def claims(analysis: Analysis) -> pd.DataFrame:
    """Test whether every model beats the baseline; one row per model other than the baseline, and none without one.

    The claim holds for a model if both conditions are met: its mean over tasks is shown to exceed the baseline's (`on_mean`: a
    verdict can be based on the difference, see `clearly_different`), and it scores higher on at least `SHARE_OF_TASKS` of the tasks
    (three of four by default). `tasks_ahead` counts the tasks on which it scores higher and above chance, and `tasks_clear`
    those of them whose own interval is above 0; `tasks_at_chance` counts those on which it scores higher, but not above
    chance. With a handful of seeds the interval of a single task is wide, so the mean over tasks is the actual test.

    `verdict` is "holds", "in part" (only some of the claim holds), "not shown", "does not hold" (the model is shown to score less),
    "diverged" (every cell of the model diverged on a task, `tasks_diverged`, so it has no mean, and no part of the claim holds), or
    "unknown" (a score or an interval is missing because a task was not run or has one seed, and the rest does not decide).
    """
    diverged = {
        (analysis.model_of[row["model"]], row["task"])
        for row in records(analysis.coverage)
        if row["present"] == row["diverged"] > 0 and not row["missing"]
    }
    rows = []
    for model in sorted(set(analysis.groups) - {analysis.baseline}) if analysis.baseline else ():
        facts = [row for row in against(analysis.comparisons, model) if row["model_b"] == analysis.baseline]
        overall = next(row for row in facts if row["kind"] == "all")
        by_task = [row for row in facts if row["kind"] == "task"]
        higher = [row for row in by_task if row["difference"] > 0 and not tied(row["difference"])]
        leads = [row for row in higher if row["above_chance"]]
        ahead, clear = len(leads), sum(row["low"] > 0 for row in leads)
        required = math.ceil(SHARE_OF_TASKS * len(by_task))
        on_mean = overall["low"] > 0 and overall["above_chance"] and clearly_different(overall, analysis.confidence)
        shown = sum(row["low"] > 0 and clearly_different(row, analysis.confidence) for row in leads)
        lost = {row["scope"] for row in by_task if (model, row["scope"]) in diverged}
        # Other tasks without a difference could still go either way once they are run.
        open_tasks = sum(math.isnan(row["difference"]) for row in by_task if row["scope"] not in lost)
        holds = on_mean and ahead >= required
        if holds:
            verdict = "holds"
        # Unknown only if the missing scores and intervals could still make the claim hold.
        elif not lost and (on_mean or math.isnan(overall["low"])) and ahead + open_tasks >= required:
            verdict = "unknown"
        # Without the mean, only tasks with a lead that is shown count.
        elif on_mean or (shown >= required and ahead):
            verdict = "in part"
        else:
            worse = overall["high"] < 0 and clearly_different(overall, analysis.confidence)
            verdict = "diverged" if lost else "does not hold" if worse else "not shown"
        rows.append(
            {
                "model": model,
                "verdict": verdict,
                "holds": holds,
                **{name: overall[name] for name in ("difference", "low", "high")},
                "on_mean": on_mean,
                "tasks": len(by_task),
                "tasks_required": required,
                "tasks_ahead": ahead,
                "tasks_clear": clear,
                "tasks_at_chance": len(higher) - ahead,
                "tasks_diverged": len(lost),
            }
        )
    return table(rows, COLUMNS)
