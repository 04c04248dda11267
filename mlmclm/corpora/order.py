"""The order of training blocks: a pure function of the step, so that resuming needs only the step number.

Each epoch is a keyed pseudo-random permutation of the blocks: a Feistel network over the smallest power of four that
is at least their number, with cycle walking (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
Memory is proportional to the batch, not to the corpus.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mlmclm.corpora.blocks import Blocks
from mlmclm.corpora.chunks import Chunks
from mlmclm.corpora.hashing import UInt64, fold
from mlmclm.corpora.mixed_blocks import MixedBlocks
from mlmclm.corpora.mixes import MixedSamples

Samples = range | MixedSamples

_ROUNDS = 6
_PURPOSE = 1
"""Keeps the random draws for the order of batches independent of those for masking, which use the same seed."""


def sample_rows(n_blocks: int, samples: range, seed: int) -> NDArray[np.int64]:
    """Return the blocks of some samples of an endless sequence, int64 [len(samples)].

    Every `n_blocks` samples are one epoch, each in a new order. A global batch is a range of samples, and may span epochs.
    """
    return _rows_at(np.arange(samples.start, samples.stop, dtype=np.int64), n_blocks, seed)


def _rows_at(numbers: NDArray[np.int64], n_blocks: int, seed: int) -> NDArray[np.int64]:
    """Return the blocks of the samples with these numbers (int64 [n], in any order), int64 [n]."""
    epochs, positions = np.divmod(numbers, n_blocks)
    rows = np.empty(len(numbers), dtype=np.int64)
    for epoch in np.unique(epochs):
        mask = epochs == epoch
        rows[mask] = permute(positions[mask], n_blocks, seed=seed, epoch=int(epoch))
    return rows


def block_numbers(blocks: Blocks | Chunks | MixedBlocks, samples: Samples, seed: int) -> NDArray[np.int64]:
    """Return the block numbers of a step's samples, int64 [len(samples)].

    Each source of a mix has a sequence of its own, which doesn't depend on the other sources.
    """
    if isinstance(samples, range):
        return sample_rows(len(blocks), samples, seed)
    assert isinstance(blocks, MixedBlocks)
    sources, numbers = samples.of_sources()
    rows = np.empty(len(samples), dtype=np.int64)
    for index, (name, _) in enumerate(samples.mix):
        mask = sources == index
        rows[mask] = blocks.first[name] + _rows_at(numbers[mask], len(blocks.sources[name]), seed)
    return rows


def step_tokens(
    blocks: Blocks | Chunks | MixedBlocks, samples: Samples, seed: int, rows: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Read some rows (int64 [n]) of the global batch with these samples: block numbers [n], tokens [n, length]."""
    chosen = block_numbers(blocks, samples, seed)[rows]
    return chosen, blocks.take(chosen)


def permute(positions: NDArray[np.int64], n: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """Map `positions` (int64 [k], each in [0, n)) under the permutation of [0, n) keyed by (seed, epoch)."""
    # A balanced Feistel network needs two halves of equal width: 2 * half bits hold n - 1.
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    values = positions.astype(np.uint64)
    outside = np.ones(values.shape, dtype=np.bool_)
    # Cycle walking: the network permutes [0, 4**half). Values outside [0, n) go through it again until they are inside.
    while outside.any():
        values[outside] = _feistel(values[outside], half, mask, seed, epoch)
        outside = values >= np.uint64(n)
    return values.astype(np.int64)


def _feistel(values: UInt64, half: np.uint64, mask: np.uint64, seed: int, epoch: int) -> UInt64:
    """Apply a balanced Feistel network over 2 * half bits, elementwise: a bijection."""
    left, right = values >> half, values & mask
    for round_number in range(_ROUNDS):
        left, right = right, left ^ (fold(_PURPOSE, seed, epoch, round_number, right) & mask)
    return (left << half) | right
