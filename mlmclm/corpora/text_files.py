"""Documents of one local file: a table with a column of text, or plain text; compressed or not."""

from __future__ import annotations

import csv
import io
import json
import lzma
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import Any

from mlmclm.errors import UserError, meant, one_line
from mlmclm.storage.arrow_files import ARROW, arrow_batches
from mlmclm.storage.data_files import (
    DELIMITERS,
    TABLES,
    delimiter_of,
    is_compressed,
    kind_of,
    open_bytes,
    open_data_file,
    open_text,
    read_start,
    read_table,
    read_text,
)
from mlmclm.storage.expansion import bounded_groups
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
    readers: dict[str, Callable[[Path, str], Iterator[str]]] = {
        ".parquet": _read_parquet,
        ARROW: _read_arrow,
        ".jsonl": _read_json,
        ".json": _read_json,
        ".csv": _read_separated,
        ".tsv": _read_separated,
    }
    kind = kind_of(path)
    try:
        if kind in readers:
            yield from readers[kind](path, column)
        elif paragraphs:
            yield from _read_paragraphs(path)
        else:
            with open_text(path) as file:
                yield file.read().rstrip("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start}).") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not valid JSON ({error}).") from error
    except PermissionError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}).") from error
    except (EOFError, lzma.LZMAError, OSError) as error:
        if not is_compressed(path):
            raise  # In an uncompressed file the error has nothing to do with truncation.
        raise UserError(f"{path} cannot be read; is it cut short? ({error})") from error


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
            import pyarrow.parquet

            with open_bytes(path) as content:
                return (
                    column
                    in pyarrow.parquet.ParquetFile(
                        io.BytesIO(content.read()) if is_compressed(path) else path
                    ).schema_arrow.names
                )
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


def _read_parquet(path: Path, column: str) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        with ExitStack() as stack:
            # Parquet is read from its end, so a compressed file must be decompressed into memory first.
            source = pyarrow.BufferReader(stack.enter_context(open_bytes(path)).read()) if is_compressed(path) else path
            file = stack.enter_context(pyarrow.parquet.ParquetFile(source))
            check_column(path, column, file.schema_arrow.names)
            for same, group in bounded_groups(source, path, [column]):
                for batch in same.iter_batches(batch_size=1024, row_groups=[group], columns=[column]):
                    for value in batch.column(0).to_pylist():
                        yield text_of(value, path, column)
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{path}: not a Parquet file ({one_line(error)}).") from error


def _read_arrow(path: Path, column: str) -> Iterator[str]:
    import pyarrow

    try:
        with open_data_file(path) as source:
            schema, batches = arrow_batches(source, path)
            check_column(path, column, schema.names)
            for batch in batches:
                for value in batch.column(column).to_pylist():
                    yield text_of(value, path, column)
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: not an Arrow file ({one_line(error)}).") from error


def _read_json(path: Path, column: str) -> Iterator[str]:
    """Yield the text column of one JSON object per line, or of an array of objects (which is called .json)."""
    for where, row in _json_rows(path):
        if not isinstance(row, dict):
            raise UserError(f"{where}: expected an object with a key {column!r}, got {type(row).__name__}.")
        check_column(where, column, row)
        yield text_of(row[column], where, column)


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield each row and where it is; only a file called .json is read whole."""
    if kind_of(path) == ".json":
        rows = rows_of_json(read_text(path), path, whole=True)
        yield from ((f"{path}, entry {number}", row) for number, row in enumerate(rows))
        return
    with open_text(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                where = f"{path}, line {number}"
                yield where, parse_json(line.encode(), where)


def _read_separated(path: Path, column: str) -> Iterator[str]:
    table = read_table(path)
    check_column(path, column, table.column_names)
    for value in table[column].to_pylist():
        yield text_of(value, path, column)


def _read_paragraphs(path: Path) -> Iterator[str]:
    """Yield the paragraphs of a text file without reading all of it into memory."""
    with open_text(path) as file:
        for written, lines in groupby(file, key=lambda line: bool(line.strip())):
            if written:
                yield "".join(lines).rstrip("\n")
