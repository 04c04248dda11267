"""Sums of gradients through shared memory, between real processes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlmclm.pretraining.host_sum import CHUNK

HEAD = """
import os, sys, time
import torch, torch.distributed as distributed
from mlmclm.pretraining import host_sum
from mlmclm.pretraining.host_sum import CHUNK, HostSum
rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
distributed.init_process_group("gloo", rank=rank, world_size=world, init_method=f"file://{folder}/rendezvous")
def tensors(rank, turn):
    generator = torch.Generator().manual_seed(100 * turn + rank)
    return [torch.randn(size, generator=generator) for size in ((1,), (3, 5), (CHUNK,), (7, CHUNK // 3), (2 * CHUNK + 1,))]
"""

SUMS = """
add = HostSum.create()
assert add is not None
for turn in range(8):
    time.sleep(0.02 * ((turn + rank) % 3))  # now one worker is late, now another
    own = tensors(rank, turn)
    add(own)
    for number, found in enumerate(own):
        expected = torch.zeros_like(found)
        for other in range(world):
            expected += tensors(other, turn)[number]
        assert torch.equal(found, expected), (turn, number)  # in the order of ranks, bit for bit
"""

NO_MEMORY = """
def refuse(name):
    raise OSError("no memory")
if rank == 1:
    os.memfd_create = refuse
assert HostSum.create() is None  # on every worker
distributed.barrier()
"""

GONE = """
add = HostSum.create()
if rank == 1:
    os._exit(0)
begun = time.monotonic()
try:
    add(tensors(rank, 0))
except RuntimeError as error:
    assert "ended while gradients were summed" in str(error)
    sys.exit(0 if time.monotonic() - begun < 60 else 3)
sys.exit(4)
"""


def run(folder: Path, code: str, world: int) -> list[int]:
    script = folder / "script.py"
    script.write_text(HEAD + code)
    workers = [
        subprocess.Popen([sys.executable, str(script), str(rank), str(world), str(folder)]) for rank in range(world)
    ]
    # Like Ray, which waits for its workers: one that has ended must not stay a zombie, which still has an entry in /proc.
    codes: dict[int, int] = {}
    end = time.monotonic() + 120
    while len(codes) < world and time.monotonic() < end:
        codes |= {rank: code for rank, worker in enumerate(workers) if (code := worker.poll()) is not None}
        time.sleep(0.05)
    for worker in workers:
        worker.kill()
        worker.wait()
    return [codes.get(rank, -1) for rank in range(world)]


@pytest.mark.parametrize("world", [2, 3])
def test_every_worker_has_the_same_exact_sums_of_tensors_of_any_size(tmp_path: Path, world: int) -> None:
    assert CHUNK % 3, "so that parts are of different sizes"
    assert run(tmp_path, SUMS, world) == [0] * world


def test_without_shared_memory_on_one_worker_none_uses_it(tmp_path: Path) -> None:
    assert run(tmp_path, NO_MEMORY, 2) == [0, 0]


def test_a_worker_that_is_gone_is_an_error_soon(tmp_path: Path) -> None:
    assert run(tmp_path, GONE, 2) == [0, 0]
