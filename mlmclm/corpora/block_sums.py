"""Checksums of single blocks, so that blocks can be read from an address without their whole shard.

train-00000.sums    CRC-32 of each block of train-00000.bin, as it is stored; then the SHA-256 of these checksums and
                    of the shard's own SHA-256, which bind the two files together
"""

from __future__ import annotations

import hashlib
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SUM = np.dtype("<u4")


def sums_file(shard: str) -> str:
    """Return the name of the file with the checksums of a shard's blocks."""
    return Path(shard).with_suffix(".sums").name


def sums_size(blocks: int) -> int:
    """Return the bytes of the file for a shard of so many blocks."""
    return SUM.itemsize * blocks + hashlib.sha256().digest_size


def block_sums(content: bytes, size: int) -> bytes:
    """Return the checksums of consecutive blocks of `size` bytes."""
    return np.array([zlib.crc32(content[at : at + size]) for at in range(0, len(content), size)], SUM).tobytes()


def sealed_sums(sums: bytes, shard_sha256: str) -> bytes:
    """Return the content of a shard's file of checksums."""
    return sums + _seal(sums, shard_sha256)


def opened_sums(content: bytes, shard_sha256: str, blocks: int) -> NDArray[np.uint32] | None:
    """Return the checksums of a shard's blocks, uint32 [blocks]; None if this is not the file that was written."""
    sums, seal = content[: SUM.itemsize * blocks], content[SUM.itemsize * blocks :]
    return np.frombuffer(sums, SUM) if seal == _seal(sums, shard_sha256) else None


def _seal(sums: bytes, shard_sha256: str) -> bytes:
    return hashlib.sha256(sums + bytes.fromhex(shard_sha256)).digest()
