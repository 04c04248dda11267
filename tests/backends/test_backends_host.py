"""Sums of gradients and common tensors through shared memory, between real processes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlmclm.backends.cpu.host import CHUNK

HEAD = """
import os, sys, time
import torch, torch.distributed as distributed
from mlmclm.backends.cpu.host import CHUNK, Host
rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
distributed.init_process_group("gloo", rank=rank, world_size=world, init_method=f"file://{folder}/rendezvous")
def tensors(rank, turn):
    generator = torch.Generator().manual_seed(100 * turn + rank)
    return [torch.randn(size, generator=generator) for size in ((1,), (3, 5), (CHUNK,), (7, CHUNK // 3), (2 * CHUNK + 1,))]
"""

END = """
distributed.barrier()
distributed.destroy_process_group()
"""

SUMS = (
    """
host = Host.create()
assert host is not None
for turn in range(8):
    time.sleep(0.02 * ((turn + rank) % 3))  # now one worker is late, now another
    own = tensors(rank, turn)
    norm = host.sum(own)
    expected = [torch.zeros_like(found) for found in own]
    for other in range(world):
        for sums, values in zip(expected, tensors(other, turn)):
            sums += values
    for found, sums in zip(own, expected):
        for part, right in zip(host.owned(found), host.owned(sums), strict=True):
            assert torch.equal(part, right), turn  # in the order of ranks, bit for bit
    right = float(torch.cat([sums.flatten() for sums in expected]).double().norm())
    assert abs(norm - right) < 1e-6 * right, (norm, right)
    norms = [None] * world
    distributed.all_gather_object(norms, norm)
    assert len(set(norms)) == 1
"""
    + END
)

COMMON = (
    """
host = Host.create()
shapes = [torch.Size(shape) for shape in ((1,), (), (3, 5), (CHUNK + 1,), (0,), (7, CHUNK // 3))]
common = host.zeros(shapes)
assert [tensor.shape for tensor in common] == shapes and all(not tensor.any() for tensor in common)
host.meet()
for tensor in common:
    for part in host.owned(tensor):
        part += rank + 1
host.meet()
for tensor in common:
    flat = tensor.view(-1)
    assert flat.data_ptr() % 64 == 0
    assert int((flat == 0).sum()) == 0  # each value is somebody's
    counts = torch.tensor([int((flat == other + 1).sum()) for other in range(world)])
    assert int(counts.sum()) == len(flat)  # and nobody else's
    assert int(counts.max() - counts.min()) <= len(flat) // CHUNK + 1
"""
    + END
)

NO_MEMORY = (
    """
def refuse(name):
    raise OSError("no memory")
if rank == 1:
    os.memfd_create = refuse
assert Host.create() is None  # on every worker
"""
    + END
)

GONE = """
host = Host.create()
if rank == 1:
    os._exit(0)
begun = time.monotonic()
try:
    host.sum(tensors(rank, 0))
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
def test_each_worker_has_exact_sums_of_what_it_owns_of_tensors_of_any_size_and_the_norm_of_all(
    tmp_path: Path, world: int
) -> None:
    assert CHUNK % 3, "so that parts are of different sizes"
    assert run(tmp_path, SUMS, world) == [0] * world


@pytest.mark.parametrize("world", [2, 3])
def test_common_tensors_are_the_same_memory_of_which_each_worker_owns_a_part(tmp_path: Path, world: int) -> None:
    assert run(tmp_path, COMMON, world) == [0] * world


def test_without_shared_memory_on_one_worker_none_uses_it(tmp_path: Path) -> None:
    assert run(tmp_path, NO_MEMORY, 2) == [0, 0]


def test_a_worker_that_is_gone_is_an_error_soon(tmp_path: Path) -> None:
    assert run(tmp_path, GONE, 2) == [0, 0]
