"""Packed token blocks on disk: shards of whole blocks, read through memory maps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mlmclm.corpora.shelf import Shelf

OPEN_SHARDS = 512
"""Maximum number of memory maps that one process keeps open: each takes a file descriptor, often limited to 1,024."""


def token_type(vocabulary: int) -> np.dtype[Any]:
    """Return the smallest type that holds every token id: uint16 up to 65,536 tokens, else uint32 (little endian)."""
    return np.dtype("<u2") if vocabulary <= 65_536 else np.dtype("<u4")


class Shard(NamedTuple):
    """A file of whole blocks."""

    file: str
    blocks: int
    sha256: str | None = None
    """None for a corpus prepared before shards had checksums."""


class Blocks:
    """A corpus part's tokens as one array [n_blocks, block_length] over all shards.

    Picklable: the receiving process fetches and maps each shard when it first reads from it.
    """

    def __init__(self, shelf: Shelf, shards: Sequence[Shard], block_length: int, dtype: str) -> None:
        """Describe the blocks of `shards`, one shard after the other, stored as `dtype` ("<u2" or "<u4").

        Nothing is opened yet.
        """
        self.shelf, self.shards, self.block_length, self.dtype = shelf, tuple(shards), block_length, dtype
        # For each shard the number of blocks up to its end, which `take` searches.
        self._ends = np.cumsum([shard.blocks for shard in self.shards], dtype=np.int64)
        self._length = int(self._ends[-1])
        self._maps: dict[int, NDArray[Any]] = {}
        self._checked: set[int] = set()

    def __len__(self) -> int:
        """Return the number of blocks."""
        return self._length

    def __reduce__(self) -> tuple[type[Blocks], tuple[Shelf, tuple[Shard, ...], int, str]]:
        """Pickle the description, not the data."""
        return Blocks, (self.shelf, self.shards, self.block_length, self.dtype)

    def bytes_of(self, shard: Shard) -> int:
        """Return the size that a shard's file must have."""
        return shard.blocks * self.block_length * np.dtype(self.dtype).itemsize

    def take(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Read the blocks `rows` (int64 [n]) as int64 [n, block_length].

        Raises:
            IndexError: a row is out of range.
            UserError: a shard is missing or damaged.
            EnvironmentFault: a shard cannot be fetched.
        """
        if len(rows) and not (rows.min() >= 0 and rows.max() < self._length):
            raise IndexError(f"rows must be in [0, {self._length}), got {rows.min()} to {rows.max()}")
        if len(self.shards) == 1:  # The fast path: NumPy gathers all rows at once.
            return self._map(0)[rows].astype(np.int64)
        shards = np.searchsorted(self._ends, rows, side="right")  # [n]
        taken = np.empty((len(rows), self.block_length), dtype=np.int64)
        for index, (shard, row) in enumerate(zip(shards.tolist(), (rows - self._ends[shards]).tolist(), strict=True)):
            taken[index] = self._map(shard)[row]  # `row` is negative: it counts back from the shard's end.
        return taken

    def damaged(self) -> dict[str, str]:
        """Describe each shard that is missing or has the wrong size, by its file name.

        Takes one listing of the folder; no shard is read.
        """
        sizes = self.shelf.sizes()
        found = {}
        for shard in self.shards:
            size, wanted = sizes.get(shard.file), self.bytes_of(shard)
            if size is None:
                found[shard.file] = "no such file"
            elif size != wanted:
                found[shard.file] = f"{size:,} bytes, but it was written with {wanted:,}"
        return found

    def _map(self, index: int) -> NDArray[Any]:
        """Return a shard's blocks, [blocks, block_length]; fetched, checked and mapped on first use."""
        known = self._maps.get(index)
        if known is not None:
            return known
        shard = self.shards[index]
        path = self.shelf.fetch(shard.file, self.bytes_of(shard), shard.sha256)
        # A map that was closed may be opened again: one checksum per process and shard is enough.
        if shard.sha256 is not None and index not in self._checked:
            self.shelf.check(shard.file, shard.sha256)
            self._checked.add(index)
        # The view as a plain array avoids the overhead that np.memmap adds to every index operation.
        mapped = np.memmap(path, dtype=self.dtype, mode="r", shape=(shard.blocks, self.block_length)).view(np.ndarray)
        if len(self._maps) >= OPEN_SHARDS:
            del self._maps[next(iter(self._maps))]  # the one opened first
        self._maps[index] = mapped
        return mapped
