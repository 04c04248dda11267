"""Packed token blocks on disk: shards of whole blocks, read as memory maps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mlmclm.corpora.shelf import AGAIN, Shelf
from mlmclm.errors import UserError

OPEN_SHARDS = 512
"""Memory maps that one process holds open: each takes a file descriptor, of which 1,024 are a common limit."""


def token_type(vocabulary: int) -> np.dtype[Any]:
    """The smallest type that holds every token id: uint16 up to 65,536 tokens, else uint32 (little endian)."""
    return np.dtype("<u2") if vocabulary <= 65_536 else np.dtype("<u4")


class Shard(NamedTuple):
    """One file of whole blocks."""

    file: str
    blocks: int
    sha256: str | None = None
    """None for a corpus that was prepared before shards had checksums."""


class Blocks:
    """Tokens seen as [n_blocks, block_length], over shards; picklable (shards are fetched and mapped where it arrives, as they are touched)."""

    def __init__(self, shelf: Shelf, shards: Sequence[Shard], block_length: int, dtype: str) -> None:
        """Tokens of `dtype` ("<u2" or "<u4"), the shards' blocks one after the other; nothing is opened yet."""
        self.shelf, self.shards, self.block_length, self.dtype = shelf, tuple(shards), block_length, dtype
        self._ends = np.cumsum([shard.blocks for shard in self.shards], dtype=np.int64)
        self._length = int(self._ends[-1])
        self._maps: dict[int, NDArray[Any]] = {}
        self._checked: set[int] = set()

    def __len__(self) -> int:
        """The number of blocks."""
        return self._length

    def __reduce__(self) -> tuple[type[Blocks], tuple[Shelf, tuple[Shard, ...], int, str]]:
        """Pickles the description, not the data."""
        return Blocks, (self.shelf, self.shards, self.block_length, self.dtype)

    def bytes_of(self, shard: Shard) -> int:
        """The size of a shard's file."""
        return shard.blocks * self.block_length * np.dtype(self.dtype).itemsize

    def take(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Blocks `rows` (int64 [n]) as int64 [n, block_length].

        Raises:
            IndexError: there is no such block.
            UserError: a shard is missing or damaged.
            EnvironmentFault: a shard cannot be fetched.
        """
        if len(rows) and not (rows.min() >= 0 and rows.max() < self._length):
            raise IndexError(f"rows must be in [0, {self._length}), got {rows.min()} to {rows.max()}")
        if len(self.shards) == 1:
            return self._map(0)[rows].astype(np.int64)
        shards = np.searchsorted(self._ends, rows, side="right")  # [n]
        taken = np.empty((len(rows), self.block_length), dtype=np.int64)
        for index, (shard, row) in enumerate(zip(shards.tolist(), (rows - self._ends[shards]).tolist(), strict=True)):
            taken[index] = self._map(shard)[row]  # counted from the shard's end: negative
        return taken

    def damaged(self) -> dict[str, str]:
        """What is wrong with each shard that is missing or has the wrong size, by its file; one look at the folder, nothing is read."""
        sizes = self.shelf.sizes()
        found = {}
        for shard in self.shards:
            size, wanted = sizes.get(shard.file), self.bytes_of(shard)
            if size is None:
                found[shard.file] = "no such file"
            elif size != wanted:
                found[shard.file] = f"{size:,} bytes, but it was written with {wanted:,}"
        return found

    def check(self) -> None:
        """Looks at the sizes of all shards.

        Raises:
            UserError: names the shards that are missing or cut short, and says what to do.
        """
        damaged = self.damaged()
        if damaged:
            lines = "\n".join(f"{self.shelf.where(file)}: {what}." for file, what in damaged.items())
            raise UserError(f"{lines}\n{AGAIN}")

    def _map(self, index: int) -> NDArray[Any]:
        """A shard's blocks, [blocks, block_length]."""
        known = self._maps.get(index)
        if known is not None:
            return known
        shard = self.shards[index]
        path = self.shelf.fetch(shard.file, self.bytes_of(shard), shard.sha256)
        if shard.sha256 is not None and index not in self._checked:
            self.shelf.check(shard.file, shard.sha256)
            self._checked.add(index)
        mapped = np.memmap(path, dtype=self.dtype, mode="r", shape=(shard.blocks, self.block_length)).view(np.ndarray)
        if len(self._maps) >= OPEN_SHARDS:
            del self._maps[next(iter(self._maps))]
        self._maps[index] = mapped
        return mapped
