"""`mlmclm sweep`: fine-tune models over a grid of learning rate x seed x task."""

from __future__ import annotations

import typer

from mlmclm.cli import options


def register(app: typer.Typer) -> None:
    """Register the command."""
    app.command("sweep")(sweep_study)


def sweep_study(
    file: options.Study,
    store: options.Store = options.DEFAULT_STORE,
    data: options.Data = None,
    task_dir: options.TaskDir = None,
    ray: options.Ray = None,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Fine-tunes the models of a study, which must be pretrained, over its search space on Ray Tune, and reports.

    A cell (model, task, learning rate, seed) is computed once, ever: its result is a file named by a hash of all that can change
    it. Run the same command again and the missing cells are computed, whatever ended the last run.

    Example: mlmclm sweep examples/quickstart.yaml
    """
    from mlmclm.cli.dry_run import show_dry_run
    from mlmclm.cli.shared import work_on
    from mlmclm.cli.study_report import command_of
    from mlmclm.study.model_folders import export_models
    from mlmclm.study.study_file import load_study
    from mlmclm.study.sweep import prepare_tasks, study_space

    study, place = load_study(file), options.place(store, data, task_dir)
    if dry_run:
        show_dry_run(study, place, as_json=as_json)
        return
    space = study_space(study, place.task_dirs)
    with work_on(study, place, ray) as work:
        models = export_models(work.prepared)
        tasks = prepare_tasks(work.prepared, space)
        work.sweep(space, models, tasks, command=command_of(file, data, task_dir), as_json=as_json)
