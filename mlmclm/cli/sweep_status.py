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
"""The column header of each status."""


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
    from mlmclm.studies.last_run import watch_of

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
    present = (status for status in ("diverged", "running", "failed", "damaged") if snapshot.counts[status])
    counts = [f"{snapshot.counts[status]:,} {COLUMNS[status]}" for status in present]
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
        (model, task, f"{sum(counts.values()):,}", *(f"{counts[status]:,}" for status in COLUMNS))
        for (model, task), counts in snapshot.by_pair().items()
    ]
    show_table(("model", "task", "cells", *COLUMNS.values()), rows)
    running = [(state.cell.name, state.holder) for state in snapshot.states if state.holder is not None]
    for name, holder in running[:RUNNING_SHOWN]:
        show(f"{name}: {_who(holder)}")
    if len(running) > RUNNING_SHOWN:
        show(f"and {len(running) - RUNNING_SHOWN:,} more running cells")
    for line in rest:
        show(line)
    if (more := len(snapshot.errors()) - ERRORS_SHOWN) > 0:
        show(f"and {more:,} more; `mlmclm sweep cells` lists them with --status failed")


def _who(holder: Holder) -> str:
    since = "" if holder.since is None else f", for {time.time() - holder.since:,.0f} s"
    return f"process {holder.process} on {holder.host}{since}"


def _as_json(snapshot: SweepStatus) -> dict[str, Any]:
    return {
        "sweep": snapshot.manifest.name,
        "planned": snapshot.manifest.planned,
        "cells": snapshot.total,
        "done": snapshot.done,
        "complete": snapshot.complete,
        "counts": {status: snapshot.counts[status] for status in COLUMNS},
        "waiting": dict(snapshot.manifest.waiting),
        "to_come": snapshot.manifest.to_come,
        "cells_per_hour": None if snapshot.rate is None else 3600 * snapshot.rate,
        "seconds_left": snapshot.seconds_left,
        "pairs": [
            {"model": model, "task": task, **{status: counts[status] for status in COLUMNS}}
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
