"""Memory shared by the workers of one machine: they sum gradients in it, and keep one copy of weights and moments.

Gloo sums through sockets, which copies each value into and out of the kernel twice and takes about twice as long.
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
"""Values exchanged at once; a region has room for two chunks."""
TOKEN, FLAG, SQUARES, HEAD = 16, 16, 24, 4096
"""Bytes: length of the token that identifies a region, then the offsets of the flag, the squares and the values."""
ROOMS = HEAD + 2 * 4 * CHUNK
"""Size of a region in bytes."""
ALIGNED = 16
"""Weights begin at multiples of this many values (64 bytes)."""
PATIENCE = 1800.0
"""Seconds that a worker waits for the others."""


class Region(NamedTuple):
    """One worker's part of the shared memory, as mapped by any of them."""

    process: int
    flag: Tensor
    """int64 [1]: number of the last barrier that the worker has reached."""
    squares: Tensor
    """fp64 [1]: sum of squares of the gradients that the worker has summed."""
    values: Tensor
    """fp32 [2, CHUNK]: two buffers, used in turn."""


class Host:
    """The `SharedMemory` of the workers of a process group, all on one machine; `owned` is a part of each chunk."""

    def __init__(self, regions: Sequence[Region], rank: int) -> None:
        self.regions, self.rank, self.turn = regions, rank, 0

    @staticmethod
    def create() -> Host | None:
        """Connect the workers of the process group; collective.

        The result is None on every worker if not all can map each other's memory.
        """
        memories = _share(ROOMS)
        if memories is None:
            return None
        return Host([_region(process, memory) for process, memory in memories], distributed.get_rank())

    def owned(self, tensor: Tensor) -> list[Tensor]:
        """See `SharedMemory.owned`."""
        return [chunk[self._part(len(chunk), self.rank)] for chunk in _chunks(tensor)]

    def sum(self, tensors: Sequence[Tensor]) -> float:
        """See `SharedMemory.sum`; raises what `meet` does."""
        norms = [torch.linalg.vector_norm(self._sum(chunk)) for tensor in tensors for chunk in _chunks(tensor)]
        self.regions[self.rank].squares[0] = float(torch.stack(norms).double().square().sum()) if norms else 0.0
        # Every worker's squares must be written before anyone adds them up.
        self.meet()
        return float(np.sqrt(sum(float(region.squares) for region in self.regions)))

    def _sum(self, chunk: Tensor) -> Tensor:
        """Sum this worker's part of a chunk over all workers, and return it."""
        rooms = [region.values[self.turn % 2, : len(chunk)] for region in self.regions]
        # Hand the other workers the parts that they own.
        for rank in range(len(self.regions)):
            if rank != self.rank:
                part = self._part(len(chunk), rank)
                rooms[self.rank][part] = chunk[part]
        # With two buffers, one barrier per chunk is enough: a worker that reaches this barrier has read the previous
        # chunk, whose buffer is written next.
        self.meet()
        mine = self._part(len(chunk), self.rank)
        values = [chunk[mine] if rank == self.rank else room[mine] for rank, room in enumerate(rooms)]
        # In the order of ranks: another order would round differently.
        total = values[0]
        for value in values[1:-1]:
            total = total + value
        return torch.add(total, values[-1], out=chunk[mine])

    def _part(self, length: int, rank: int) -> slice:
        """Return the part of a chunk that the worker of a rank owns."""
        world = len(self.regions)
        return slice(length * rank // world, length * (rank + 1) // world)

    def meet(self) -> None:
        """See `SharedMemory.meet`; a `RuntimeError` says that another worker has ended, or doesn't come in time."""
        self.turn += 1
        self.regions[self.rank].flag[0] = self.turn
        begun, looks = time.monotonic(), 0
        for region in self.regions:
            while int(region.flag) < self.turn:
                looks += 1
                # Spin at first, since the others are usually close behind; then leave them the processor.
                if looks > 2000:
                    time.sleep(1e-4)
                # A worker that was killed never comes. Looking costs system calls, so this is done rarely.
                if looks % 10_000 == 0:
                    if not Path(f"/proc/{region.process}").exists():
                        raise RuntimeError(f"a worker (process {region.process}) ended while gradients were summed")
                    if time.monotonic() - begun > PATIENCE:
                        raise RuntimeError(
                            f"no gradients from a worker (process {region.process}) for {PATIENCE:.0f} s"
                        )

    def zeros(self, shapes: Sequence[torch.Size]) -> list[Tensor]:
        """See `SharedMemory.zeros`; a `RuntimeError` says that the workers can't share them."""
        starts = np.cumsum([0, *(-(-shape.numel() // ALIGNED) * ALIGNED for shape in shapes)])
        # All tensors lie in rank 0's region; the others only take part in the exchange.
        memories = _share(HEAD + 4 * int(starts[-1]) if self.rank == 0 else HEAD)
        if memories is None:
            raise RuntimeError("a worker can't see another's memory any more")
        whole = torch.from_numpy(np.frombuffer(memories[0][1], np.float32, int(starts[-1]), HEAD))
        return [whole[start : start + shape.numel()].view(shape) for start, shape in zip(starts, shapes, strict=False)]


def _chunks(tensor: Tensor) -> list[Tensor]:
    flat = tensor.detach().view(-1)
    return [flat[start : start + CHUNK] for start in range(0, len(flat), CHUNK)]


def _share(size: int) -> list[tuple[int, mmap.mmap]] | None:
    """Map a new region of every worker: return (process, memory) in the order of ranks. Collective.

    `size` is that of this worker's region. The result is None on every worker if not all can map each other's memory.
    """
    token = secrets.token_bytes(TOKEN)
    own = _own(size, token)
    told: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(told, None if own is None else (os.getpid(), own[0], size, token))
    seen = None if own is None else _seen(told, own[1])
    all_see = torch.tensor(int(seen is not None))
    distributed.all_reduce(all_see, distributed.ReduceOp.MIN)  # all have mapped it: no file is needed now
    if own is not None:
        os.close(own[0])
    return seen if all_see else None


def _own(size: int, token: bytes) -> tuple[int, mmap.mmap] | None:
    """Create a region; return its file descriptor and its memory, or None if this machine has no such memory."""
    # The barrier needs values to become visible before the flag that is written after them. x86-64 guarantees that
    # order without memory fences.
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return None
    try:
        # A memfd has no name in the file system, so nothing is left behind when a worker is killed.
        descriptor = os.memfd_create("mlmclm")
        os.ftruncate(descriptor, size)
        memory = mmap.mmap(descriptor, size)
    except OSError:
        return None
    memory[:TOKEN] = token
    return descriptor, memory


def _seen(told: Sequence[Any], own: mmap.mmap) -> list[tuple[int, mmap.mmap]] | None:
    """Map all workers' regions: return (process, memory) of each, or None if one can't be mapped from here."""
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
        if memory[:TOKEN] != token:  # a process with this id on another machine, or in another container
            return None
        found.append((process, memory))
    return found


def _region(process: int, memory: mmap.mmap) -> Region:
    flag = torch.from_numpy(np.frombuffer(memory, np.int64, 1, FLAG))
    squares = torch.from_numpy(np.frombuffer(memory, np.float64, 1, SQUARES))
    values = torch.from_numpy(np.frombuffer(memory, np.float32, 2 * CHUNK, HEAD)).view(2, CHUNK)
    return Region(process, flag, squares, values)
