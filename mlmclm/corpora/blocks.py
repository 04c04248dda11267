"""Packed token blocks on disk: shards of whole blocks, read through memory maps."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mlmclm.corpora.shelf import AGAIN, Shelf
from mlmclm.errors import UserError
from mlmclm.storage.files import write_atomic
from mlmclm.storage.unchanged import Mark, check_hashed, mark_of

NUMBER = np.dtype("<u4")
SUMS, ENDS = ".sums", ".ends"
"""Suffixes of the small files beside a shard at an address, with which parts of it are found and verified without the whole shard:
the CRC-32 of each block as it is stored, and the position of each EOS. Each is an array of uint32, then the SHA-256 of these
numbers and of the shard's own SHA-256, which binds the two files together."""
_SEAL = hashlib.sha256().digest_size


def beside(shard: str, suffix: str) -> str:
    """Return the name of a shard's file of checksums (`SUMS`) or of positions of EOS (`ENDS`)."""
    return Path(shard).with_suffix(suffix).name


def sealed_size(numbers: int) -> int:
    """Return the size in bytes of a file with this many `numbers`."""
    return NUMBER.itemsize * numbers + _SEAL


def block_sums(content: bytes, size: int) -> bytes:
    """Return the checksums of consecutive blocks of `size` bytes."""
    return np.array([zlib.crc32(content[at : at + size]) for at in range(0, len(content), size)], NUMBER).tobytes()


def sealed_numbers(numbers: bytes, shard_sha256: str) -> bytes:
    """Return the content of a file beside a shard: the numbers, then the SHA-256."""
    return numbers + _seal(numbers, shard_sha256)


def opened_numbers(content: bytes, shard_sha256: str) -> NDArray[np.uint32] | None:
    """Return the numbers in a file beside a shard, uint32 [n]; None if this is not the file that was written."""
    numbers, seal = content[:-_SEAL], content[-_SEAL:]
    return np.frombuffer(numbers, NUMBER) if seal == _seal(numbers, shard_sha256) else None


