"""Sums of gradients and common tensors through shared memory, between real processes."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from typing import Any

import pytest

from mlmclm.backends.cpu.host import CHUNK

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="other CPUs do not keep the order of writes, and workers send messages there"
)

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

SUMS = """
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

COMMON = """
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

NO_MEMORY = """
def refuse(name):
    raise OSError("no memory")
create = os.memfd_create
if rank == 1:
    os.memfd_create = refuse
try:
    assert Host.create() is None  # on every worker
finally:
    os.memfd_create = create
"""

GONE = """
host = Host.create()
if rank == 1:
    os._exit(0)
try:
    host.sum(tensors(rank, 0))
except RuntimeError as error:
    assert "ended while gradients were summed" in str(error)
else:
    raise AssertionError("a worker was gone, and the sum ended well")
"""

TAIL = """
import json, traceback
for name, part in json.loads(sys.argv[4]):
    distributed.barrier()
    try:
        exec(part, globals())
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # not past the others, which wait for this worker
    print(name, flush=True)
os._exit(0)  # the group has lost a worker
"""

PARTS = {"sums": SUMS, "common": COMMON, "no memory": NO_MEMORY, "gone": GONE}

Ended = dict[str, list[bool]]
"""Which workers came to the end of each part."""
WORLD = 3


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """All parts, one after the other in one group of workers, since a worker takes seconds to start."""
    folder = tmp_path_factory.mktemp("host")
    script = folder / "script.py"
    script.write_text(HEAD + TAIL)
    given = json.dumps([(part, PARTS[part]) for part in PARTS])
    outputs = [folder / f"output-{rank}" for rank in range(WORLD)]
    workers: list[subprocess.Popen[Any]] = []
    for rank, output in enumerate(outputs):
        with output.open("w") as file:
            line = [sys.executable, str(script), str(rank), str(WORLD), str(folder), given]
            workers.append(subprocess.Popen(line, stdout=file))
    # Like Ray, which waits for its workers: one that has ended must not stay a zombie, which still has an entry in /proc.
    end = time.monotonic() + 1500
    while [worker for worker in workers if worker.poll() is None] and time.monotonic() < end:
        time.sleep(0.05)
    for worker in workers:
        worker.kill()
        worker.wait()
    ended = [output.read_text().splitlines() for output in outputs]
    return {part: [part in lines for lines in ended] for part in PARTS}


def test_each_worker_has_exact_sums_of_what_it_owns_of_tensors_of_any_size_and_the_norm_of_all(
    ended: Ended,
) -> None:
    assert CHUNK % 3, "so that parts are of different sizes"
    assert ended["sums"] == [True] * WORLD


def test_common_tensors_are_the_same_memory_of_which_each_worker_owns_a_part(ended: Ended) -> None:
    assert ended["common"] == [True] * WORLD


def test_without_shared_memory_on_one_worker_none_uses_it(ended: Ended) -> None:
    assert ended["no memory"] == [True] * WORLD


def test_a_worker_that_is_gone_is_an_error_soon(ended: Ended) -> None:
    assert ended["gone"] == [True, False, True], "the second one has left"
