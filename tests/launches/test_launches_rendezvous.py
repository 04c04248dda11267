"""Workers of several machines meet on the cluster's own address, and on no other."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from mlmclm.errors import EnvironmentFault
from mlmclm.launches.rendezvous import closed_torch_config

WORKER = """
import sys
import psutil, torch, torch.distributed as distributed
from mlmclm.launches.rendezvous import ClosedTorchConfig, _join, _listen

rank, address = int(sys.argv[1]), sys.argv[2]
port = _listen(address) if rank == 0 else int(sys.argv[3])
print(port, flush=True)
_join(ClosedTorchConfig(backend="gloo", timeout_s=300), (address, port), [address] * 2, rank)
total = torch.ones(1)
distributed.all_reduce(total)
listening = {c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN}
distributed.barrier()
print(int(total), *sorted(listening))
"""


def own_address() -> str:
    """An address of this machine that others can reach; loopback where it has none."""
    found = [
        item.address
        for addresses in psutil.net_if_addrs().values()
        for item in addresses
        if item.family == socket.AF_INET and not item.address.startswith("127.")
    ]
    return found[0] if found else "127.0.0.1"


@pytest.mark.slow
def test_a_group_of_several_machines_listens_on_the_clusters_address_only(tmp_path: Path) -> None:
    address = own_address()

    def start(rank: int, *more: str) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", WORKER, str(rank), address, *more]
        return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=tmp_path)

    first = start(0)
    assert first.stdout is not None
    second = start(1, first.stdout.readline().strip())
    try:
        said = [worker.communicate(timeout=1500)[0].split() for worker in (second, first)]
    finally:
        for worker in (first, second):
            worker.kill()
            worker.wait()
    assert said[0][1:] == ["2", address], "the sum, and gloo's socket"
    assert said[1] == ["2", address], "the same, and the store's socket"


def test_a_folder_to_meet_in_that_cannot_be_made_is_a_fault_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(EnvironmentFault, match="runs/rendezvous: cannot write"):
        closed_torch_config("gloo", tmp_path / "runs" / "rendezvous")


def test_the_folder_to_meet_in_is_made_anew(tmp_path: Path) -> None:
    folder = tmp_path / "rendezvous"
    folder.mkdir(mode=0o755)
    (folder / "left over").touch()
    closed_torch_config("gloo", folder)
    assert folder.stat().st_mode & 0o777 == 0o700 and not list(folder.iterdir())
