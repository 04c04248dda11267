"""The example notebook runs from top to bottom, on a small study that is finished."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"
CELLS = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]

NUMBERS = "print(len(results.best), results.figure('overall')._repr_html_().count('aria-label='))"
BAR = """
from time import sleep
from mlmclm.progress import Bar
with Bar("reading", 300, unit="rows") as bar:
    for done in range(301):
        bar.update(done)
        sleep(0.01)
"""


def test_it_has_no_outputs() -> None:
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in CELLS)


def test_its_cells_run_one_after_the_other_and_show_tables_figures_and_progress(
    finished_study: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ipykernel")
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    monkeypatch.setenv("MLMCLM_STORE", str(finished_study.store))
    monkeypatch.setenv("MLMCLM_DATA", str(finished_study.study.parent / "data"))
    monkeypatch.setenv("HOME", str(finished_study.home))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace('mlmclm.study("quickstart")', f"mlmclm.study({str(finished_study.study)!r})")
    assert any(str(finished_study.study) in cell.source for cell in notebook.cells)
    notebook.cells += [nbformat.v4.new_code_cell(source) for source in (NUMBERS, BAR)]
    nbclient.NotebookClient(notebook, timeout=1500, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    printed = [output.text for output in outputs if output.output_type == "stream" and output.name == "stdout"]
    assert any("1m-clm-30" in text for text in printed), "the verdict names models"
    assert printed[-1] == "6 1\n"
    assert {"text/plain", "text/html"} <= {kind for output in outputs for kind in output.get("data", ())}
    (bar,) = notebook.cells[-1].outputs
    assert bar.data["text/plain"].startswith("reading") and "300/300 rows" in bar.data["text/plain"]
