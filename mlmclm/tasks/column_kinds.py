"""Kinds of a table's columns (text, class, number, list, or of no use), from which the task of a data file is inferred."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import pyarrow as pa

from mlmclm.errors import UserError

Kind = Literal["text", "class", "number", "list", "answers", "id", "empty", "other"]
MOST_CLASSES = 50
"""Maximum number of different values in a column that is taken for classes without being named as the label."""
ROWS_A_CLASS = 3
"""Minimum mean number of rows per value of such a column."""
CLASS_WORDS = 4
"""Maximum mean number of words in the name of a class."""
MOST_WHOLE_CLASSES = 20
"""Maximum number of different whole numbers in a column that is taken for classes; with more, it is a number to predict."""
_ID_NAME = re.compile(
    r"(?i)(|id|idx|index|uuid|guid|key|row|rownum|.*[_ -](id|idx|uuid)|[a-z]+Id|unnamed: ?\d+|__index_level_\d+__)"
)


@dataclass(frozen=True)
class ColumnKind:
    """A column of a table.

    Attributes:
        different: number of different values that aren't missing; 0 for lists.
        whole: whether all values are whole numbers, be they integers, floats or text.
    """

    name: str
    kind: Kind
    different: int = 0
    whole: bool = False


def plain_columns(table: pa.Table, where: object) -> pa.Table:
    """Return a table whose structs are flattened into columns called `outer.field`, except SQuAD's answers.

    Raises:
        UserError: two columns have one name.
    """
    while any(pa.types.is_struct(field.type) and not _is_answers(field.type) for field in table.schema):
        columns: dict[str, Any] = {}
        for field, column in zip(table.schema, table.columns, strict=True):
            one = pa.table([column], names=[field.name])
            parts = one if _is_answers(field.type) else one.flatten()
            columns |= dict(zip(parts.column_names, parts.columns, strict=True))
        table = pa.table(columns)
    twice = [name for name in dict.fromkeys(table.column_names) if table.column_names.count(name) > 1]
    if twice:
        raise UserError(f"{where}: the column {twice[0]!r} is there twice; give every column a name of its own.")
    return table


def kinds_of(table: pa.Table) -> dict[str, ColumnKind]:
    """Return the kind of each column of a table, by its name."""
    return {name: _inspect(name, table[name]) for name in table.column_names}


def missing(value: object) -> bool:
    """Return whether a cell of a table is a gap: null, NaN, or text of spaces alone. The texts `NA`, `nan` and `null` are no gaps."""
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, float) and math.isnan(value))


def finite_number(value: object) -> float | None:
    """Return a finite number, also one that is written as text; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _inspect(name: str, column: pa.ChunkedArray) -> ColumnKind:
    kind = column.type
    if _is_answers(kind):
        return ColumnKind(name, "answers")
    cells = column.to_pylist()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        if pa.types.is_nested(kind.value_type) or any(cell is not None and len(cell) > 1 for cell in cells):
            return ColumnKind(name, "list")
        cells = [cell[0] if cell else None for cell in cells]  # a list of one value is that value, an empty one a gap
    values = [value for value in cells if not missing(value)]
    if not values:
        return ColumnKind(name, "empty")
    if not isinstance(values[0], str | int | float):
        return ColumnKind(name, "other")
    different = len(set(values))
    numbers = [finite_number(value) for value in values]
    if all(number is not None for number in numbers):
        return _numeric(name, [number for number in numbers if number is not None], different)
    if isinstance(values[0], bool):
        return ColumnKind(name, "class", different)
    words = sum(len(str(value).split()) for value in values) / len(values)
    if different == len(values) and words <= 1 and (_ID_NAME.fullmatch(name) or len(values) > ROWS_A_CLASS):
        return ColumnKind(name, "id", different)
    classes = different <= MOST_CLASSES and different * ROWS_A_CLASS <= len(values) and words <= CLASS_WORDS
    return ColumnKind(name, "class" if classes else "text", different)


def _numeric(name: str, numbers: list[float], different: int) -> ColumnKind:
    whole = all(number == int(number) for number in numbers)
    steps = all(later - earlier == 1 for earlier, later in pairwise(numbers))
    if whole and (_ID_NAME.fullmatch(name) or (len(numbers) > ROWS_A_CLASS and steps)):
        return ColumnKind(name, "id", different, whole)
    classes = whole and different <= MOST_WHOLE_CLASSES and different * ROWS_A_CLASS <= len(numbers)
    return ColumnKind(name, "class" if classes else "number", different, whole)


def _is_answers(kind: pa.DataType) -> bool:
    return pa.types.is_struct(kind) and {field.name for field in kind} >= {"text", "answer_start"}
