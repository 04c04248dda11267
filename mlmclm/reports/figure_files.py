"""A study's figures and tables as files for a paper: SVG, PDF, LaTeX, and their numbers as CSV."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from mlmclm.analysis.analyse import Analysis
from mlmclm.reports.drawing import Legend, ReportInput, drawn, needs_legend
from mlmclm.reports.paper_tables import paper_tables
from mlmclm.reports.printed_charts import printed
from mlmclm.reports.study_facts import ModelFacts, StudyFacts
from mlmclm.reports.view import report_input
from mlmclm.storage.csv_text import csv_text
from mlmclm.storage.files import check_folder, write_atomic


def write_figure_files(analysis: Analysis, facts: StudyFacts, folder: Path) -> list[Path]:
    """Write each group of figures as GROUP.svg, GROUP.pdf and GROUP.csv, and each table as table-NAME.tex and table-NAME.csv.

    The panels of a group are one file, with one legend. The same study always gives the same bytes.

    Returns:
        The files, in the order of the groups and then of the tables.

    Raises:
        UserError: the folder's path is that of a file.
        EnvironmentFault: the folder cannot be written or the disk is full.
    """
    check_folder(folder)
    study, files = report_input(analysis, facts), list[tuple[str, str | bytes]]()
    for name, figures in drawn(study).items():
        legend = _legend(study) if needs_legend(study, name, figures) else ()
        files += [(f"{name}.{kind}", content) for kind, content in printed(figures, legend).items()]
        rows = [{"panel": figure.title, **row} for figure in figures for row in figure.data]
        files.append((f"{name}.csv", csv_text(pd.DataFrame(rows))))
    for table in paper_tables(study):
        files.append((f"table-{table.name}.tex", table.latex()))
        files.append((f"table-{table.name}.csv", csv_text(table.frame())))
    for file, content in files:
        write_atomic(folder / file, content)
    return [folder / file for file, _ in files]


def _legend(study: ReportInput) -> Legend:
    """Return the legend of models, in which all that share a pale look are one entry."""
    clear = [(name, style) for name, style in study.looks.items() if not style.quiet]
    pale: dict[str, list[ModelFacts]] = {}
    for model in study.listed:
        if study.looks[model.name].quiet:
            pale.setdefault(study.looks[model.name].classes, []).append(model)
    pale_entries = []
    for models in pale.values():
        kinds = {model.objective for model in models}
        words = ["other", *(kinds if len(kinds) == 1 else ()), "models"]
        pale_entries.append((" ".join(filter(None, words)), study.looks[models[0].name]))
    return (*clear, *pale_entries)
