"""Sums over the workers of one machine, through memory that they share.

Gloo sends them through sockets: each value is copied into and out of the kernel twice, about twice the time of what is done here.
"""

from __future__ import annotations

import mmap
import os
import platform
import secrets
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as distributed
from torch import Tensor

CHUNK = 1 << 18
"""Values that are exchanged at once; there is room for two of them."""
TOKEN, FLAGS, HEAD = 16, 16, 4096
"""Bytes: a token that tells regions apart; where the two flags begin; where the values begin."""
PATIENCE = 1800.0
"""Seconds that a worker waits for the others."""


class Region(NamedTuple):
    """One worker's part of the shared memory, as seen by any of them."""

    process: int
    flags: torch.Tensor
    """int64 [2]: the last exchange for which the worker has given its values, and for which its sums are there."""
    values: torch.Tensor
    """fp32 [2, CHUNK], used in turn."""


class HostSum:
    """In-place sums of fp32 tensors over all workers, which are the same bits on each.

    Of each chunk every worker sums a part, in the order of ranks, and writes it where the others read it.
    """

    def __init__(self, regions: Sequence[Region], rank: int) -> None:
        self.regions, self.rank, self.turn = regions, rank, 0

    @staticmethod
    def create() -> HostSum | None:
        """For the workers of the process group; None (on each) where not all of them can see each other's memory."""
        world, rank = distributed.get_world_size(), distributed.get_rank()
        token = secrets.token_bytes(TOKEN)
        own = _own(token)
        told: list[Any] = [None] * world
        distributed.all_gather_object(told, None if own is None else (os.getpid(), own[0], token))
        regions = None if own is None else _others(told, rank, own[1])
        all_see = torch.tensor(int(regions is not None))
        distributed.all_reduce(all_see, distributed.ReduceOp.MIN)
        return HostSum(regions, rank) if all_see and regions is not None else None

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        """Sums each tensor, contiguous and fp32, in place.

        Raises:
            RuntimeError: another worker is gone, or does not come.
        """
        for tensor in tensors:
            flat = tensor.detach().view(-1)
            for start in range(0, len(flat), CHUNK):
                self._sum(flat[start : start + CHUNK])

    def _sum(self, chunk: Tensor) -> None:
        world, own = len(self.regions), self.regions[self.rank]
        self.turn += 1
        rooms = [region.values[self.turn % 2, : len(chunk)] for region in self.regions]
        bounds = [len(chunk) * rank // world for rank in range(world + 1)]
        parts = [slice(first, last) for first, last in pairwise(bounds)]
        mine = parts[self.rank]
        for part in parts:
            if part != mine:
                rooms[self.rank][part] = chunk[part]
        own.flags[0] = self.turn
        # Whoever has given values for this turn has read the sums of the turn before, and of the one that had this room.
        self._wait(0)
        values = [chunk[mine] if rank == self.rank else room[mine] for rank, room in enumerate(rooms)]
        total = torch.add(values[0], values[1], out=rooms[self.rank][mine])
        for value in values[2:]:
            total += value
        chunk[mine] = total
        own.flags[1] = self.turn
        self._wait(1)
        for room, part in zip(rooms, parts, strict=True):
            if part != mine:
                chunk[part] = room[part]

    def _wait(self, flag: int) -> None:
        """Until all workers' flag is this turn's."""
        begun, looks = time.monotonic(), 0
        for region in self.regions:
            while int(region.flags[flag]) < self.turn:
                looks += 1
                if looks > 2000:
                    time.sleep(1e-4)
                if looks % 10_000 == 0:
                    if not Path(f"/proc/{region.process}").exists():
                        raise RuntimeError(f"a worker (process {region.process}) ended while gradients were summed")
                    if time.monotonic() - begun > PATIENCE:
                        raise RuntimeError(
                            f"no gradients from a worker (process {region.process}) for {PATIENCE:.0f} s"
                        )


def _own(token: bytes) -> tuple[int, mmap.mmap] | None:
    """A new region: its file descriptor, which the process keeps, and its memory."""
    # The order in which flags and values are seen is what these processors keep without more ado.
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return None
    try:
        descriptor = os.memfd_create("mlmclm-sum")
        os.ftruncate(descriptor, HEAD + 2 * 4 * CHUNK)
        memory = mmap.mmap(descriptor, 0)
    except OSError:
        return None
    memory[:TOKEN] = token
    return descriptor, memory


def _others(told: Sequence[Any], rank: int, own: mmap.mmap) -> list[Region] | None:
    """All workers' regions; None if one of them can't be opened from here."""
    regions = []
    for number, entry in enumerate(told):
        if entry is None:
            return None
        process, descriptor, token = entry
        memory = own
        if number != rank:
            try:
                with Path(f"/proc/{process}/fd/{descriptor}").open("r+b") as file:
                    memory = mmap.mmap(file.fileno(), HEAD + 2 * 4 * CHUNK)
            except (OSError, ValueError):
                return None
        if memory[:TOKEN] != token:  # a process of this number on another machine, or in another container
            return None
        flags = torch.from_numpy(np.frombuffer(memory, np.int64, 2, FLAGS))
        values = torch.from_numpy(np.frombuffer(memory, np.float32, 2 * CHUNK, HEAD)).view(2, CHUNK)
        regions.append(Region(process, flags, values))
    return regions
