"""Counter-based pseudo-random numbers: pure functions of integers, the same on every machine."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

UInt64 = NDArray[np.uint64]

# The constants of SplitMix64.
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def splitmix64(value: UInt64) -> UInt64:
    """Apply the finaliser of SplitMix64 (Steele, Lea and Flood, 2014): a bijection of 64-bit integers, elementwise."""
    mixed = value + _GAMMA
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND
    return mixed ^ (mixed >> np.uint64(31))


def fold(*values: int | UInt64) -> UInt64:
    """Hash a sequence of integers or broadcastable arrays, in order, into 64-bit words; negative integers wrap.

    The result has the broadcast shape of the arguments, with at least one dimension: unlike NumPy scalars, arrays
    overflow without a warning.
    """
    state = np.zeros(1, dtype=np.uint64)
    for value in values:
        word = np.array([value & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64) if isinstance(value, int) else value
        state = splitmix64(state ^ splitmix64(word))
    return state


def unit_interval(words: UInt64) -> NDArray[np.float64]:
    """Turn the upper 53 bits of each word into a uniform double in [0, 1)."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def text_hash(text: str, *, purpose: str, seed: int) -> int:
    """Return a 64-bit hash of a text; another `purpose` or `seed` gives an independent one."""
    salt = f"{purpose}:{seed}".encode()
    if len(salt) > hashlib.blake2b.SALT_SIZE:  # truncated, it would also be the salt of other seeds
        salt = hashlib.blake2b(salt, digest_size=hashlib.blake2b.SALT_SIZE).digest()
    # "surrogatepass": JSON can hold lone surrogates, which plain UTF-8 refuses.
    return int.from_bytes(
        hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, salt=salt).digest(), "big"
    )
