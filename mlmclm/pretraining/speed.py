"""What a worker can do and what it uses: the peak of its matrix products, measured, and its memory."""

from __future__ import annotations

import resource
import time

import torch

from mlmclm.plans.devices import Device
from mlmclm.tracking.system import processor

SHAPES = ((1024, 1024, 1024), (2048, 2048, 2048), (8192, 1024, 4096))
"""Rows, inner and outer width of the products tried; the last only on an accelerator."""
ROUNDS = 5


def matrix_peak(device: torch.device, *, bf16: bool) -> float:
    """FLOP/s of the fastest of some large matrix products on this worker, with the threads it has; takes about 0.2 s.

    Args:
        bf16: measure bfloat16 products, else float32.
    """
    kind = torch.bfloat16 if bf16 else torch.float32
    best = 0.0
    for rows, inner, columns in SHAPES if device.type != "cpu" else SHAPES[:-1]:
        left, right = (torch.ones(shape, dtype=kind, device=device) for shape in ((rows, inner), (inner, columns)))
        out = torch.empty(rows, columns, dtype=kind, device=device)
        for _ in range(ROUNDS):
            _wait(device)
            started = time.perf_counter()
            torch.mm(left, right, out=out)
            _wait(device)
            best = max(best, 2 * rows * inner * columns / (time.perf_counter() - started))
    return best


def this_machine(*, bf16: bool) -> Device:
    """This machine's GPU, or its processor with all cores, and the peak that it reaches now; takes about 0.2 s.

    Args:
        bf16: as `matrix_peak`'s.
    """
    gpu = torch.cuda.is_available()
    title = torch.cuda.get_device_name() if gpu else f"{processor()}, {torch.get_num_threads()} cores"
    peak = matrix_peak(torch.device("cuda" if gpu else "cpu"), bf16=bf16)
    return Device(title, peak, f"measured now on this machine, in {'bf16' if bf16 else 'fp32'}")


def peak_memory(device: torch.device) -> int:
    """Most bytes this worker has held so far: of the accelerator's memory, or of the machine's where there is none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
