"""`mlmclm sweep status`: how far a sweep is, from any machine that sees its store."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text
from typer import Option

from mlmclm.cli import options
from mlmclm.cli.output import print_json, show, show_table
from mlmclm.progress import spoken

if TYPE_CHECKING:
    from mlmclm.storage.claims import Holder
    from mlmclm.studies.place import Place
    from mlmclm.sweeps.status import SweepStatus, Watch

SECONDS_BETWEEN_LOOKS = 5.0
ERRORS_SHOWN, RUNNING_SHOWN = 5, 20
COLUMNS = {"ok": "scored", "diverged": "diverged", "running": "running", "failed": "failed", "damaged": "damaged",
           "missing": "missing"}  # fmt: skip
"""Status -> header."""

Which = options.StudyOrSweep


def watch_of(which: str, place: Place) -> Watch:
    """Return a look at the sweep that a command names.

    Raises:
        UserError: there is no such sweep in the store, or the file is wrong.
    """
    from mlmclm.sweeps.ledger import Ledger
    from mlmclm.sweeps.manifest import read_manifest
    from mlmclm.sweeps.status import Watch

    return Watch(read_manifest(name_of(which), place.store), Ledger(place.store))


def name_of(which: str) -> str:
    """Return the name of a sweep or study that is given by its name or its file.

    Raises:
        UserError: the file is missing or wrong.
    """
    from mlmclm.studies.last_run import is_path

    if not is_path(which):
        return which
    from mlmclm.studies.study_file import load_study
    from mlmclm.studies.sweep_file import is_sweep_file, load_sweep

    path = Path(which)
    return load_sweep(path).name if is_sweep_file(path) else load_study(path).name


def status(
    which: Which,
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
    watch = watch_of(which, options.place(store, None))
    if follow and not as_json:
        _follow(watch)
        return
    for found in _looks(watch) if follow else [watch.look()]:
        print_json(_as_json(found)) if as_json else _show(found)


def _looks(watch: Watch) -> Iterator[SweepStatus]:
    """Look at intervals until every cell has a result."""
    while True:
        found = watch.look()
        yield found
        if found.complete:
            return
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _follow(watch: Watch) -> None:

    spoken()
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        said = ""
        for found in _looks(watch):
            line = ", ".join(_lines(found, errors=0))
            if line != said:
                show(line)
                said = line
        return
    # Drawn when something was looked at, never in between: nothing on the screen moves on its own.
    with Live(console=console, auto_refresh=False) as live:
        for found in _looks(watch):
            lines = [Text(line, no_wrap=True, overflow="ellipsis") for line in _lines(found, errors=2)]
            live.update(Group(lines[0], found.table(), *lines[1:]), refresh=True)


def _lines(found: SweepStatus, *, errors: int) -> list[str]:
    """Return the sums, the rate, and the last errors, in one line each."""
    left = found.total - found.done
    counts = [f"{found.counts[status]:,} {COLUMNS[status]}" for status in ("diverged", "running", "failed", "damaged")
              if found.counts[status]]  # fmt: skip
    waiting = sum(found.manifest.waiting.values())
    counts += [f"{waiting:,} wait for what they start from"] if waiting else []
    lines = [", ".join([f"sweep {found.manifest.name}: {found.done:,} of {found.total:,} cells are done", *counts])]
    if found.rate and left:
        time_left = found.seconds_left
        ends = f", {timedelta(seconds=round(time_left))} left" if time_left is not None else ", none is running"
        hourly = 3600 * found.rate
        lines.append(f"{hourly:,.0f} cells an hour{ends}" if hourly >= 10 else f"{hourly:.2g} cells an hour{ends}")
    for state in found.errors()[:errors]:
        said = f", {state.failure.time}, {state.failure.count} times" if state.failure else ""
        reason = state.failure.reason if state.failure else state.damage
        lines.append(f"{state.cell.name} {state.status}{said}: {reason}")
    return lines


def _show(found: SweepStatus) -> None:
    first, *others = _lines(found, errors=ERRORS_SHOWN)
    show(first, style="bold")
    rows = [
        (model, task, f"{sum(counts.values()):,}", *(f"{counts[status]:,}" for status in COLUMNS))
        for (model, task), counts in found.by_pair().items()
    ]
    show_table(("model", "task", "cells", *COLUMNS.values()), rows)
    running = [(state.cell.name, state.holder) for state in found.states if state.holder is not None]
    for name, holder in running[:RUNNING_SHOWN]:
        show(f"{name}: {_who(holder)}")
    if len(running) > RUNNING_SHOWN:
        show(f"and {len(running) - RUNNING_SHOWN:,} more running cells")
    for line in others:
        show(line)
    if len(found.errors()) > ERRORS_SHOWN:
        show(f"and {len(found.errors()) - ERRORS_SHOWN:,} more; `mlmclm sweep cells` lists them with --status failed")


def _who(holder: Holder) -> str:
    since = "" if holder.since is None else f", for {time.time() - holder.since:,.0f} s"
    return f"process {holder.process} on {holder.host}{since}"


def _as_json(found: SweepStatus) -> dict[str, Any]:
    return {
        "sweep": found.manifest.name,
        "planned": found.manifest.planned,
        "cells": found.total,
        "done": found.done,
        "complete": found.complete,
        "counts": {status: found.counts[status] for status in COLUMNS},
        "waiting": dict(found.manifest.waiting),
        "cells_per_hour": None if found.rate is None else 3600 * found.rate,
        "seconds_left": found.seconds_left,
        "pairs": [
            {"model": model, "task": task, **{status: counts[status] for status in COLUMNS}}
            for (model, task), counts in found.by_pair().items()
        ],
        "running": [
            {"name": state.cell.name, "key": state.cell.key, "host": state.holder.host,
             "process": state.holder.process, "since": state.holder.since}
            for state in found.states if state.holder is not None
        ],
        "errors": [
            {"name": state.cell.name, "status": state.status, "damage": state.damage,
             **(asdict(state.failure) if state.failure else {"key": state.cell.key})}
            for state in found.errors()
        ],
    }  # fmt: skip
