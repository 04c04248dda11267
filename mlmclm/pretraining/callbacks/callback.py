"""The interface of a callback: work that a stage does around its training steps.

Callbacks are in this folder, or registered (`mlmclm.registry`). A stage runs those that its recipe names, and those that `always`
run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, cast

from mlmclm.errors import UserError, unknown
from mlmclm.plans.segments import segment_at
from mlmclm.pretraining.job import StageJob
from mlmclm.pretraining.launcher import Launcher
from mlmclm.pretraining.step_metrics import REPRODUCED, StepMetrics
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
    """Metrics of the last step for which they were read; that is every step if a callback `asks` for some."""
    callbacks: dict[str, Callback] = field(default_factory=dict)
    """This worker's callbacks by name."""
    check_inputs: Callable[[], None] = lambda: None
    """Raises a `UserError` if the stage's inputs have changed since they were hashed; called before a state is written."""


class KeyedStage:
    """A running stage as seen by a callback on which weights may depend: only what enters the keys of its states.

    Its first, last and deposited steps are hidden: under the same keys, they may differ by study and after an
    interruption.
    """

    def __init__(self, stage: RunningStage, *, each_step: bool) -> None:
        self._stage, self._each_step = stage, each_step

    @property
    def engine(self) -> Engine:
        """The engine, with the weights."""
        return self._stage.engine

    @property
    def latest(self) -> StepMetrics | None:
        """Metrics of the last step, without times; None unless the callback `asks` for some."""
        latest = self._stage.latest
        return None if latest is None or not self._each_step else latest.reproduced()

    @property
    def stopped(self) -> bool:
        """As `RunningStage.stopped`."""
        return self._stage.stopped

    @stopped.setter
    def stopped(self, value: bool) -> None:
        self._stage.stopped = value

    def decay_end(self, step: int) -> int | None:
        """Return the last step of the learning-rate decay that a step is in, both counted from 1; None if it is in none."""
        return segment_at(self._stage.job.stage.end.segments, step - 1).decay_end

    def __getattr__(self, name: str) -> Any:
        raise UserError(
            f"a callback asks for stage.{name}, which no key of a state contains, so runs that differ in it would share states. It may "
            "ask for engine, latest, stopped and decay_end(step). If no weights depend on it, set observes = True, and it may ask for all."
        )


class Callback:
    """Base class of the callbacks. Hooks do nothing by default. Steps are counted from 1.

    Callbacks of the recipe run first, in its order, so that a state written after a step includes their effects.

    A state also holds what `state_dict` returns; a stage that resumes from the state passes it to `load_state_dict`.

    A callback of the recipe is given a `KeyedStage`, unless it `observes`. Its hooks are then called at the same steps in
    every study: `on_metrics` after each step, `on_validation` at multiples of the recipe's `evaluate_every` alone, and
    `on_step_end` before a validation, so that the validated weights are those that are stored. `on_start`, `on_end` and `state_dict` are
    also called where a stage is divided or interrupted, and must leave the weights as they are.

    Class attributes:
        everywhere: whether every worker runs the callback, rather than rank 0 only. Needed if it uses collectives or
            changes weights.
        observes: True if the weights don't depend on it. The keys of states then leave it out. For a state from
            before it was added, `load_state_dict` is not called.
        always: whether every stage runs the callback, not only those whose recipe names it. This enters no key, so another
            package's callback must also set `observes`.
        asks: names of the fields of `StepMetrics` that it needs after every step (`metric`), which costs an all-reduce.
    """

    everywhere: ClassVar[bool] = False
    observes: ClassVar[bool] = False
    always: ClassVar[bool] = False
    asks: ClassVar[tuple[str, ...]] = ()

    def __init__(self, stage: RunningStage) -> None:
        self.stage = stage

    @classmethod
    def lacks(cls) -> list[str]:
        """Return the faults of a callback that is not built in."""
        return ["sets always = True, so it must set observes = True"] if cls.always and not cls.observes else []

    @classmethod
    def timing(cls) -> tuple[str, ...]:
        """Return the recipe's fields on which the calls of its hooks depend; keys contain them, unless the callback `observes`."""
        return () if cls.on_validation is Callback.on_validation else ("evaluate_every", "evaluation_blocks")

    @classmethod
    def needs_each_step(cls) -> bool:
        """Return whether the metrics of every step are needed for it."""
        return bool(cls.asks) or not (cls.observes or cls.on_metrics is Callback.on_metrics)

    def on_start(self) -> None:
        """Handle the start of the stage, before its first step."""

    def on_step_begin(self, step: int) -> None:
        """Handle the beginning of a step, before it has its batch."""

    def on_metrics(self, metrics: Sequence[StepMetrics]) -> None:
        """Handle new metrics; called every few steps and before each state that is kept, or after each step.

        Args:
            metrics: metrics over all workers for each step since the last call, at least one.
        """

    def on_validation(self, step: int, loss: float, accuracy: float) -> None:
        """Handle the result of a validation after a step (see `engine.Evaluation`)."""

    def on_step_end(self, step: int) -> None:
        """Handle the end of a step; not called if the stage is stopped earlier in the step."""

    def on_end(self) -> None:
        """Handle the end of the stage, after its last step or when it is stopped; not called if it fails."""

    def metric(self, name: str) -> float:
        """Return a metric in `asks` of the step just taken, over all workers; for use in `on_metrics` and `on_step_end`.

        It is NaN if the step doesn't have the metric, such as the loss of a step without a labelled token.
        """
        if name not in self.asks:
            raise unknown("metric", name, self.asks, where=f"{type(self).__name__}.asks")
        value = getattr(self.stage.latest, name)
        return math.nan if value is None else float(value)

    def state_dict(self) -> Mapping[str, Any]:
        """Return the callback's state: tensors, and values of JSON, by name. Called on each worker that runs it; rank 0's is stored."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned, before `on_start`; tensors are on the CPU."""


CALLBACKS: Registry[type[Callback]] = KINDS["callback"]
"""The callbacks by name."""


def added_kinds(job: StageJob) -> dict[str, type[Callback]]:
    """Return the callbacks of a stage's recipe by name, in its order.

    Raises:
        UserError: one asks for an unknown metric, or asks for one that differs from run to run without `observes`.
    """
    kinds = {name: CALLBACKS[name] for name in job.recipe.callbacks}
    for name, kind in kinds.items():
        for metric in kind.asks:
            if metric not in StepMetrics._fields:
                raise unknown("metric", metric, StepMetrics._fields, where=f"callback {name!r}")
            if metric not in REPRODUCED and not kind.observes:
                raise UserError(
                    f"callback {name!r}: {metric} differs from run to run, and weights may depend on the callback: ask for "
                    f"{', '.join(REPRODUCED)} only, or set observes = True."
                )
    return kinds


def callbacks_of(stage: RunningStage) -> dict[str, Callback]:
    """Create this worker's callbacks, the recipe's first: all on rank 0, those marked `everywhere` on other ranks."""
    added = added_kinds(stage.job)
    kinds = added | {name: kind for name, kind in CALLBACKS.items() if kind.always and name not in added}
    local = {name: kind for name, kind in kinds.items() if kind.everywhere or stage.engine.rank == 0}
    return {name: kind(_seen_by(kind, stage) if name in added else stage) for name, kind in local.items()}


def _seen_by(kind: type[Callback], stage: RunningStage) -> RunningStage:
    seen = KeyedStage(stage, each_step=kind.needs_each_step())
    return stage if kind.observes else cast(RunningStage, seen)
