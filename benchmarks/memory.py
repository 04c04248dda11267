"""Memory of a worker under ZeRO 0 to 3, beside the formula's:  python -m benchmarks.memory

Two workers train one model a few steps under each stage. The formula (ZeRO, arXiv 1910.02054, section 3, with everything in fp32)
gives the bytes of weights, gradients and Adam's two moments. What a worker holds besides (libraries, activations, buffers) is
measured as the peak of a model of almost no parameters on the same batch, and taken off.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.pretraining import VOCABULARY, corpus
from benchmarks.results import machine, write_section
from mlmclm.models.sizes import SIZES, parameters
from mlmclm.pretraining.launch import prepare_environment, run_stage
from mlmclm.service.ray_cluster import ray_session
from mlmclm.studies.names import parse
from mlmclm.studies.plans import fingerprint, make_plan
from mlmclm.studies.recipe import Recipe
from mlmclm.workers import worker_environment

SIZE = "210m"
WORKERS = 2
STEPS = 3
ROWS, LENGTH = 2, 64
"""Of a worker's share: activations should be small beside weights."""


def predicted(stage: int, count: int) -> float:
    """Bytes of `count` parameters' weights (4 each), gradients (4) and moments (8) on one of the workers."""
    shared = (stage >= 3, stage >= 2, stage >= 1)
    return sum(width * count / (WORKERS if split else 1) for width, split in zip((4, 4, 8), shared, strict=True))


def peak(size: str, stage: int, folder: Path) -> float:
    """Largest resident memory of a worker, in bytes, over a short stage."""
    prepared = corpus(folder, length=LENGTH)
    recipe = Recipe(
        block_length=LENGTH, batch=ROWS * WORKERS, peak_learning_rate=1e-4, warmup_steps=1, decay_steps=1, workers=WORKERS,
        zero_stage=stage, checkpoint_every=10**6, evaluate_every=10**6, evaluation_blocks=2, max_failures=0,
    )  # fmt: skip
    plan = make_plan([parse(f"{size}-mlm40-{STEPS}")], recipe)
    seen: list[dict[str, Any]] = []
    prepare_environment()
    with ray_session(folder / "store", num_cpus=WORKERS):
        run_stage(
            plan.stages[0], store=folder / "store", corpus=prepared, recipe=recipe,
            fingerprint=fingerprint(recipe, prepared.key, VOCABULARY), observer=seen.extend,
        )  # fmt: skip
    return float([record for record in seen if "memory" in record][-1]["memory"])


def main() -> None:
    """Measures each stage and writes the section of RESULTS.md."""
    os.environ.update(worker_environment())
    count = parameters(SIZES[SIZE], VOCABULARY) + VOCABULARY * SIZES[SIZE].hidden
    little = parameters(SIZES["1m"], VOCABULARY) + VOCABULARY * SIZES["1m"].hidden
    lines = [
        f"Command: `python -m benchmarks.memory`. Machine: {machine()}.",
        f"{SIZE} at a vocabulary of {VOCABULARY:,}: {count / 1e6:.0f} M parameters with LM head, {WORKERS} workers, fp32 weights, gradients and",
        "moments. *Formula*: ZeRO's, 16 bytes a parameter, of which stage 1 divides the moments' 8, stage 2 also the gradients' 4, stage 3",
        "also the weights' 4. *Measured*: the peak of a worker's resident memory, less that of `1m` on the same batch, plus the formula's for",
        "`1m`. A checkpoint is not written in these steps but at their end, when rank 0 holds weights and moments whole (12 bytes a parameter);",
        "the peak is read before it. It includes the start, at which every worker builds the whole model before DeepSpeed divides it, and a",
        "CPU worker keeps the memory that it once had: what ZeRO saves on a CPU does not show in a peak.",
        "",
        "| ZeRO | formula, GiB | measured, GiB | measured / formula |",
        "|---|---|---|---|",
    ]
    for stage in range(4):
        found = []
        for size in ("1m", SIZE):
            with tempfile.TemporaryDirectory(prefix="mlmclm-benchmark-") as place:
                found.append(peak(size, stage, Path(place)))
            print(f"ZeRO {stage}, {size}: {found[-1] / 2**30:.2f} GiB", flush=True)
        formula = predicted(stage, count)
        measured = found[1] - found[0] + predicted(stage, little)
        lines.append(f"| {stage} | {formula / 2**30:.2f} | {measured / 2**30:.2f} | {measured / formula:.2f} |")
    write_section("Memory of pretraining", lines)


if __name__ == "__main__":
    main()
