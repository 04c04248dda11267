"""`mlmclm sweep`: fine-tune models over a grid of learning rate x seed x task, and look at such a sweep and its cells."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text
from typer import Argument, Option

from mlmclm.arguments import SECONDS_FOR_NODES
from mlmclm.cli import options
from mlmclm.cli.default_command import DefaultCommand
from mlmclm.cli.output import print_json, show, show_plan, show_results, show_table
from mlmclm.errors import UserError, for_each, unknown
from mlmclm.numbers import plural
from mlmclm.progress import spoken
from mlmclm.storage.csv_text import safe_cell

if TYPE_CHECKING:
    from mlmclm.sweeps.status import SweepStatus, Watch

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


SECONDS_BETWEEN_LOOKS = 5.0
ERRORS_SHOWN, RUNNING_SHOWN = 5, 20
STATUSES = ("ok", "diverged", "running", "failed", "damaged", "missing")


@verbs.command()
def status(
    which: options.StudyOrSweep,
    store: options.Store = options.DEFAULT_STORE,
    follow: Annotated[
        bool, Option("--follow", "-f", help="Look again every 5 s until every cell has a result, or Ctrl-C.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Says how far a sweep is: cells by model and task, who computes what, rate, time left, and the last errors.

    It reads the store only, so it works on any machine that sees it. It shows the cells that the sweep was last started with.

    Examples:

    mlmclm sweep status quickstart

    mlmclm sweep status my_sweep.yaml --follow
    """
    from mlmclm.studies.study_record import watch_of

    watch = watch_of(which, store.resolve())
    if follow and not as_json:
        _follow(watch)
        return
    for snapshot in _looks(watch) if follow else [watch.look()]:
        print_json(_as_json(snapshot)) if as_json else _show(snapshot)


def _looks(watch: Watch) -> Iterator[SweepStatus]:
    """Yield the status at regular intervals until every cell has a result."""
    while True:
        snapshot = watch.look()
        yield snapshot
        if snapshot.complete:
            return
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _follow(watch: Watch) -> None:
    spoken()
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        last_line = ""
        for snapshot in _looks(watch):
            line = ", ".join(_lines(snapshot, errors=0))
            if line != last_line:
                show(line)
                last_line = line
        return
    # Redrawn only after a look at the store: nothing on the screen moves in between.
    with Live(console=console, auto_refresh=False) as live:
        for snapshot in _looks(watch):
            lines = [Text(line, no_wrap=True, overflow="ellipsis") for line in _lines(snapshot, errors=2)]
            live.update(Group(lines[0], snapshot.table(), *lines[1:]), refresh=True)


def _lines(snapshot: SweepStatus, *, errors: int) -> list[str]:
    """Return the sums, the rate, and the last errors, one line each."""
    left = snapshot.total - snapshot.done
    present = (status for status in STATUSES[1:-1] if snapshot.counts[status])
    counts = [f"{snapshot.counts[status]:,} {status}" for status in present]
    waiting = sum(snapshot.manifest.waiting.values())
    counts += [f"{waiting:,} wait for the cells that they start from"] if waiting else []
    to_come = snapshot.manifest.to_come
    counts += [f"at most {to_come:,} more that results may add"] if to_come else []
    done = f"sweep {snapshot.manifest.name}: {snapshot.done:,} of {snapshot.total:,} cells are done"
    lines = [", ".join([done, *counts])]
    if snapshot.rate and left:
        time_left = snapshot.seconds_left
        ends = f", {timedelta(seconds=round(time_left))} left" if time_left is not None else ", none is running"
        hourly = 3600 * snapshot.rate
        lines.append(f"{hourly:,.0f} cells an hour{ends}" if hourly >= 10 else f"{hourly:.2g} cells an hour{ends}")
    for state in snapshot.errors()[:errors]:
        when = f", {state.failure.time}, {state.failure.count} times" if state.failure else ""
        reason = state.failure.reason if state.failure else state.damage
        lines.append(f"{state.cell.name} {state.status}{when}: {reason}")
    return lines


def _show(snapshot: SweepStatus) -> None:
    first, *rest = _lines(snapshot, errors=ERRORS_SHOWN)
    show(first, style="bold")
    rows = [
        (model, task, f"{sum(counts.values()):,}", *(f"{counts[status]:,}" for status in STATUSES))
        for (model, task), counts in snapshot.by_pair().items()
    ]
    show_table(("model", "task", "cells", "scored", *STATUSES[1:]), rows)
    running = [(state.cell.name, state.holder) for state in snapshot.states if state.holder is not None]
    for name, holder in running[:RUNNING_SHOWN]:
        since = "" if holder.since is None else f", for {time.time() - holder.since:,.0f} s"
        show(f"{name}: process {holder.process} on {holder.host}{since}")
    if len(running) > RUNNING_SHOWN:
        show(f"and {len(running) - RUNNING_SHOWN:,} more running cells")
    for line in rest:
        show(line)
    if (more := len(snapshot.errors()) - ERRORS_SHOWN) > 0:
        show(f"and {more:,} more; `mlmclm sweep cells` lists them with --status failed")


