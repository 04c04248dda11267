"""`mlmclm replicate`: test the claims of a paper by a study of its kind."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from mlmclm.arguments import SECONDS_FOR_NODES
from mlmclm.cli import options
from mlmclm.cli.output import print_json, show
from mlmclm.errors import UserError
from mlmclm.numbers import time_text


def replicate(
    paper: Annotated[str, Argument(metavar="study|ettin", help="arXiv 2507.00994 (study) or 2507.11412 (ettin).")],
    scale: Annotated[
        str,
        Option(
            metavar="tiny|small|paper",
            help="tiny: minutes, without data. small: a night on two cores, with the data sets of --data. paper: what the paper itself "
            "computed, as a plan with its price.",
        ),
    ] = "tiny",
    part: options.Part = None,
    store: options.Store = options.DEFAULT_STORE,
    data: options.Data = None,
    ray: options.Ray = None,
    wait_for_nodes: options.WaitForNodes = SECONDS_FOR_NODES,
    dry_run: options.DryRun = False,
    write: Annotated[
        Path | None, Option(metavar="FOLDER", help="Only copy the study file and its tasks to a folder, to edit.")
    ] = None,
    device: options.Device = None,
    price: Annotated[
        float | None,
        Option(min=0, help="With --scale paper: price of an hour of one device, for the cost of pretraining."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Runs the packaged study that replicates a paper, and says of each of the paper's claims whether the results show it.

    It is a study like any other (`mlmclm study replicate-study-small` is the same): what the store has is not computed again.
    Its parts, of at most three hours each on two cores, each end with tables, a report and claims.

    Examples:

    mlmclm replicate study --scale tiny

    mlmclm replicate ettin --scale small --data ~/datasets --part half

    mlmclm replicate study --scale paper --device h100 --price 2.50
    """
    from mlmclm.studies.replication import COMPUTED, replication_of, write_replication

    name, planned = replication_of(paper, scale), scale not in COMPUTED
    for option, setting in (("--device", device), ("--price", price)):
        if setting is not None and not planned:
            raise UserError(f"{option} is for --scale paper.")
    for option, value in (("--part", part), ("--write", write)):
        if value is not None and planned:
            raise UserError(f"{option} is for the scales that are computed: --scale {' or '.join(COMPUTED)}.")
    if planned:
        _show_paper_scale(paper, store, data, device, price, as_json=as_json)
    elif write is not None:
        study, *task_files = write_replication(name, write)
        show("\n".join(map(str, (study, *task_files))))
        show(f"What it would compute: mlmclm study {study} --dry-run")
    else:
        from mlmclm.cli.study_report import show_plan, show_results
        from mlmclm.studies.api import study as open_study

        opened = open_study(name, part=part, store=store, data=data)
        if dry_run:
            show_plan(opened.plan(), as_json=as_json)
            return
        results = opened.run(ray=ray, wait_for_nodes=wait_for_nodes, check=False)
        show_results(results, as_json=as_json, claims=True)


def _show_paper_scale(
    paper: str, store: Path, data: Path | None, device: str | None, price: float | None, *, as_json: bool
) -> None:
    """Print the plan of a paper's computations, their cost on a device, and the commands that run them; compute nothing."""
    from mlmclm.cli.plan import show_priced
    from mlmclm.studies.api import study as open_study
    from mlmclm.studies.replication import PAPERS

    replication = PAPERS[paper]
    priced = replication.priced(device)
    hours = priced.pricing.plan(priced.plan).device_hours
    grid = None if replication.study is None else open_study(replication.study, store=store, data=data).plan().sweep
    if as_json:
        cost = {} if price is None else {"cost": hours * price}
        print_json(priced.as_dict() | cost | {"commands": [command for _, command in replication.commands]}
                   | ({} if grid is None else {"grid": grid.as_dict()}))  # fmt: skip
        return
    show_priced(priced, replication.suite)
    if price is not None:
        show(f"cost of pretraining: {hours * price:,.0f} for {time_text(hours)} at {price:,.2f} an hour")
    for title, command in replication.commands:
        show(f"{title}: {command}")
    if grid is not None:
        for line in grid.lines():
            show(line)
