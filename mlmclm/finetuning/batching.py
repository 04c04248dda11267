"""Batching and random streams of a cell, all pure functions of the seed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import torch

from mlmclm.results.measures import Array
from mlmclm.tasks.prepared_task import Lists

AHEAD = 32
"""Number of coming batches whose examples are searched for those that share no text."""


def stream(seed: int, name: str) -> int:
    """Return the 63-bit seed of one of a cell's random streams (`head`, `order`, `dropout`).

    The streams are independent of each other, even when they share a seed.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # 63 bits, so that the seed also fits a signed 64-bit integer


def training_rows(examples: int, batch_size: int, seed: int, distinct: Lists | None = None) -> Iterator[Array]:
    """Yield the row numbers of each step's batch, int64 [batch_size], for ever.

    Each pass over the examples has its own permutation. A batch may span two passes, so no example is dropped and every
    batch is full.

    Args:
        seed: seed of the stream `order`.
        distinct: numbers of each example's texts. An example that shares a text with its batch waits for a later batch. If
            too few of the next `AHEAD` batches' examples share none, those that have waited longest fill the batch.
    """
    epoch = 0
    left = np.empty(0, dtype=np.int64)
    # Keep a few batches' examples to choose from: near the end of a pass, too few of its remaining examples share no text.
    fewest = batch_size if distinct is None else 4 * batch_size
    while True:
        while len(left) < fewest:  # a loop: a batch may be larger than the whole training split
            generator = torch.Generator().manual_seed(stream(seed, f"epoch {epoch}"))
            left = np.concatenate((left, torch.randperm(examples, generator=generator).numpy()))
            epoch += 1
        chosen = _first_distinct(left[: AHEAD * batch_size], batch_size, distinct)
        if len(chosen) < batch_size:
            others = np.delete(np.arange(len(left)), chosen)
            chosen = np.concatenate((chosen, others[: batch_size - len(chosen)]))
        yield left[chosen]
        left = np.delete(left, chosen)


def _first_distinct(rows: Array, most: int, distinct: Lists | None) -> Array:
    """Return the positions of the first `most` rows; with `distinct`, of the first that share no text with one chosen before."""
    if distinct is None:
        return np.arange(min(most, len(rows)))
    chosen: list[int] = []
    seen: set[int] = set()
    for position, row in enumerate(rows):
        if len(chosen) == most:
            break
        texts = distinct[row].tolist()
        if seen.isdisjoint(texts):
            seen.update(texts)
            chosen.append(position)
    return np.array(chosen, dtype=np.int64)


def batches_by_length(lengths: Array, budget: int) -> Iterator[Array]:
    """Yield batches of row numbers, longest sequences first, of at most `budget` tokens each.

    A sequence longer than the budget forms a batch of its own. `lengths`, int [rows], are the sequences' tokens.
    """
    order = np.argsort(-lengths, kind="stable")
    ends = np.cumsum(lengths[order])
    first = 0
    while first < len(order):
        before = ends[first - 1] if first else 0  # tokens in all earlier batches
        last = max(first + 1, int(np.searchsorted(ends, before + budget, side="right")))
        yield order[first:last]
        first = last
