"""A study's figures and tables as files for a paper: SVG and PDF, LaTeX (booktabs), and their numbers as CSV.

Tables have models by tasks, the best in bold and those not clearly different from it underlined.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import pandas as pd

from mlmclm.analysis.analyse import Analysis
from mlmclm.analysis.results import Record, records
from mlmclm.reports import text, wording
from mlmclm.reports.drawing import Legend, ReportInput, drawn, known_rows, needs_legend
from mlmclm.reports.printed_charts import printed
from mlmclm.reports.study_facts import ModelFacts, StudyFacts
from mlmclm.reports.view import report_input
from mlmclm.reports.wording import winners_of
from mlmclm.results.chance import chance_of
from mlmclm.results.intervals import NAN
from mlmclm.storage.csv_text import csv_text
from mlmclm.storage.files import check_folder, write_atomic

_ESCAPES = str.maketrans(
    {
        **{char: f"\\{char}" for char in "&%$#_{}"},
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "\\": r"\textbackslash{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        text.MINUS: "--",
        "–": "--",
        "…": r"\dots{}",
        "×": r"$\times$",
    }
)


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


@dataclass(frozen=True)
class PaperCell:
    """A number of a table with its interval, in the unit that is shown.

    Attributes:
        mark: `best`, `level` for what is not clearly different from the best, or "".
        plain: the plain mean of the test scores, where the number is a score.
    """

    value: float
    low: float = NAN
    high: float = NAN
    mark: str = ""
    plain: float = NAN

    def latex(self) -> str:
        """Return the cell: the number, and its interval as a subscript: half its width, or its ends if it is not symmetric."""
        if math.isnan(self.value):
            return "--"
        number = f"{self.value:.2f}"
        number = {"best": rf"\textbf{{{number}}}", "level": rf"\underline{{{number}}}"}.get(self.mark, number)
        if math.isnan(self.low):
            return number
        below, above = self.value - self.low, self.high - self.value
        if abs(above - below) < 0.01:  # equal in the two decimals that are shown
            return rf"{number}$_{{\pm {(below + above) / 2:.2f}}}$"
        return rf"{number}$_{{[{self.low:.2f},\,{self.high:.2f}]}}$"


@dataclass(frozen=True)
class PaperTable:
    """A table of models.

    Attributes:
        caption: what the table shows, in sentences.
        columns: the title of each column and a second line below it, such as a metric.
        rows: a model's cells in the order of the columns; models of a group are together.
        groups: the objectives of the models; empty if fewer than two objectives are known, or no two models share one.
        chances: the chance level of each column, if any is known.
    """

    name: str
    caption: str
    columns: tuple[tuple[str, str], ...]
    rows: tuple[tuple[str, tuple[PaperCell, ...]], ...]
    groups: Mapping[str, str] = field(default_factory=dict)
    chances: tuple[PaperCell, ...] = ()

    def latex(self) -> str:
        """Return a `table` environment, which needs the package booktabs."""
        heads = [[_escaped(title) for title, _ in self.columns], [_escaped(second) for _, second in self.columns]]
        body: list[str] = []
        for group, rows in groupby(self.rows, lambda row: self.groups.get(row[0], "")):
            if self.groups:
                title = rf"\multicolumn{{{len(self.columns) + 1}}}{{l}}{{\textit{{{_escaped(group or 'others')}}}}} \\"
                body += [*([r"\midrule"] if body else []), title]
            body += [" & ".join([_escaped(model), *(cell.latex() for cell in cells)]) + r" \\" for model, cells in rows]
        if self.chances:
            body += [r"\midrule", " & ".join(["Chance", *(cell.latex() for cell in self.chances)]) + r" \\"]
        parts = [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{_escaped(self.caption)}}}",
            rf"\label{{tab:{self.name}}}",
            rf"\begin{{tabular}}{{l{'r' * len(self.columns)}}}",
            r"\toprule",
            " & ".join(["Model", *heads[0]]) + r" \\",
            *([" & ".join(["", *heads[1]]) + r" \\"] if any(heads[1]) else []),
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
        ]
        return "\n".join(parts) + "\n"

    def frame(self) -> pd.DataFrame:
        """Return the same table with a column each for the numbers, the ends of their intervals, their marks and plain means."""
        rows = []
        with_plain = [any(not math.isnan(cells[at].plain) for _, cells in self.rows) for at in range(len(self.columns))]
        for model, cells in [*self.rows, *([("chance", self.chances)] if self.chances else [])]:
            row: Record = {"model": model} | ({"objective": self.groups.get(model, "")} if self.groups else {})
            for (title, _), cell, plain in zip(self.columns, cells, with_plain, strict=True):
                row |= {f"{title}_plain_mean": cell.plain} if plain else {}
                row |= {
                    title: cell.value,
                    f"{title}_low": cell.low,
                    f"{title}_high": cell.high,
                    f"{title}_mark": cell.mark,
                }
            rows.append(row)
        return pd.DataFrame(rows)


def _escaped(words: str) -> str:
    return words.translate(_ESCAPES)


def paper_tables(study: ReportInput) -> list[PaperTable]:
    """Return the tables of a study; one that has nothing to show is left out."""
    tables = [_scores(study), _families(study), _sensitivity(study)]
    return [table for table in tables if table is not None]


def _intervals(study: ReportInput) -> str:
    return (
        "Scores are means over the chosen runs that learn; plain means of all chosen runs are in the CSV file, and scores of fresh runs in best.csv. "
        f"{_subscripts(study)} Bold: highest, if above chance; underlined: not clearly different from it (Holm)."
    )


def _subscripts(study: ReportInput) -> str:
    return f"Subscripts: half widths of {study.analysis.confidence * 100:g} % intervals, or their ends if these are not as far away."


def _marked(study: ReportInput, scope: str, rows: Sequence[Record]) -> dict[str, PaperCell]:
    """Return the cells of one column, in points; `rows` have `model`, `score`, its ends and `above_chance`."""
    best, level = winners_of(study.analysis, scope, rows)
    return _cells(rows, ("score", "score_low", "score_high"), best, level)


def _mean(study: ReportInput) -> dict[str, PaperCell]:
    """Return the cells of the mean over tasks, marked as on the first screen of the report."""
    rows = [row for row in records(study.analysis.overall) if row["kind"] == "all"]
    return _cells(rows, ("mean", "low", "high"), *wording.marked(study.analysis))


def _cells(
    rows: Sequence[Record], names: tuple[str, str, str], best: Collection[str] = (), level: Collection[str] = ()
) -> dict[str, PaperCell]:
    """Return the cells by model, in points, from the columns of the score and of the ends of its interval."""
    cells = {}
    for row in rows:
        value, low, high = (100 * row[name] for name in names)
        mark = "best" if row["model"] in best else "level" if row["model"] in level else ""
        cells[row["model"]] = PaperCell(value, low, high, mark, 100 * row.get("test_mean", NAN))
    return cells


def _table(
    study: ReportInput,
    name: str,
    caption: str,
    columns: Sequence[tuple[str, str, dict[str, PaperCell]]],
    scopes: Sequence[Sequence[str]] = (),
) -> PaperTable:
    """Return a table; `scopes` are the tasks of each column, for the line of chance levels."""
    nothing = PaperCell(NAN)
    groups = {model.name: model.objective for model in study.listed}
    kinds = set(groups.values())
    groups = groups if len(kinds - {"", "untrained"}) > 1 and len(kinds) < len(groups) else {}
    place = list(dict.fromkeys(groups.values())).index
    models = sorted(study.looks, key=lambda name: place(groups[name]) if groups else 0)
    rows = tuple((name, tuple(cells.get(name, nothing) for *_, cells in columns)) for name in models)
    levels = [chance_of(study.analysis.chances, tasks) for tasks in scopes]
    chances = () if all(map(math.isnan, levels)) else tuple(PaperCell(100 * level) for level in levels)
    return PaperTable(name, caption, tuple((title, second) for title, second, _ in columns), rows, groups, chances)


def _scores(study: ReportInput) -> PaperTable:
    columns = []
    for task in study.tasks:
        rows = [row for (_, row_task), row in study.best.items() if row_task == task.name]
        columns.append((task.name, text.metric(task.metric), _marked(study, task.name, rows)))
    names = [task.name for task in study.tasks]
    scopes = [[task] for task in names]
    if len(columns) > 1:
        columns.append(("Mean", "", _mean(study)))
        scopes.append(names)
    caption = f"Test scores at each model's best learning rate. {_intervals(study)}"
    return _table(study, "scores", caption, columns, scopes)


def _families(study: ReportInput) -> PaperTable | None:
    families = dict.fromkeys(task.family for task in study.tasks)
    if len(families) < 2:
        return None
    means = [
        row | {"score": row["mean"], "score_low": row["low"], "score_high": row["high"]}
        for row in records(study.analysis.overall)
        if row["kind"] == "family"
    ]
    columns, scopes = [], []
    for family in families:
        tasks = [task.name for task in study.tasks if task.family == family]
        scope = tasks[0] if len(tasks) == 1 else family
        rows = [row for (_, row_task), row in study.best.items() if row_task == scope] if len(tasks) == 1 else []
        rows = rows or [row for row in means if row["scope"] == family]
        columns.append((text.family(family), text.plural(len(tasks), "task"), _marked(study, scope, rows)))
        scopes.append(tasks)
    columns.append(("Mean", text.plural(len(study.tasks), "task"), _mean(study)))
    scopes.append([task.name for task in study.tasks])
    return _table(study, "families", f"Mean test scores by family of tasks. {_intervals(study)}", columns, scopes)


def _sensitivity(study: ReportInput) -> PaperTable | None:
    rows = known_rows(records(study.analysis.stability), "sd_rates")
    columns = []
    for task in study.tasks:
        task_rows = [row for row in rows if row["task"] == task.name]
        cells = _cells(task_rows, ("sd_rates", "sd_rates_low", "sd_rates_high"))
        columns.append((task.name, "", cells))
    caption = (
        "Sensitivity to the learning rate: standard deviation over rates of the true mean test scores, in points, corrected for seed noise. "
        f"{_subscripts(study)}"
    )
    return _table(study, "sensitivity", caption, columns) if rows else None