def _as_json(snapshot: SweepStatus) -> dict[str, Any]:
    return {
        "sweep": snapshot.manifest.name,
        "planned": snapshot.manifest.planned,
        "cells": snapshot.total,
        "done": snapshot.done,
        "complete": snapshot.complete,
        "counts": {status: snapshot.counts[status] for status in STATUSES},
        "waiting": dict(snapshot.manifest.waiting),
        "to_come": snapshot.manifest.to_come,
        "cells_per_hour": None if snapshot.rate is None else 3600 * snapshot.rate,
        "seconds_left": snapshot.seconds_left,
        "pairs": [
            {"model": model, "task": task, **{status: counts[status] for status in STATUSES}}
            for (model, task), counts in snapshot.by_pair().items()
        ],
        "running": [
            {"name": state.cell.name, "key": state.cell.key, "host": state.holder.host,
             "process": state.holder.process, "since": state.holder.since}
            for state in snapshot.states if state.holder is not None
        ],
        "errors": [
            {"name": state.cell.name, "status": state.status, "damage": state.damage,
             **(asdict(state.failure) if state.failure else {"key": state.cell.key})}
            for state in snapshot.errors()
        ],
    }  # fmt: skip


Models = Annotated[list[str] | None, Option("--model", help="Only this model; may be given several times.")]
Tasks = Annotated[list[str] | None, Option("--task", help="Only this task; may be given several times.")]
FORMATS = ("table", "csv", "json")
SHOWN = ("name", "status", "validation_score", "score", "seconds", "node", "started_from", "key")


@verbs.command()
def cells(
    which: options.StudyOrSweep,
    store: options.Store = options.DEFAULT_STORE,
    model: Models = None,
    task: Tasks = None,
    status: Annotated[
        list[str] | None,
        Option(help="Only ok, diverged, damaged, running, failed or missing; may be given several times."),
    ] = None,
    form: Annotated[str, Option("--format", metavar="|".join(FORMATS), help="How to print them.")] = "table",
    as_json: options.Json = False,
) -> None:
    """Lists the cells of a sweep: name, status, scores, seconds, node, the cell that it started from, key.

    CSV and JSON have more columns, and the numbers in them are not rounded. Scores are fractions of the task's main metric.

    Example: mlmclm sweep cells quickstart --status diverged --format csv
    """
    from mlmclm.studies.study_record import watch_of

    if form not in FORMATS:
        raise unknown("format", form, FORMATS, where="--format")
    snapshot = watch_of(which, store.resolve()).look()
    rows = [state.row() for state in snapshot.chosen(model or (), task or (), status or ())]
    if as_json or form == "json":
        print_json(rows)
    elif form == "csv":
        text = io.StringIO()
        writer = csv.DictWriter(text, rows[0] if rows else SHOWN, lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: safe_cell(value) for name, value in row.items()} for row in rows)
        show(text.getvalue().rstrip("\n"))
    else:
        show_table(SHOWN, [[_short(row, name) for name in SHOWN] for row in rows], drop=("key", "started_from", "node"))
        show("Scores are fractions of 1.")


def _short(row: dict[str, Any], name: str) -> str:
    value = row[name]
    if value is None:
        return ""
    if name in ("key", "started_from"):
        return str(value)[:12]
    if name == "seconds":
        return f"{value:,.1f}"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


@verbs.command()
def retry(
    which: options.StudyOrSweep,
    store: options.Store = options.DEFAULT_STORE,
    cell: Annotated[
        list[str] | None,
        Option(
            metavar="KEY|NAME",
            help="Compute this cell again, by its key, the key's first digits, or its name; may be given several times.",
        ),
    ] = None,
    status: Annotated[
        list[str] | None, Option(metavar="damaged|diverged", help="Compute all cells of this status again.")
    ] = None,
    model: Models = None,
    task: Tasks = None,
    yes: Annotated[bool, Option("--yes", help="Set them aside; without this, they are only listed.")] = False,
    as_json: options.Json = False,
) -> None:
    """Lists the cells that the next run computes, and sets chosen results aside so that it computes them again.

    A result that is set aside is moved, with its examples, to the folder set-aside/ of the results. Nothing is deleted. `--status damaged`
    reads all test examples, and chooses results with damaged ones too. Divergence is a result too, and the same software would diverge
    again.

    Example: mlmclm sweep retry quickstart --status damaged --yes
    """
    from mlmclm.studies.artifacts import with_examples
    from mlmclm.studies.study_record import watch_of
    from mlmclm.sweeps.results_store import ResultsStore

    if (model or task) and not (cell or status):
        raise UserError("--model and --task narrow --status or --cell; give one of these.")
    if yes and not (cell or status):
        raise UserError(
            "--yes: choose results with --status or --cell. Failed cells are computed by the next run anyway."
        )
    snapshot = watch_of(which, store.resolve()).look()
    results_store = ResultsStore(store.resolve())
    if "damaged" in (status or ()):
        snapshot = with_examples(snapshot, store.resolve())
    chosen = snapshot.again(cell or (), status or (), models=model or (), tasks=task or ())
    moved = for_each(chosen, results_store.set_aside) if yes else []
    unfinished = {name: snapshot.counts[name] for name in ("failed", "missing")}
    if as_json:
        failed = [state.row() for state in snapshot.errors() if state.status == "failed"]
        asides = {key: str(folder) for key, folder in zip(chosen, moved, strict=bool(moved))}
        print_json({**unfinished, "failed_cells": failed, "again": chosen, "set_aside": asides})
        return
    for state in snapshot.errors():
        show(f"{state.cell.name} {state.status}: {state.failure.reason if state.failure else state.damage}")
    lacking = f"{unfinished['failed']:,} failed and {plural(unfinished['missing'], 'other cell')}"
    show(f"{lacking} have no result: the next run computes them")
    for number, (key, name) in enumerate(chosen.items()):
        show(f"{name}: {results_store.path(key)} {f'is now in {moved[number]}' if yes else 'would be set aside'}")
    if chosen and not yes:
        them = "it" if len(chosen) == 1 else "them"
        show(
            f"nothing is changed yet: with --yes, {plural(len(chosen), 'result')} will be set aside, and the next run computes {them}"
        )
