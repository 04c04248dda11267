"""Live table of a sweep, models down and tasks across; logs get a line for each finished pair instead."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from mlmclm.analysis.selection import rate_text
from mlmclm.finetuning.cell import Cell
from mlmclm.results.metrics import value_of
from mlmclm.sweeps.cells import cell_name

LINES_A_ROW = 2
OTHER_LINES = 9
"""Lines of a terminal that aren't rows of the table: headers, rules, the bar, messages."""
RUNNING_SHOWN = 4
ENDLESS = 10_000


@dataclass
class _Pair:
    """The cells of one model on one task."""

    cells: int = 0
    done: int = 0
    running: int = 0
    diverged: int = 0
    failed: int = 0
    validation: dict[tuple[str, float], list[float]] = field(default_factory=lambda: defaultdict(list))
    """Validation scores so far, by setting and learning rate."""

    def __add__(self, other: _Pair) -> _Pair:
        names = ("cells", "done", "running", "diverged", "failed")
        return _Pair(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def counts(self) -> str:
        parts = [f"{self.done:,}/{self.cells:,}"]
        parts += [
            f"{count} {word}"
            for count, word in (
                (self.running, "running"), (self.diverged, "diverged"), (self.failed, "failed"),
            )
            if count
        ]  # fmt: skip
        return ", ".join(parts)

    def best(self) -> str:
        """Format the best mean validation score so far, in points, and its learning rate; ties go to the lower rate."""
        # The drawing thread may run after a list is created and before its first score is added.
        means = {place: sum(scores) / len(scores) for place, scores in list(self.validation.items()) if scores}
        if not means:
            return ""
        setting, rate = min(means, key=lambda place: (-means[place], place[1]))
        where = f"{rate_text(rate)}, {setting}" if setting else rate_text(rate)
        return f"{100 * means[setting, rate]:.1f} at {where}"


class SweepTable:
    """The present state of all cells of a sweep; a rich renderable that fits the terminal on which it is drawn.

    Scores are those of the validation split, on which learning rates are chosen. Test scores wait for the report.
    """

    def __init__(self, cells: Iterable[Cell]) -> None:
        self._pairs: dict[tuple[str, str], _Pair] = defaultdict(_Pair)
        for cell in cells:
            self._pairs[cell.model, cell.task].cells += 1
        self._models = list(dict.fromkeys(model for model, _ in self._pairs))
        self._tasks = list(dict.fromkeys(task for _, task in self._pairs))
        self._running: dict[str, tuple[float, str]] = {}
        """Name of a running cell -> its start and its worker."""

    def started(self, cell: Cell, worker: str) -> None:
        """Note that a worker of this name has taken the cell."""
        self._pairs[cell.model, cell.task].running += 1
        self._running[cell_name(cell)] = time.monotonic(), worker

    def stopped(self, cell: Cell, *, failed: bool = False) -> None:
        """Note that a worker is done with the cell, whether it succeeded or not."""
        pair = self._pairs[cell.model, cell.task]
        pair.running -= 1
        pair.failed += failed
        self._running.pop(cell_name(cell), None)

    def add(self, result: Mapping[str, Any]) -> str | None:
        """Add a cell's result; if it is the last one of its model and task, return a line that sums them up."""
        model, task = result["model"], result["task"]
        pair = self._pairs[model, task]
        pair.done += 1
        if result["status"] == "ok":
            score = value_of(result["scores"]["validation"], result["metric"])
            pair.validation[result.get("setting", ""), result["learning_rate"]].append(score)
        else:
            pair.diverged += 1
        if pair.done < pair.cells:
            return None
        best = f", best validation score {pair.best()}" if pair.best() else ""
        diverged = f", {pair.diverged} diverged" if pair.diverged else ""
        return f"{model} on {task}: all {pair.cells:,} cells are done{best}{diverged}"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = max(1, (options.size.height - OTHER_LINES - min(len(self._running), RUNNING_SHOWN)) // LINES_A_ROW)
        models = self._models if len(self._models) <= room else self._most_telling(room)
        wide = self._table(models, self._tasks)
        # Measured on an endless console, because rich caps what a table needs at the console's own width.
        measuring = Console(width=ENDLESS)
        if Measurement.get(measuring, measuring.options, wide).maximum <= options.max_width:
            yield wide
        else:
            yield self._table(models, [])
        others = set(self._models) - set(models)
        if others:
            total = self._total((model, task) for model in others for task in self._tasks)
            yield Text(f"and {len(others)} more models: {total.counts()}", style="dim")
        now = time.monotonic()
        longest = sorted(self._running.items(), key=lambda item: item[1])
        for name, (began, worker) in longest[:RUNNING_SHOWN]:
            yield Text(f"{worker}: {name}, {now - began:.0f} s", style="dim", no_wrap=True)
        if len(longest) > RUNNING_SHOWN:
            yield Text(f"and {len(longest) - RUNNING_SHOWN} more busy workers", style="dim")

    def _most_telling(self, count: int) -> list[str]:
        """Choose `count` models, first those with running cells, then unfinished ones; keep the usual order."""

        def place(model: str) -> tuple[bool, bool]:
            total = self._total((model, task) for task in self._tasks)
            return not total.running, total.done >= total.cells

        chosen = set(sorted(self._models, key=place)[:count])
        return [model for model in self._models if model in chosen]

    def _total(self, pairs: Iterable[tuple[str, str]]) -> _Pair:
        return sum((self._pairs[pair] for pair in pairs if pair in self._pairs), start=_Pair())

    def _table(self, models: list[str], tasks: list[str]) -> Table:
        """Build the table of models by tasks; without tasks, give each model's sum over all of them."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        table.add_column("model", no_wrap=True)
        for header in tasks or [f"{len(self._tasks)} tasks"]:
            table.add_column(Text(header), no_wrap=True)
        for model in models:
            shown = [self._pairs.get((model, task), _Pair()) for task in tasks]
            row = [f"{pair.counts()}\n{pair.best()}" if pair.cells else "" for pair in shown]
            row = row or [self._total((model, task) for task in self._tasks).counts()]
            table.add_row(*map(Text, [model, *row]))
        return table
