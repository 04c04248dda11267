"""Checks of task data that several families share, run before any training.

Each raises a `UserError` that names the task, the split and the row; `where` is the beginning of its text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from mlmclm.errors import UserError

if TYPE_CHECKING:
    from mlmclm.tasks.declaration import Task

Array = np.ndarray[Any, Any]


def check_filled(task: Task, where: str, table: pa.Table) -> None:
    """Raise UserError for a canonical table without rows or with a null.

    `text_pair` may be null in a task without a second text.
    """
    if table.num_rows == 0:
        raise UserError(f"{where}: the split is empty.")
    for column in table.column_names:
        if column != "text_pair" or task.pair_template:
            check_no_nulls(where, table, column)


def check_no_nulls(where: str, table: pa.Table, column: str) -> None:
    """Raise UserError for a column that has a null."""
    nulls = pyarrow.compute.is_null(table[column]).to_numpy()
    if nulls.any():
        raise UserError(f"{where}: row {int(nulls.argmax())}: {column} is null.")


def check_in_range(where: str, what: str, labels: Array, rows: Array, names: tuple[str, ...]) -> None:
    """Raise UserError for a label that is not the number of a label name.

    Args:
        what: the message's word for a label.
        rows: row of each label.
    """
    bad = np.flatnonzero((labels < 0) | (labels >= len(names)))
    if len(bad):
        value = int(labels[bad[0]])
        hint = " (-1 marks a split without public labels)" if value == -1 else ""
        raise UserError(
            f"{where}: row {int(rows[bad[0]])}: {what} {value} is outside 0..{len(names) - 1}{hint}; "
            f"the labels are {', '.join(names)}."
        )


def check_labels_seen(
    task: Task, column: str, train: pa.Table, others: Mapping[str, pa.Table], names: tuple[str, ...]
) -> None:
    """Raise UserError for a label of an evaluation split that train lacks: no model could learn to predict it."""
    nested = pa.types.is_list(train[column].type)

    def seen(table: pa.Table) -> set[int]:
        values = table[column].combine_chunks()
        return set((values.flatten() if nested else values).unique().to_pylist())

    trained = seen(train)
    for split, table in others.items():
        unseen = sorted(seen(table) - trained)
        if unseen:
            raise UserError(
                f"task {task.name}: {split} has the {'tag' if nested else 'label'} {names[unseen[0]]!r}, "
                "which train never shows."
            )
