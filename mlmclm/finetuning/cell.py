"""The specification of one cell of a sweep, and the permanent key of its result.

This module imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlmclm import versions
from mlmclm.backends.device_kinds import keyed_backend
from mlmclm.backends.model_shape import ModelShape
from mlmclm.configuration import Role
from mlmclm.finetuning.protocol import Protocol
from mlmclm.models.warm_up import shape_of_folder
from mlmclm.registry import KINDS
from mlmclm.results.metrics import metric_parts
from mlmclm.seeds import Seed, seed_value
from mlmclm.storage.addresses import fetched
from mlmclm.storage.files import stable_hash
from mlmclm.tasks.declaration import Task
from mlmclm.tasks.declared_tasks import get_task
from mlmclm.tasks.metric import metrics_of

CELL_THREADS = 1
"""Number of torch threads that compute a cell. It is fixed because it determines the order in which sums are taken."""


@dataclass(frozen=True)
class Start:
    """The fine-tuned encoder that a cell starts from in place of the base model, made by another cell of that model."""

    key: str
    """Key of the other cell."""
    task: str = field(compare=False)
    """Task of the other cell."""


@dataclass(frozen=True)
class Cell:
    """One fine-tuning run to compute.

    `model` and `model_folder` only name and locate the weights; they are not part of the key.
    """

    model: str
    model_folder: Path
    weights: str
    """`weights_hash` of the folder."""
    task: str
    task_data: str
    """Fingerprint of the task's data (`PreparedTask.task_data`)."""
    protocol: Protocol
    learning_rate: float
    seed: Seed
    """One number for all random streams, or one for each."""
    declaration: Task | None = field(default=None, compare=False)
    """The task's declaration, which a worker may not have installed; None for the installed task of this name.

    It is not part of the key: `task_data` covers everything in it that affects the scores. The choice of the main score
    affects them only if the protocol evaluates during training; then it is in the key."""
    setting: str = field(default="", compare=False)
    """Name of the grid point that `protocol` is for; empty without a grid. The key holds `protocol` itself instead."""
    start: Start | None = None
    """Fine-tuned weights to start from; None for the base model's."""
    recut: bool = False
    """True if `pair_truncation: longest_first` gives different examples from `joined` (`PreparedTask.recut`)."""
    training_data: str = field(default="", compare=False)
    """Fingerprint of what the cell is trained on (`PreparedTask.training_data`); empty if it is not known."""
    earlier: tuple[str, ...] = field(default=(), compare=False)
    """Hashes of the same weights by earlier definitions, under which the result may be filed (`ResultsStore.as_filed`)."""
    work: tuple[float, float] = field(default=(1.0, 0.0), compare=False)
    """Estimate of the work of training and of evaluating, in tokens passed forward once (`sweeps.trial.work_of`)."""

    @property
    def declared(self) -> Task:
        """The task's declaration: the cell's own, else the installed one."""
        return self.declaration or get_task(self.task)

    @property
    def added(self) -> dict[str, Any]:
        """Entries of the key for a family, metrics and a backend that aren't built in; empty where there are none."""
        families, metrics, entry = KINDS["family"], KINDS["metric"], dict[str, Any](keyed_backend())
        if families.extended or metrics.extended:
            name = self.declared.family
            family, added = families.keyed(name), metrics_of(name)
            named = [part for part in metric_parts(self.declared.metric) if part in added]
            entry |= {"family": "" if family == name else family, "metrics": [metrics.keyed(part) for part in named]}
        return {part: value for part, value in entry.items() if value}

    @property
    def has_distinct_batches(self) -> bool:
        """Whether no text may occur twice in a batch (`batching.training_rows`)."""
        if self.protocol.distinct_batches:
            return True
        # A cell without a declaration has an installed task, and no installed task has hard negatives.
        task = self.declaration
        return task is not None and (task.negatives is not None or "negative" in task.columns)

    def identity(self) -> dict[str, Any]:
        """Return the protocol's settings as stored in the key and in the result."""
        # `pair_truncation` counts only where it changes an example; the keys of all other cells are without it.
        return {**self.protocol.identity(), **({"pair_truncation": "longest_first"} if self.recut else {})}


def shapes_of(cells: Iterable[Cell]) -> list[ModelShape | None]:
    """Return the distinct shapes of these cells' models, for `mlmclm.models.warm_up.compile_kernels`."""
    models = {(cell.model_folder, cell.protocol.precision) for cell in cells}
    return [shape_of_folder(fetched(folder, "config.json"), precision) for folder, precision in models]


def training_key(cell: Cell) -> str:
    """Return a key (hex) shared by the cells whose trained models are equal, so that one training serves them all.

    For example, MNLI's two test sets share a training, and so do all the study's tasks that train on MS MARCO.
    """
    # With `evaluate_every`, the cell's own validation split decides when its training ends.
    if not cell.training_data or cell.protocol.evaluate_every:
        return cell_key(cell)
    # The truncation of pairs is not listed here: `training_data` covers the tokenised rows.
    settings = cell.protocol.keyed(Role.WEIGHTS)
    start = cell.start.key if cell.start else None
    seed = seed_value(cell.seed)
    batches = [versions.DISTINCT_BATCHES] if cell.has_distinct_batches else []
    return stable_hash([cell.weights, cell.training_data, settings, float(cell.learning_rate), seed, start, *batches])


def cell_key(cell: Cell) -> str:
    """Return the cell's key (hex): a hash of everything that can change the result, but of no path or model name."""
    return stable_hash(
        {
            "weights": cell.weights,
            "task": cell.task,
            "task_data": cell.task_data,
            "protocol": cell.identity(),
            "learning_rate": float(cell.learning_rate),
            "seed": seed_value(cell.seed),
            "engine": versions.CELLS,
            # Left out when empty, so that cells without a start keep their keys.
            **({"start": cell.start.key} if cell.start else {}),
            **({"batches": versions.DISTINCT_BATCHES} if cell.has_distinct_batches else {}),
            **cell.added,
            # Without evaluations during training, the choice of the main score changes no weights.
            **({"metric": cell.declared.metric} if cell.protocol.evaluate_every else {}),
        }
    )
