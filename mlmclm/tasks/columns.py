"""Access to a table's columns by canonical name and in canonical type, and checks of tables that families share."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from mlmclm.errors import UserError, clipped, meant, unknown
from mlmclm.results.measures import Array
from mlmclm.tasks.declaration import Task

_WHOLE = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_CLASSES = (pa.bool_(), pa.null())
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
    """Hash (hex) of everything in these fields that can change a score, and of nothing else."""


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
    """Class names by column, if the source stores them."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Canonical name -> the source's name, where it differs from the task's."""
    untyped: bool = False
    """Whether all columns are text, as in CSV. Spaces around ids, labels and numbers are then ignored."""

    @property
    def where(self) -> str:
        """Beginning of each message about the table."""
        return f"task {self.task.name}, {self.split} ({self.source})"

    def own_name(self, canonical: str) -> str:
        """Return the source's name of a canonical column: as `renamed` has it, else as the task declares it."""
        return self.renamed.get(canonical) or self.task.column(canonical)

    def plain(self, canonical: str) -> pa.ChunkedArray:
        """Return a column unchanged, or raise UserError."""
        table, name = self.table, self.own_name(canonical)
        outer, _, field = name.partition(".")
        # A column whose name itself contains a dot takes precedence over a field of a struct.
        if name not in table.column_names and outer in table.column_names:
            kind = table.schema.field(outer).type
            if pa.types.is_struct(kind) and kind.get_field_index(field) >= 0:
                return pa.compute.struct_field(table[outer], field)
        if name not in table.column_names:
            raise UserError(
                f"{self.where}: the column {name!r} is missing.{meant(name, table.column_names)} "
                f"There are: {', '.join(table.column_names) or '(none)'}.{self._headerless()}"
            )
        return table[name]

    def _headerless(self) -> str:
        """Return a hint if pyarrow seems to have read a row of a CSV or TSV file as the columns' names, else an empty text."""
        expected = set(map(self.own_name, self.task.kind.columns))
        if not self.untyped or expected & set(self.table.column_names):
            return ""
        return (
            " If the file's first line is a row, put a line with the columns' names above it, or declare them: header: "
            f"[{', '.join(['...'] * len(self.table.column_names))}]."
        )

    def typed(self, canonical: str, kind: pa.DataType) -> pa.Array:
        """Return a column cast to its canonical type, or raise UserError."""
        column = self.plain(canonical).combine_chunks()
        if self.untyped and _is_text(column.type) and (canonical in IDS or kind != pa.string()):
            column = _filled(column)
        if pa.types.is_floating(kind) and (names := self.carried(canonical)):
            column = as_class_names(column, names)  # the class 4 may have the number 0
        # pyarrow would cast numbers and dates to text without complaint; in a text column they are a mistake.
        if kind == pa.string() and not _is_text(column.type):
            if canonical in IDS and pa.types.is_integer(column.type):
                return column.cast(kind)
            if not pa.types.is_null(column.type):
                raise self._holds(canonical, column.type, "text")
        try:
            return column.cast(kind)
        except pa.ArrowException as error:
            if _is_text(column.type) and pa.types.is_floating(kind):
                raise self._no_number(canonical, column) from error
            raise self._holds(canonical, column.type, kind) from error

    def _holds(self, canonical: str, actual: pa.DataType, wanted: object) -> UserError:
        described = "lists or objects among other values" if pa.types.is_binary(actual) else actual
        return UserError(f"{self.where}: the column {self.own_name(canonical)!r} holds {described}, not {wanted}.")

    def _no_number(self, canonical: str, column: pa.Array) -> UserError:
        row, text = next((row, text) for row, text in enumerate(column.to_pylist()) if not _is_number(text))
        return UserError(
            f"{self.where}: row {row}: the column {self.own_name(canonical)!r} holds {clipped(text, 60)!r}, not a number."
        )

    def label_names(self, canonical: str, kind: pa.DataType) -> tuple[str, ...]:
        """Return the names of classes or tags: as the task declares them, else as the source stores them, else as found in the column.

        Names that are found are sorted: numbers by value, others by their characters, with the tag O first. Values other
        than text, whole numbers and truth values raise UserError.
        """
        if self.task.label_names:
            return self.task.label_names
        carried = self.carried(canonical)
        if carried:
            return carried
        values = _flat(self._labels(canonical, kind))
        texts = {text for text in values.unique().cast(pa.string()).to_pylist() if text and not text.isspace()}
        if not texts:
            raise UserError(f"{self.where}: the column {self.own_name(canonical)!r} has no label.")
        if (self.untyped or not _is_text(values.type)) and all(map(_WHOLE.fullmatch, texts)):
            return tuple(sorted(texts, key=int))
        return tuple(sorted(texts, key=lambda text: (text != "O", text)))

    def carried(self, canonical: str) -> tuple[str, ...]:
        """Return the class names that the source stores for a column; empty if there are none."""
        return self.names.get(self.own_name(canonical), ())

    def numbered(self, canonical: str, kind: pa.DataType, names: Sequence[str]) -> pa.Array:
        """Return labels as int64, or as lists of int64: the index of each label's name in `names`.

        If the source stores class names, an integer is an index into those. Any other label is a name, as it is written.
        But if the task declares names and none of them is a number, a number is an index into `names`; its range isn't checked.

        Raises UserError for a label that is not among the names, or that is empty (a missing value in a CSV file).
        """
        column = self._labels(canonical, kind)
        values, carried, what = _flat(column), self.carried(canonical), "tag" if pa.types.is_list(kind) else "label"
        if carried and pa.types.is_integer(values.type):
            labels = values.drop_null().to_numpy()
            check_in_range(self.where, what, labels, _rows_of(column)[values.is_valid().to_numpy(False)], carried)
            if carried == tuple(names):
                return column.cast(kind)
            values = pa.array(carried, pa.string()).take(values)
        number_of: dict[str, int] = {name: place for place, name in enumerate(names)}
        positional = self.task.label_names and not any(map(_WHOLE.fullmatch, names))
        encoded = values.dictionary_encode()
        places = []
        for number, text in enumerate(encoded.dictionary.cast(pa.string()).to_pylist()):
            if text not in number_of and not text.strip():
                row = _rows_of(column)[pa.compute.index(encoded.indices, number).as_py()]
                raise UserError(f"{self.where}: row {row}: the {what} is empty.")
            if text not in number_of and not (positional and _WHOLE.fullmatch(text)):
                hint = f" The file's own names are {', '.join(carried)}." if carried else ""
                raise UserError(f"{unknown('label', text, names, where=self.where)}{hint}{_unlabelled(text)}")
            places.append(number_of[text] if text in number_of else int(text))
        numbers = pa.array(places, pa.int64()).take(encoded.indices)
        if not pa.types.is_list(kind):
            return numbers
        ends = np.cumsum(pa.compute.list_value_length(column).fill_null(0).to_numpy())
        offsets = pa.array(np.concatenate(([0], ends)), pa.int32())
        return pa.ListArray.from_arrays(offsets, numbers, mask=column.is_null())

    def _labels(self, canonical: str, kind: pa.DataType) -> pa.Array:
        """Return a column of labels or tags as text, whole numbers or truth values; a list of one label counts as the label."""
        column = self.plain(canonical).combine_chunks()
        lists = _is_list(column.type)
        if lists and not pa.types.is_list(kind):
            column = self._single(column)
        elif pa.types.is_list(kind) and not lists and not pa.types.is_null(column.type):
            raise self._holds(canonical, column.type, "lists of tags")
        values = _flat(column)
        if not (_is_text(values.type) or values.type in _CLASSES or pa.types.is_integer(values.type)):
            raise UserError(
                f"{self.where}: labels of type {values.type} are not numbers or names. Save them as whole numbers or text."
            )
        return pa.compute.utf8_trim_whitespace(column) if self.untyped and _is_text(column.type) else column

    def _single(self, column: pa.Array) -> pa.Array:
        counts = pa.compute.list_value_length(column)
        many = pa.compute.index(pa.compute.greater(counts, 1), True).as_py()
        if many >= 0:
            raise UserError(
                f"{self.where}: row {many}: it has {counts[many]} labels, {column[many].as_py()}; one label a row is expected."
            )
        return pa.compute.list_flatten(
            pa.compute.if_else(pa.compute.equal(counts, 1), column, pa.scalar([None], column.type))
        )


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _is_number(text: str | None) -> bool:
    try:
        pa.scalar(text, pa.string()).cast(pa.float64())
    except pa.ArrowException:
        return False
    return True


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _flat(column: pa.Array) -> pa.Array:
    """Return the values of a column, or those in its lists."""
    return column.flatten() if _is_list(column.type) else column


