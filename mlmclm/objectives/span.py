"""Span masking: predict hidden runs of tokens from the tokens on both sides (SpanBERT, arXiv 1907.10529, section 3.1)."""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from mlmclm.objectives.masking import draws, hide
from mlmclm.objectives.mlm import Masked
from mlmclm.objectives.objective import Masking

LONGEST = 10
"""Length of the longest span, in tokens."""
_SHARES = 0.8 ** np.arange(LONGEST + 1)
BEYOND = (_SHARES - _SHARES[-1])[:-1] / (1 - _SHARES[-1])
"""Probability that a span is longer than 0, 1, 2, ... tokens: geometric with p = 0.2, up to `LONGEST` (mean 3.8)."""
_START, _LENGTH = 3, 4
_STEPS = 2**20


@dataclass(frozen=True)
class Spans(Masked):
    """`span15`: 15 % of the tokens are hidden in spans, and each is predicted at its own position."""

    name = "span"
    examples = ("span15",)

    @property
    def words(self) -> str:
        return f"masked at {self.mask_percent} % in spans"

    def label(self, tokens: NDArray[np.int64], masking: Masking) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        length = tokens.shape[1]
        # Spans may start before the row, or its first tokens would be hidden less often.
        positions = np.arange(1 - LONGEST, length)
        starts = draws(masking, positions, _START) < start_rate(self.hidden_share)
        # A uniform number below the probability of being longer than n tokens makes a span longer than n tokens.
        lengths = LONGEST - np.searchsorted(BEYOND[::-1], draws(masking, positions, _LENGTH), side="right")
        hidden = np.zeros(tokens.shape, dtype=np.bool_)
        for before in range(LONGEST):
            first = LONGEST - 1 - before
            hidden |= (starts & (lengths > before))[:, first : first + length]
        return hide(tokens, masking, hidden)


@cache
def start_rate(share: float) -> float:
    """Return the probability that a span starts at a position, such that this share of all tokens is hidden.

    Spans may overlap. A token stays visible if no span that starts at one of the `LONGEST` positions up to its own reaches it.
    """
    # The share grows with the rate, so bisection finds the rate.
    return bisect(range(_STEPS), share, key=lambda step: float(1 - np.prod(1 - step / _STEPS * BEYOND))) / _STEPS
