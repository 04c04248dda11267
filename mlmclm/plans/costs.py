"""Cost of a plan: tokens, model FLOPs, and hours on a named device at an assumed utilisation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from mlmclm.errors import UserError, unknown
from mlmclm.models.sizes import PUBLISHED_VOCABULARY, SIZES, Size, training_flops
from mlmclm.plans.devices import DEFAULT_UTILISATION, DEVICES, HERE, Device
from mlmclm.plans.recipe import Recipe
from mlmclm.plans.segments import Segment
from mlmclm.plans.stages import Plan, Stage, State


@dataclass(frozen=True)
class Cost:
    """An amount of work, and the device-hours that it takes (n devices take an n-th of the time)."""

    steps: int
    tokens: int
    flops: int
    device_hours: float


@dataclass(frozen=True)
class Pricing:
    """Everything needed to turn steps into costs.

    Raises:
        UserError: if the device is unknown or the utilisation is outside (0, 1].
    """

    recipe: Recipe
    vocabulary: int | None
    """Rows of the embedding and the LM head; None takes those of the architecture's published models. A size with a
    vocabulary of its own ignores this."""
    device_name: str
    utilisation: float = DEFAULT_UTILISATION
    """Share of the device's peak FLOP/s that training reaches."""
    sizes: Mapping[str, Size] = field(default_factory=lambda: SIZES)
    here: Device | None = None
    """This machine, needed if `device_name` is `HERE`."""

    def __post_init__(self) -> None:
        if self.device_name not in (*DEVICES, HERE):
            raise unknown("device", self.device_name, (*DEVICES, HERE), where="--device")
        if self.device_name == HERE and self.here is None:
            raise ValueError(f"the device {HERE!r} needs its measured peak: pass it as `here`")
        if not 0 < self.utilisation <= 1:
            raise UserError(f"--utilisation {self.utilisation}: a share of the peak, more than 0 and at most 1.")

    @property
    def device(self) -> Device:
        """The device whose hours are counted."""
        return self.here if self.here is not None and self.device_name == HERE else DEVICES[self.device_name]

    def rows(self, size: str) -> int:
        """Return the number of rows in a size's embedding and LM head."""
        shape = self.sizes[size]
        return shape.vocabulary or self.vocabulary or PUBLISHED_VOCABULARY[shape.architecture]

    def stage(self, stage: Stage) -> Cost:
        """Return the cost of one stage."""
        return self._cost((stage.end.size, segment) for segment in stage.segments)

    def plan(self, plan: Plan) -> Cost:
        """Return the cost of a plan, with each stage counted once."""
        return self._cost((stage.end.size, segment) for stage in plan.stages for segment in stage.segments)

    def states(self, states: Iterable[State]) -> Cost:
        """Return the cost of training each state separately from initialisation."""
        return self._cost((state.size, segment) for state in states for segment in state.segments)

    def _cost(self, segments: Iterable[tuple[str, Segment]]) -> Cost:
        steps = tokens = flops = 0
        for size, segment in segments:
            steps += segment.stop - segment.start
            tokens += segment.tokens(segment.stop, self.recipe)
            flops += segment_flops(self.sizes[size], segment, self.recipe, self.rows(size))
        hours = flops / (self.device.peak * self.utilisation) / 3600
        return Cost(steps, tokens, flops, hours)


def segment_flops(
    size: Size,
    segment: Segment,
    recipe: Recipe,
    vocabulary: int,
    documents: NDArray[Any] | None = None,
    *,
    filled: float = 1.0,
) -> int:
    """Return the model FLOPs of a segment's steps (`models.sizes.training_flops`). The LM head counts labelled tokens only.

    Args:
        documents: lengths of a sample of the corpus's documents, or chunks, if the recipe isolates them. Without it
            the result is an upper bound.
        filled: share of the rows' positions that hold tokens; less than 1 for chunks only.
    """
    tokens, block_length = (
        round(filled * segment.tokens(segment.stop, recipe)),
        recipe.during(segment.phase).block_length,
    )
    length, count = (block_length, 1) if documents is None else (int(documents.sum()), len(documents))
    return training_flops(
        size,
        tokens=tokens,
        labelled=round(tokens * segment.objective.labelled_share(length, count)),
        length=block_length,
        vocabulary=vocabulary,
        causal=segment.objective.causal,
        documents=documents,
    )
