"""`mlmclm advise`: say what a study's results advise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlmclm.cli import options
from mlmclm.cli.output import print_json

if TYPE_CHECKING:
    from mlmclm.reports.advice import Advice


def advise(
    file: options.StudyOrSweep,
    store: options.Store = options.DEFAULT_STORE,
    data: options.Data = None,
    task_dir: options.TaskDir = None,
    rule: options.Rule = None,
    as_json: options.Json = False,
) -> None:
    """Says which model and learning rate the results so far advise, how sure that is, what it is based on, and what would settle the rest.

    The report's first screen has the same words. Nothing is computed or written.

    Example: mlmclm advise quickstart
    """
    from dataclasses import asdict

    from mlmclm.cli.study_report import show_advice
    from mlmclm.studies.api import open as open_store

    advice: Advice = open_store(store, data=data, task_dirs=task_dir).results(file, rule=rule).advice
    if as_json:
        print_json(asdict(advice))
        return
    show_advice(advice)
