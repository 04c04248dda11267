"""A small search space, from the models' sizes and the lengths of the tasks' texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class GridModel:
    """The facts of a model that a grid depends on: its weights, its context in tokens if it has one, and its tokenizer's folder."""

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


@dataclass(frozen=True)
class GridTask:
    """The facts of a task that a grid depends on.

    Attributes:
        train: its training rows in canonical columns.
    """

    name: str
    train: pa.Table

    @property
    def texts(self) -> list[str]:
        """The texts of the first training rows, those of a row joined."""
        wanted = [
            name for name in self.train.column_names if name not in ("id", "label", "tags", "answers", "negative")
        ]
        rows = self.train.select(wanted).slice(0, LOOKED_AT).to_pylist()
        return [
            " ".join(" ".join(each) if isinstance(each, list) else each or "" for each in row.values()) for row in rows
        ]

    @property
    def settings(self) -> dict[str, int]:
        """The size of a batch and the number of steps, by the number of rows."""
        batch = 32 if self.train.num_rows >= LARGE else 16
        steps = math.ceil(EPOCHS * self.train.num_rows / batch)
        return {"batch_size": batch, "max_steps": min(max(steps, STEPS[0]), STEPS[1])}


def grid_for(tasks: Sequence[GridTask], models: Sequence[GridModel], *, seeds: int = SEEDS) -> dict[str, Any]:
    """Return the values of a search space: rates by the models' sizes, steps by the rows, lengths by the texts.

    Args:
        seeds: seeds at each rate.
    """
    length = length_for(tasks, models)
    found: dict[str, Any] = {
        "tasks": [task.name for task in tasks],
        "learning_rates": {"values": rates_for([model.weights for model in models]), "extend": True},
        "seeds": list(range(seeds)),
        "protocol": {"base": "standard", **tasks[0].settings, "max_length": length, "stride": length // 4},
    }
    others = {task.name: task.settings for task in tasks[1:] if task.settings != tasks[0].settings}
    return found | ({"per_task": others} if others else {})


def length_for(tasks: Sequence[GridTask], models: Sequence[GridModel]) -> int:
    """Return the tokens of the longest sequence, a multiple of 16: nearly all texts fit, as far as every model takes them."""
    most = min([LONGEST, *(model.context for model in models if model.context is not None)])
    needed = 16
    for model in models:
        tokenizer = load_tokenizer(model.folder)
        for task in tasks:
            lengths = sorted(
                len(ids) for ids in tokenizer(task.texts, add_special_tokens=False, verbose=False)["input_ids"]
            )
            # Prompt and special tokens come on top.
            needed = max(needed, lengths[math.ceil(COVERED * len(lengths)) - 1] + 16)
    return min(math.ceil(needed / 16) * 16, most)
