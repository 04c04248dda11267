"""`mlmclm study`: the whole way from a study file to its report."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import typer

from mlmclm.cli import options
from mlmclm.cli.options import (
    AddressOption,
    DataOption,
    DryRunOption,
    JsonOption,
    StoreOption,
    StudyArgument,
    TaskDirOption,
)

if TYPE_CHECKING:
    from mlmclm.study.place import Place
    from mlmclm.study.study_file import StudyFile


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command("study")(study)


def study(
    file: StudyArgument,
    store: StoreOption = options.DEFAULT_STORE,
    data: DataOption = None,
    task_dir: TaskDirOption = None,
    ray: AddressOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Does all of a study: prepares the data, pretrains, fine-tunes the grid, chooses, reports.

    What is in the store already is not computed again: run the same command after a crash, a kill or a change of the file, and
    only what is missing is done.

    Example: mlmclm study examples/quickstart.yaml
    """
    from mlmclm.cli.shared import at_work, command_of
    from mlmclm.study.study_file import load_study

    loaded, place = load_study(file), options.place(store, data, task_dir)
    if dry_run:
        from mlmclm.cli.dry_run import show_dry_run

        show_dry_run(loaded, place, as_json=as_json)
        return
    with at_work(loaded, place):
        _run(loaded, place, command=command_of(file, data, task_dir), address=ray, as_json=as_json)


def _run(loaded: StudyFile, place: Place, *, command: str, address: str | None, as_json: bool) -> None:
    """The study from its first missing piece to its report."""
    from mlmclm.cli.shared import on_cluster, shared_session, write_study_report
    from mlmclm.study.model_folders import export_models
    from mlmclm.study.prepare import prepare
    from mlmclm.study.pretrain import pretrain
    from mlmclm.study.sweep import plan_sweep, prepare_tasks, study_space, sweep
    from mlmclm.study.tracking import StudyTracking

    space = study_space(loaded, place.task_dirs)
    with ExitStack() as stack:
        tracking = stack.enter_context(StudyTracking(loaded, place))
        session = shared_session(stack, place, address)
        prepared = prepare(loaded, place, session=session if on_cluster(address) else None)
        tasks = prepare_tasks(prepared, space)
        if prepared.unfinished():
            session()
            pretrain(prepared, tracking.stage_lines(prepared))
        models = export_models(prepared)
        tracking.pretrained(prepared)
        tracking.sweep_begins(prepared, space)
        plan = partial(plan_sweep, space, models, tasks, place)
        outcome = sweep(prepared, space, plan, session=session, on_result=tracking.cell)
        folder = place.study_folder(loaded)
        write_study_report(prepared, space, tasks, outcome.results, command, tracking, folder=folder, as_json=as_json)
