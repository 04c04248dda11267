"""`mlmclm study`: run a whole study, from its file to its report."""

from __future__ import annotations

import typer

from mlmclm.cli import options


def register(app: typer.Typer) -> None:
    """Register the command."""
    app.command("study")(study)


def study(
    file: options.Study,
    store: options.Store = options.DEFAULT_STORE,
    data: options.Data = None,
    task_dir: options.TaskDir = None,
    ledger: options.Ledger = None,
    ray: options.Ray = None,
    replace: options.Replace = False,
    dry_run: options.DryRun = False,
    workers: options.Workers = None,
    price: options.Price = None,
    as_json: options.Json = False,
) -> None:
    """Does all of a study: prepares the data, pretrains, fine-tunes the grid, chooses, reports.

    What is in the store already is not computed again: run the same command after a crash, a kill or a change of the file, and
    only what is missing is done. A change that leaves out or alters a part of the grid needs another name, or --replace.

    Example: mlmclm study examples/quickstart.yaml
    """
    from mlmclm.cli.dry_run import show_dry_run
    from mlmclm.cli.shared import work_on
    from mlmclm.cli.study_report import command_of
    from mlmclm.study.last_grid import check_last
    from mlmclm.study.study_file import load_study
    from mlmclm.study.sweep import prepare_tasks, study_grid, study_space
    from mlmclm.study.zero_shot import zero_shot_tasks

    loaded, place = load_study(file), options.place(store, data, task_dir, ledger)
    dry = options.assumed(workers, price, dry_run=dry_run)
    if dry is not None:
        show_dry_run(loaded, place, dry, as_json=as_json)
        return
    space, evaluations = study_space(loaded, place.task_dirs), zero_shot_tasks(loaded, place)
    check_last(place.study_folder(loaded), study_grid(loaded, space), replace=replace)
    with work_on(loaded, place, ray) as work:
        tasks = prepare_tasks(work.prepared, space)  # before training, so that bad data cost no time
        models = work.pretrain()
        command = command_of("study", [str(file)], data, task_dir)
        work.sweep(space, models, tasks, evaluations, command=command, as_json=as_json)
