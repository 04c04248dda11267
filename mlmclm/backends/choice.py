"""Choice of the backend that this process uses for each kind of device."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

import torch

from mlmclm.backends.device_kinds import BACKEND
from mlmclm.backends.reference import Reference
from mlmclm.backends.wide_products import WideProducts
from mlmclm.errors import UserError, unknown
from mlmclm.registry import KINDS, Registry

BACKENDS: Registry[type[Reference]] = KINDS["backend"]
"""The backends by name, except `Reference`, which any device has."""
# A plain dictionary, because torch.compile traces into `backend_of`, and would bypass functools.cache.
_chosen: dict[tuple[str, str], Reference] = {}
BACKENDS.on_change(lambda: _chosen.clear())  # a notebook registers a changed backend again
_given_up: set[str] = set()
"""Kinds of device that compute with torch's operations from now on; see `give_up`."""


def visible(device: torch.device | str) -> bool:
    """Return whether torch sees a device of this kind here."""
    return bool(torch.get_device_module(device).is_available())


def best_device() -> torch.device:
    """Return this machine's GPU if torch sees one, else its CPU."""
    return torch.device("cuda" if visible("cuda") else "cpu")


def gpu_names() -> list[str]:
    """Return the names of the GPUs that torch sees here."""
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def device_of_workers() -> torch.device:
    """Return the kind of device that this process group's workers compute on."""
    return torch.device(_device_of(torch.distributed.get_backend()))


def backend_of(device: torch.device | str) -> Reference:
    """Return the backend for tensors on a device, the same object at each call.

    Raises:
        UserError: `MLMCLM_BACKEND` names a backend that neither this device nor any other kind has, or one whose process
            group is that of another kind of device.
    """
    key = torch.device(device).type, os.environ.get(BACKEND, "")
    if key not in _chosen:
        _chosen[key] = _choose(*key)
    return _chosen[key]


def backends_of(device: torch.device | str) -> dict[str, Reference]:
    """Return the backends for a device that work on this machine, by name and best first.

    A backend is better than one that it extends. Those that are not built in come last: they are used only if the user
    names them. `reference` is the device's own one (`_reference_of`), which also has its registered name.
    """
    kind = torch.device(device).type
    built_in, reference = {Reference, *BACKENDS.built_in()}, _reference_of(kind)
    usable = [b for b in BACKENDS.values() if b.device == kind and b is not reference and b.available()]
    usable.sort(key=lambda backend: (backend not in built_in, -len(backend.__mro__)))
    own_backends = {backend.name: backend() for backend in usable if backend in built_in}
    others = {backend.name: backend() for backend in usable if backend not in built_in}
    plain = reference()
    return {**own_backends, Reference.name: plain, **others, reference.name: plain}


def _reference_of(kind: str) -> type[Reference]:
    """Return the backend with torch's operations for a kind of device, and with its clock and random generator.

    The device's other backends extend it: it has the fewest bases of the built-in ones, or of all if none is built in.
    """
    built_in = {Reference, *BACKENDS.built_in()}
    kinds: list[type[Reference]] = [Reference, *BACKENDS.values()]
    usable = [backend for backend in kinds if backend.device == kind and backend.available()]
    return min(usable, key=lambda backend: (backend not in built_in, len(backend.__mro__)), default=Reference)


def _choose(kind: str, wanted: str) -> Reference:
    available, named = backends_of(kind), BACKENDS.find(wanted)
    if kind in _given_up:
        return available["reference"]
    if wanted in available:
        chosen = available[wanted]
        # Workers infer their device from their process group alone.
        if chosen.device == kind != _device_of(chosen.process_group):
            raise UserError(
                f"backend {wanted!r} is for the device {kind}, but its process_group {chosen.process_group!r} is that of the device "
                f"{_device_of(chosen.process_group)}. Give it the one of its device, or make it a subclass of a backend for {kind}."
            )
        return chosen
    # A process that computes on a GPU also computes on its CPU. Naming a GPU's backend must not change the CPU's.
    if wanted and (named is None or named.device == kind):
        raise unknown("backend", wanted, list(available), where=f"{BACKEND}, for the device {kind}")
    return next(iter(available.values()))


def _device_of(process_group: str) -> str:
    """Return the kind of device whose workers form such a process group."""
    kinds: list[type[Reference]] = [Reference, *BACKENDS.values()]
    return next(backend.device for backend in kinds if backend.process_group == process_group)


def autocast(device: torch.device, bf16: bool) -> AbstractContextManager[object]:
    """Return a context in which matrix products on the device are computed in bfloat16, if `bf16` is set and it supports that."""
    return torch.autocast(device.type, torch.bfloat16) if bf16 and backend_of(device).has_bf16() else nullcontext()


def rounded_products(device: torch.device) -> AbstractContextManager[object]:
    """Return a context for models with bfloat16 weights, in which a device without bfloat16 multiplies in float32."""
    return nullcontext() if backend_of(device).has_bf16() else WideProducts()


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which matrix products on the device are computed in the dtype of their factors."""
    return torch.autocast(device.type, enabled=False)


def give_up(device: torch.device | str) -> None:
    """Fall back on torch's operations for this kind of device, for the rest of this process."""
    _given_up.add(torch.device(device).type)
    _chosen.clear()


def agree_on_backend(device: torch.device) -> None:
    """Use torch's operations on all workers of the process group if one of them does; collective.

    A backend decides which collectives a worker takes part in, so workers with different ones would wait for each other.
    """
    reference = torch.tensor(int(type(backend_of(device)) is _reference_of(device.type)), device=device)
    torch.distributed.all_reduce(reference, torch.distributed.ReduceOp.MAX)
    if reference:
        give_up(device)
