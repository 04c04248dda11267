"""Rows of data files, each with its place for error messages, and checks of their values."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from mlmclm.errors import UserError, clipped, meant, one_line
from mlmclm.storage.data_files import DELIMITERS, kind_of, lines_of, read_start, read_table, read_text
from mlmclm.storage.received_files import LARGEST_NUMBER, unique_keys

Row = dict[str, Any]
ROWS_AT_ONCE = 1 << 16
"""Rows of a table that are Python objects at the same time."""
_LIST = re.compile(r"\s*\[\s*[{\]]")
"""Beginning of a JSON list of objects, which some tools write into files that are named as JSON Lines."""
_TRUTHS = {"true": 1.0, "false": 0.0}
"""Truth values as text: pandas writes them to CSV files, and lm-evaluation-harness writes numpy's in this way."""


def read_rows(path: Path, needed: Collection[str] = (), optional: Collection[str] = ()) -> Iterator[tuple[str, Row]]:
    """Yield the rows of a CSV, TSV, JSON Lines, JSON or Parquet file, each with its place ("FILE, row N").

    Args:
        needed, optional: the columns that are used. Other columns of a table are left out, unless it lacks a needed one.

    Raises:
        UserError: the file is malformed; the message names the line or row.
    """
    kind = kind_of(path)
    if kind == ".parquet" or kind in DELIMITERS:
        yield from _of_table(path, needed, optional)
    elif (kind == ".json" and read_start(path).lstrip().startswith("[")) or _LIST.match(read_start(path)):
        for number, value in enumerate(json_value(read_text(path), str(path)), 1):
            yield f"{path}, entry {number}", json_object(value, f"{path}, entry {number}")
    else:  # one object per line; some such files are named .json
        for number, line in enumerate(lines_of(path), 1):
            if line.strip():
                place = f"{path}, line {number}"
                yield place, json_object(json_value(line, place), place)


def named_place(path: Path) -> Path:
    """Return an absolute path without following links: the Hub's cache has links to files that are named by hashes."""
    return Path(os.path.abspath(path))  # noqa: PTH100


def columns_of(path: Path) -> set[str]:
    """Return the columns of the first row of a file; empty if it cannot be read or has no rows."""
    try:
        return set(next(read_rows(path), ("", {}))[1])
    except UserError:
        return set()


def _of_table(path: Path, needed: Collection[str], optional: Collection[str]) -> Iterator[tuple[str, Row]]:
    table = read_table(path)
    twice = sorted(name for name, count in Counter(table.column_names).items() if count > 1)
    if twice:
        raise UserError(f"{path}, line 1: column {twice[0]!r} is there twice.")
    if needed and set(needed) <= set(table.column_names):
        table = table.select([name for name in table.column_names if name in (*needed, *optional)])
    number = 0
    for batch in table.to_batches(max_chunksize=ROWS_AT_ONCE):
        for row in batch.to_pylist():
            number += 1
            yield f"{path}, row {number}", row


def json_value(content: str, place: str) -> Any:
    """Return the value of a JSON text."""
    try:
        return json.loads(content, object_pairs_hook=unique_keys)
    except json.JSONDecodeError as error:
        line = "" if error.lineno == 1 else f", line {error.lineno}"
        raise UserError(f"{place}{line}: not JSON ({error.msg}, column {error.colno}); is it cut short?") from error
    except RecursionError as error:
        raise UserError(f"{place}: not JSON that can be read (nested too deeply).") from error
    except ValueError as error:
        raise UserError(f"{place}: not JSON that can be read ({one_line(error, 60)}).") from error


def json_object(value: Any, place: str) -> Row:
    """Return a JSON object; raise a `UserError` for anything else."""
    if not isinstance(value, dict):
        raise UserError(f"{place}: {_shown(value)} where an object with named values is expected.")
    return value


def entry(row: Mapping[str, Any], key: str, place: str) -> Any:
    """Return the value of a key; raise a `UserError` that names the keys if it is missing."""
    if key not in row:
        raise UserError(f"{place}: no {key!r}.{meant(key, row)} There is: {', '.join(map(str, row)) or 'nothing'}.")
    return row[key]


def word(row: Mapping[str, Any], key: str, place: str) -> str:
    """Return the value of a key as a text that is not empty: a text or a whole number."""
    value = entry(row, key, place)
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # a column of whole numbers in which some are missing has become one of floats
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise UserError(f"{place}: {key} is {_shown(value)}; expected a name or a whole number.")
    return str(value)


def number(row: Mapping[str, Any], key: str, place: str) -> float:
    """Return the value of a key as a finite number; true and false are 1 and 0."""
    value = entry(row, key, place)
    finite = as_number(value)
    if finite is None:
        most = f" of at most {LARGEST_NUMBER:g}" if isinstance(value, float) and math.isfinite(value) else ""
        raise UserError(f"{place}: {key} is {_shown(value)}; expected a finite number{most}.")
    return finite


def as_number(value: Any) -> float | None:
    """Return a finite number, also if it is written as text; true and false are 1 and 0.

    Return None for anything else, and for numbers so large that their squares can't be added up.
    """
    if isinstance(value, str):
        value = _TRUTHS.get(value.lower(), value)
    if isinstance(value, str) and "_" in value:  # Python's float reads 1_000 as 1000
        return None
    try:
        result = float(value) if isinstance(value, str | int | float | Decimal) else math.nan
    except (ValueError, OverflowError):
        return None
    return result if abs(result) <= LARGEST_NUMBER else None


def _shown(value: Any) -> str:
    return "empty" if value in (None, "") else clipped(repr(value), 60)
