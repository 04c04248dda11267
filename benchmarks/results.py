"""Shared parts of benchmarks: facts of the machine, and RESULTS.md, of which each benchmark writes one section."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from mlmclm.system import processor, usable_cpus

RESULTS = Path(__file__).with_name("RESULTS.md")


def machine(*, gpu: bool = False) -> str:
    """Processor and cores, or the GPU, and torch's version."""
    return (
        f"{torch.cuda.get_device_name() if gpu else f'{processor()}, {usable_cpus()} cores'}, torch {torch.__version__}"
    )


def matrix_peak(threads: int = 2) -> float:
    """FLOP/s of the fastest of several large bf16 matrix products, of which each is repeated for some tenths of a second."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    best = 0.0
    for rows, inner, columns in ((4096, 4096, 4096), (2048, 2048, 2048), (4096, 512, 2048), (8192, 1536, 512)):
        left, right = torch.randn(rows, inner).bfloat16(), torch.randn(inner, columns).bfloat16()
        out = torch.empty(rows, columns, dtype=torch.bfloat16)
        for _ in range(10):
            started = time.perf_counter()
            torch.mm(left, right, out=out)
            best = max(best, 2 * rows * inner * columns / (time.perf_counter() - started))
    torch.set_num_threads(before)
    return best


def write_section(title: str, lines: Sequence[str]) -> None:
    """Replaces the section `title` of RESULTS.md, or adds it; the others stay as they are."""
    text = RESULTS.read_text(encoding="utf-8") if RESULTS.is_file() else "# Measured\n"
    head, *sections = re.split(r"^## ", text, flags=re.MULTILINE)
    kept = [section.strip() for section in sections if section.partition("\n")[0] != title]
    parts = [head.strip(), *(f"## {section}" for section in (*kept, "\n".join((title, "", *lines))))]
    RESULTS.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    print("\n".join(lines))
