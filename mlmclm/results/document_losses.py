"""Losses by document of models before and after a training, and the difference with its interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mlmclm.results.intervals import Estimate, deviation, satterthwaite, unknown


@dataclass(frozen=True)
class DocumentLosses:
    """The losses of one model on the same documents as another.

    Attributes:
        sums: summed loss of each document in nats, float64 [documents].
        tokens: predicted tokens of each document, int64 [documents].
    """

    sums: NDArray[np.float64]
    tokens: NDArray[np.int64]

    @property
    def loss(self) -> float:
        """Mean loss of a token, in nats."""
        return math.fsum(self.sums) / int(self.tokens.sum())


def loss_difference(before: DocumentLosses, after: Sequence[DocumentLosses], *, confidence: float = 0.95) -> Estimate:
    """Estimate by how much the loss of a token falls, paired over documents: positive if the training helped.

    The value is a ratio of means over documents, summed difference to tokens. Its variance is that of a ratio estimate,
    n / (n - 1) x sum (d_i - value x t_i)^2 / (sum t_i)^2 (Cochran, Sampling Techniques, 1977, section 6.4), with n - 1 degrees
    of freedom. With several runs of the training, d_i is the mean over runs, and the variance of the runs' values
    divided by their number is added (Satterthwaite). With one run, other runs' noise is not in the interval.

    Args:
        before: the losses of the untouched model.
        after: those of each run of the training, on the same documents with the same hidden tokens.

    Raises:
        ValueError: the documents or their tokens differ.
    """
    if any(not np.array_equal(run.tokens, before.tokens) for run in after):
        raise ValueError("losses of different tokens cannot be paired")
    tokens, count = int(before.tokens.sum()), len(before.tokens)
    falls = np.mean([before.sums - run.sums for run in after], axis=0)  # [documents]
    value = math.fsum(falls) / tokens
    if count < 2:
        return unknown(value, single=True)
    residuals = falls - value * before.tokens
    shares = [(count / (count - 1) * math.fsum(residuals**2) / tokens**2, count - 1.0)]
    if len(after) > 1:
        runs = deviation([run.loss for run in after])
        shares.append((runs**2 / len(after), len(after) - 1.0))
    if not math.fsum(size for size, _ in shares):
        return unknown(value)
    return satterthwaite(value, shares, confidence=confidence)
