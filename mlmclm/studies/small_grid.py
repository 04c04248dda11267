"""A small search space for one task, from the models' sizes and the lengths of its texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from mlmclm.models.folder import context_of, load_tokenizer
from mlmclm.models.sources import weight_files
from mlmclm.studies.data_file import FileTask

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


@dataclass(frozen=True)
class GridModel:
    """What a grid must know of a model: its weights, its context in tokens if it has one, and its tokenizer's folder."""

    weights: int
    context: int | None
    folder: Path

    @classmethod
    def of(cls, folder: Path) -> GridModel:
        """Read a model's folder; no weight is loaded."""
        return cls(count_weights(folder), context_of(folder), folder)


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


def grid_for(task: FileTask, models: Sequence[GridModel], *, seeds: int = SEEDS) -> dict[str, Any]:
    """Return the values of a search space: rates by the models' sizes, steps by the rows, lengths by the texts.

    Args:
        seeds: seeds at each rate.
    """
    rows = task.tables["train"].num_rows
    batch = 32 if rows >= LARGE else 16
    length = length_for(task, models)
    protocol: dict[str, Any] = {
        "base": "standard",
        "batch_size": batch,
        "max_steps": min(max(math.ceil(EPOCHS * rows / batch), STEPS[0]), STEPS[1]),
        "max_length": length,
        "stride": length // 4,
    }
    return {
        "tasks": [task.name],
        "learning_rates": {"values": rates_for([model.weights for model in models]), "extend": True},
        "seeds": list(range(seeds)),
        "protocol": protocol,
    }


def length_for(task: FileTask, models: Sequence[GridModel]) -> int:
    """Return the tokens of the longest sequence, a multiple of 16: nearly all texts fit, as far as every model takes them."""
    texts = task.texts(LOOKED_AT)
    most = min([LONGEST, *(model.context for model in models if model.context is not None)])
    needed = 16
    for model in models:
        tokenizer = load_tokenizer(model.folder)
        lengths = sorted(len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"])
        # Prompt and special tokens come on top.
        needed = max(needed, lengths[math.ceil(COVERED * len(lengths)) - 1] + 16)
    return min(math.ceil(needed / 16) * 16, most)
