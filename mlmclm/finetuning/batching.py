"""Which examples a step sees, and the streams of chance of a cell: pure functions of the seed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]


def stream(seed: int, name: str) -> int:
    """The seed (63 bits) of one stream of a cell (`head`, `order`, `dropout`), independent of the others'."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def training_rows(examples: int, batch_size: int, seed: int) -> Iterator[Array]:
    """int64 [batch_size] of each step: one shuffled pass over the examples after another, without a gap at their seams.

    Args:
        seed: of the stream `order`; each pass has its own permutation.
    """
    epoch = 0
    left = np.empty(0, dtype=np.int64)
    while True:
        while len(left) < batch_size:
            generator = torch.Generator().manual_seed(stream(seed, f"epoch {epoch}"))
            left = np.concatenate((left, torch.randperm(examples, generator=generator).numpy()))
            epoch += 1
        yield left[:batch_size]
        left = left[batch_size:]


def batches_by_length(lengths: Array, budget: int) -> Iterator[Array]:
    """Row numbers by falling length, so many at a time as have at most `budget` tokens together; at least one.

    Args:
        lengths: int [rows], tokens of each sequence.
    """
    order = np.argsort(-lengths, kind="stable")
    ends = np.cumsum(lengths[order])
    first = 0
    while first < len(order):
        before = ends[first - 1] if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + budget, side="right")))
        yield order[first:last]
        first = last
