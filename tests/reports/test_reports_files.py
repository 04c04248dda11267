"""The files of a report: the page and the tables beside it."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from analysis_study import TASKS, synthetic_results
from report_page import Page, read, study
from report_study import MODELS, facts

import mlmclm
from mlmclm.analysis.analyse import Analysis, analyse
from mlmclm.errors import EnvironmentFault, UserError
from mlmclm.registry import KINDS
from mlmclm.reports.charts import Axis, Chart
from mlmclm.reports.drawing import Figure, FigureGroup, ReportInput
from mlmclm.reports.write_report import write_report


def test_the_tables_beside_the_page_hold_the_analysis(tmp_path: Path) -> None:
    found = study(diverge=frozenset({("2m-clm-600", 3e-3)}))
    paths = write_report(found, facts(), tmp_path / "studies" / "quickstart")
    assert set(paths) >= {"report", "parquet", "results", "best", "stability", "comparisons"}
    assert sorted(path.name for path in paths.values()) == sorted(
        path.name for path in paths["report"].parent.iterdir()
    )
    pd.testing.assert_frame_equal(
        pd.read_parquet(paths["parquet"]), found.cells, check_dtype=False, check_index_type=False
    )
    for name in ("best", "stability", "comparisons"):
        read_back = pd.read_csv(paths[name])
        assert [column for column in read_back.columns if column != "score_covered"] == list(
            getattr(found, name).columns
        )
        numbers = getattr(found, name).select_dtypes("float")
        pd.testing.assert_frame_equal(read_back[numbers.columns], numbers, check_dtype=False, rtol=1e-15)


SCRIPT = """
import sys, hashlib, pathlib
sys.path[:0] = sys.argv[2:]
from analysis_study import synthetic_results
from report_study import MODELS, facts
from mlmclm.analysis.analyse import analyse
from mlmclm.reports.write_report import write_report
paths = write_report(analyse(synthetic_results(MODELS), "2m-untrained"), facts(), pathlib.Path(sys.argv[1]))
for name, path in sorted(paths.items()):
    print(name, hashlib.sha256(path.read_bytes()).hexdigest())
"""


def test_every_byte_is_a_function_of_results_and_facts(tmp_path: Path) -> None:
    # Another process, another hash seed, another time zone, another order of the results.
    paths = write_report(analyse(synthetic_results(MODELS)[::-1], "2m-untrained"), facts(), tmp_path / "here")
    here = "".join(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n" for name, path in sorted(paths.items()))
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "analysis")]
    surroundings = os.environ | {"PYTHONHASHSEED": "77", "TZ": "Asia/Tokyo"}
    there = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "there"), *folders],
        env=surroundings,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert here == there


def test_a_folder_that_cannot_be_written_is_the_environment_s_fault_and_a_file_in_its_place_the_user_s(
    tmp_path: Path,
) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(EnvironmentFault, match="cannot write"):
        write_report(study(), facts(), Path("/proc/nothing"))
    with pytest.raises(UserError, match="taken is a file; name a folder"):
        write_report(study(), facts(), tmp_path / "taken")


def test_added_statistics_and_figures_are_in_the_report(registers: None, tmp_path: Path) -> None:
    analysis = study()

    @mlmclm.register("statistic", "cells-a-task")
    def cells_a_task(analysis: Analysis) -> pd.DataFrame:
        return analysis.cells.groupby("task", as_index=False)["model"].count()

    @mlmclm.register("figure")
    class Empty(FigureGroup):
        name = "empty"
        title = "Nothing"

        def draw(self, study: ReportInput) -> list[Figure]:
            chart = Chart(Axis.numbers([0, 1], ""), Axis.names([]), 10)
            return [Figure("mine", f"{len(study.looks)} models", chart, "nothing")]

    source, page = read(analysis)
    assert '<svg id="mine"' in source and "Nothing" in page.text and "4 models" in page.text
    paths = write_report(analysis, facts(), tmp_path)
    assert list(pd.read_csv(paths["cells-a-task"])["task"]) == sorted(TASKS)


class Textless:
    def __str__(self) -> str:
        raise ValueError("no text")


BROKEN: dict[str, dict[str, Any]] = {
    "statistic": {
        "empty": lambda analysis: pd.DataFrame(),
        "rowless": lambda analysis: analysis.best[:0],
        "text": lambda analysis: "a table",
        "raises": lambda analysis: analysis.nothing,
        "ends": lambda: None,
        "exits": lambda analysis: sys.exit(1),
        "textless": lambda analysis: pd.DataFrame({"x": [Textless()]}),
        "changes": lambda analysis: analysis.best.insert(0, "mine", 1),
        "best": lambda analysis: analysis.cells,
        "results": lambda analysis: analysis.best,
    },
}


def test_what_is_added_and_broken_is_left_out_and_named_and_the_report_is_complete(
    registers: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    analysis = study()
    whole = write_report(analysis, facts(), tmp_path / "whole")
    mlmclm.register("statistic", "raises", lambda analysis: analysis.best)
    write_report(analysis, facts(), tmp_path / "with")
    KINDS["statistic"].remove("raises")
    for kind, members in BROKEN.items():
        for name, member in members.items():
            mlmclm.register(kind, name, member)
    mlmclm.register("statistic", "kept", lambda analysis: analysis.best)
    paths = write_report(analysis, facts(), tmp_path / "with")
    assert paths.keys() == {*whole, "kept"} and not (tmp_path / "with" / "raises.csv").exists(), "of an earlier report"
    assert all(paths[name].read_bytes() == file.read_bytes() for name, file in whole.items() if name != "report")
    page, said = Page(paths["report"].read_text()).text, capsys.readouterr().err
    for kind, members in BROKEN.items():
        for name in members:
            assert f"Left out: {kind} {name!r}: " in page and f"left out: {kind} {name!r} from " in said
    assert "Left out: statistic 'raises': AttributeError: " in page and "returns an empty table" in page
    others = re.sub(r'<section id="added">.*?</section>', "", paths["report"].read_text(), flags=re.DOTALL)
    assert Page(others).text == Page(whole["report"].read_text()).text
