"""A small search space, from the models' sizes and the lengths of a task's texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from safetensors import safe_open

from mlmclm.models.folder import context_of, load_tokenizer
from mlmclm.models.sources import weight_files

LADDER = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3)
BANDS = ((10_000_000, (5e-4, 2e-3)), (60_000_000, (1e-4, 5e-4)), (math.inf, (2e-5, 1e-4)))
"""Lowest and highest learning rate for models with fewer weights than the number. The published protocols (`tune_spaces/protocols`)
cover those of 150 million and more; the smaller ones were measured in this project's own studies. The sweep extends the list."""
SEEDS = 3
EPOCHS = 3
STEPS = (60, 1_000)
"""The fewest and the most steps of a cell."""
LARGE = 2_000
"""Training rows from which a batch has 32 of them instead of 16."""
LONGEST = 512
LOOKED_AT = 500
"""Training rows whose texts are measured."""
COVERED = 0.98
"""Share of these texts that are not cut."""


def count_weights(folder: Path) -> int:
    """Return the number of weights in a folder's safetensors files, from their headers."""
    total = 0
    for file in weight_files(folder):
        with safe_open(str(file), "pt") as handle:
            total += sum(math.prod(handle.get_slice(name).get_shape()) for name in handle.keys())  # noqa: SIM118
    return total


def rates_for(weights: Sequence[int]) -> list[float]:
    """Return the learning rates to begin with, for models with these numbers of weights."""
    bands = [next(rates for most, rates in BANDS if count < most) for count in weights]
    low, high = min(low for low, _ in bands), max(high for _, high in bands)
    return [rate for rate in LADDER if low <= rate <= high]


def grid_for(task: str, train: pa.Table, models: Sequence[Path], seeds: int = SEEDS) -> dict[str, Any]:
    """Return the values of a search space: rates by the models' sizes, steps by the rows, lengths by the texts.

    Args:
        task: the task's name.
        train: its training rows in canonical columns.
        models: the models' folders.
        seeds: their number.
    """
    batch = 32 if train.num_rows >= LARGE else 16
    steps = math.ceil(EPOCHS * train.num_rows / batch)
    length = length_for(train, models)
    return {
        "tasks": [task],
        "learning_rates": {"values": rates_for([count_weights(folder) for folder in models]), "extend": True},
        "seeds": list(range(seeds)),
        "protocol": {
            "base": "standard",
            "batch_size": batch,
            "max_steps": min(max(steps, STEPS[0]), STEPS[1]),
            "max_length": length,
            "stride": length // 4,
        },
    }


def length_for(train: pa.Table, models: Sequence[Path]) -> int:
    """Return the tokens of the longest sequence, a multiple of 16: nearly all texts fit, as far as every model takes them."""
    wanted = [name for name in train.column_names if name not in ("id", "label", "tags", "answers", "negative")]
    rows = train.select(wanted).slice(0, LOOKED_AT).to_pylist()
    texts = [
        " ".join(" ".join(each) if isinstance(each, list) else each or "" for each in row.values()) for row in rows
    ]
    contexts = [context for folder in models if (context := context_of(folder)) is not None]
    needed = 16
    for folder in models:
        tokenized = load_tokenizer(folder)(texts, add_special_tokens=False, verbose=False)["input_ids"]
        lengths = sorted(map(len, tokenized))
        # Prompt and special tokens come on top.
        needed = max(needed, lengths[math.ceil(COVERED * len(lengths)) - 1] + 16)
    return min(math.ceil(needed / 16) * 16, LONGEST, *contexts)
