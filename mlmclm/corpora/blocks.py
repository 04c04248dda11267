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
    sha256: str


class Blocks:
    """A corpus part's tokens as one array [n_blocks, block_length] over all shards.

    Picklable: the receiving process fetches and maps each shard when it first reads from it.
    """

    def __init__(
        self, shelf: Shelf, shards: Sequence[Shard], block_length: int, dtype: str, stored_length: int | None = None
    ) -> None:
        """Describe the blocks of `shards`, one after the other, stored as `dtype` ("<u2" or "<u4"); open nothing yet.

        `stored_length` is the length of the blocks that the shards count, if it differs (`at_length`).
        """
        self.shelf, self.shards, self.block_length, self.dtype = shelf, tuple(shards), block_length, dtype
        self.stored_length = stored_length or block_length
        # For each shard the number of blocks up to its end, which `take` searches.
        counts = [shard.blocks * self.stored_length // block_length for shard in self.shards]
        self._ends = np.cumsum(counts, dtype=np.int64)
        self._maps: dict[int, NDArray[Any]] = {}
        self._checked: set[int] = set()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def at_length(self, length: int) -> Blocks:
        """Return the same text in blocks of another length; a remainder at the end of a shard is dropped.

        A shard's blocks are consecutive parts of one text, so longer blocks join and shorter ones divide them.
        """
        if length == self.block_length:
            return self
        return Blocks(self.shelf, self.shards, length, self.dtype, self.stored_length)

    def __reduce__(self) -> tuple[type[Blocks], tuple[Shelf, tuple[Shard, ...], int, str, int]]:
        """Pickle the description, not the data."""
        return Blocks, (self.shelf, self.shards, self.block_length, self.dtype, self.stored_length)

    def bytes_of(self, shard: Shard) -> int:
        """Return the size that a shard's file must have."""
        return shard.blocks * self.stored_length * np.dtype(self.dtype).itemsize

    def take(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Read the blocks `rows` (int64 [n]) as int64 [n, block_length].

        Raises:
            IndexError: a row is out of range.
            UserError: a shard is missing or damaged.
            EnvironmentFault: a shard cannot be fetched.
        """
        if len(rows) and not (rows.min() >= 0 and rows.max() < len(self)):
            raise IndexError(f"rows must be in [0, {len(self)}), got {rows.min()} to {rows.max()}")
        if len(self.shards) == 1:  # The fast path: NumPy gathers all rows at once.
            return self._map(0)[rows].astype(np.int64)
        shards = np.searchsorted(self._ends, rows, side="right")  # [n]
        taken = np.empty((len(rows), self.block_length), dtype=np.int64)
        for index, (shard, row) in enumerate(zip(shards.tolist(), (rows - self._ends[shards]).tolist(), strict=True)):
            taken[index] = self._map(shard)[row]  # `row` is negative: it counts back from the shard's end.
        return taken

    def tokens(self, shard: int) -> NDArray[Any]:
        """Return all tokens in a shard's blocks, given the shard's number; raises what `take` does."""
        return self._map(shard).reshape(-1)

    def damaged(self) -> dict[str, str]:
        """Describe each shard that is missing or has the wrong size, by its file name; lists the folder, reads none."""
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
        if index not in self._checked:
            self.shelf.check(shard.file, shard.sha256)
            self._checked.add(index)
        # The view as a plain array avoids the overhead that np.memmap adds to every index operation.
        count = shard.blocks * self.stored_length // self.block_length
        mapped = np.memmap(path, dtype=self.dtype, mode="r", shape=(count, self.block_length)).view(np.ndarray)
        if len(self._maps) >= OPEN_SHARDS:
            del self._maps[next(iter(self._maps))]  # the one opened first
        self._maps[index] = mapped
        return mapped
