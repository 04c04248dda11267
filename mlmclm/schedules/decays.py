"""The shapes of a learning-rate decay."""

from __future__ import annotations

import math

from mlmclm.schedules.decay import Decay


class Linear(Decay):
    """Linear decay to 0, as in the study (arXiv 2507.00994)."""

    name = "linear"

    def factor(self, left: float) -> float:
        return left

    def rate(self, peak: float, left: int, steps: int) -> float:
        # Multiply first, as for the oldest stored results: dividing first would change the last bits.
        return peak * left / steps


class OneMinusSqrt(Decay):
    """Decay by 1 - sqrt(share done), fast at first (arXiv 2405.18392; Ettin's last phase, arXiv 2507.11412)."""

    name = "1-sqrt"

    def factor(self, left: float) -> float:
        return 1 - math.sqrt(1 - left)


class OneMinusSquare(Decay):
    """Decay by 1 - share done squared, slow at first (arXiv 2405.18392)."""

    name = "1-square"

    def factor(self, left: float) -> float:
        return 1 - (1 - left) ** 2


class Cosine(Decay):
    """Half a cosine wave, which falls slowly at the start and at the end."""

    name = "cosine"

    def factor(self, left: float) -> float:
        return (1 - math.cos(math.pi * left)) / 2


class Constant(Decay):
    """No decay: the rate stays at its peak."""

    name = "constant"
    decays = False

    def factor(self, left: float) -> float:
        return 1.0
