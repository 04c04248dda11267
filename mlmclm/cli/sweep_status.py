"""`mlmclm sweep status`: how far a sweep is, from any machine that sees its store."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text
from typer import Option

from mlmclm.cli import options
from mlmclm.cli.output import print_json, show, show_table
from mlmclm.progress import spoken

if TYPE_CHECKING:
    from mlmclm.storage.leases import Holder
    from mlmclm.sweeps.status import SweepStatus, Watch

SECONDS_BETWEEN_LOOKS = 5.0
ERRORS_SHOWN, RUNNING_SHOWN = 5, 20
COLUMNS = {"ok": "scored", "diverged": "diverged", "running": "running", "failed": "failed", "damaged": "damaged",
           "missing": "missing"}  # fmt: skip
"""Status -> header."""

Which = options.StudyOrSweep


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
    from mlmclm.studies.last_run import watch_of

    watch = watch_of(which, store.resolve())
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
    to_come = found.manifest.to_come
    counts += [f"at most {to_come:,} more that results may add"] if to_come else []
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
        "to_come": found.manifest.to_come,
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
