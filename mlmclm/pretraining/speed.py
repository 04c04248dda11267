"""Measured peak of a worker's matrix products, the reference for its utilisation."""

from __future__ import annotations

import time

import torch

from mlmclm.backends.choice import backend_of, best_device
from mlmclm.plans.devices import Device

ROUNDS = 5


def matrix_peak(device: torch.device, *, bf16: bool) -> float:
    """Measure the FLOP/s of the fastest of some large matrix products with this worker's threads, in about 0.2 s.

    Args:
        bf16: whether to measure bfloat16 products rather than float32, if the device has them.
    """
    backend = backend_of(device)
    kind = torch.bfloat16 if bf16 and backend.has_bf16() else torch.float32
    best = 0.0
    for rows, inner, columns in backend.matrix_shapes():
        left, right = (torch.ones(shape, dtype=kind, device=device) for shape in ((rows, inner), (inner, columns)))
        out = torch.empty(rows, columns, dtype=kind, device=device)
        for _ in range(ROUNDS):
            # Kernels on an accelerator run asynchronously: without waiting, the clock would measure only their launch.
            backend.synchronize()
            started = time.perf_counter()
            torch.mm(left, right, out=out)
            backend.synchronize()
            # The fastest of several rounds: the first one warms up, and others may be disturbed.
            best = max(best, 2 * rows * inner * columns / (time.perf_counter() - started))
    return best


def this_machine(*, bf16: bool) -> Device:
    """Return this machine's GPU, or its processor with all cores, with its measured peak. Takes about 0.2 s.

    Args:
        bf16: as in `matrix_peak`.
    """
    device = best_device()
    backend = backend_of(device)
    title, bf16 = backend.title(), bf16 and backend.has_bf16()
    if backend.in_host_memory:
        title += f", {torch.get_num_threads()} cores"
    peak = matrix_peak(device, bf16=bf16)
    return Device(title, peak, f"measured now on this machine, in {'bf16' if bf16 else 'fp32'}")
