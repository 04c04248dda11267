"""`mlmclm sweep`: fine-tunes models over a grid of learning rate x seed x task."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

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


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command("sweep")(sweep_study)


def sweep_study(
    file: StudyArgument,
    store: StoreOption = options.DEFAULT_STORE,
    data: DataOption = None,
    task_dir: TaskDirOption = None,
    ray: AddressOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Fine-tunes the models of a study, which must be pretrained, over its search space on Ray Tune, and reports.

    A cell (model, task, learning rate, seed) is computed once, ever: its result is a file named by a hash of all that can change
    it. Run the same command again and the missing cells are computed, whatever ended the last run.

    Example: mlmclm sweep examples/quickstart.yaml
    """
    from mlmclm.cli.shared import at_work, command_of, on_cluster, shared_session, write_study_report
    from mlmclm.study.model_folders import export_models
    from mlmclm.study.prepare import prepare
    from mlmclm.study.study_file import load_study
    from mlmclm.study.sweep import plan_sweep, prepare_tasks, study_space, sweep
    from mlmclm.study.tracking import StudyTracking

    study, place = load_study(file), options.place(store, data, task_dir)
    if dry_run:
        from mlmclm.cli.dry_run import show_dry_run

        show_dry_run(study, place, as_json=as_json)
        return
    space = study_space(study, place.task_dirs)
    with at_work(study, place), ExitStack() as stack:
        tracking = stack.enter_context(StudyTracking(study, place))
        session = shared_session(stack, place, ray)
        prepared = prepare(study, place, session=session if on_cluster(ray) else None)
        models = export_models(prepared)
        tasks = prepare_tasks(prepared, space)
        tracking.sweep_begins(prepared, space)
        plan = partial(plan_sweep, space, models, tasks, place)
        outcome = sweep(prepared, space, plan, session=session, on_result=tracking.cell)
        command, folder = command_of(file, data, task_dir), place.study_folder(study)
        write_study_report(prepared, space, tasks, outcome.results, command, tracking, folder=folder, as_json=as_json)
