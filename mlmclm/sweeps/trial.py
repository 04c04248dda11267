"""Trials of a sweep: which cells each computes, and what it needs for that."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from mlmclm.cluster.placement import Resources
from mlmclm.errors import UserError
from mlmclm.finetuning.cell import Cell
from mlmclm.registry import Shipment
from mlmclm.seeds import seed_value
from mlmclm.sweeps.protocols import searched
from mlmclm.sweeps.trainings import Training

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
