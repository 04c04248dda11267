"""Settings of glibc's allocator for work that needs memory more than speed; workers begin with the opposite ones."""

from __future__ import annotations

import ctypes

LARGE_BLOCK = 1 << 20
"""Smallest block, in bytes, that `map_large_blocks` maps by itself."""
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -2, -3, -4
"""Parameters of mallopt, from glibc's malloc.h."""


def map_large_blocks() -> None:
    """Make this process map each large block separately and return it to the system as soon as it is freed.

    This is the opposite of `cluster.worker_environment`. It does nothing if the C library is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)
        # Undoes MALLOC_MMAP_MAX_=0, which forbids mappings altogether.
        mallopt(M_MMAP_MAX, 1 << 16)
        mallopt(M_TRIM_THRESHOLD, LARGE_BLOCK)
        mallopt(M_TOP_PAD, LARGE_BLOCK)


def return_freed_memory() -> None:
    """Return freed memory, which `cluster.worker_environment` makes the process keep, to the system; glibc only."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