def _seal(numbers: bytes, shard_sha256: str) -> bytes:
    return hashlib.sha256(numbers + bytes.fromhex(shard_sha256)).digest()


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

        `stored_length` is the length of the blocks that `Shard.blocks` counts, if it isn't `block_length` (`at_length`).
        """
        self.shelf, self.shards, self.block_length, self.dtype = shelf, tuple(shards), block_length, dtype
        self.stored_length = stored_length or block_length
        # For each shard the number of blocks up to its end, which `take` searches, and up to its beginning.
        counts = np.array([shard.blocks * self.stored_length // block_length for shard in self.shards], dtype=np.int64)
        self._ends = np.cumsum(counts)
        self._begins = self._ends - counts
        self._maps: dict[int, NDArray[Any]] = {}
        self._checked: dict[int, Mark] = {}
        self._copied: dict[int, bool] = {}
        self._sums: dict[int, NDArray[np.uint32]] = {}

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

    @cached_property
    def size(self) -> int:
        """Bytes of all shards."""
        return sum(map(self.bytes_of, self.shards))

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
        if len(self.shards) == 1 and self._whole(0):  # The fast path: NumPy gathers all rows at once.
            return self._map(0)[rows].astype(np.int64)
        shards = np.searchsorted(self._ends, rows, side="right")  # [n]
        first = (rows - self._begins[shards]) * self.block_length  # [n], in the shard
        taken = np.empty((len(rows), self.block_length), dtype=np.int64)
        wanted = zip(shards.tolist(), first.tolist(), (first + self.block_length).tolist(), strict=True)
        for index, tokens in enumerate(self.parts(list(wanted))):
            taken[index] = tokens
        return taken

    def parts(self, wanted: Sequence[tuple[int, int, int]]) -> list[NDArray[Any]]:
        """Read parts of shards, each given by the shard's number, its first token and its end; raises what `take` does."""
        apart = iter(self._read([part for part in wanted if not self._whole(part[0])]))
        return [self.tokens(shard)[first:end] if self._whole(shard) else next(apart) for shard, first, end in wanted]

    def tokens(self, shard: int) -> NDArray[Any]:
        """Return all tokens in a shard's blocks, given the shard's number; raises what `take` does."""
        self._copied[shard] = True
        return self._map(shard).reshape(-1)

    def tokens_in(self, shard: int) -> int:
        """Return the number of tokens in a shard, given its number; reads nothing."""
        return self.shards[shard].blocks * self.stored_length

    def ends(self, shard: int, eos: int) -> NDArray[np.int64]:
        """Return the positions of EOS in a shard, int64 [documents], given the shard's number; raises what `take` does.

        Those of a shard at an address are in a file beside it.
        """
        if self.shelf.address is not None:
            self.bring(ENDS, [shard])
            return self._beside(shard, ENDS).astype(np.int64)
        return np.flatnonzero(self.tokens(shard) == eos)

    def bring(self, suffix: str, shards: Iterable[int]) -> None:
        """Copy the files beside several shards to this node in parallel. Opening one verifies it, and fails if it is missing."""
        if self.shelf.address is None:
            return
        files = [beside(self.shards[shard].file, suffix) for shard in shards]
        absent = [(file, 0, None) for file in files if not (self.shelf.local / file).is_file()]
        with suppress(UserError):
            for (file, _, _), content in zip(absent, self.shelf.ranges(absent), strict=True):
                write_atomic(self.shelf.local / file, content)

    def check_unchanged(self) -> None:
        """Raise a `UserError` if a shard that was read is not what it was when its checksum was compared.

        A memory map shows later writes to its file. Copies of remote shards are not checked: their times record the last use.
        """
        if self.shelf.address is None:
            for index, mark in self._checked.items():
                check_hashed(self.shelf.local / self.shards[index].file, mark, self.shards[index].sha256)

    def damaged(self) -> dict[str, str]:
        """Describe each shard that is missing or has the wrong size, by its file name; lists the folder and reads no shard."""
        sizes = self.shelf.sizes()
        faults = {}
        for shard in self.shards:
            size, expected = sizes.get(shard.file), self.bytes_of(shard)
            if size is None:
                faults[shard.file] = "no such file"
            elif size != expected:
                faults[shard.file] = f"{size:,} bytes, but it was written with {expected:,}"
        return faults

    def _whole(self, index: int) -> bool:
        """Return whether blocks are read from a whole shard on this node: it has the shard, or has room to copy it.

        A corpus that doesn't fit into a node's copies is not copied at all. Its order is random, so each shard is as likely
        to be needed next as any other, and to replace one by another would only cost traffic.
        """
        if self.shelf.address is None:
            return True
        if index not in self._copied:
            size = self.bytes_of(self.shards[index])
            fits = self.size <= self.shelf.gib * 2**30
            self._copied[index] = fits and (self.shelf.has(self.shards[index].file, size) or self.shelf.has_room(size))
        return self._copied[index]

    def _read(self, wanted: Sequence[tuple[int, int, int]]) -> list[NDArray[Any]]:
        """Read parts of shards as `parts` does, from the address, and verify the stored blocks in which they lie.

        Raises:
            UserError: a shard or its checksums are missing or damaged.
            EnvironmentFault: the address cannot be reached.
        """
        size, dtype = self.stored_length * np.dtype(self.dtype).itemsize, np.dtype(self.dtype)
        spans, parts = [], []
        for shard, first, end in wanted:
            blocks = range(first // self.stored_length, -(-end // self.stored_length))  # as they are stored
            spans.append(
                (blocks, slice(first - blocks.start * self.stored_length, end - blocks.start * self.stored_length))
            )
            parts.append((self.shards[shard].file, blocks.start * size, blocks.stop * size))
        self.bring(SUMS, {shard for shard, _, _ in wanted} - self._sums.keys())
        tokens = []
        for (shard, _, _), (blocks, span), (file, _, _), content in zip(
            wanted, spans, parts, self.shelf.ranges(parts), strict=True
        ):
            sums = self._sums_of(shard)[blocks.start : blocks.stop].tobytes()
            if len(content) != len(blocks) * size or block_sums(content, size) != sums:
                raise UserError(
                    f"{self.shelf.where(file)}: blocks {blocks.start} to {blocks.stop - 1} are not what was written. {AGAIN}"
                )
            tokens.append(np.frombuffer(content, dtype)[span])
        return tokens

    def _sums_of(self, index: int) -> NDArray[np.uint32]:
        """Return the checksums of a shard's blocks as they are stored, uint32 [blocks], from a copy on this node."""
        if index not in self._sums:
            shard = self.shards[index]
            file = beside(shard.file, SUMS)
            self._beside(index, SUMS)
            copy = self.shelf.local / file
            self._sums[index] = np.memmap(copy, NUMBER, mode="r", shape=(shard.blocks,)).view(np.ndarray)
        return self._sums[index]

    def _beside(self, index: int, suffix: str) -> NDArray[np.uint32]:
        """Return the numbers in a file beside a shard, verified, from a copy on this node.

        Raises:
            UserError: the file is missing or damaged.
        """
        shard = self.shards[index]
        file = beside(shard.file, suffix)
        copy = self.shelf.local / file
        content = copy.read_bytes() if copy.is_file() else None
        numbers = None if content is None else opened_numbers(content, shard.sha256)
        if numbers is None:
            content = self.shelf.read(file)
            numbers = None if content is None else opened_numbers(content, shard.sha256)
            if content is None or numbers is None:
                raise UserError(
                    f"{self.shelf.where(file)}: {'no such file' if content is None else 'not what was written'}. Delete {shard.file} beside "
                    "it and run `mlmclm data` on the study: they are made again together."
                )
            write_atomic(copy, content)
        return numbers

    def _map(self, index: int) -> NDArray[Any]:
        """Return a shard's blocks, [blocks, block_length]; fetched, checked and mapped on first use."""
        opened = self._maps.get(index)
        if opened is not None:
            return opened
        shard = self.shards[index]
        path = self.shelf.fetch(shard.file, self.bytes_of(shard), shard.sha256)
        if self.shelf.address is not None:
            os.utime(path)  # when it was last used, for `Shelf.has_room`
        # A map that was closed may be opened again: one checksum per process and shard is enough.
        if index not in self._checked:
            mark = mark_of(path.stat())
            self.shelf.check(shard.file, shard.sha256)
            self._checked[index] = mark
        # The view as a plain array avoids the overhead that np.memmap adds to every index operation.
        mapped = np.memmap(
            path, dtype=self.dtype, mode="r", shape=(int(self._ends[index] - self._begins[index]), self.block_length)
        ).view(np.ndarray)
        if len(self._maps) >= OPEN_SHARDS:
            del self._maps[next(iter(self._maps))]  # the one opened first
        self._maps[index] = mapped
        return mapped
