"""Memory of a worker under ZeRO 0 to 3, beside the formula's:  python -m benchmarks.memory

Two workers train one model a few steps under each stage. The formula (ZeRO, arXiv 1910.02054, section 3, with everything in fp32)
gives the bytes of weights, gradients and Adam's two moments. What a worker holds besides (libraries, activations, buffers) is
measured as the peak of a model of almost no parameters on the same batch, and taken off. Peaks are resident memory: of the whole
run, and of its last steps alone, for which the kernel's mark is set back (Linux: `clear_refs`).
"""

from __future__ import annotations

import os
import statistics
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.pretraining import VOCABULARY, corpus
from benchmarks.results import machine, write_section
from mlmclm.cluster.ray_cluster import prepare_environment, ray_session
from mlmclm.cluster.worker_environment import worker_environment
from mlmclm.launches.run_stage import run_stage
from mlmclm.models.sizes import SIZES, parameters
from mlmclm.plans.names import parse_name
from mlmclm.plans.recipe import Recipe
from mlmclm.plans.stages import make_plan, study_fingerprint

SIZE = "210m"
WORKERS = 2
STEPS = 13
"""The workers report their memory after ten steps and at the end."""
ROWS, LENGTH = 2, 64
"""Sequences of a worker and tokens of a sequence: activations should be small beside weights."""


def predicted(stage: int, count: int) -> float:
    """Bytes of `count` parameters' weights (4 each), gradients (4) and moments (8) on one of the workers."""
    shared = (stage >= 3, stage >= 2, stage >= 1)
    return sum(width * count / (WORKERS if split else 1) for width, split in zip((4, 4, 8), shared, strict=True))


def set_back_peaks() -> None:
    """Reset the peak of the resident memory of this machine's training workers."""
    for process in psutil.Process().children(recursive=True):
        if "RayTrainWorker" in " ".join(process.cmdline()):
            Path(f"/proc/{process.pid}/clear_refs").write_text("5")


class Measured(NamedTuple):
    """Measurements of a short stage."""

    peaks: tuple[float, float]
    """Largest resident memory of a worker, in bytes, over the whole stage and over its last steps."""
    step: float
    """Seconds of the median step."""


def measure(size: str, stage: int, folder: Path) -> Measured:
    """Train with a ZeRO stage."""
    prepared = corpus(folder, length=LENGTH)
    recipe = Recipe(
        block_length=LENGTH, batch=ROWS * WORKERS, peak_learning_rate=1e-4, warmup_steps=1, decay_steps=1, workers=WORKERS,
        zero_stage=stage, checkpoint_every=10**6, evaluate_every=10**6, evaluation_blocks=2, max_failures=0,
    )  # fmt: skip
    plan = make_plan([parse_name(f"{size}-mlm40-{STEPS}")], recipe)
    seen: list[dict[str, Any]] = []

    def observe(records: list[dict[str, Any]]) -> None:
        if not seen:
            set_back_peaks()
        seen.extend(record for record in records if "memory" in record)

    prepare_environment()
    with ray_session(folder / "store", num_cpus=WORKERS):
        run_stage(
            plan.stages[0], store=folder / "store", corpus=prepared, recipe=recipe,
            fingerprint=study_fingerprint(recipe, prepared.key, VOCABULARY), device="cpu", observer=observe,
        )  # fmt: skip
    peaks = float(max(record["memory"] for record in seen)), float(seen[-1]["memory"])
    return Measured(peaks, statistics.median(record["step_seconds"] for record in seen))


def main() -> None:
    """Measure each stage, and write the section of RESULTS.md."""
    os.environ.update(worker_environment())
    count = parameters(SIZES[SIZE], VOCABULARY) + VOCABULARY * SIZES[SIZE].hidden
    little = parameters(SIZES["1m"], VOCABULARY) + VOCABULARY * SIZES["1m"].hidden
    with tempfile.TemporaryDirectory(prefix="mlmclm-benchmark-") as place:
        besides = measure("1m", 0, Path(place)).peaks[0] - predicted(0, little)
    lines = [
        f"Command: `python -m benchmarks.memory`. Machine: {machine()}.",
        f"{SIZE} at a vocabulary of {VOCABULARY:,}: {count / 1e6:.0f} M parameters with LM head, {WORKERS} workers, fp32 weights, gradients and",
        "moments. *Formula*: ZeRO's, 16 bytes a parameter, of which stage 1 divides the moments' 8, stage 2 also the gradients' 4, stage 3",
        "also the weights' 4. *Measured*: the peak of a worker's resident memory, less what a worker holds besides, which is the peak of `1m`",
        f"on the same batch less the formula's for it ({besides / 2**30:.2f} GiB): over the whole run with its start, and over the last three of",
        f"its {STEPS} steps alone. The checkpoint at the end is in neither: rank 0 then holds weights and moments whole (12 bytes a parameter).",
        "A CPU worker keeps what it has freed, and allocates beside it where the holes don't fit: both peaks have that in them. Under ZeRO 3,",
        "which gathers and frees each weight twice a step, it gives back what it frees, and its steps take longer for it. All have weights in",
        "bf16, which the forward pass keeps for the backward pass (2 bytes a parameter), and ZeRO 3 the layer that is gathered.",
        "ZeRO 0 and 1 are the same on one machine's CPUs: workers have weights and moments in common, and of the moments each touches its half.",
        "",
        "| ZeRO | formula, GiB | whole run, GiB | / formula | last steps, GiB | / formula | median step, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for stage in range(4):
        with tempfile.TemporaryDirectory(prefix="mlmclm-benchmark-") as place:
            measured = measure(SIZE, stage, Path(place))
        print(f"ZeRO {stage}: {' and '.join(f'{peak / 2**30:.2f}' for peak in measured.peaks)} GiB", flush=True)
        formula = predicted(stage, count)
        cells = (f"{(peak - besides) / 2**30:.2f} | {(peak - besides) / formula:.2f}" for peak in measured.peaks)
        lines.append(f"| {stage} | {formula / 2**30:.2f} | {' | '.join(cells)} | {measured.step:.2f} |")
    write_section("Memory of pretraining", lines)


if __name__ == "__main__":
    main()
