"""Live table of a sweep, models as rows and tasks as columns; logs get a line for each finished pair of model and task."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from mlmclm.finetuning.cell import Cell
from mlmclm.numbers import rate_text
from mlmclm.results.metrics import value_of
from mlmclm.sweeps.cells import ListedCell, cell_name

AnyCell = Cell | ListedCell

OTHER_LINES = 9
"""Lines of a terminal that aren't rows of the table: headers, rules, the bar, messages."""
RUNNING_SHOWN = 4
GAP = 3
"""Spaces between columns."""
COUNTED = ("cells", "done", "running", "diverged", "failed")


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

    def counts(self) -> str:
        others = [f"{getattr(self, name)} {name}" for name in ("running", "diverged", "failed") if getattr(self, name)]
        return ", ".join([f"{self.done:,}/{self.cells:,}", *others])

    def best(self) -> str:
        """Format the best mean validation score so far, in points, and its learning rate; ties go to the lower rate."""
        # The drawing thread may run after a list is created and before its first score is added.
        means = {place: sum(scores) / len(scores) for place, scores in list(self.validation.items()) if scores}
        if not means:
            return ""
        setting, rate = min(means, key=lambda point: (-means[point], point[1]))
        where = f"{rate_text(rate)}, {setting}" if setting else rate_text(rate)
        return f"{100 * means[setting, rate]:.1f} at {where}"


class SweepTable:
    """The present state of all cells of a sweep; a rich renderable that fits the terminal on which it is drawn.

    Scores are those of the validation split, on which learning rates are chosen. Test scores are shown only in the report.
    """

    def __init__(self, cells: Iterable[AnyCell]) -> None:
        self._pairs: dict[tuple[str, str], _Pair] = defaultdict(_Pair)
        for cell in cells:
            self._pairs[cell.model, cell.task].cells += 1
        self._models = list(dict.fromkeys(model for model, _ in self._pairs))
        self._tasks = list(dict.fromkeys(task for _, task in self._pairs))
        self._running: dict[str, tuple[float, str]] = {}
        """Name of a running cell -> its start and its worker."""

    def started(self, cell: AnyCell, worker: str = "", *, seconds: float = 0.0) -> None:
        """Note that a worker began the cell `seconds` ago; its name is empty if unknown."""
        self._pairs[cell.model, cell.task].running += 1
        self._running[cell_name(cell)] = time.monotonic() - seconds, worker

    def stopped(self, cell: AnyCell, *, failed: bool = False) -> None:
        """Note that a worker is done with the cell, whether it succeeded or not."""
        pair = self._pairs[cell.model, cell.task]
        pair.running -= 1
        pair.failed += failed
        self._running.pop(cell_name(cell), None)

    def add(self, result: Mapping[str, Any]) -> str | None:
        """Add a cell's result; if it is the last one of its model and task, return a line that summarises them."""
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

    def running(self) -> str:
        """Say how many cells are running, and which of them for how long: `2 running, m/sst2/lr1e-3/s0 for 34 s`."""
        if not self._running:
            return "none running"
        name, (began, _) = min(self._running.items(), key=lambda item: item[1])
        return f"{len(self._running)} running, {name} for {time.monotonic() - began:.0f} s"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = max(1, options.size.height - OTHER_LINES - min(len(self._running), RUNNING_SHOWN))
        models, columns = self._fitting(lines, options.max_width)
        yield from _drawn(columns)
        others = [model for model in self._models if model not in set(models)]
        if others:
            yield Text(f"and {len(others)} more models: {self._total(others).counts()}", style="dim")
        now = time.monotonic()
        longest = sorted(self._running.items(), key=lambda item: item[1])
        for name, (began, worker) in longest[:RUNNING_SHOWN]:
            where = f"{worker}: " if worker else ""
            yield Text(f"{where}{name}, {now - began:.0f} s", style="dim", no_wrap=True)
        if len(longest) > RUNNING_SHOWN:
            yield Text(f"and {len(longest) - RUNNING_SHOWN} more busy workers", style="dim")

    def _fitting(self, lines: int, width: int) -> tuple[list[str], list[list[str]]]:
        """Return models and columns of the fullest form that fits: with best scores, with counts, or with sums only."""
        for lines_a_row, cells in ((2, self._scored), (1, self._counted)):
            models = self._most_telling(max(1, lines // lines_a_row))
            rows = [line for model in models for line in (model, "")[:lines_a_row]]
            columns = [["model", *rows]]
            for task in self._tasks:
                pairs = [self._pairs.get((model, task), _Pair()) for model in models]
                columns.append([task, *(line for pair in pairs for line in cells(pair))])
            if sum(map(_width, columns)) + GAP * len(self._tasks) <= width:
                return models, columns
        models = self._most_telling(lines)
        sums = [f"{len(self._tasks)} tasks", *(self._total([model]).counts() for model in models)]
        return models, [["model", *models], sums]

    @staticmethod
    def _scored(pair: _Pair) -> tuple[str, ...]:
        return (pair.counts(), pair.best()) if pair.cells else ("", "")

    @staticmethod
    def _counted(pair: _Pair) -> tuple[str, ...]:
        return (f"{pair.done:,}/{pair.cells:,}" if pair.cells else "",)

    def _most_telling(self, count: int) -> list[str]:
        """Choose at most `count` models, first those with running cells, then unfinished ones; keep the usual order."""
        if len(self._models) <= count:
            return self._models

        def place(model: str) -> tuple[bool, bool]:
            total = self._total([model])
            return not total.running, total.done >= total.cells

        chosen = set(sorted(self._models, key=place)[:count])
        return [model for model in self._models if model in chosen]

    def _total(self, models: Iterable[str]) -> _Pair:
        """Return the sums of these models over all tasks."""
        pairs = [
            self._pairs[pair] for model in models for task in self._tasks if (pair := (model, task)) in self._pairs
        ]
        return _Pair(*(sum(getattr(pair, name) for pair in pairs) for name in COUNTED))


def _drawn(columns: list[list[str]]) -> Iterator[Text]:
    """Yield the lines of a table: headers, a rule, rows.

    Rich's own table takes fifteen times as long (140 ms for 42 models and 12 tasks), and it is drawn twice a second
    during the work.
    """
    widths = list(map(_width, columns))
    for number, cells in enumerate(zip(*columns, strict=True)):
        padded = (cell + " " * (width - cell_len(cell)) for cell, width in zip(cells, widths, strict=True))
        yield Text((" " * GAP).join(padded).rstrip(), style="" if number else "bold", no_wrap=True)
        if number == 0:
            yield Text("─" * (sum(widths) + GAP * (len(widths) - 1)), no_wrap=True, overflow="crop")


def _width(column: list[str]) -> int:
    return max(map(cell_len, column))
