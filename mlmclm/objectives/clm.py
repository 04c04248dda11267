"""Causal language modelling: predict each token from the tokens before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from mlmclm.objectives.objective import Masking, Objective


@dataclass(frozen=True)
class Causal(Objective):
    """`clm`: position t predicts token t + 1."""

    name = "clm"
    causal = True
    masks = False
    loss_weight = "clm"
    examples = ("clm",)

    @classmethod
    def parse(cls, text: str) -> Self | None:
        return cls() if text == cls.name else None

    def __str__(self) -> str:
        return self.name

    @property
    def words(self) -> str:
        return "causal (CLM)"

    def label(self, tokens: NDArray[np.int64], masking: Masking) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return tokens, masking.one_earlier(tokens, tokens)

    def labelled_share(self, length: int, documents: int) -> float:
        # The last token of each document has no next token to predict.
        return (length - documents) / length
