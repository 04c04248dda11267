"""A task's data, wherever they are read from (`tasks.splits`), checked and in the canonical columns of the task's family."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mlmclm.errors import UserError
from mlmclm.storage.files import canonical_json
from mlmclm.tasks.check import check_labels_seen
from mlmclm.tasks.columns import Columns
from mlmclm.tasks.declaration import Task
from mlmclm.tasks.pins import check_pin
from mlmclm.tasks.splits import from_hub, reader


@dataclass(frozen=True)
class TaskData:
    """A task's checked data in canonical columns."""

    task: Task
    train: pa.Table
    validation: Any
    """A table, or what else the family's `evaluation` gives; `test` too."""
    test: Any
    label_names: tuple[str, ...]
    """Classes or tags by number; empty for the families without any."""
    fingerprint: str
    """Hex; changes with anything here that can change a score, and with nothing else."""


def load_task(
    task: Task,
    *,
    store: Path,
    data_root: Path | None,
    progress: Callable[[str, int, int | None], None] | None = None,
) -> TaskData:
    """Reads and checks all splits.

    Args:
        data_root: a folder whose `task.folder`, where it exists, stands in for the Hub.

    Raises:
        UserError: missing or empty split, missing column (with the nearest), a label out of range, tags that don't fit
            their tokens, an answer that isn't in its context, judgements of unknown documents, a damaged file; data of a branch
            of the Hub that have changed since the store first read them.
        EnvironmentFault: the Hub can't be reached.
    """
    family, read = task.kind, reader(task, store, data_root, progress)
    columns = Columns(task, "train", family.training_source(task, read))
    names = columns.label_names(family.labels, family.columns[family.labels]) if family.labels else ()
    train = family.table(columns, names)
    if task.splits.validation is None:
        train, held_out = _hold_out(task, train)
        validation = family.held_out(held_out)
    else:
        validation = family.evaluation(task, "validation", task.splits.validation, read, names)
    test = family.evaluation(task, "test", task.splits.test, read, names)
    if family.labels:
        check_labels_seen(task, family.labels, train, {"validation": validation, "test": test}, names)
    evaluated = [*family.tables(validation).values(), *family.tables(test).values()]
    fingerprint = _fingerprint(task, names, [train, *evaluated])
    if from_hub(task, data_root):
        check_pin(task, fingerprint, store)
    return TaskData(task, train, validation, test, names, fingerprint)


def _hold_out(task: Task, train: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Cuts validation out of train: `validation_fraction` of the rows, in whole groups where there are groups."""
    import torch

    splits = task.splits
    assert splits.validation_fraction is not None
    generator = torch.Generator().manual_seed(splits.validation_seed)
    rows = len(train)
    if splits.validation_group is None:
        order = torch.randperm(rows, generator=generator).numpy()
        held = order[: max(1, round(rows * splits.validation_fraction))]
    else:
        group = train[splits.validation_group].combine_chunks().dictionary_encode().indices.to_numpy()
        counts = np.bincount(group)
        order = torch.randperm(len(counts), generator=generator).numpy()
        wanted = np.cumsum(counts[order]) <= max(1, round(rows * splits.validation_fraction))
        wanted[0] = True
        held = np.flatnonzero(np.isin(group, order[wanted]))
    mask = np.zeros(rows, dtype=bool)
    mask[held] = True
    if mask.all():
        raise UserError(f"task {task.name}: train is too small ({rows} rows) to hold out a validation split.")
    return train.filter(pa.array(~mask)), train.filter(pa.array(mask))


def _fingerprint(task: Task, names: tuple[str, ...], tables: list[pa.Table]) -> str:
    """SHA-256 over what examples and scores are made of."""
    kind = [task.family, task.pair_template, list(names), *(["unanswerable"] if task.unanswerable else [])]
    digest = hashlib.sha256(canonical_json(kind).encode())
    for table in tables:
        digest.update(canonical_json([table.num_rows, table.column_names]).encode())
        for start in range(0, table.num_rows, 8192):
            digest.update(canonical_json(table.slice(start, 8192).to_pydict()).encode())
    return digest.hexdigest()
