"""`mlmclm report`: tables and report from the results that are there."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated

import typer

from mlmclm.cli import options
from mlmclm.cli.options import (
    DataOption,
    JsonOption,
    RuleOption,
    StoreOption,
    StudyArgument,
    TaskDirOption,
)
from mlmclm.cli.study import write_study_report
from mlmclm.errors import UserError
from mlmclm.pipeline import plan_sweep, study_space
from mlmclm.stored import open_study
from mlmclm.study_file import load_study


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command("report")(report)


def report(
    file: StudyArgument,
    store: StoreOption = options.DEFAULT_STORE,
    data: DataOption = None,
    task_dir: TaskDirOption = None,
    export: Annotated[
        bool, typer.Option("--export", help="Also write every run to MLflow that isn't there yet.")
    ] = False,
    rule: RuleOption = None,
    as_json: JsonOption = False,
) -> None:
    """Analyses the results that a study has so far and writes its tables and its HTML report; prepares and computes nothing.

    Example: mlmclm report examples/quickstart.yaml
    """
    from mlmclm.study_tracking import StudyTracking
    from mlmclm.sweeps.ledger import Ledger

    study, place = load_study(file), options.place(store, data, task_dir)
    space = options.by_rule(study_space(study, place.task_dirs), rule)
    stored = open_study(study, place, space, file)
    results = Ledger(place.store).results(plan_sweep(space, stored.models, stored.tasks, place).cells)
    if not results:
        raise UserError(f"study {study.name!r} has no results yet: run `mlmclm study {file}` first.")
    with ExitStack() as stack:
        tracking = stack.enter_context(StudyTracking(study, place)) if export else None
        if tracking is not None:
            tracking.pretrained(stored.prepared)
            tracking.sweep_begins(stored.prepared, space)
            for result in results:
                tracking.cell(result)
        command = f"mlmclm study {file}"
        write_study_report(stored.prepared, space, stored.tasks, results, command, tracking, as_json=as_json)
