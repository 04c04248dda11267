"""The interface of a callback: work that a stage does around its training steps.

To add a callback, add a file with a subclass of `Callback` to this folder. Nothing else needs to name it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mlmclm.discovery import classes_in
from mlmclm.pretraining.job import StageJob
from mlmclm.pretraining.launcher import Launcher
from mlmclm.pretraining.step_metrics import StepMetrics

if TYPE_CHECKING:
    from mlmclm.pretraining.engine import Engine


@dataclass
class RunningStage:
    """A running stage, as seen by one of its workers."""

    job: StageJob
    engine: Engine
    launcher: Launcher
    """What has started the worker."""
    start: int
    """Step of the state from which training continues."""
    stopped: bool = False
    """Set to True to end the stage after the remaining callbacks have run. The workers meet in a collective in every
    step, so a callback must set it on all workers at the same step."""


class Callback:
    """Base class of the callbacks. Hooks do nothing by default. Steps are counted from 1.

    Callbacks run in the order of their file names, but must not rely on it.

    Class attributes:
        everywhere: whether every worker runs the callback, rather than rank 0 only. Needed if it uses collectives.
    """

    everywhere: ClassVar[bool] = False

    def __init__(self, stage: RunningStage) -> None:
        self.stage = stage

    def on_start(self) -> None:
        """Handle the start of the stage, before its first step."""

    def on_metrics(self, metrics: Sequence[StepMetrics]) -> None:
        """Handle new metrics; called every few steps and before each state that is kept.

        Args:
            metrics: metrics over all workers for each step since the last call, at least one.
        """

    def on_validation(self, step: int, loss: float, accuracy: float) -> None:
        """Handle the result of a validation after a step (see `engine.Evaluation`)."""

    def on_step_end(self, step: int) -> None:
        """Handle the end of a step; not called for the step at which the stage is stopped."""

    def on_end(self) -> None:
        """Handle the end of the stage, after its last step or when it is stopped; not called if it fails."""


def callbacks_of(stage: RunningStage) -> list[Callback]:
    """Create this worker's callbacks: all in this folder on rank 0, those marked `everywhere` on other ranks."""
    return [
        kind(stage)
        for kind in classes_in("mlmclm.pretraining.callbacks")
        if issubclass(kind, Callback) and kind is not Callback and (kind.everywhere or stage.engine.rank == 0)
    ]
