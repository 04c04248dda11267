"""Learning rates by step: a warm-up, then a stable part or none, and a decay with one of several shapes.

To add a shape, add a subclass of `Decay` to this folder, or register one (`mlmclm.registry`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Annotated, ClassVar

from mlmclm.registry import KINDS, MemberName, Registry


class Decay(ABC):
    """The shape of a learning-rate decay. It has no state."""

    name: ClassVar[str]
    """The name in a recipe or protocol."""
    decays: ClassVar[bool] = True
    """False if the rate stays as it is; settings of a decay then don't apply."""

    @abstractmethod
    def factor(self, left: float) -> float:
        """Return the learning rate as a share of the peak.

        Args:
            left: share of the decay's steps that remain, in (0, 1].
        """

    def rate(self, peak: float, left: int, steps: int) -> float:
        """Return the learning rate when `left` of a decay's `steps` remain."""
        return peak * self.factor(left / steps)


DECAYS: Registry[type[Decay]] = KINDS["schedule"]
"""The shapes of a decay by name."""
DecayName = Annotated[str, MemberName("schedule")]
"""The name of a decay."""


def learning_rate(
    step: int,
    *,
    peak: float,
    warmup: int,
    origin: int,
    decay: int,
    decay_end: int | None,
    law: str = "linear",
    final_share: float = 0.0,
) -> float:
    """Return the learning rate of a pretraining step under a warm-up / stable / decay schedule; a pure function.

    Args:
        step: the step about to be taken, counted from 0.
        peak: learning rate of the stable part.
        warmup: steps of linear warm-up, counted from `origin`; the step at `origin` has peak / warmup.
        origin: step from which the warm-up is counted.
        decay: steps of decay before `decay_end`.
        decay_end: step at which the decay ends; None for no decay.
        law: name of the decay.
        final_share: share of the peak to which the rate decays.
    """
    rate = peak
    if warmup > 0:
        rate *= min(1.0, (step - origin + 1) / warmup)
    if decay_end is not None and decay > 0:
        rate *= final_share + (1 - final_share) * DECAYS[law]().factor(min(1.0, (decay_end - step) / decay))
    return rate


def finetuning_rate(peak: float, step: int, steps: int, warmup_ratio: float, law: str = "linear") -> float:
    """Return the learning rate of a fine-tuning step, counted from 0.

    The rate warms up linearly over the first `ceil(warmup_ratio * steps)` steps, then decays over all others. With the
    linear decay this is transformers' schedule, except that the first step's rate is not 0, so that no step is wasted.
    """
    warmup = math.ceil(warmup_ratio * steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    return DECAYS[law]().rate(peak, steps - step, max(1, steps - warmup))
