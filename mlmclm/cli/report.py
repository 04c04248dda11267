"""`mlmclm report`: write tables and a report from the results so far."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from mlmclm.cli import options
from mlmclm.progress import say


def report(
    file: options.StudyOrSweep,
    store: options.Store = options.DEFAULT_STORE,
    data: options.Data = None,
    task_dir: options.TaskDir = None,
    rule: options.Rule = None,
    to: Annotated[
        Path | None, Option(metavar="FOLDER", help="Write here, in place of the store's studies/NAME.")
    ] = None,
    predictions: Annotated[
        Path | None,
        Option(
            metavar="FOLDER",
            help="Also write what each model predicted for the test examples at its best learning rate: "
            "FOLDER/MODEL/TASK/sSEED.jsonl.",
        ),
    ] = None,
    figures: Annotated[
        Path | None,
        Option(
            metavar="FOLDER",
            help="Also write the figures as SVG, PDF and CSV, and the tables as LaTeX (booktabs) and CSV, for a paper.",
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Analyses the results that a study or sweep has so far and writes its tables and its HTML report; prepares and computes nothing.

    If the store is read-only, results are printed, and a report is only written with `--to`.

    Examples:

    mlmclm report quickstart

    mlmclm report quickstart --figures figures
    """
    from mlmclm.answers.record import is_bundle
    from mlmclm.cli.study_report import show_results
    from mlmclm.studies.api import open as open_store

    opened = open_store(store, data=data, task_dirs=task_dir)
    if not is_bundle(Path(file)):
        results = opened.study(file).report(rule=rule, to=to)
    else:
        results = opened.results(file, rule=rule)
        results = results if to is None else results.write(to)
    if results.report is None:
        say("the report is not written: the place of the results is read-only, or a bundle; name a folder with --to.")
    if predictions is not None:
        results.write_predictions(predictions)
    show_results(results, as_json=as_json, figures=[] if figures is None else results.write_figures(figures))
