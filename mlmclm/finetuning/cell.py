"""One cell of a sweep: what is to be computed, and the key that its result has for ever. Nothing heavy is imported here."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlmclm.finetuning.protocol import Protocol
from mlmclm.seeds import Seed, seed_value
from mlmclm.storage.files import stable_hash
from mlmclm.tasks.declaration import Task
from mlmclm.tasks.registry import get_task

ENGINE_VERSION = "4"
"""Raised whenever the same cell gives another score; it is part of every cell's key."""
CELL_THREADS = 1
"""Torch's threads while a cell is computed: sums are taken in another order with another number of them."""


@dataclass(frozen=True)
class Start:
    """The encoder that a cell begins with in place of the model's own: as another cell's fine-tuning of the model left it."""

    key: str
    """Of the other cell."""
    task: str = field(compare=False)
    """That it was fine-tuned on."""


@dataclass(frozen=True)
class Cell:
    """What is to be computed. `model` and `model_folder` only say where the weights are and what to call them."""

    model: str
    model_folder: Path
    weights: str
    """`weights_hash` of the folder."""
    task: str
    task_data: str
    """Fingerprint of the task's data (`Prepared.task_data`)."""
    protocol: Protocol
    learning_rate: float
    seed: Seed
    """One number for all streams, or one for each."""
    declaration: Task | None = field(default=None, compare=False)
    """The task's, which a worker may not have installed; None for the installed one of this name. `task_data` has what
    matters of it, and not which of the scores is the main one."""
    setting: str = field(default="", compare=False)
    """What the protocol is called among those of a grid; `protocol` itself is in the key."""
    start: Start | None = None
    """Fine-tuned weights to begin with; None for the model's own."""
    recut: bool = False
    """Whether `pair_truncation: longest_first` makes other examples than `joined` would (`Prepared.recut`)."""

    @property
    def declared(self) -> Task:
        """The task's declaration."""
        return self.declaration or get_task(self.task)

    def identity(self) -> dict[str, Any]:
        """Return the settings that the key and the result hold of the protocol."""
        return {**self.protocol.identity(), **({"pair_truncation": "longest_first"} if self.recut else {})}


def cell_key(cell: Cell) -> str:
    """Hex; a hash of all that can change the result, and never of a path or the model's name."""
    return stable_hash(
        {
            "weights": cell.weights,
            "task": cell.task,
            "task_data": cell.task_data,
            "protocol": cell.identity(),
            "learning_rate": float(cell.learning_rate),
            "seed": seed_value(cell.seed),
            "engine": ENGINE_VERSION,
            **({"start": cell.start.key} if cell.start else {}),
        }
    )
