"""The backend that this process computes with on each kind of device."""

from __future__ import annotations

import importlib
import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch

from mlmclm.backends.reference import Reference
from mlmclm.errors import unknown
from mlmclm.service.worker_environment import BACKEND

_MODULES = {"cpu": "mlmclm.backends.cpu.backend", "cuda": "mlmclm.backends.cuda"}
_given_up: set[str] = set()


def backend_of(device: torch.device | str) -> Reference:
    """The backend for tensors on a device, the same object at each call.

    Raises:
        UserError: the environment variable names none of those that the device has.
    """
    return _choose(torch.device(device).type, os.environ.get(BACKEND, ""))


def backends_of(device: torch.device | str) -> dict[str, Reference]:
    """All backends for a device by name, the best first."""
    kind = torch.device(device).type
    own = [] if kind in _given_up else _own(kind)
    return {backend.name: backend for backend in (*own, Reference())}


@lru_cache
def _choose(kind: str, wanted: str) -> Reference:
    available = backends_of(kind)
    if not wanted:
        return next(iter(available.values()))
    if wanted not in available:
        raise unknown("backend", wanted, list(available), where=f"{BACKEND}, for the device {kind}")
    return available[wanted]


def _own(kind: str) -> list[Reference]:
    """The backends made for a kind of device that work on this machine, the best first."""
    module = _MODULES.get(kind)
    folder = module is not None and importlib.util.find_spec(module.rpartition(".")[0])
    if module is None or not folder or importlib.util.find_spec(module) is None:
        return []
    backends: list[Reference] = importlib.import_module(module).backends()
    return backends


def autocast(device: torch.device, bf16: bool) -> AbstractContextManager[object]:
    """A context in which matrix products on the device are computed in bfloat16, if that is asked for."""
    return torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext()


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context in which matrix products on the device are computed in the type of their factors."""
    return torch.autocast(device.type, enabled=False)


def give_up(device: torch.device | str) -> None:
    """Compute on this kind of device by torch's operations from now on, in this process."""
    _given_up.add(torch.device(device).type)
    _choose.cache_clear()
