"""The interface of a callback: work that a stage does around its training steps.

The built-in callbacks are in this folder, and all of them run. Others are registered (`mlmclm.registry`), and run in the
stages of the recipes that name them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from mlmclm.errors import unknown
from mlmclm.pretraining.job import StageJob
from mlmclm.pretraining.launcher import Launcher
from mlmclm.pretraining.step_metrics import StepMetrics
from mlmclm.registry import KINDS, Registry

if TYPE_CHECKING:
    from mlmclm.pretraining.engine import Engine


@dataclass
class RunningStage:
    """A running stage, as seen by one of its workers."""

    job: StageJob
    engine: Engine
    launcher: Launcher
    """The launcher that started the worker."""
    start: int
    """Step of the state from which training continues."""
    stopped: bool = False
    """Set to True to end the stage after the remaining callbacks have run. The workers meet in a collective in every
    step, so a callback must set it on all workers at the same step."""
    latest: StepMetrics | None = None
    """Metrics of the last step that was looked at: of every step, if a callback `asks` for some."""
    callbacks: dict[str, Callback] = field(default_factory=dict)
    """This worker's callbacks by name."""
    check_inputs: Callable[[], None] = lambda: None
    """Raises a `UserError` if what the stage reads is not what was hashed any more; called before a state is kept."""


class Callback:
    """Base class of the callbacks. Hooks do nothing by default. Steps are counted from 1.

    Callbacks of the recipe run first, in its order, so that a state that is written after a step holds what they did.

    A state also holds what `state_dict` returns, and a stage that goes on from the state goes on with it.

    Class attributes:
        everywhere: whether every worker runs the callback, rather than rank 0 only. Needed if it uses collectives or
            changes weights.
        observes: True if the weights don't depend on it. The keys of states then leave it out, and a state from before
            it was there has nothing for `load_state_dict`.
        asks: names of the fields of `StepMetrics` that it needs after every step (`metric`), which costs an all-reduce.
    """

    everywhere: ClassVar[bool] = False
    observes: ClassVar[bool] = False
    asks: ClassVar[tuple[str, ...]] = ()

    def __init__(self, stage: RunningStage) -> None:
        self.stage = stage

    def on_start(self) -> None:
        """Handle the start of the stage, before its first step."""

    def on_step_begin(self, step: int) -> None:
        """Handle the beginning of a step, before it has its batch."""

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

    def metric(self, name: str) -> float:
        """Return a metric of the step just taken, over all workers, in `on_metrics` and `on_step_end`; one in `asks`.

        NaN stands for a metric that the step doesn't have, such as the loss of a step without a labelled token.
        """
        if name not in self.asks:
            raise unknown("metric", name, self.asks, where=f"{type(self).__name__}.asks")
        value = getattr(self.stage.latest, name)
        return math.nan if value is None else float(value)

    def state_dict(self) -> Mapping[str, Any]:
        """Return the callback's state: tensors, and values of JSON, by name. Called wherever it runs; rank 0's is kept."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state that `state_dict` returned, before `on_start`; tensors are on the CPU."""


CALLBACKS: Registry[type[Callback]] = KINDS["callback"]
"""The callbacks by name."""


def kinds_of(job: StageJob) -> dict[str, type[Callback]]:
    """Return the callbacks of a stage by name: those of its recipe, then the built-in ones.

    Raises:
        UserError: one asks for a metric that there isn't.
    """
    kinds = {name: CALLBACKS[name] for name in job.recipe.callbacks}
    for name, kind in kinds.items():
        for metric in kind.asks:
            if metric not in StepMetrics._fields:
                raise unknown("metric", metric, StepMetrics._fields, where=f"callback {name!r}")
    return kinds | {kind.__name__: kind for kind in CALLBACKS.built_in()}


def callbacks_of(stage: RunningStage) -> dict[str, Callback]:
    """Create this worker's callbacks: all on rank 0, those marked `everywhere` on other ranks."""
    kinds = kinds_of(stage.job).items()
    return {name: kind(stage) for name, kind in kinds if kind.everywhere or stage.engine.rank == 0}
