"""`mlmclm sweep`: fine-tune models over a grid of learning rate x seed x task, and look at such a sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from mlmclm.arguments import SECONDS_FOR_NODES
from mlmclm.cli import options
from mlmclm.cli.default_command import DefaultCommand
from mlmclm.cli.sweep_cells import cells, retry
from mlmclm.cli.sweep_status import status
from mlmclm.errors import UserError

verbs = typer.Typer(
    cls=DefaultCommand,
    help="Fine-tunes models over a search space, and shows the progress.",
    rich_markup_mode="markdown",
)


@verbs.command(short_help="Computes the missing cells; `sweep FILE` does this too.")
def run(
    file: Annotated[
        Path | None, Argument(help="A study file, whose models must be pretrained, or a sweep file (YAML).")
    ] = None,
    overrides: options.Overrides = None,
    model: options.Models = None,
    task: Annotated[
        list[str] | None, Option(help="A task, in place of the space's; may be given several times.")
    ] = None,
    space: Annotated[str | None, Option(metavar="NAME|FILE", help="The search space, such as glue.")] = None,
    name: Annotated[
        str | None, Option(help="Name of the report's folder and the MLflow experiment; `sweep` if not given.")
    ] = None,
    baseline: Annotated[str | None, Option(help="The model with which the others are compared.")] = None,
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
    """Fine-tunes models over a search space on Ray Tune, and reports: a study's models, or any that you name.

    A cell (model, task, learning rate, seed) is computed only once: its result is a file named by a hash of everything that can
    change it. The same command computes the missing cells, whatever ended the last run.

    Examples:

    mlmclm sweep examples/quickstart.yaml

    mlmclm sweep --model answerdotai/ModernBERT-base --model ./my_encoder --task sst2 --task rte --space glue
    """
    from mlmclm.cli.study_report import show_plan, show_results
    from mlmclm.studies import api

    options.refuse_without_dry_run(dry_run=dry_run, workers=workers, price=price)
    chosen = {"--model": model, "--task": task, "--space": space, "--name": name, "--baseline": baseline}
    used = [option for option, value in chosen.items() if value]
    if file is not None and used:
        raise UserError(f"{', '.join(used)}: {file} sets this already; give a file or options.")
    folders: dict[str, Any] = {"store": store, "data": data, "task_dirs": task_dir}
    folders["wait_for_storage"] = wait_for_storage
    if file is not None:
        opened = api.study(file, overrides=overrides or (), **folders)
    elif not model:
        raise UserError("give a study file, a sweep file, or models with --model.")
    elif space is None:
        raise UserError("--space is missing: name a search space, such as glue, or a YAML file.")
    else:
        opened = api.sweep(model, task, space, name=name, baseline=baseline, **folders)
    if dry_run:
        show_plan(opened.plan(workers=workers, price=price), as_json=as_json)
        return
    show_results(
        opened.run(pretrain=False, ray=ray, replace=replace, wait_for_nodes=wait_for_nodes, check=False),
        as_json=as_json,
    )


for verb in (status, cells, retry):
    verbs.command()(verb)
