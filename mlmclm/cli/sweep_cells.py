"""`mlmclm sweep cells` and `retry`: the cells of a sweep one by one."""

from __future__ import annotations

import csv
import io
from typing import Annotated, Any

from typer import Option

from mlmclm.cli import options
from mlmclm.cli.output import print_json, show, show_table
from mlmclm.errors import UserError, for_each, unknown
from mlmclm.numbers import plural
from mlmclm.progress import bars
from mlmclm.storage.csv_text import safe_cell

Models = Annotated[list[str] | None, Option("--model", help="Only this model; may be given several times.")]
Tasks = Annotated[list[str] | None, Option("--task", help="Only this task; may be given several times.")]
FORMATS = ("table", "csv", "json")
SHOWN = ("name", "status", "validation_score", "score", "seconds", "node", "started_from", "key")


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
) -> None:
    """Lists the cells of a sweep: name, status, scores, seconds, node, the cell that it started from, key.

    CSV and JSON have more columns, and the numbers in them are not rounded. Scores are fractions of the task's main metric.

    Example: mlmclm sweep cells quickstart --status diverged --format csv
    """
    from mlmclm.studies.last_run import watch_of

    if form not in FORMATS:
        raise unknown("format", form, FORMATS, where="--format")
    snapshot = watch_of(which, store.resolve()).look()
    rows = [state.row() for state in snapshot.chosen(model or (), task or (), status or ())]
    if form == "json":
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
    from mlmclm.studies.last_run import watch_of
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
        with bars() as progress:
            snapshot = with_examples(snapshot, store.resolve(), progress)
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
