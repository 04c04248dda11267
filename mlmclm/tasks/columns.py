"""Access to a table's columns by canonical name and in canonical type, and checks of tables that families share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from mlmclm.errors import UserError, meant, unknown
from mlmclm.results.measures import Array
from mlmclm.storage.data_files import DELIMITERS, kind_of
from mlmclm.tasks.declaration import Task

IDS = ("id", "query_id", "corpus_id")
"""Text columns that a source may hold as integers."""


@dataclass(frozen=True)
class TaskData:
    """A task's checked data in canonical columns."""

    task: Task
    train: pa.Table
    validation: Any
    """A table, or the object that the family's `evaluation` returns; `test` likewise."""
    test: Any
    label_names: tuple[str, ...]
    """Names of classes or tags, by number; empty for families without labels."""
    fingerprint: str
    """Hash (hex) that changes with everything here that can change a score, and with nothing else."""


@dataclass(frozen=True)
class Columns:
    """The columns of a table as read from its source."""

    task: Task
    split: str
    """The table's name in messages."""
    table: pa.Table
    source: str
    """File or Hub split, for messages."""
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Class names by column, if the source carries them."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Canonical name -> the source's name, where it differs from the task's."""

    @property
    def where(self) -> str:
        """Beginning of each message about the table."""
        return f"task {self.task.name}, {self.split} ({self.source})"

    def plain(self, canonical: str) -> pa.ChunkedArray:
        """Return a column unchanged, or raise UserError."""
        table = self.table
        # The table's own column names take precedence over the task's.
        wanted = self.renamed.get(canonical) or self.task.column(canonical)
        outer, _, field = wanted.partition(".")
        # A column whose name itself contains a dot comes before a field of a struct.
        if wanted not in table.column_names and outer in table.column_names:
            kind = table.schema.field(outer).type
            if pa.types.is_struct(kind) and kind.get_field_index(field) >= 0:
                return pa.compute.struct_field(table[outer], field)
        if wanted not in table.column_names:
            raise UserError(
                f"{self.where}: the column {wanted!r} is missing.{meant(wanted, table.column_names)} "
                f"There are: {', '.join(table.column_names) or '(none)'}.{self._headerless()}"
            )
        return table[wanted]

    def _headerless(self) -> str:
        """Return a hint if the first line of a CSV or TSV file seems to be a row, which pyarrow takes for names."""
        wanted = {self.renamed.get(name) or self.task.column(name) for name in self.task.kind.columns}
        if kind_of(Path(self.source)) not in DELIMITERS or wanted & set(self.table.column_names):
            return ""
        return (
            " If the file's first line is a row, put a line with the columns' names above it, or declare them: header: "
            f"[{', '.join(['...'] * len(self.table.column_names))}]."
        )

    def typed(self, canonical: str, kind: pa.DataType) -> pa.Array:
        """Return a column cast to its canonical type, or raise UserError."""
        column = self.plain(canonical)
        # pyarrow would cast numbers and dates to text without complaint; in a text column they are a mistake.
        if kind == pa.string() and not _is_text(column.type):
            if canonical in IDS and pa.types.is_integer(column.type):
                return column.cast(kind)
            if not pa.types.is_null(column.type):
                raise self._holds(canonical, column.type, "text")
        try:
            return column.combine_chunks().cast(kind)
        except pa.ArrowException as error:
            raise self._holds(canonical, column.type, kind) from error

    def _holds(self, canonical: str, found: pa.DataType, wanted: object) -> UserError:
        return UserError(f"{self.where}: the column {self.task.column(canonical)!r} holds {found}, not {wanted}.")

    def label_names(self, canonical: str, kind: pa.DataType) -> tuple[str, ...]:
        """Return the names of classes or tags: as declared, as carried by the data, or as found in the column.

        Names found as strings are sorted, with the tag O first. Numbers from 0 on serve as their own names. Anything
        else is a UserError.
        """
        if self.task.label_names:
            return self.task.label_names
        carried = self.names.get(self.task.column(canonical))
        if carried:
            return carried
        column = self.plain(canonical).combine_chunks()
        found = (column.flatten() if pa.types.is_list(kind) else column).unique().to_pylist()
        values = [value for value in found if value is not None and not _blank(value)]
        if values and all(isinstance(value, str) for value in values):
            return tuple(sorted(values, key=lambda value: (value != "O", value)))
        if values and all(isinstance(value, int) and value >= 0 for value in values):
            return tuple(str(number) for number in range(max(values) + 1))
        raise UserError(
            f"task {self.task.name} ({self.source}): the column {self.task.column(canonical)!r} holds neither names "
            "nor numbers from 0 on."
        )

    def numbered(self, canonical: str, kind: pa.DataType, names: Sequence[str]) -> pa.Array:
        """Return labels as int64, or as lists of int64; names become numbers.

        Raises UserError for a label that is neither a number nor a known name, or is empty: a missing value in a CSV file.
        """
        values, nested = self.plain(canonical).combine_chunks(), pa.types.is_list(kind)
        for row, value in enumerate(values.to_pylist()):
            if any(map(_blank, value or ()) if nested else [_blank(value)]):
                raise UserError(f"{self.where}: row {row}: the {'tag' if nested else 'label'} is empty.")
        number = {name: index for index, name in enumerate(names)}

        def one(value: Any) -> Any:
            if not isinstance(value, str):
                return value
            if value not in number:
                raise unknown("label", value, names, where=self.where)
            return number[value]

        try:
            if not _is_text(values.type.value_type if nested else values.type):
                return values.cast(kind)
            rows = values.to_pylist()
            return pa.array([[one(tag) for tag in row] for row in rows] if nested else list(map(one, rows)), kind)
        except (pa.ArrowException, AttributeError, TypeError) as error:
            raise UserError(f"{self.where}: labels of type {values.type} are not numbers or names.") from error


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _blank(value: Any) -> bool:
    return isinstance(value, str) and not value.strip()


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
