"""How fast a worker can be: the peak of its matrix products, measured."""

from __future__ import annotations

import time

import torch

from mlmclm.backends.choice import backend_of
from mlmclm.plans.devices import Device

ROUNDS = 5


def matrix_peak(device: torch.device, *, bf16: bool) -> float:
    """FLOP/s of the fastest of some large matrix products on this worker, with the threads it has; takes about 0.2 s.

    Args:
        bf16: measure bfloat16 products, else float32.
    """
    backend = backend_of(device)
    kind = torch.bfloat16 if bf16 else torch.float32
    best = 0.0
    for rows, inner, columns in backend.matrix_shapes():
        left, right = (torch.ones(shape, dtype=kind, device=device) for shape in ((rows, inner), (inner, columns)))
        out = torch.empty(rows, columns, dtype=kind, device=device)
        for _ in range(ROUNDS):
            backend.synchronize()
            started = time.perf_counter()
            torch.mm(left, right, out=out)
            backend.synchronize()
            best = max(best, 2 * rows * inner * columns / (time.perf_counter() - started))
    return best


def this_machine(*, bf16: bool) -> Device:
    """This machine's GPU, or its processor with all cores, and the peak that it reaches now; takes about 0.2 s.

    Args:
        bf16: as `matrix_peak`'s.
    """
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device, title = torch.device(kind), backend_of(kind).title()
    if kind == "cpu":
        title += f", {torch.get_num_threads()} cores"
    peak = matrix_peak(device, bf16=bf16)
    return Device(title, peak, f"measured now on this machine, in {'bf16' if bf16 else 'fp32'}")
