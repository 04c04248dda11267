"""Learning-rate schedules: warm-up, a stable part, and a decay with one of several shapes.

To add a decay, write a class and register it in `LAWS`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Annotated, ClassVar

from pydantic import AfterValidator

from mlmclm.errors import unknown


class Decay(ABC):
    """The shape of the learning-rate decay at the end of a phase."""

    decays: ClassVar[bool] = True
    """False if the rate stays as it is; settings of a decay then don't apply."""

    @abstractmethod
    def factor(self, left: float) -> float:
        """Return the learning rate as a share of the peak.

        Args:
            left: share of the decay that is still to come, in (0, 1].
        """


class Linear(Decay):
    """Linear decay to 0, as in the study (arXiv 2507.00994)."""

    def factor(self, left: float) -> float:
        return left


class OneMinusSqrt(Decay):
    """Decay by 1 - sqrt(share done), fast at first (arXiv 2405.18392; Ettin's last phase, arXiv 2507.11412)."""

    def factor(self, left: float) -> float:
        return 1 - math.sqrt(1 - left)


class OneMinusSquare(Decay):
    """Decay by 1 - share done squared, slow at first (arXiv 2405.18392)."""

    def factor(self, left: float) -> float:
        return 1 - (1 - left) ** 2


class Cosine(Decay):
    """Half a cosine wave, which falls slowly at the start and at the end."""

    def factor(self, left: float) -> float:
        return (1 - math.cos(math.pi * left)) / 2


class Constant(Decay):
    """No decay: the rate stays at its peak."""

    decays = False

    def factor(self, left: float) -> float:
        return 1.0


LAWS: dict[str, Decay] = {
    "linear": Linear(),
    "1-sqrt": OneMinusSqrt(),
    "1-square": OneMinusSquare(),
    "cosine": Cosine(),
    "constant": Constant(),
}
"""Decays by the names that `recipe.decay` accepts."""


def _known(name: str) -> str:
    if name not in LAWS:
        raise ValueError(str(unknown("decay", name, LAWS)).rstrip("."))
    return name


Law = Annotated[str, AfterValidator(_known)]
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
    """Return the learning rate of a step under a warm-up / stable / decay schedule; a pure function.

    Args:
        step: the step about to be taken, counted from 0.
        peak: learning rate of the stable part.
        warmup: steps of linear warm-up, counted from `origin`; the step at `origin` has peak / warmup.
        origin: step from which the warm-up is counted.
        decay: steps of decay before `decay_end`.
        decay_end: step at which the decay ends; None for no decay.
        law: name of the decay, one of `LAWS`.
        final_share: share of the peak to which the rate decays.
    """
    rate = peak
    if warmup > 0:
        rate *= min(1.0, (step - origin + 1) / warmup)
    if decay_end is not None and decay > 0:
        rate *= final_share + (1 - final_share) * LAWS[law].factor(min(1.0, (decay_end - step) / decay))
    return rate
