"""Masked language modelling: predict hidden tokens from the tokens on both sides."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from mlmclm.objectives.masking import mask_tokens
from mlmclm.objectives.objective import Masking, Objective


@dataclass(frozen=True)
class Masked(Objective):
    """`mlm40`: 40 % of the tokens are hidden, and each is predicted at its own position."""

    mask_percent: int
    """Share of the tokens that are hidden, in per cent."""

    name = "mlm"
    causal = False
    masks = True
    loss_weight = "mlm"
    examples: ClassVar[tuple[str, ...]] = ("mlm15", "mlm20", "mlm30", "mlm40", "mlm50")

    @classmethod
    def parse(cls, text: str) -> Self | None:
        match = re.fullmatch(rf"{cls.name}(\d+)", text)
        if match is None:
            return None
        percent = int(match[1])
        if not 1 <= percent <= 99:
            raise ValueError(f"the mask ratio of {text!r} is {percent} %; allowed: 1 to 99.")
        return cls(percent)

    def __str__(self) -> str:
        return f"{self.name}{self.mask_percent}"

    @property
    def words(self) -> str:
        return f"masked at {self.mask_percent} % (MLM)"

    @property
    def hidden_share(self) -> float:
        return self.mask_percent / 100

    def label(self, tokens: NDArray[np.int64], masking: Masking) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return mask_tokens(tokens, masking, self.hidden_share)

    def labelled_share(self, length: int, documents: int) -> float:
        return self.hidden_share
