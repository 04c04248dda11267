"""The example notebook runs from top to bottom, on a small study that is finished."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"
CELLS = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]

BAR = """
from time import sleep
from mlmclm.progress import Bar
with Bar("reading", 300, unit="rows") as bar:
    for done in range(301):
        bar.update(done)
        sleep(0.01)
"""


def environment(finished: Any) -> dict[str, str]:
    """Where the small study's store and data are, with a home folder of its own."""
    places = {"MLMCLM_STORE": finished.store, "MLMCLM_DATA": finished.study.parent / "data", "HOME": finished.home}
    return {**os.environ, **{name: str(place) for name, place in places.items()}}


def small(source: str, finished: Any) -> str:
    return source.replace('mlmclm.study("quickstart")', f"mlmclm.study({str(finished.study)!r})")


def test_it_has_no_outputs() -> None:
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in CELLS)


def test_its_cells_run_one_after_the_other(finished_study: Any) -> None:
    script = "\n".join(small("".join(cell["source"]), finished_study) for cell in CELLS)
    assert str(finished_study.study) in script
    script += "\nprint(len(results.best), results.figure('overall')._repr_html_().count('aria-label='))"
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(finished_study), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "6 1" and "1m-clm-30" in done.stdout, "the verdict names models"


def test_a_notebook_shows_tables_figures_and_progress(finished_study: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ipykernel")
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    for name, value in environment(finished_study).items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        cell.source = small(cell.source, finished_study)
    notebook.cells.append(nbformat.v4.new_code_cell(BAR))
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    shown = {kind for cell in notebook.cells for output in cell.get("outputs", ()) for kind in output.get("data", ())}
    assert {"text/plain", "text/html"} <= shown
    (bar,) = notebook.cells[-1].outputs
    assert bar.data["text/plain"].startswith("reading") and "300/300 rows" in bar.data["text/plain"]
