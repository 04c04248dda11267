"""What worker processes do with freed memory."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from mlmclm.cluster.worker_environment import worker_environment

MEBIBYTE = 1 << 20
HELD_AFTER_FREEING = """
import ctypes, psutil, sys
from mlmclm.backends.host_memory import map_large_blocks
if sys.argv[1] == "mapped":
    map_large_blocks()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.memset.argtypes, libc.free.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t), (ctypes.c_void_p,)
size, before = 4 << 20, psutil.Process().memory_info().rss
blocks = [libc.malloc(size) for _ in range(32)]
for block in blocks:
    libc.memset(block, 1, size)
taken = psutil.Process().memory_info().rss
for block in blocks:
    libc.free(block)
print(taken - before, psutil.Process().memory_info().rss - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
def test_freed_blocks_stay_in_a_worker_unless_it_needs_memory_more_than_speed() -> None:
    held = {}
    for how in ("kept", "mapped"):
        done = subprocess.run(
            [sys.executable, "-c", HELD_AFTER_FREEING, how],
            env={**os.environ, **worker_environment()}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        taken, held[how] = map(int, done.stdout.split())
        assert taken > 120 * MEBIBYTE
    assert held["kept"] > 120 * MEBIBYTE
    assert held["mapped"] < 8 * MEBIBYTE
