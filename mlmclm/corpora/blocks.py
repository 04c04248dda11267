"""Packed token blocks on disk: written once, in order; read as a memory map."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from mlmclm.errors import UserError


def token_type(vocabulary: int) -> np.dtype[Any]:
    """The smallest type that holds every token id: uint16 up to 65,536 tokens, else uint32 (little endian)."""
    return np.dtype("<u2") if vocabulary <= 65_536 else np.dtype("<u4")


class Blocks:
    """A file of tokens seen as [n_blocks, block_length]; picklable (the map is opened again where it arrives)."""

    def __init__(self, path: Path, block_length: int, dtype: str) -> None:
        """Opens `path`, tokens of `dtype` ("<u2" or "<u4").

        Raises:
            UserError: no such file, or its size is not a whole number of blocks.
        """
        self.path, self.block_length, self.dtype = path, block_length, dtype
        width = block_length * np.dtype(dtype).itemsize
        try:
            size = path.stat().st_size
        except FileNotFoundError as error:
            raise UserError(f"{path}: no such file. Delete the folder {path.parent} to have it built again.") from error
        if size == 0 or size % width:
            raise UserError(
                f"{path}: {size} bytes are not a whole number of blocks of {block_length} tokens. "
                f"Delete the folder {path.parent} to have it built again."
            )
        self._map = np.memmap(path, dtype=dtype, mode="r", shape=(size // width, block_length))

    def __len__(self) -> int:
        """The number of blocks."""
        return int(self._map.shape[0])

    def __reduce__(self) -> tuple[type[Blocks], tuple[Path, int, str]]:
        """Pickles the description, not the data."""
        return Blocks, (self.path, self.block_length, self.dtype)

    def take(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Blocks `rows` (int64 [n]) as int64 [n, block_length]."""
        return self._map[rows].astype(np.int64)


class BlockWriter:
    """Packs documents into a file of whole blocks; what fills no block at the end is dropped."""

    def __init__(self, path: Path, block_length: int, dtype: np.dtype[Any], max_tokens: int | None) -> None:
        """Writes to `path` until `max_tokens` (rounded down to blocks) are reached."""
        self.blocks = 0
        self.documents = 0
        self._block_length, self._dtype = block_length, dtype
        self._limit = None if max_tokens is None else max_tokens // block_length
        self._pending: list[NDArray[Any]] = []
        self._pending_tokens = 0
        self._file: BinaryIO = path.open("wb")

    def __enter__(self) -> Self:
        """The writer itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the file."""
        self._file.close()

    @property
    def full(self) -> bool:
        """Whether the limit is reached: further documents are ignored."""
        return self._limit is not None and self.blocks >= self._limit

    @property
    def tokens(self) -> int:
        """Tokens in the blocks written so far."""
        return self.blocks * self._block_length

    def add(self, tokens: NDArray[Any]) -> None:
        """Appends one document, int [n], its EOS included."""
        if self.full:
            return
        self.documents += 1
        self._pending.append(tokens)
        self._pending_tokens += len(tokens)
        if self._pending_tokens >= self._block_length:
            self._write()

    def _write(self) -> None:
        """Writes the whole blocks among the pending tokens."""
        stream = np.concatenate(self._pending)
        blocks = len(stream) // self._block_length
        if self._limit is not None:
            blocks = min(blocks, self._limit - self.blocks)
        end = blocks * self._block_length
        self._file.write(stream[:end].astype(self._dtype).tobytes())
        self.blocks += blocks
        self._pending, self._pending_tokens = [stream[end:]], len(stream) - end
