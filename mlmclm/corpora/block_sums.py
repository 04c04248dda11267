"""Small files beside a shard at an fsspec address, with which parts of it are found and verified without the whole shard.

train-00000.sums    CRC-32 of each block of train-00000.bin, as it is stored
train-00000.ends    position of each EOS in train-00000.bin

Each is an array of uint32, then the SHA-256 of these numbers and of the shard's own SHA-256, which binds the two files
together.
"""

from __future__ import annotations

import hashlib
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

NUMBER = np.dtype("<u4")
SUMS, ENDS = ".sums", ".ends"
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
