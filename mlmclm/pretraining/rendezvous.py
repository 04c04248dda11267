"""How the workers of a stage find each other, in a way that is closed to others.

Ray Train's is torch's TCPStore, which listens on all interfaces and lets whoever reaches it read and write keys. Here the
workers of one machine meet in a file that only its owner can open and talk over loopback; those of several machines meet
in a TCPStore that listens on the cluster's own network only. The traffic between machines (that store, gloo, NCCL) is neither
encrypted nor authenticated: a cluster's network must be private, as Ray itself demands.
"""

from __future__ import annotations

import os
import shutil
import socket
import uuid
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import ray
import torch
import torch.distributed as distributed
from ray.train.torch import TorchConfig
from ray.train.torch.config import _set_torch_distributed_env_vars, _TorchBackend

from mlmclm.errors import EnvironmentFault
from mlmclm.service.placement import no_gpu
from mlmclm.storage.files import disk_fault

LOOPBACK = "127.0.0.1"
_listening: list[socket.socket] = []
"""Rank 0's socket, from the call that opens it to the one that makes the store."""


@dataclass
class ClosedTorchConfig(TorchConfig):
    """Ray Train's configuration of torch's process group, with a rendezvous of our own."""

    folder: str = ""
    """A folder of the store that only its owner can enter; see `closed`."""

    @property
    def backend_cls(self) -> type[ClosedBackend]:
        """The class with which Ray Train starts the group."""
        return ClosedBackend


def closed(backend: str, folder: Path) -> ClosedTorchConfig:
    """A configuration whose workers meet in `folder`, which is made anew.

    Raises:
        EnvironmentFault: it cannot be made, or another user's is in its place.
    """
    try:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True, mode=0o700)
    except OSError as error:
        raise disk_fault(error, folder) from error
    return ClosedTorchConfig(backend=backend, folder=str(folder.resolve()))


class ClosedBackend(_TorchBackend):
    """Starts the process group of one attempt; ending it stays Ray's."""

    def on_start(self, worker_group: Any, backend_config: ClosedTorchConfig) -> None:
        """Runs in Ray Train's controller, once for each group of workers."""
        worker_group.execute(_set_torch_distributed_env_vars)
        nodes = worker_group.execute(ray.util.get_node_ip_address)
        if len(set(nodes)) == 1:
            where: str | tuple[str, int] = f"{backend_config.folder}/{uuid.uuid4().hex}"
        else:
            where = (nodes[0], worker_group.execute_single(0, _listen, nodes[0]))
        ray.get(
            [
                worker_group.execute_single_async(rank, _join, backend_config, where, nodes, rank)
                for rank in range(len(nodes))
            ]
        )


def _listen(address: str) -> int:
    """Opens the port of the store that other machines need; returns its number."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    _listening[:] = [socket.create_server((address, 0), family=family)]
    return int(_listening[0].getsockname()[1])


def _join(config: ClosedTorchConfig, where: str | tuple[str, int], nodes: list[str], rank: int) -> None:
    """Makes one worker part of the group.

    Args:
        where: a file, or address and port of rank 0.
        nodes: each worker's address.

    Raises:
        EnvironmentFault: the worker has reserved a GPU that torch doesn't see.
    """
    if config.backend == "nccl" and not torch.cuda.is_available():
        raise EnvironmentFault(no_gpu(nodes[rank]))
    timeout, world = timedelta(seconds=config.timeout_s), len(nodes)
    store: Any
    if isinstance(where, str):
        store = distributed.FileStore(where, world)  # type: ignore[attr-defined]
        store.set_timeout(timeout)
        _use_interface(LOOPBACK, "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    else:
        listener = _listening.pop().detach() if rank == 0 else None
        store = distributed.TCPStore(*where, world, rank == 0, timeout, master_listen_fd=listener)  # type: ignore[attr-defined]
        # NCCL chooses among all of a machine's interfaces, for speed.
        _use_interface(nodes[rank], "GLOO_SOCKET_IFNAME")
    if config.backend == "nccl":
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # as Ray Train does
    distributed.init_process_group(config.backend, store=store, rank=rank, world_size=world, timeout=timeout)


def _use_interface(address: str, *variables: str) -> None:
    """Has libraries listen where this machine has `address`, unless the user has chosen; otherwise they take what its name resolves to."""
    for name, addresses in psutil.net_if_addrs().items():
        if address in (found.address for found in addresses):
            for variable in variables:
                os.environ.setdefault(variable, name)