def _rows_of(column: pa.Array) -> Array:
    """Return the row number of each value that `_flat` returns, int [values]."""
    rows = np.arange(len(column))
    return (
        np.repeat(rows, pa.compute.list_value_length(column).fill_null(0).to_numpy()) if _is_list(column.type) else rows
    )


def _filled(column: pa.Array) -> pa.Array:
    """Return text without the spaces around it, and null where nothing is left."""
    trimmed = pa.compute.utf8_trim_whitespace(column)
    return pa.compute.if_else(pa.compute.equal(trimmed, ""), None, trimmed)


def class_names(metadata: Mapping[bytes, bytes] | None) -> dict[str, tuple[str, ...]]:
    """Return class names by column from the `huggingface` metadata that `datasets` writes into Parquet and Arrow files."""
    try:
        features = json.loads((metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
    except (KeyError, TypeError, ValueError):
        return {}
    names = {}
    for column, feature in features.items():
        # The class label of a list column is the feature of its items.
        while isinstance(feature, dict) and isinstance(feature.get("feature"), dict):
            feature = feature["feature"]
        if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" and feature.get("names"):
            names[column] = tuple(feature["names"])
    return names


def as_class_names(column: pa.Array | pa.ChunkedArray, names: Sequence[str]) -> pa.Array:
    """Return a column of class numbers, or of lists of them, as names; a number without a name becomes its digits."""
    number = dict(enumerate(names))

    def of(value: Any) -> Any:
        return (
            list(map(of, value))
            if isinstance(value, list)
            else value
            if value is None
            else number.get(value, str(value))
        )

    return pa.array(list(map(of, column.to_pylist())))


def check_filled(where: str, table: pa.Table, *, pairs: bool = True) -> None:
    """Raise UserError for a canonical table without rows or with a null; `text_pair` may be null in a task without `pairs`."""
    if table.num_rows == 0:
        raise UserError(f"{where}: the split is empty.")
    for column in table.column_names:
        nulls = pyarrow.compute.is_null(table[column]).to_numpy()
        if nulls.any() and (pairs or column != "text_pair"):
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
        raise UserError(
            f"{where}: row {int(rows[bad[0]])}: {what} {value} is outside 0..{len(names) - 1}; "
            f"the labels are {', '.join(names)}.{_unlabelled(str(value))}"
        )


def _unlabelled(label: str) -> str:
    return " -1 marks rows without public labels." if label == "-1" else ""


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
