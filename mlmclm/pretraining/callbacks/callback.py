"""The interface of a callback: work around the steps of a stage that is not training itself.

To add a callback, add a file with a subclass of `Callback` to this folder. Nothing else names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mlmclm.discovery import classes_in
from mlmclm.pretraining.job import StageJob
from mlmclm.pretraining.step_metrics import StepMetrics

if TYPE_CHECKING:
    from mlmclm.pretraining.engine import Engine


@dataclass
class RunningStage:
    """A stage in one of its workers."""

    job: StageJob
    engine: Engine
    start: int
    """Step of the state that training goes on from."""
    stopped: bool = False
    """Ends the stage once the other callbacks have been told. The workers wait for each other in every step, so a callback that
    sets it must set it on all of them at the same step."""


class Callback:
    """Base of the callbacks. Each hook does nothing by default; steps are counted from 1.

    The order of callbacks is that of their files' names. None may rely on it.

    Class attributes:
        everywhere: whether every worker has one, and not only rank 0. One that communicates between workers must be everywhere.
    """

    everywhere: ClassVar[bool] = False

    def __init__(self, stage: RunningStage) -> None:
        self.stage = stage

    def on_start(self) -> None:
        """Called before the first step."""

    def on_metrics(self, metrics: Sequence[StepMetrics]) -> None:
        """Called every few steps, and before each state that is kept.

        Args:
            metrics: of the steps since the last call, at least one, over all workers.
        """

    def on_validation(self, step: int, loss: float, accuracy: float) -> None:
        """Called when the validation blocks were evaluated behind a step (`engine.Evaluation`)."""

    def on_step_end(self, step: int) -> None:
        """Called behind each step, unless the stage was stopped at it."""

    def on_end(self) -> None:
        """Called when the last step is done or the stage was stopped, and not if it fails."""


def callbacks_of(stage: RunningStage) -> list[Callback]:
    """Return the callbacks of this worker: one of every class in this folder, or on other ranks than 0 of those `everywhere`."""
    return [
        kind(stage)
        for kind in classes_in("mlmclm.pretraining.callbacks")
        if issubclass(kind, Callback) and kind is not Callback and (kind.everywhere or stage.engine.rank == 0)
    ]
