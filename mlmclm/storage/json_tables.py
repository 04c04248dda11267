"""Tables in JSON, read in the forms that occur in practice; columns get the types of their values.

- objects one after the other (JSON Lines), or an array of objects: each is a row;
- one object of columns: lists of equal length, pandas' objects `{"0": ..., "1": ...}`, or pandas' `split`;
- one object of rows by their ids, or an object with a single list of rows, such as `{"version": 1, "data": [...]}`.

The keys of rows become the column `id`, unless there is one. Text stays text, whatever it looks like. A column with text
and numbers is text. One that mixes lists or objects with other values holds their JSON as bytes, which no task reads.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from mlmclm.errors import UserError, clipped

if TYPE_CHECKING:
    import pyarrow as pa

MOST_SPARSE = 100
"""Most columns of a table of which less than a hundredth is filled. More keys than that are ids, not columns."""
_SPACE = re.compile(r"[ \t\r\n]*")
Row = Mapping[str, Any]


def table_of_json(content: str, where: object, *, whole: bool) -> pa.Table:
    """Read a table from a JSON text; see `rows_of_json`."""
    import pyarrow as pa

    try:
        count, columns = _columns(rows_of_json(content, where, whole=whole))
        if not _is_sparse(count, columns):
            return pa.table({name: _array(_filled(count, *column)) for name, column in columns.items()})
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: it holds text that is no Unicode ({error.reason}).") from error
    raise UserError(
        f"{where}: its {count:,} objects have {len(columns):,} different keys, and each of them only few. Write the keys as values of a "
        "column."
    )


def rows_of_json(content: str, where: object, *, whole: bool) -> Iterator[Row]:
    """Yield the rows of a JSON text.

    Args:
        where: the file, which starts each message.
        whole: whether a single object may be a table (`.json`) instead of a row (`.jsonl`).

    Raises:
        UserError: there is something else than objects, or it isn't clear which are the rows.
        json.JSONDecodeError: this is no JSON.
    """
    values = _values(content, where)
    first = list(islice(values, 2))
    rows: Iterable[Any] = chain(first, values)
    if len(first) == 1 and isinstance(first[0], list):
        rows = first[0]
    elif len(first) == 1 and isinstance(first[0], dict) and whole:
        rows = _of_object(first[0], where)
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise UserError(
                f"{where}: value {number} is {clipped(json.dumps(row), 60)}, where an object is expected, one a row."
            )
        yield row


def _values(content: str, where: object) -> Iterator[Any]:
    """Yield the JSON values of a text, at least one."""
    decoder, place = json.JSONDecoder(), _after_space(content, 0)
    while True:
        try:
            value, place = decoder.raw_decode(content, place)
        except json.JSONDecodeError:
            raise
        except (RecursionError, ValueError) as error:
            why = "nested too deeply" if isinstance(error, RecursionError) else "a number of too many digits"
            raise UserError(f"{where}: not JSON that can be read ({why}).") from error
        yield value
        place = _after_space(content, place)
        if place == len(content):
            return


def _after_space(content: str, place: int) -> int:
    spaces = _SPACE.match(content, place)
    return spaces.end() if spaces else place


def _of_object(value: Mapping[str, Any], where: object) -> Iterable[Row]:
    """Return the rows of an object that is a table; an object that isn't one is a row."""
    parts = list(value.values())
    if {"columns", "data"} <= value.keys() and all(isinstance(value[name], list) for name in ("columns", "data")):
        names = value["columns"]  # pandas' "split"; a row of another length stays a list, which is then refused
        fits = (isinstance(row, list) and len(row) == len(names) for row in value["data"])
        return (
            dict(zip(names, row, strict=True)) if fit else row for row, fit in zip(value["data"], fits, strict=True)
        )
    if parts and all(isinstance(part, dict) for part in parts):
        return _of_objects(value, where)
    lists = {name: part for name, part in value.items() if isinstance(part, list)}
    rows = [name for name, part in lists.items() if part and all(isinstance(row, dict) for row in part)]
    if len(rows) > 1 and len(rows) == len(lists):
        raise UserError(f"{where}: {' and '.join(rows)} are a table each. Write each into a file of its own.")
    if len(lists) == len(parts) > 1 and len({len(part) for part in parts}) == 1:
        return (dict(zip(lists, row, strict=True)) for row in zip(*parts, strict=True))
    return lists[rows[0]] if len(rows) == 1 else [value]


