"""Rows of data files with the places that messages name, and checked values of them."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlmclm.errors import UserError, cut, meant, one_line
from mlmclm.storage.data_files import DELIMITERS, kind_of, read_lines, read_table, read_text

Row = dict[str, Any]


def rows_of(path: Path) -> Iterator[tuple[str, Row]]:
    """Yield the rows of a CSV, TSV, JSON Lines, JSON or Parquet file, each with its place ("FILE, line N").

    Raises:
        UserError: the file is malformed; the message names the line.
    """
    kind = kind_of(path)
    if kind in DELIMITERS:
        yield from _separated(path, DELIMITERS[kind])
    elif kind == ".jsonl":
        for number, line in enumerate(read_lines(path), 1):
            if line.strip():
                place = f"{path}, line {number}"
                yield place, an_object(parsed(line, place), place)
    elif kind == ".json":
        values = parsed(read_text(path), str(path))
        if not isinstance(values, list):
            raise UserError(f"{path}: an array of objects is expected, one a row.")
        for number, value in enumerate(values, 1):
            yield f"{path}, entry {number}", an_object(value, f"{path}, entry {number}")
    else:
        for number, row in enumerate(read_table(path).to_pylist(), 1):
            yield f"{path}, row {number}", row


def columns_of(path: Path) -> set[str]:
    """Return the columns of the first row of a file; empty if it cannot be read or has no rows."""
    try:
        return set(next(rows_of(path), ("", {}))[1])
    except UserError:
        return set()


def _separated(path: Path, delimiter: str) -> Iterator[tuple[str, Row]]:
    lines = csv.reader(read_lines(path), delimiter=delimiter, strict=True)
    try:
        header = next(lines, [])
        twice = sorted({name for name in header if header.count(name) > 1})
        if twice:
            raise UserError(f"{path}, line 1: column {twice[0]!r} is there twice.")
        for values in lines:
            place = f"{path}, line {lines.line_num}"
            if values and len(values) != len(header):
                raise UserError(
                    f"{place}: {len(values)} fields, but the header has {len(header)}: {', '.join(header)}."
                )
            if values:
                yield place, dict(zip(header, values, strict=True))
    except csv.Error as error:
        raise UserError(f"{path}, line {lines.line_num}: {one_line(error)}.") from error


def parsed(content: str, place: str) -> Any:
    """Return the value of a JSON text."""
    try:
        return json.loads(content)
    except json.JSONDecodeError as error:
        line = "" if error.lineno == 1 else f", line {error.lineno}"
        raise UserError(f"{place}{line}: not JSON ({error.msg}, column {error.colno}); is it cut short?") from error
    except RecursionError as error:
        raise UserError(f"{place}: not JSON that can be read (nested too deeply).") from error


def an_object(value: Any, place: str) -> Row:
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
    found = as_number(value)
    if found is None:
        raise UserError(f"{place}: {key} is {_shown(value)}; expected a finite number.")
    return found


def as_number(value: Any) -> float | None:
    """Return a finite number, also if it is written as text; None for anything else."""
    try:
        found = float(value) if isinstance(value, str | int | float) else math.nan
    except (ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def _shown(value: Any) -> str:
    return "empty" if value in (None, "") else cut(repr(value), 60)
