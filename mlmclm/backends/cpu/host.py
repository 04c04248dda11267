"""What the workers of one machine do through memory that they share: sum gradients, and keep one copy of weights and moments.

Gloo sends sums through sockets: each value is copied into and out of the kernel twice, about twice the time of what is done here.
"""

from __future__ import annotations

import mmap
import os
import platform
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as distributed
from torch import Tensor

CHUNK = 1 << 18
"""Values that are exchanged at once; there is room for two of them."""
TOKEN, FLAG, SQUARES, HEAD = 16, 16, 24, 4096
"""Bytes: a token that tells regions apart; where the flag lies, the squares, and where the values begin."""
ROOMS = HEAD + 2 * 4 * CHUNK
"""Bytes of a region."""
ALIGNED = 16
"""Weights begin at a multiple of so many values (64 bytes)."""
PATIENCE = 1800.0
"""Seconds that a worker waits for the others."""


class Region(NamedTuple):
    """One worker's part of the shared memory, as seen by any of them."""

    process: int
    flag: Tensor
    """int64 [1]: the last meeting that the worker has come to."""
    squares: Tensor
    """fp64 [1]: the sum of squares of the gradients that the worker has summed."""
    values: Tensor
    """fp32 [2, CHUNK], used in turn."""


class Host:
    """The workers of a process group, all on one machine.

    Each *owns* a part of every tensor, the same part of each, which is all that it sums, and all that it updates.
    """

    def __init__(self, regions: Sequence[Region], rank: int) -> None:
        self.regions, self.rank, self.turn = regions, rank, 0

    @staticmethod
    def create() -> Host | None:
        """For the workers of the process group; None (on each) where not all of them can see each other's memory."""
        memories = _share(ROOMS)
        if memories is None:
            return None
        return Host([_region(process, memory) for process, memory in memories], distributed.get_rank())

    def owned(self, tensor: Tensor) -> list[Tensor]:
        """Views of a contiguous tensor: this worker's part of each chunk of it."""
        return [chunk[self._part(len(chunk), self.rank)] for chunk in _chunks(tensor)]

    def sum(self, tensors: Sequence[Tensor]) -> float:
        """Sums what this worker owns of each tensor, contiguous and fp32, over all workers in the order of ranks, in place.

        Returns:
            The norm of all sums, the same bits on each worker.

        Raises:
            RuntimeError: another worker is gone, or does not come.
        """
        norms = [torch.linalg.vector_norm(self._sum(chunk)) for tensor in tensors for chunk in _chunks(tensor)]
        self.regions[self.rank].squares[0] = float(torch.stack(norms).double().square().sum()) if norms else 0.0
        self.meet()
        return float(np.sqrt(sum(float(region.squares) for region in self.regions)))

    def _sum(self, chunk: Tensor) -> Tensor:
        """What this worker owns of a chunk, summed."""
        rooms = [region.values[self.turn % 2, : len(chunk)] for region in self.regions]
        for rank in range(len(self.regions)):
            if rank != self.rank:
                part = self._part(len(chunk), rank)
                rooms[self.rank][part] = chunk[part]
        # Whoever has come to a meeting has read what was given for the one before, whose other room is written next.
        self.meet()
        mine = self._part(len(chunk), self.rank)
        values = [chunk[mine] if rank == self.rank else room[mine] for rank, room in enumerate(rooms)]
        total = values[0]
        for value in values[1:-1]:
            total = total + value
        return torch.add(total, values[-1], out=chunk[mine])

    def _part(self, length: int, rank: int) -> slice:
        """What the worker of a rank owns of a chunk."""
        world = len(self.regions)
        return slice(length * rank // world, length * (rank + 1) // world)

    def meet(self) -> None:
        """Returns when all workers have come here, and what each has written into shared memory before is there for all.

        Raises:
            RuntimeError: another worker is gone, or does not come.
        """
        self.turn += 1
        self.regions[self.rank].flag[0] = self.turn
        begun, looks = time.monotonic(), 0
        for region in self.regions:
            while int(region.flag) < self.turn:
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

    def zeros(self, shapes: Sequence[torch.Size]) -> list[Tensor]:
        """fp32 tensors that all workers have in common; collective.

        Raises:
            RuntimeError: a worker can't see another's memory any more.
        """
        starts = np.cumsum([0, *(-(-shape.numel() // ALIGNED) * ALIGNED for shape in shapes)])
        memories = _share(HEAD + 4 * int(starts[-1]) if self.rank == 0 else HEAD)
        if memories is None:
            raise RuntimeError("a worker can't see another's memory any more")
        whole = torch.from_numpy(np.frombuffer(memories[0][1], np.float32, int(starts[-1]), HEAD))
        return [whole[start : start + shape.numel()].view(shape) for start, shape in zip(starts, shapes, strict=False)]


def _chunks(tensor: Tensor) -> list[Tensor]:
    flat = tensor.detach().view(-1)
    return [flat[start : start + CHUNK] for start in range(0, len(flat), CHUNK)]


def _share(size: int) -> list[tuple[int, mmap.mmap]] | None:
    """Each worker's process and a new region of the size that it gives, in the order of ranks; collective.

    None (on each) where not all of them can see each other's memory.
    """
    token = secrets.token_bytes(TOKEN)
    own = _own(size, token)
    told: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(told, None if own is None else (os.getpid(), own[0], size, token))
    seen = None if own is None else _seen(told, own[1])
    all_see = torch.tensor(int(seen is not None))
    distributed.all_reduce(all_see, distributed.ReduceOp.MIN)  # whereupon memories need no file any more
    if own is not None:
        os.close(own[0])
    return seen if all_see else None


def _own(size: int, token: bytes) -> tuple[int, mmap.mmap] | None:
    """A new region: its file descriptor, and its memory."""
    # The order in which flags and values are seen is what these processors keep without more ado.
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return None
    try:
        descriptor = os.memfd_create("mlmclm")
        os.ftruncate(descriptor, size)
        memory = mmap.mmap(descriptor, size)
    except OSError:
        return None
    memory[:TOKEN] = token
    return descriptor, memory


def _seen(told: Sequence[Any], own: mmap.mmap) -> list[tuple[int, mmap.mmap]] | None:
    """All workers' processes and regions; None if one of them can't be opened from here."""
    found = []
    for entry in told:
        if entry is None:
            return None
        process, descriptor, size, token = entry
        memory = own
        if process != os.getpid():
            try:
                with Path(f"/proc/{process}/fd/{descriptor}").open("r+b") as file:
                    memory = mmap.mmap(file.fileno(), size)
            except (OSError, ValueError):
                return None
        if memory[:TOKEN] != token:  # a process of this number on another machine, or in another container
            return None
        found.append((process, memory))
    return found


def _region(process: int, memory: mmap.mmap) -> Region:
    flag = torch.from_numpy(np.frombuffer(memory, np.int64, 1, FLAG))
    squares = torch.from_numpy(np.frombuffer(memory, np.float64, 1, SQUARES))
    values = torch.from_numpy(np.frombuffer(memory, np.float32, 2 * CHUNK, HEAD)).view(2, CHUNK)
    return Region(process, flag, squares, values)
