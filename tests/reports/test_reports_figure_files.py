"""The figures and tables that are written for papers."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pandas as pd
import pytest
from analysis_study import TASKS, cell, synthetic_results
from report_study import MODELS, facts

from mlmclm.analysis.analyse import Analysis, analyse
from mlmclm.analysis.results import records
from mlmclm.answers.named_facts import phase_facts
from mlmclm.errors import EnvironmentFault, UserError
from mlmclm.plans.names import parse_name
from mlmclm.reports.drawing import HUES, drawn
from mlmclm.reports.figure_files import PaperCell, PaperTable, _legend, paper_tables, write_figure_files
from mlmclm.reports.printed_charts import _colours
from mlmclm.reports.study_facts import ModelFacts
from mlmclm.reports.view import report_input, score_rows
from mlmclm.results.chance import Chance


def study(**more: Any) -> Analysis:
    return analyse(synthetic_results(MODELS, **more), "2m-untrained")


def test_each_group_is_an_svg_a_pdf_and_its_data_and_each_table_latex_and_csv(tmp_path: Path) -> None:
    found = study(tasks=("pydocs-kind", "pydocs-qa"))
    files = write_figure_files(found, facts(), tmp_path / "figures")
    groups = drawn(report_input(found, facts()))
    names = {f"{name}.{kind}" for name in groups for kind in ("svg", "pdf", "csv")}
    names |= {
        f"table-{table.name}.{kind}" for table in paper_tables(report_input(found, facts())) for kind in ("tex", "csv")
    }
    assert {file.name for file in files} == names == {path.name for path in (tmp_path / "figures").iterdir()}
    for name, figures in groups.items():
        folder = tmp_path / "figures"
        assert ElementTree.parse(folder / f"{name}.svg").getroot().tag.endswith("svg")
        assert (folder / f"{name}.pdf").read_bytes().startswith(b"%PDF-")
        table = pd.read_csv(folder / f"{name}.csv")
        assert len(table) == sum(len(figure.data) for figure in figures)
        assert list(dict.fromkeys(table["panel"])) == [figure.title for figure in figures if figure.data]
    curves = pd.read_csv(tmp_path / "figures" / "rates.csv")
    merged = curves.merge(found.curves, on=["model", "task", "learning_rate"])
    assert len(merged) == len(found.curves) and (abs(merged["test_mean_x"] - merged["test_mean_y"]) < 1e-15).all()


def test_colours_on_paper_are_those_of_the_light_page() -> None:
    assert set(HUES) <= set(_colours()) and all(re.fullmatch("#[0-9a-f]{6}", colour) for colour in _colours().values())
    assert _colours()["c0"] == "#0072b2"


def test_the_table_of_scores_has_the_best_in_bold_and_those_level_with_it_underlined() -> None:
    given = report_input(study(noise=0.02), facts())
    (table,) = [each for each in paper_tables(given) if each.name == "scores"]
    assert [title for title, _ in table.columns] == [*TASKS, "Mean"]
    for (model, cells), row in zip(table.rows, score_rows(given.analysis, given.listed, given.tasks), strict=True):
        assert model == row["model"]
        for own, shown in zip(cells, row["cells"], strict=True):
            assert (own.mark == "best", own.mark == "level") == (shown["best"], shown["tied"])
            assert f"{own.value:.2f}" == shown["score"]
    marks = {own.mark for _, cells in table.rows for own in cells}
    assert marks == {"best", "level", ""}
    lines = table.latex().splitlines()
    assert all(rule in lines for rule in (r"\toprule", r"\midrule", r"\bottomrule"))
    body = lines[lines.index(r"\midrule") + 1 : lines.index(r"\bottomrule")]
    assert len(body) == len(MODELS) and all(line.count("&") == len(TASKS) + 1 and line.endswith(r"\\") for line in body)
    assert sum(line.count(r"\textbf") for line in body) == sum(
        cell.mark == "best" for _, cells in table.rows for cell in cells
    )
    assert sum(line.count(r"\underline") for line in body) == sum(
        cell.mark == "level" for _, cells in table.rows for cell in cells
    )


def test_models_of_an_objective_are_together_in_a_table() -> None:
    names = ("2m-mlm20-600", "2m-clm-600", "2m-mlm40-600", "2m-untrained")
    levels = dict(zip(names, (0.7, 0.6, 0.5, 0.4), strict=True))
    models = tuple(
        ModelFacts(name, "pretrained" if parse_name(name).phases else "untrained", phases=phase_facts(parse_name(name)))
        for name in names
    )
    given = report_input(analyse(synthetic_results(levels, tasks=("pydocs-kind",))), replace(facts(), models=models))
    table = paper_tables(given)[0]
    assert [model for model, _ in table.rows] == [names[0], names[2], names[1], names[3]]
    lines = table.latex().splitlines()
    body = lines[lines.index(r"\midrule") + 1 : lines.index(r"\bottomrule")]
    starts = [line.partition(" &")[0] for line in body]
    title = r"\multicolumn{2}{l}{\textit{%s}} \\"
    assert starts == [
        title % "MLM", names[0], names[2], r"\midrule", title % "CLM", names[1], r"\midrule", title % "untrained", names[3],
    ]  # fmt: skip
    assert list(table.frame()["objective"]) == ["MLM", "MLM", "CLM", "untrained"]
    alone = report_input(given.analysis, replace(given.facts, models=given.facts.models[1:]))
    assert "objective" not in paper_tables(alone)[0].frame(), "each has its own"


def test_on_paper_the_models_of_a_pale_look_share_an_entry_of_the_legend() -> None:
    names = [f"2m-{kind}-{steps}" for kind in ("clm", "mlm40") for steps in range(100, 110)]
    models = tuple(ModelFacts(name, "pretrained", phases=phase_facts(parse_name(name))) for name in names)
    levels = {name: 0.5 + number / 100 for number, name in enumerate(names)}
    found = analyse(synthetic_results(levels, tasks=("pydocs-kind",), rates=(1e-4,), seeds=2))
    legend = _legend(report_input(found, replace(facts(), models=models)))
    assert [name for name, _ in legend] == ["2m-mlm40-109", "2m-clm-109", "other MLM models", "other CLM models"]
    assert [style.classes for _, style in legend] == ["c1", "c0", "c1 quiet", "c0 quiet"]
    legend = _legend(report_input(found, replace(facts(), models=())))
    assert [name for name, _ in legend][7:] == ["other models"]


def test_tables_say_which_number_they_hold_and_have_plain_means_and_chance() -> None:
    chances = {task: Chance(0.25 + 0.05 * number, "any") for number, task in enumerate(TASKS)}
    found = analyse(synthetic_results(MODELS, noise=0.02), "2m-untrained", chances=chances)
    best = {(row["model"], row["task"]): row for row in records(found.best)}
    table = next(each for each in paper_tables(report_input(found, facts())) if each.name == "scores")
    assert "means over the chosen runs that learn; plain means of all chosen runs are in the CSV file" in table.caption
    frame = table.frame().set_index("model")
    for (model, task), row in best.items():
        assert frame.loc[model, f"{task}_plain_mean"] == pytest.approx(100 * row["test_mean"])
        assert frame.loc[model, task] == pytest.approx(100 * row["score"])
    levels = [100 * chances[task].score for task in TASKS]
    assert list(frame.loc["chance", list(TASKS)]) == pytest.approx(levels)
    line = next(line for line in table.latex().splitlines() if line.startswith("Chance"))
    assert line == " & ".join(["Chance", *(f"{level:.2f}" for level in (*levels, sum(levels) / len(levels)))]) + r" \\"
    shown = {row["model"]: row["cells"] for row in score_rows(found, facts().models, facts().tasks)}
    for model, cells in shown.items():
        assert [cell["plain"] for cell in cells[:-1]] == [
            f"{100 * best[model, cell['task']]['test_mean']:.2f}" for cell in cells[:-1]
        ]


def test_no_score_is_bold_where_none_is_above_chance() -> None:
    found = analyse(synthetic_results(MODELS, noise=0.02), chances={task: Chance(0.99, "any") for task in TASKS})
    given = report_input(found, facts())
    for table in paper_tables(given):
        if table.name in ("scores", "families"):
            assert {cell.mark for _, cells in table.rows for cell in cells} == {""}
    assert not any(cell["best"] for row in score_rows(found, given.listed, given.tasks) for cell in row["cells"])


def test_latex_is_escaped_and_unknown_numbers_are_dashes() -> None:
    table = PaperTable(
        "one",
        "50 % of A & B",
        (("task_1", "F1"),),
        (("a_b#1", (PaperCell(float("nan")),)), ("c", (PaperCell(61.234, 60.0, 62.0, "best"),))),
    )
    latex = table.latex()
    assert r"50 \% of A \& B" in latex and r"task\_1" in latex and r"a\_b\#1 & --" in latex
    # 61.23 is not in the middle of 60 to 62.
    assert r"c & \textbf{61.23}$_{[60.00,\,62.00]}$ \\" in latex
    assert PaperCell(61.0, 60.0, 62.0, "level").latex() == r"\underline{61.00}$_{\pm 1.00}$"
    # A deviation that is not told from 0 is no more than 2.85, and not 1.43.
    assert PaperCell(0.0, 0.0, 2.853).latex() == r"0.00$_{[0.00,\,2.85]}$"
    assert PaperCell(0.0, float("nan"), float("nan")).latex() == "0.00"


@pytest.mark.slow
def test_every_byte_is_a_function_of_results_and_facts(tmp_path: Path) -> None:
    made = synthetic_results(MODELS, tasks=("pydocs-kind",))
    here = write_figure_files(analyse(made), facts(), tmp_path / "here")
    there = write_figure_files(analyse(made[::-1]), facts(), tmp_path / "there")
    assert [file.read_bytes() for file in here] == [file.read_bytes() for file in there]


def test_a_folder_that_cannot_be_written_is_the_environment_s_fault_and_a_file_in_its_place_the_user_s(
    tmp_path: Path,
) -> None:
    (tmp_path / "taken").write_text("a file")
    found = analyse([cell("m", "pydocs-kind", 1e-3, 0, 0.5, 0.5)]), facts()
    with pytest.raises(EnvironmentFault, match="cannot write"):
        write_figure_files(*found, Path("/proc/nothing"))
    with pytest.raises(UserError, match="taken is a file; name a folder"):
        write_figure_files(*found, tmp_path / "taken")
