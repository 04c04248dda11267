"""Masked language modelling: hidden tokens from those on both sides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from mlmclm.objectives.hiding import hide, parse_ratio
from mlmclm.objectives.objective import Draw, Objective


@dataclass(frozen=True)
class Masked(Objective):
    """`mlm40`: 40 % of the tokens are hidden, and each is predicted at its own position."""

    mask_percent: int
    """Share of the tokens that are hidden, in per cent."""

    kind: ClassVar[str] = "mlm"
    causal = False
    masks = True
    loss_weight = "mlm"
    examples: ClassVar[tuple[str, ...]] = ("mlm15", "mlm20", "mlm30", "mlm40", "mlm50")

    @classmethod
    def parse(cls, text: str) -> Self | None:
        percent = parse_ratio(cls.kind, text)
        return None if percent is None else cls(percent)

    def __str__(self) -> str:
        return f"{self.kind}{self.mask_percent}"

    @property
    def words(self) -> str:
        return f"masked at {self.mask_percent} % (MLM)"

    def label(self, tokens: NDArray[np.int64], draw: Draw) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return hide(tokens, draw, self.mask_percent / 100)

    def labelled_share(self, length: int, documents: int) -> float:
        return self.mask_percent / 100
