"""A study's report: tables as Parquet and CSV, and one self-contained HTML page.

Every byte is a function of the analysis and the facts (and of the versions of Plotly and Arrow). The page loads
nothing: it contains Plotly's script, and its content security policy forbids everything else.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from mlmclm.analysis.analyse import Analysis
from mlmclm.reports.paired_models import pair_frame, pairs, zero_shot_frame
from mlmclm.reports.study_facts import StudyFacts
from mlmclm.reports.view import ordered_tasks, page
from mlmclm.storage.files import canonical_json, write_atomic

TABLES = ("best", "curves", "stability", "comparisons", "overall", "claims", "coverage")
"""Tables of an analysis that are written as CSV by their names; that of the cells is called `results`."""


def embedded_json(value: Any) -> Markup:
    """Serialise to JSON that is safe inside a script element: it contains no "<", ">" or "&"."""
    escaped = canonical_json(value).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return Markup(escaped)


def render_report(analysis: Analysis, facts: StudyFacts) -> str:
    """Return the HTML page, about 5 MB, most of which is Plotly's script."""
    content = page(analysis, facts)
    # A round trip through JSON leaves plain values only, as `canonical_json` needs.
    specs = json.loads(json.dumps(content.pop("specs")))
    figures = embedded_json({"specs": specs, "dark": content["colours"]})
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("mlmclm.reports", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2").render(
        **content, figures_json=figures, plotly=Markup(get_plotlyjs())
    )


def write_report(analysis: Analysis, facts: StudyFacts, folder: Path) -> dict[str, Path]:
    """Write the report into `folder` (created if needed), each file atomically.

    Returns:
        The paths by name: "report" (report.html), "parquet" (results.parquet: one row per cell), and the CSV tables
            "results", "best", "curves", "stability", "comparisons", "overall", "claims" and "coverage"; "zero_shot"
            and "pairs" where there are such results.

    Raises:
        EnvironmentFault: the folder cannot be written or the disk is full.
    """
    paths = {"report": folder / "report.html", "parquet": folder / "results.parquet"}
    write_atomic(paths["parquet"], analysis.cells.to_parquet(index=False))
    optional = {
        "zero_shot": zero_shot_frame(facts),
        "pairs": pair_frame(pairs(analysis, facts, ordered_tasks(analysis, facts))),
    }
    tables: dict[str, pd.DataFrame] = {"results": analysis.cells, **{name: getattr(analysis, name) for name in TABLES}}
    for name, frame in (tables | optional).items():
        file = folder / f"{name}.csv"
        if len(frame) or name in tables:
            paths[name] = file
            write_atomic(file, frame.to_csv(index=False, lineterminator="\n"))
        else:
            file.unlink(missing_ok=True)  # of an earlier report
    # Last, so that once the page exists, its tables do too.
    write_atomic(paths["report"], render_report(analysis, facts))
    return paths
