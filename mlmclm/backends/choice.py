"""Choice of the backend that this process uses for each kind of device."""

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
"""Kinds of device that compute with torch's operations from now on; see `give_up`."""


def backend_of(device: torch.device | str) -> Reference:
    """Return the backend for tensors on a device, the same object at each call.

    Raises:
        UserError: `MLMCLM_BACKEND` names a backend that the device doesn't have, and that is none of another kind of device.
    """
    # The variable's value is an argument, so that it is part of the cache's key.
    return _choose(torch.device(device).type, os.environ.get(BACKEND, ""))


def backends_of(device: torch.device | str) -> dict[str, Reference]:
    """All backends for a device by name, the best first."""
    kind = torch.device(device).type
    own = [] if kind in _given_up else _own(kind)
    return {backend.name: backend for backend in (*own, Reference())}


@lru_cache
def _choose(kind: str, wanted: str) -> Reference:
    available = backends_of(kind)
    # A process that computes on a GPU has work for its CPU too, which a name of the GPU's backend says nothing about.
    if not wanted or wanted.partition("+")[0] in _MODULES.keys() - {kind}:
        # Backends are listed best first, and `reference` last.
        return next(iter(available.values()))
    if wanted not in available:
        raise unknown("backend", wanted, list(available), where=f"{BACKEND}, for the device {kind}")
    return available[wanted]


def _own(kind: str) -> list[Reference]:
    """Return the backends for a kind of device that work on this machine, best first."""
    # `find_spec` instead of a try around the import: a backend that isn't there is skipped, an error inside one is
    # raised. The package comes first, because `find_spec` of its submodule fails where it is missing.
    module = _MODULES.get(kind)
    folder = module is not None and importlib.util.find_spec(module.rpartition(".")[0])
    if module is None or not folder or importlib.util.find_spec(module) is None:
        return []
    backends: list[Reference] = importlib.import_module(module).backends()
    return backends


def autocast(device: torch.device, bf16: bool) -> AbstractContextManager[object]:
    """Return a context in which matrix products on the device are computed in bfloat16, if `bf16`."""
    return torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext()


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which matrix products on the device are computed in the dtype of their factors."""
    return torch.autocast(device.type, enabled=False)


def give_up(device: torch.device | str) -> None:
    """Fall back on torch's operations for this kind of device, for the rest of this process."""
    _given_up.add(torch.device(device).type)
    _choose.cache_clear()
