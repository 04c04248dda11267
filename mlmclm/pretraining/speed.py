"""What a worker can do and what it uses: the peak of its matrix products, measured, and its memory."""

from __future__ import annotations

import resource
import time

import torch

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


def peak_memory(device: torch.device) -> int:
    """Most bytes this worker has held so far: of the accelerator's memory, or of the machine's where there is none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
