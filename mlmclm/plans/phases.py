"""Training phases: periods of pretraining that differ in block length, batch, learning rate or positions.

A model's name says which objective is trained when, the phases say how. Ettin's models, for instance, are trained on
blocks of 1,024 tokens, then on longer ones with another RoPE base, and at last with a decaying rate (arXiv 2507.11412).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from mlmclm.configuration import Enters, Frozen, Role
from mlmclm.corpora.mixes import Mix
from mlmclm.schedules.decay import DECAYS, DecayName

_CARRIED = "as in the phase before it, or in the recipe"
"""Mark of the settings that a phase takes from the phase before it, or from the recipe, unless it sets them."""


class BatchWarmup(Frozen):
    """Growth of the batch at the start of a phase, in equal numbers of steps at each size."""

    steps: Annotated[int, Role.WEIGHTS] = Field(ge=1)
    """Steps until the batch has its full size."""
    first: Annotated[int, Role.WEIGHTS] = Field(ge=1)
    """Sequences per step at first; each further batch size is larger by this number."""

    def sizes(self, batch: int) -> int:
        """Return the number of batch sizes below the full one, at least 1."""
        return max(1, -(-batch // self.first) - 1)


class TrainingPhase(Frozen):
    """A phase. Settings that it omits are those of the phase before it, or of the recipe; its schedule always begins anew."""

    name: Annotated[str, Role.DISPLAY] = Field(pattern=r"^[a-z]+$")
    """Short name; revisions of exported models are tagged with it and the phase's own steps (`ext2000`)."""
    steps: Annotated[int | None, Role.WEIGHTS] = Field(None, ge=1)
    """Optimiser steps. Either these or `tokens`."""
    tokens: Annotated[int | None, Role.WEIGHTS] = Field(None, ge=1)
    """Tokens, rounded up to whole steps."""
    block_length: Annotated[int | None, Role.WEIGHTS, Role.SHAPE, _CARRIED] = Field(None, ge=8)
    """Tokens per sequence. It divides the recipe's `block_length`, in which the corpus is stored, or is a multiple of it."""
    batch: Annotated[int | None, Role.WEIGHTS, _CARRIED] = Field(None, ge=1)
    """Sequences per step over all workers."""
    batch_warmup: Annotated[BatchWarmup | None, Role.WEIGHTS] = None
    peak_learning_rate: Annotated[float | None, Role.WEIGHTS, _CARRIED] = Field(None, gt=0)
    weight_decay: Annotated[float | None, Role.WEIGHTS, _CARRIED] = Field(None, ge=0)
    warmup_steps: Annotated[int, Role.WEIGHTS] = Field(0, ge=0)
    """Steps of linear warm-up of the learning rate at the start of the phase."""
    decay: Annotated[DecayName, Role.WEIGHTS] = "constant"
    """Shape of the decay, as the recipe's: constant (no decay), linear, 1-sqrt, 1-square or cosine."""
    decay_steps: Annotated[int | None, Role.WEIGHTS] = Field(None, ge=1)
    """Steps of decay at the end of the phase; None for all that follow the warm-up."""
    final_share: Annotated[float, Role.WEIGHTS] = Field(0.0, ge=0, lt=1)
    """Share of the peak to which the learning rate decays."""
    rope_base: Annotated[float | None, Role.WEIGHTS, Role.SHAPE, _CARRIED] = Field(None, gt=1)
    """Base of the rotary position embedding; where some layers have local attention, only that of the global ones."""
    local_rope_base: Annotated[float | None, Role.WEIGHTS, Role.SHAPE, _CARRIED] = Field(None, gt=1)
    """The same for layers with local attention."""
    mix: Annotated[Mix | None, Role.WEIGHTS, _CARRIED] = None
    """Sources with their weights, as the recipe's `mix`; the name of a source means that source alone."""
    moments: Annotated[Literal["keep", "new"], Role.WEIGHTS] = "keep"
    """Whether the optimizer keeps its moments or starts with zero moments, as if only the weights had been loaded."""

    @model_validator(mode="after")
    def _one_length(self) -> TrainingPhase:
        if (self.steps is None) == (self.tokens is None):
            raise ValueError(f"phase {self.name!r}: give either steps or tokens")
        if self.name == "step":
            raise ValueError("phase 'step': the tags of the first phase's revisions are named so; choose another name")
        if not self.decays and (self.decay_steps is not None or self.final_share):
            raise ValueError(
                f"phase {self.name!r}: decay_steps and final_share belong to a decay, and there is none; give decay: "
                f"{', '.join(law.name for law in DECAYS.values() if law.decays)}"
            )
        decay_steps = self.decay_steps or (1 if self.decays else 0)
        if self.steps is not None and self.warmup_steps + decay_steps > self.steps:
            raise ValueError(
                f"phase {self.name!r}: warmup_steps {self.warmup_steps} and decay_steps {decay_steps} are more than its {self.steps} steps"
            )
        return self

    @property
    def decays(self) -> bool:
        """Whether the learning rate decays."""
        return DECAYS[self.decay].decays


