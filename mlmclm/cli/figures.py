"""`mlmclm figures`: write a study's figures and tables for a paper."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from mlmclm.cli import options
from mlmclm.cli.output import print_json, show


def figures(
    file: options.StudyOrSweep,
    to: Annotated[Path, Option(metavar="FOLDER", help="Where the files are written; created if it does not exist.")],
    store: options.Store = options.DEFAULT_STORE,
    data: options.Data = None,
    task_dir: options.TaskDir = None,
    rule: options.Rule = None,
    as_json: options.Json = False,
) -> None:
    """Writes the figures of a study or sweep as SVG, PDF and CSV, and its tables as LaTeX (booktabs) and CSV, from the results so far.

    Example: mlmclm figures quickstart --to figures
    """
    from mlmclm.studies.door import open as open_store

    found = open_store(store, data=data, task_dirs=task_dir).results(file, rule=rule)
    files = found.write_figures(to)
    if as_json:
        print_json({"files": list(map(str, files))})
    else:
        show("\n".join(map(str, files)))
