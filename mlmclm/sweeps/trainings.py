"""Trainings of a sweep: each serves all the cells whose trained models are equal, and each has an estimate of its work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

from mlmclm.finetuning.cell import Cell, training_key
from mlmclm.finetuning.protocol import Protocol
from mlmclm.sweeps.cells import cell_name
from mlmclm.tasks.prepared_task import PreparedTask

BACKWARD = 2
"""Work of a backward pass relative to a forward pass: a matrix product has two gradients."""


@dataclass(frozen=True)
class Training:
    """Cells that are trained once and evaluated one after the other."""

    cells: Mapping[str, Cell]
    """The cells by key, of one model, in the order of the grid."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The cells' keys."""
        return tuple(self.cells)

    @property
    def first(self) -> Cell:
        """The first cell, which stands for the others in messages and progress."""
        return next(iter(self.cells.values()))

    @cached_property
    def task(self) -> str:
        """The tasks: `mnli`, or `mnli+mnli_mm`."""
        return "+".join(dict.fromkeys(cell.task for cell in self.cells.values()))

    @cached_property
    def name(self) -> str:
        """The name in messages and in the Ray dashboard, such as `m/mnli/lr1e-4/s0` or `m/mnli+mnli_mm/lr1e-4/s0`."""
        return cell_name(replace(self.first, task=self.task))

    @cached_property
    def all_but_seed(self) -> tuple[Any, ...]:
        """All that must be equal for trainings to share a trial."""
        cells = [replace(cell, seed=0) for cell in self.cells.values()]
        return tuple((cell_name(cell), cell.weights, cell.protocol.model_dump_json(), cell.start) for cell in cells)

    @property
    def work(self) -> float:
        """Estimate of the work, in tokens passed forward once."""
        return self.first.work[0] + sum(cell.work[1] for cell in self.cells.values())


def trainings_of(cells: Mapping[str, Cell]) -> list[Training]:
    """Group cells, given by key, by the training that they share, in the order of their first cells."""
    groups: dict[str, dict[str, Cell]] = {}
    for key, cell in cells.items():
        groups.setdefault(training_key(cell), {})[key] = cell
    return [Training(group) for group in groups.values()]


def work_of(task: PreparedTask, protocol: Protocol) -> tuple[float, float]:
    """Estimate the work of training on prepared data and of evaluating, in tokens passed forward once."""
    sizes = dict(task.sizes)
    rows, tokens = sizes.pop("train", (1, 0))
    seen = protocol.steps(rows) * protocol.batch_size * tokens / max(1, rows)
    during = protocol.steps(rows) // protocol.evaluate_every if protocol.evaluate_every else 0
    evaluated = during * sizes.get("validation", (0, 0))[1]
    return (1 + BACKWARD) * seen + evaluated, sum(tokens for _, tokens in sizes.values())


def with_trainings(cells: Iterable[Cell], tasks: Mapping[str, PreparedTask]) -> list[Cell]:
    """Return the cells with `work` and `training_data` (by which they share a training) set from their tasks' prepared data."""

    @cache
    def work(task: str, protocol: Protocol) -> tuple[float, float]:
        return work_of(tasks[task], protocol)

    return [
        replace(cell, training_data=tasks[cell.task].training_data, work=work(cell.task, cell.protocol))
        for cell in cells
    ]