def _of_objects(value: Mapping[str, Row], where: object) -> Iterable[Row]:
    """Return the rows of an object of objects: of columns by name, or of rows by id."""
    keys = list(next(iter(value.values())))
    alike = all(part.keys() == set(keys) for part in value.values())
    if not alike or len(value) > len(keys) or _are_numbers(value):
        return ({"id": name, **row} for name, row in value.items())
    if len(value) == len(keys) and not _are_numbers(keys):
        raise UserError(
            f"{where}: its {len(keys)} objects with {len(keys)} keys each could be rows or columns. Write an array of objects, one a row."
        )
    return ({"id": key, **{name: column[key] for name, column in value.items()}} for key in keys)


def _are_numbers(keys: Iterable[str]) -> bool:
    """Return whether keys are 0, 1, 2 and so on, as pandas numbers rows."""
    return all(key == str(number) for number, key in enumerate(keys))


def _columns(rows: Iterable[Row]) -> tuple[int, dict[str, tuple[list[int], list[Any]]]]:
    """Return the number of rows, and for each key the rows that have it and their values; keys in order of appearance."""
    columns: dict[str, tuple[list[int], list[Any]]] = {}
    count = 0
    for row in rows:
        for name, value in row.items():
            if name not in columns:
                columns[name] = [], []
            places, values = columns[name]
            places.append(count)
            values.append(value)
        count += 1
    return count, columns


def _is_sparse(count: int, columns: Mapping[str, tuple[list[int], list[Any]]]) -> bool:
    """Return whether a table would be almost empty: its size could grow with the square of that of the objects."""
    filled = sum(len(values) for _, values in columns.values())
    return len(columns) > MOST_SPARSE and MOST_SPARSE * filled < count * len(columns)


def _filled(count: int, places: Sequence[int], values: list[Any]) -> list[Any]:
    """Return a column with None where a row lacks it."""
    if len(values) == count:
        return values
    filled: list[Any] = [None] * count
    for place, value in zip(places, values, strict=True):
        filled[place] = value
    return filled


def _array(values: list[Any]) -> pa.Array:
    """Return a column with the type of its values; see the module for those of several types."""
    import pyarrow as pa

    kinds = {type(value) for value in values} - {type(None)}
    if float in kinds and kinds - {int, float}:  # NaN stands for a missing value in columns of any type
        values = [None if isinstance(value, float) and math.isnan(value) else value for value in values]
        kinds = {type(value) for value in values} - {type(None)}
    if kinds == {list}:
        ends: list[int] = [0]
        inner: list[Any] = []
        for value in values:
            inner += value or ()
            ends.append(len(inner))
        mask = pa.array([value is None for value in values])
        return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), _array(inner), mask=mask)
    if kinds == {dict}:
        count, columns = _columns(value or {} for value in values)
        if not columns:
            return pa.array(values, pa.struct([]))
        if not _is_sparse(count, columns):
            fields = [_array(_filled(count, *column)) for column in columns.values()]
            mask = pa.array([value is None for value in values])
            return pa.StructArray.from_arrays(fields, names=list(columns), mask=mask)
    if kinds & {list, dict}:
        return pa.array([None if value is None else json.dumps(value).encode() for value in values], pa.binary())
    if len(kinds) < 2 or kinds == {int, float}:
        try:
            return pa.array(values)
        except (pa.ArrowInvalid, OverflowError):  # integers too large for Arrow
            pass
    texts = [value if value is None or isinstance(value, str) else json.dumps(value) for value in values]
    return pa.array(texts, pa.string())
