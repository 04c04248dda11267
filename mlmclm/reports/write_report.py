"""A study's report: tables as Parquet and CSV, and one self-contained HTML page.

Every byte is a function of the analysis and the facts (and of Arrow's version). The page loads nothing: its content
security policy forbids it.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from mlmclm.analysis.additions import statistics_of
from mlmclm.analysis.analyse import Analysis
from mlmclm.reports.paired_models import pair_frame, pairs, zero_shot_frame
from mlmclm.reports.study_facts import StudyFacts
from mlmclm.reports.templating import render
from mlmclm.reports.tested_claims import claim_frame, verdicts_on
from mlmclm.reports.view import ordered_tasks, page
from mlmclm.storage.csv_text import csv_text
from mlmclm.storage.files import check_folder, write_atomic

TABLES = ("best", "comparisons", "overall", "coverage")
"""Tables of an analysis that are written as CSV by their names, beside the statistics; that of the cells is called `results`."""


def render_report(analysis: Analysis, facts: StudyFacts) -> str:
    """Return the HTML page: some hundred kB for a few models, 3 MB for 42 models on twelve tasks."""
    tested = verdicts_on(facts.claims, analysis, facts)
    return render("report.html.j2", **page(analysis, facts, tested, statistics_of(analysis)))


def write_report(analysis: Analysis, facts: StudyFacts, folder: Path) -> dict[str, Path]:
    """Write the report into `folder` (created if needed), each file atomically.

    Returns:
        The paths by name: "report" (report.html), "parquet" (results.parquet: one row per cell), and the CSV tables "results",
            those of `TABLES` and of all statistics; "zero_shot", "pairs" and "tested_claims" if the study has such results.

    Raises:
        UserError: the folder's path is that of a file.
        EnvironmentFault: the folder cannot be written or the disk is full.
    """
    check_folder(folder)
    paths = {"report": folder / "report.html", "parquet": folder / "results.parquet"}
    write_atomic(paths["parquet"], analysis.cells.to_parquet(index=False))
    tested = verdicts_on(facts.claims, analysis, facts)
    optional = {
        "zero_shot": zero_shot_frame(facts),
        "pairs": pair_frame(pairs(analysis, facts, ordered_tasks(analysis, facts))),
        "tested_claims": claim_frame(tested),
    }
    statistics = statistics_of(analysis)
    tables: dict[str, pd.DataFrame] = {"results": analysis.cells, **{name: getattr(analysis, name) for name in TABLES}}
    tables |= statistics.every
    optional |= dict.fromkeys(statistics.absent - tables.keys(), pd.DataFrame())
    for name, frame in (tables | optional).items():
        file = folder / f"{name}.csv"
        if len(frame) or name in tables:
            paths[name] = file
            write_atomic(file, csv_text(frame))
        else:
            file.unlink(missing_ok=True)  # it is from an earlier report
    # Last, so that once the page exists, its tables do too.
    write_atomic(paths["report"], render("report.html.j2", **page(analysis, facts, tested, statistics)))
    return paths
