"""Ray Train's trainer of a stage, and the rendezvous of its workers, closed to other users of the machine and the network.

Ray Train uses torch's TCPStore, which listens on all interfaces and lets anyone who reaches it read and write keys.
Here the workers of one machine meet in a file that only its owner can open. Workers on several machines meet in a
TCPStore that listens only on the cluster's own network. docs/store.md says who can still reach what.
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
import torch.distributed as distributed
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.torch.config import _set_torch_distributed_env_vars, _TorchBackend
from ray.train.v2._internal.callbacks import DatasetsCallback
from ray.train.v2._internal.execution.callback import RayTrainCallback

from mlmclm.backends.choice import visible
from mlmclm.cluster.placement import no_gpu
from mlmclm.errors import EnvironmentFault
from mlmclm.storage.files import disk_faults

LOOPBACK = "127.0.0.1"
_listening: list[socket.socket] = []
"""Rank 0's socket, kept from `_listen`, which opens it, until `_join`, which makes the store."""


class Trainer(TorchTrainer):
    """A trainer whose workers read their data themselves."""

    def _create_default_callbacks(self) -> list[RayTrainCallback]:
        # The callback for Ray Data starts an actor in each run, even if there are no data sets to hand out.
        callbacks = super()._create_default_callbacks()
        return [callback for callback in callbacks if not isinstance(callback, DatasetsCallback)]


@dataclass
class ClosedTorchConfig(TorchConfig):
    """Ray Train's configuration of torch's process group, with the rendezvous of this module."""

    folder: str = ""
    """A folder in the store that only its owner can enter (see `closed_torch_config`)."""

    @property
    def backend_cls(self) -> type[ClosedBackend]:
        """The class that Ray Train uses to start the process group."""
        return ClosedBackend


def closed_torch_config(backend: str, folder: Path) -> ClosedTorchConfig:
    """Return a configuration whose workers meet in `folder`, which is created empty.

    Raises:
        EnvironmentFault: if the folder cannot be created, or another user's folder is in its place.
    """
    with disk_faults(folder):
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True, mode=0o700)
    return ClosedTorchConfig(backend=backend, folder=str(folder.resolve()))


class ClosedBackend(_TorchBackend):
    """Starts the process group of one attempt. Ray Train's own code shuts it down."""

    def on_start(self, worker_group: Any, backend_config: ClosedTorchConfig) -> None:
        """Start the process group; runs in Ray Train's controller, once for each worker group."""
        # Ray's own `on_start` also does this; libraries read RANK, WORLD_SIZE and LOCAL_RANK from the environment.
        worker_group.execute(_set_torch_distributed_env_vars)
        nodes = worker_group.execute(ray.util.get_node_ip_address)
        if len(set(nodes)) == 1:
            # A new name per attempt: a FileStore must not see the keys of a group that died.
            where: str | tuple[str, int] = f"{backend_config.folder}/{uuid.uuid4().hex}"
        else:
            where = (nodes[0], worker_group.execute_single(0, _listen, nodes[0]))
        # `init_process_group` blocks until every rank has joined, so start all of them before waiting for any.
        ray.get(
            [
                worker_group.execute_single_async(rank, _join, backend_config, where, nodes, rank)
                for rank in range(len(nodes))
            ]
        )


def _listen(address: str) -> int:
    """Open the port through which other machines reach the store; return its number."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    # Port 0 lets the kernel choose. The open socket goes to the store, so nobody can take the port in between.
    _listening[:] = [socket.create_server((address, 0), family=family)]
    return int(_listening[0].getsockname()[1])


def _join(config: ClosedTorchConfig, where: str | tuple[str, int], nodes: list[str], rank: int) -> None:
    """Join this worker to the process group.

    Args:
        where: a file, or the address and port of rank 0.
        nodes: each worker's address, by rank.

    Raises:
        EnvironmentFault: if the worker has reserved a GPU that torch does not see.
    """
    if config.backend == "nccl" and not visible("cuda"):
        raise EnvironmentFault(no_gpu(nodes[rank]))
    # The driver has created the folder on its machine, but with a store at an address each machine needs its own.
    Path(config.folder).mkdir(mode=0o700, parents=True, exist_ok=True)
    timeout, world = timedelta(seconds=config.timeout_s), len(nodes)
    store: Any
    if isinstance(where, str):
        store = distributed.FileStore(where, world)  # type: ignore[attr-defined]
        store.set_timeout(timeout)
        _use_interface(LOOPBACK, "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    else:
        listener = _listening.pop().detach() if rank == 0 else None
        store = distributed.TCPStore(*where, world, rank == 0, timeout, master_listen_fd=listener)  # type: ignore[attr-defined]
        # NCCL stays free to choose among all of a machine's interfaces, for speed.
        _use_interface(nodes[rank], "GLOO_SOCKET_IFNAME")
    if config.backend == "nccl":
        # As Ray Train does, so that a collective that times out fails.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    distributed.init_process_group(config.backend, store=store, rank=rank, world_size=world, timeout=timeout)


def _use_interface(address: str, *variables: str) -> None:
    """Make libraries use the interface that has `address`, unless the user has set these variables.

    By default they use the interface that the machine's name resolves to.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if address in (entry.address for entry in addresses):
            for variable in variables:
                os.environ.setdefault(variable, name)
