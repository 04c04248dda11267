"""Trials of a sweep: the trainings that each does, the cells that these serve, and what it needs for that."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Self

from mlmclm.cluster.placement import Resources
from mlmclm.errors import UserError
from mlmclm.finetuning.cell import Cell, training_key
from mlmclm.finetuning.protocol import Protocol
from mlmclm.registry import Shipment
from mlmclm.seeds import seed_value
from mlmclm.sweeps.cells import cell_name
from mlmclm.sweeps.space import searched
from mlmclm.tasks.prepared_task import PreparedTask

SWEEP = "sweep"
"""Entry of a trial's config that holds the trial or sweep itself, for programs only."""
WAITING, COMPUTED, REUSED = "waiting", "computed", "reused"
USER_ERROR, ENVIRONMENT_FAULT = "user error", "environment fault"
STORAGE_FAULT = "storage fault"
"""Outcome if the storage of the results has not answered for too long: no cell is at fault, and computed results are kept."""
TAKEN = "taken"
"""Outcome if another process is computing the cell: the driver waits for it, and this trial moves on."""
SECONDS_OF_A_TRIAL, SECONDS_A_PLACE = 5.0, 0.05
"""A trial of short cells computes enough of them to last `SECONDS_OF_A_TRIAL`, or `SECONDS_A_PLACE` x the number of trials that run
at once, if that is more. Starting and reporting a trial costs the driver some hundredths of a second."""
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


def seeds_together(seconds: float | None, waiting: int, places: int) -> int:
    """Return how many trainings that differ in their seed alone a trial computes, at least 1.

    Args:
        seconds: the time of one of them; None if unknown.
        waiting: trainings of the sweep that no trial has yet.
        places: trials that run at once; the last trainings are shared equally among them.
    """
    wanted = max(SECONDS_OF_A_TRIAL, SECONDS_A_PLACE * places)
    if seconds is None or seconds >= wanted:
        return 1
    share = max(1, waiting // max(1, places))
    return share if seconds <= 0 else min(share, math.ceil(wanted / seconds))


@dataclass(frozen=True, repr=False)
class SweepTrial:
    """A trial: trainings of one model, task and learning rate, with one seed each.

    Attributes:
        registered: members that the driver has registered; the first field, as unpickling the others may need these.
        source: the cell whose encoder they start from, if the trial must make sure that it is kept.
        every: training steps between reports; None for a report on each training alone.
        failures: earlier failures of the first training, in the form of `retried_after` in its results.
        resources: what it reserves, by Ray's names.
        seen: a folder of the sweep in the store, which a node that shares the store sees.
        by_itself: whether it raises errors and waits for cells that other processes compute, as a user's own Tuner wants it. A
            sweep's trial reports both, and goes on.
    """

    registered: Shipment = field(default=Shipment(()), kw_only=True)
    trainings: tuple[Training, ...]
    store: Path
    data_root: Path | None = None
    source: Cell | None = None
    every: int | None = None
    failures: tuple[Mapping[str, str], ...] = ()
    resources: Resources = field(default_factory=dict)
    seen: Path | None = None
    by_itself: bool = False

    def trial(self, config: Mapping[str, Any]) -> Self:
        """Return the trial of a config, which is this one."""
        return self

    def bundle(self) -> Resources:
        """Return the resources that a trial reserves."""
        return self.resources

    @property
    def first(self) -> Cell:
        """The first cell."""
        return self.trainings[0].first

    @cached_property
    def name(self) -> str:
        """The name in Tune's output and the Ray dashboard, such as `1m-clm-1k/sst2/lr1e-3/s0`, or `.../s0+s1` of two seeds."""
        others = [training.name.rpartition("/")[2] for training in self.trainings[1:]]
        return "+".join([self.trainings[0].name, *others])

    @property
    def config(self) -> dict[str, Any]:
        """The config of the trial for Ray Tune."""
        seeds = [seed_value(training.first.seed) for training in self.trainings]
        return {
            "model": self.first.model,
            "task": self.trainings[0].task,
            "learning_rate": self.first.learning_rate,
            "seed": seeds[0] if len(seeds) == 1 else seeds,
            **searched(self.first.protocol, self.first.setting),
            SWEEP: self,
        }

    def __repr__(self) -> str:
        return f"<{self.name} in {self.store}>"

    def __deepcopy__(self, memo: Any) -> Self:
        # Tune copies every config several times.
        return self


def trial_source(config: Mapping[str, Any]) -> Any:
    """Return what makes the trial of a config: a `SweepTrial`, or a `TunedSweep` of `mlmclm.tune.param_space`.

    Raises:
        UserError: the config lacks it; `Tuner.restore` leaves it out unless it gets the search space.
    """
    entry = config.get(SWEEP)
    if isinstance(entry, dict):  # below a key of the space's content, so that Ray refuses to restore another space
        (entry,) = entry.values()
    if not hasattr(entry, "trial"):
        raise UserError(
            "a trial's config comes from mlmclm.tune.param_space; give Tuner.restore the same param_space=."
        )
    return entry
