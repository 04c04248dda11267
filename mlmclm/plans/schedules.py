"""Learning-rate schedules: warm-up, a stable part, and a decay by one of several laws. To add a law, add a class and name it in `LAWS`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod


class Decay(ABC):
    """How the rate falls at the end of a phase."""

    @abstractmethod
    def factor(self, left: float) -> float:
        """The share of the peak that the rate has when `left` of the decay, more than 0 and at most 1, is still to come."""


class Linear(Decay):
    """In equal steps to 0, as in the study (arXiv 2507.00994)."""

    def factor(self, left: float) -> float:
        return left


class OneMinusSqrt(Decay):
    """1 - sqrt(share that is over): fast at first (arXiv 2405.18392; Ettin's last phase, arXiv 2507.11412)."""

    def factor(self, left: float) -> float:
        return 1 - math.sqrt(1 - left)


class Cosine(Decay):
    """Half a wave of the cosine: slow at first and at the end."""

    def factor(self, left: float) -> float:
        return (1 - math.cos(math.pi * left)) / 2


class Constant(Decay):
    """None: the rate stays at its peak to the end."""

    def factor(self, left: float) -> float:
        return 1.0


LAWS: dict[str, Decay] = {
    "linear": Linear(),
    "1-sqrt": OneMinusSqrt(),
    "cosine": Cosine(),
    "constant": Constant(),
}
"""Laws by the names that `recipe.decay` can have."""


def learning_rate(
    step: int, *, peak: float, warmup: int, origin: int, decay: int, decay_end: int | None, law: str = "linear"
) -> float:
    """The learning rate of a step under warm-up / stable / decay: a pure function of its arguments.

    Args:
        step: the step about to be taken, from 0.
        peak: rate of the stable part.
        warmup: steps of linear warm-up, counted from `origin`; the step at `origin` has peak / warmup.
        decay: steps of decay before `decay_end`; None there for no decay.
        law: of the decay, one of `LAWS`.
    """
    rate = peak
    if warmup > 0:
        rate *= min(1.0, (step - origin + 1) / warmup)
    if decay_end is not None and decay > 0:
        rate *= LAWS[law].factor(min(1.0, (decay_end - step) / decay))
    return rate
