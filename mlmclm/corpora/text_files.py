"""Documents of one local file: a table with a column of text, or plain text; compressed or not."""

from __future__ import annotations

import csv
import io
import lzma
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from mlmclm.errors import UserError, meant
from mlmclm.storage.arrow_files import ARROW
from mlmclm.storage.data_files import (
    DELIMITERS,
    TABLES,
    delimiter_of,
    kind_of,
    lines_of,
    open_table,
    open_text,
    read_start,
    read_table,
    read_text,
    reader_errors,
)
from mlmclm.storage.files import parse_json
from mlmclm.storage.json_tables import rows_of_json

TEXT = (".txt", ".md")
SUFFIXES = TABLES + TEXT


def read_documents(path: Path, column: str, *, paragraphs: bool) -> Iterator[str]:
    """Yield the documents of a file, in order, including empty ones.

    Args:
        column: the column of text, if the file has columns.
        paragraphs: make each paragraph of a text file a document, instead of the file.

    Raises:
        UserError: the file's format is not what its suffix says, or the file cannot be read, lacks the column, or
            expands beyond the limit (`storage.expansion`).
    """
    kind = kind_of(path)
    with reader_errors(path):
        if kind in TEXT and not paragraphs:
            with open_text(path) as file:
                yield file.read().rstrip("\n")
        elif kind in TEXT:
            for written, lines in groupby(lines_of(path), key=lambda line: bool(line.strip())):
                if written:
                    yield "".join(lines).rstrip("\n")
        elif kind in (".parquet", ARROW):
            with open_table(path, [column]) as (schema, batches):
                check_column(path, column, schema.names)
                for batch in batches:
                    yield from (text_of(value, path, column) for value in batch.column(column).to_pylist())
        elif kind in DELIMITERS:
            table = read_table(path)
            check_column(path, column, table.column_names)
            yield from (text_of(value, path, column) for value in table[column].to_pylist())
        else:
            for where, row in _json_rows(path):
                if not isinstance(row, dict):
                    raise UserError(f"{where}: expected an object with a key {column!r}, got {type(row).__name__}.")
                check_column(where, column, row)
                yield text_of(row[column], where, column)


def check_column(where: object, column: str, columns: Iterable[str]) -> None:
    """Raise a UserError if there is no such column."""
    names = list(columns)
    if column not in names:
        raise UserError(
            f"{where}: there is no column {column!r}.{meant(column, names)} Its columns: {', '.join(names)}. Set text_column."
        )


def has_column(path: Path, column: str) -> bool:
    """Return whether a table has a column, by its beginning; True for a damaged table, whose fault is reported when it is read."""
    kind = kind_of(path)
    try:
        if kind in DELIMITERS:
            start = read_start(path)
            begin, delimiter = delimiter_of(start.encode(), kind)
            return column in next(csv.reader(io.StringIO(start[begin:]), delimiter=delimiter), [])
        if kind == ".parquet":
            with open_table(path) as (schema, _):
                return column in schema.names
        _, row = next(_json_rows(path), ("", None))
        return isinstance(row, dict) and column in row
    except (UserError, ValueError, EOFError, OSError, lzma.LZMAError, csv.Error):
        return True


def text_of(value: Any, where: object, column: str) -> str:
    """Return the text of a cell, or raise UserError; a missing value is an empty document."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{where}: column {column!r} holds {type(value).__name__}, not text. Set text_column.")
    return value


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield each row and where it is; only a file called .json is read whole."""
    if kind_of(path) == ".json":
        rows = rows_of_json(read_text(path), path, whole=True)
        yield from ((f"{path}, entry {number}", row) for number, row in enumerate(rows))
        return
    for number, line in enumerate(lines_of(path), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            yield where, parse_json(line.encode(), where)
