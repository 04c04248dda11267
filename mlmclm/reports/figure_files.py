"""A study's figures and tables as files for a paper: SVG, PDF, LaTeX, and their numbers as CSV."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from mlmclm.analysis.analyse import Analysis
from mlmclm.reports.charts import shortened
from mlmclm.reports.drawing import FIGURES, Figure, Legend, ReportInput, drawn
from mlmclm.reports.paper_tables import paper_tables
from mlmclm.reports.printed_charts import printed
from mlmclm.reports.study_facts import StudyFacts
from mlmclm.reports.view import report_input
from mlmclm.storage.files import check_folder, write_atomic


def write_figure_files(analysis: Analysis, facts: StudyFacts, folder: Path) -> list[Path]:
    """Write each group of figures as GROUP.svg, GROUP.pdf and GROUP.csv, and each table as table-NAME.tex and table-NAME.csv.

    The panels of a group are one file, with one legend. The same study always gives the same bytes.

    Returns:
        The files, in the order of the groups and then of the tables.

    Raises:
        UserError: a file is in the folder's place.
        EnvironmentFault: the folder cannot be written or the disk is full.
    """
    check_folder(folder)
    study, files = report_input(analysis, facts), list[tuple[str, str | bytes]]()
    for name, figures in drawn(study).items():
        legend = _legend(study, name, figures)
        files += [(f"{name}.{kind}", content) for kind, content in printed(figures, legend).items()]
        rows = [{"panel": figure.title, **row} for figure in figures for row in figure.data]
        files.append((f"{name}.csv", pd.DataFrame(rows).to_csv(index=False, lineterminator="\n")))
    for table in paper_tables(study):
        files.append((f"table-{table.name}.tex", table.latex()))
        files.append((f"table-{table.name}.csv", table.frame().to_csv(index=False, lineterminator="\n")))
    for file, content in files:
        write_atomic(folder / file, content)
    return [folder / file for file, _ in files]


def _legend(study: ReportInput, group: str, figures: Sequence[Figure]) -> Legend:
    """Return the legend of models, which a chart with a row for each model doesn't need."""
    names = {shortened(name) for name in study.looks}
    named = all(figure.chart.y.rows and {label for _, label in figure.chart.y.ticks} <= names for figure in figures)
    return tuple(study.looks.items()) if FIGURES[group].by_model and not named else ()
