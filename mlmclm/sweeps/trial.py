"""Trials of a sweep: which cells each computes, and what it needs to know for that."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from mlmclm.cluster.placement import Resources
from mlmclm.finetuning.cell import Cell
from mlmclm.seeds import seed_value
from mlmclm.sweeps.cells import cell_name
from mlmclm.sweeps.trainings import Training

SWEEP = "sweep"
"""Entry of a trial's config with what no person needs to read."""
BEGUN, WAITING, COMPUTED, REUSED = "begun", "waiting", "computed", "reused"
USER_ERROR, ENVIRONMENT_FAULT = "user error", "environment fault"
STORAGE_FAULT = "storage fault"
"""Outcome if the results' place has not answered for too long: no cell is at fault, and what is computed is kept."""
TAKEN = "taken"
"""Outcome if another process is computing the cell: the driver waits for it, and this trial moves on."""
SECONDS_OF_A_TRIAL = 5.0
"""How long a trial shall be at least, where cells are short: starting one costs the driver some hundredths of a second."""


def seeds_together(seconds: float | None, alike: int, waiting: int, places: int) -> int:
    """Return how many trainings that differ in their seed alone a trial computes, at least 1.

    Args:
        seconds: of one of them, as far as is known.
        alike: how many there are.
        waiting: trainings of the sweep that no trial has yet.
        places: trials that run at once; each shall have as many of the last ones as the others.
    """
    if seconds is None or seconds >= SECONDS_OF_A_TRIAL:
        return 1
    wanted = alike if seconds <= 0 else math.ceil(SECONDS_OF_A_TRIAL / seconds)
    return max(1, min(alike, wanted, waiting // max(1, places)))


@dataclass(frozen=True, repr=False)
class SweepTrial:
    """A trial: trainings of one model, task and learning rate, with one seed each.

    Attributes:
        source: the cell whose encoder they start from, if that is to be made sure of.
        every: training steps between reports; None for a report on each training alone.
        failures: earlier failures of the first training, as they will stand in its results.
        resources: what it reserves, by Ray's names.
        seen: a folder of the sweep in the store, which a node that shares the store sees.
        by_itself: whether it raises errors and waits for cells that other processes compute, as a user's own Tuner wants it. A
            sweep's trial reports both, and goes on.
    """

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
        tasks = dict.fromkeys(cell.task for cell in self.trainings[0].cells.values())
        return {
            "model": self.first.model,
            "task": "+".join(tasks),
            "learning_rate": self.first.learning_rate,
            "seed": seeds[0] if len(seeds) == 1 else seeds,
            SWEEP: self,
        }

    def __repr__(self) -> str:
        return f"<{self.name} in {self.store}>"

    def __deepcopy__(self, memo: Any) -> Self:
        # Tune copies every config several times.
        return self


def differs_in_seed(training: Training) -> tuple[Any, ...]:
    """Return what trainings of one trial have in common: all but the seed."""
    cells = [replace(cell, seed=0) for cell in training.cells.values()]
    return tuple((cell_name(cell), cell.weights, cell.protocol.model_dump_json(), cell.start) for cell in cells)
