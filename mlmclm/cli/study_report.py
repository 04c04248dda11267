"""The report of a study: written to files, logged to MLflow, and printed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlmclm.cli.output import print_json, show, show_table

if TYPE_CHECKING:
    from mlmclm.analysis.analyse import Analysis
    from mlmclm.reports.study_facts import StudyFacts
    from mlmclm.studies.place import Place
    from mlmclm.studies.study_tracking import StudyTracking
    from mlmclm.sweeps.space import Space


def command_of(verb: str, words: Sequence[str], data: Path | None, task_dirs: Sequence[Path] | None) -> str:
    """Return the command that computes a study or sweep again, as the report shows it."""
    words = [f"mlmclm {verb}", *words, *([f"--data {data}"] if data is not None else [])]
    return " ".join([*words, *(f"--task-dir {folder}" for folder in task_dirs or ())])


def writable(folder: Path) -> bool:
    """Return whether a file can be written to a folder, which need not exist yet."""
    there = next(place for place in (folder, *folder.parents) if place.exists())
    return os.access(there, os.W_OK)


def record(
    analysis: Analysis, facts: StudyFacts, space: Space, tracking: StudyTracking | None, *, folder: Path | None
) -> dict[str, Path]:
    """Write tables and report to a folder, if there is one, log them to MLflow, and return the written paths by name."""
    from mlmclm.reports.write_report import write_report

    paths = write_report(analysis, facts, folder) if folder is not None else {}
    if tracking is not None:
        tracking.reported(space, analysis, paths, facts.provenance)
    return paths


def write_study_report(
    analysis: Analysis,
    facts: StudyFacts,
    space: Space,
    place: Place,
    tracking: StudyTracking | None = None,
    *,
    folder: Path | None,
    as_json: bool = False,
) -> None:
    """Write tables and report, log them to MLflow, and print the findings.

    Args:
        folder: where to write. With None nothing is written, and MLflow gets no files.
    """
    from mlmclm.analysis.summary import summary
    from mlmclm.reports.wording import baseline_sentence, headline

    paths = record(analysis, facts, space, tracking, folder=folder)
    if as_json:
        print_json(
            {"report": str(paths["report"]) if paths else None, "provenance": facts.provenance, **summary(analysis)}
        )
        return
    found = headline(analysis)
    show(found.verdict, style="bold")
    show(found.detail)
    if facts.baseline is not None:
        show(baseline_sentence(analysis))
    show_best(analysis)
    if analysis.rule == "on_test":
        show("The learning rates were chosen on these test scores (rule: on_test), which is optimistic.")
    if paths:
        show(f"report:  {paths['report']}")
    elsewhere = tracking.elsewhere if tracking is not None else None
    show(f"compare: {elsewhere or f'mlmclm ui --store {place.store}'}")


def show_best(analysis: Analysis) -> None:
    """Print the model-by-task table."""
    from mlmclm.analysis.chance import above_chance
    from mlmclm.analysis.results import records
    from mlmclm.analysis.selection import best_rates
    from mlmclm.reports import text

    rates = "rates (seeds)" if analysis.rule == "per_seed" else "best rate"
    rows = []
    for row in records(analysis.best):
        score = text.estimate(row["test_mean"], row["test_low"], row["test_high"]) if row["n"] > 0 else "–"
        spread = text.points(row["test_sd"]) if row["n"] > 1 else "–"
        rate = ", ".join(filter(None, (best_rates(row), row["setting"])))
        marks = ["one prediction for all"] if row["constant"] and row["constant"] == row["n"] else []
        marks += ["not above"] if above_chance(row["test_mean"], row["test_low"], row["chance"]) == "no" else []
        chance = text.points(row["chance"]) + (f" ({', '.join(marks)})" if marks else "")
        rows.append((row["model"], row["task"], text.metric(row["metric"]), rate, score, spread, chance))
    columns = ("model", "task", "metric", rates, "test [95 %]", "sd over seeds", "chance")
    show_table(columns, rows, drop=("metric", "sd over seeds", rates))
