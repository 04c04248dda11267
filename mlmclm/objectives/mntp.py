"""Masked next-token prediction: predict hidden tokens from both sides, each at the position before it.

It turns a decoder into an encoder (LLM2Vec, arXiv 2404.05961; Ettin's encoders from decoders, arXiv 2507.11412).
Attention is bidirectional, but every output still predicts the next token, as the decoder learned to do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mlmclm.objectives.mlm import Masked
from mlmclm.objectives.objective import Masking


@dataclass(frozen=True)
class MaskedNextToken(Masked):
    """`mntp15`: 15 % of the tokens are hidden, and the token at position i is predicted at position i - 1."""

    name = "mntp"
    predicts_one_earlier = True
    examples = ("mntp15",)

    @property
    def words(self) -> str:
        return f"masked at {self.mask_percent} %, predicted one position earlier (MNTP)"

    def label(self, tokens: NDArray[np.int64], masking: Masking) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        inputs, hidden = super().label(tokens, masking)
        return inputs, masking.one_earlier(hidden, tokens)

    def labelled_share(self, length: int, documents: int) -> float:
        # The first token of each document has no position before it to be predicted at.
        return super().labelled_share(length, documents) * (length - documents) / length
