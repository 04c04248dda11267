"""`mlmclm study`: run a whole study, from its file to its report."""

from __future__ import annotations

from mlmclm.arguments import SECONDS_FOR_NODES
from mlmclm.cli import options


def study(
    file: options.Study,
    overrides: options.Overrides = None,
    part: options.Part = None,
    store: options.Store = options.DEFAULT_STORE,
    data: options.Data = None,
    task_dir: options.TaskDir = None,
    wait_for_storage: options.WaitForStorage = None,
    ray: options.Ray = None,
    wait_for_nodes: options.WaitForNodes = SECONDS_FOR_NODES,
    replace: options.Replace = False,
    dry_run: options.DryRun = False,
    workers: options.Workers = None,
    price: options.Price = None,
    as_json: options.Json = False,
) -> None:
    """Runs a whole study: prepares the data, pretrains, fine-tunes the grid, chooses, reports.

    What the store already has is not computed again: after a crash, a kill or a change of the file, the same command computes
    only what is missing. A change that leaves out or alters a part of the grid needs another name, or --replace. A study whose
    file has parts can be computed part by part, with `--part`.

    Examples:

    mlmclm study quickstart

    mlmclm study my_study.yaml name=larger-batch recipe.batch=32 --data ~/datasets
    """
    from mlmclm.cli.study_report import show_plan, show_results
    from mlmclm.studies.api import study as open_study

    options.refuse_without_dry_run(dry_run=dry_run, workers=workers, price=price)
    opened = open_study(
        file,
        part=part,
        overrides=overrides or (),
        store=store,
        data=data,
        task_dirs=task_dir,
        wait_for_storage=wait_for_storage,
    )
    if dry_run:
        show_plan(opened.plan(workers=workers, price=price), as_json=as_json)
        return
    show_results(opened.run(ray=ray, replace=replace, wait_for_nodes=wait_for_nodes, check=False), as_json=as_json)