CARRIED = TrainingPhase.fields_with(_CARRIED)
"""Settings that a phase takes from the one before it, or from the recipe, unless it sets them."""


class ResolvedPhase(Frozen):
    """A phase with its first step and the step after its last, and with all settings that it takes from earlier phases or the recipe."""

    name: Annotated[str, Role.DISPLAY]
    start: Annotated[int, Role.WEIGHTS, Enters.INDIRECTLY]
    """Step at which it begins."""
    stop: Annotated[int, Role.WEIGHTS, Enters.INDIRECTLY]
    block_length: Annotated[int, Role.WEIGHTS, Role.SHAPE]
    batch: Annotated[int, Role.WEIGHTS]
    batch_warmup: Annotated[BatchWarmup | None, Role.WEIGHTS, Enters.IF_CHANGED] = None
    peak_learning_rate: Annotated[float, Role.WEIGHTS]
    weight_decay: Annotated[float, Role.WEIGHTS]
    warmup_steps: Annotated[int, Role.WEIGHTS]
    decay: Annotated[DecayName, Role.WEIGHTS]
    decay_steps: Annotated[int, Role.WEIGHTS]
    final_share: Annotated[float, Role.WEIGHTS]
    rope_base: Annotated[float | None, Role.WEIGHTS, Role.SHAPE, Enters.IF_CHANGED] = None
    local_rope_base: Annotated[float | None, Role.WEIGHTS, Role.SHAPE, Enters.IF_CHANGED] = None
    mix: Annotated[Mix | None, Role.WEIGHTS, Enters.IF_CHANGED] = None
    moments: Annotated[Literal["keep", "new"], Role.WEIGHTS]

    def batch_at(self, step: int) -> int:
        """Return the sequences of a step, counted from 0 at initialisation."""
        warmup, done = self.batch_warmup, step - self.start
        if warmup is None or done >= warmup.steps:
            return self.batch
        return min(self.batch, warmup.first * (1 + done * warmup.sizes(self.batch) // warmup.steps))

    def samples(self, step: int) -> int:
        """Return the sequences that the phase has seen before a step, counted from 0 at initialisation."""
        return samples_in(step - self.start, self.batch, self.batch_warmup)

    def identity(self) -> dict[str, Any]:
        """Return what determines the weights after a step of the phase, for a state's key.

        A segment's `identity` adds where it starts and stops. Steps of a phase without decay don't depend on the phase's
        length, so models that stay in it for different times share its states.
        """
        left_out = () if DECAYS[self.decay].decays else ("decay_steps", "final_share")
        return {name: value for name, value in self.keyed(Role.WEIGHTS, Role.TOKENS).items() if name not in left_out}


def samples_in(steps: int, batch: int, warmup: BatchWarmup | None) -> int:
    """Return the sequences of the first steps of a phase."""
    if warmup is None:
        return steps * batch
    sizes, seen = warmup.sizes(batch), 0
    for index in range(sizes):
        # This size is that of the steps s with index <= s * sizes / warmup.steps < index + 1.
        begin, end = (-(-bound * warmup.steps // sizes) for bound in (index, index + 1))
        seen += max(0, min(steps, end) - begin) * min(batch, warmup.first * (1 + index))
    return seen + max(0, steps - warmup.steps) * batch


def steps_of(phase: TrainingPhase, *, block_length: int, batch: int) -> int:
    """Return the optimiser steps of a phase.

    `block_length` and `batch` are those of the phase, or the recipe's where it omits them.
    """
    if phase.steps is not None:
        return phase.steps
    assert phase.tokens is not None
    wanted = -(-phase.tokens // block_length)
    # A step sees at least one sequence.
    return bisect_left(range(wanted), wanted, key=lambda steps: samples_in(steps, batch, phase.batch_warmup))


def resolve_phases(phases: Sequence[TrainingPhase], recipe: Frozen) -> tuple[ResolvedPhase, ...]:
    """Return the phases resolved, the first from step 0 on; `CARRIED` settings that the first ones omit are the recipe's."""
    resolved: list[ResolvedPhase] = []
    values, start = {name: getattr(recipe, name) for name in CARRIED}, 0
    for phase in phases:
        settings = {name: value for name, value in phase if name not in ("steps", "tokens")}
        values |= {name: value for name, value in settings.items() if name not in CARRIED or value is not None}
        stop = start + steps_of(phase, block_length=values["block_length"], batch=values["batch"])
        if not resolved:
            values["moments"] = "keep"  # there are none yet, so "new" would only give the same states other keys
        values["decay_steps"] = (phase.decay_steps or max(1, stop - start - phase.warmup_steps)) if phase.decays else 0
        resolved.append(ResolvedPhase(**values, start=start, stop=stop))
        start = stop
    return tuple(resolved)
