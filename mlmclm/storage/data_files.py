"""Data files in common formats: Parquet, JSON Lines, JSON arrays, CSV and TSV, also compressed or split into parts."""

from __future__ import annotations

import io
import json
import lzma
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import IO, TYPE_CHECKING

from mlmclm.errors import UserError, clipped, one_line
from mlmclm.storage.arrow_files import ARROW, arrow_batches, without_caches
from mlmclm.storage.expansion import bounded, bounded_groups
from mlmclm.storage.json_tables import table_of_json

if TYPE_CHECKING:
    import pyarrow as pa

TABLES = (".parquet", ARROW, ".jsonl", ".json", ".csv", ".tsv")
"""Suffixes of files that hold a table, in order of preference if a split exists in several formats."""
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
"""Compressions that pyarrow reads, with pyarrow's names."""
DELIMITERS = {".csv": ",", ".tsv": "\t"}
_PART = re.compile(r"(?P<split>.*)-(?P<number>\d+)-of-(?P<count>\d+)(-[0-9a-f]+)?")
"""Name, without suffixes, of the Hub's part files of a split, such as `train-00000-of-00002.parquet`."""
_INSTEAD = {
    **dict.fromkeys((".zip", ".tar", ".tgz", ".7z", ".rar"), "Unpack it, and give the files in it"),
    **dict.fromkeys((".xlsx", ".xls", ".ods"), "Save the sheet as CSV in UTF-8"),
    **dict.fromkeys((".pkl", ".pickle"), "Write Parquet instead (DataFrame.to_parquet): a pickle can run code"),
    **dict.fromkeys((".ann", ".spacy"), "Write a word and its tag on each line (CoNLL) instead of spans"),
}
"""Advice on files of other kinds."""
NO_TABLES = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""Metadata files that lie beside a data set."""
_CLOSED = r"\"(?:[^\"]++|\"\")*+"
"""A quoted field up to its closing mark; possessive, because backtracking could not find another match."""
_DELIMITER_LINE = re.compile(rb'"?sep=([^\w\s"]|\t)"?\r?\n')
"""A first line that tells Excel the delimiter of the fields, such as `sep=;`."""
_MOST_COLUMNS = 10_000
_MARK = b"\xef\xbb\xbf"
"""The byte order mark of UTF-8, which some programs write."""
_LONGEST_BLOCK = 2**31 - 1
"""The largest block, in bytes, that pyarrow reads; a row must not exceed a block."""


def kind_of(path: Path) -> str:
    """Return the suffix of the file format, without that of the compression: `.csv` for `train.csv.gz`."""
    return _stem_and_kind(path)[1]


def instead_of(paths: Iterable[Path]) -> str:
    """Return advice on converting the first of these files whose format is known but not read; empty if there is none."""
    return next((f" {_INSTEAD[kind_of(path)]} ({path.name})." for path in paths if kind_of(path) in _INSTEAD), "")


def is_compressed(path: Path) -> bool:
    """Return whether a file's name ends in the suffix of a compression."""
    return path.suffix.lower() in COMPRESSED


def read_table(path: Path, header: Sequence[str] | None = None) -> pa.Table:
    """Read the table in a file; text columns have a plain string type, however the file encodes them.

    Args:
        header: names of the columns of a CSV or TSV file whose first line is a row already. A file whose first line has
            one of these names has a header of its own.

    Raises:
        UserError: the file is truncated, is not UTF-8, does not match its suffix, has another number of columns than
            `header`, or expands beyond the limit (`storage.expansion`).
    """
    import pyarrow as pa

    kind = kind_of(path)
    with reader_errors(path):
        if kind in (".parquet", ARROW):
            with open_table(path) as (schema, batches):
                return _plain(pa.Table.from_batches(batches, schema))
        content = _read_utf8(path)
        if kind in DELIMITERS:
            return _plain(_read_separated(path, content, header))
        return table_of_json(content.decode(), path, whole=kind == ".json")


@contextmanager
def open_table(
    path: Path, columns: Sequence[str] | None = None
) -> Iterator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
    """Open a Parquet or Arrow file; yield its schema, and its batches, each within the limit of `storage.expansion`.

    Args:
        columns: the columns of a Parquet file to read; None for all.
    """
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    # Not mapped into memory as an Arrow file is: one that is cut short meanwhile would end the process.
    plain = kind_of(path) == ".parquet" and not is_compressed(path)
    with pa.OSFile(str(path)) if plain else open_data_file(path) as source:
        if kind_of(path) == ARROW:
            yield arrow_batches(source, path)
        else:
            yield (
                ParquetFile(source).schema_arrow,
                (
                    batch
                    for file, group in bounded_groups(source, path, columns)
                    for batch in file.iter_batches(8192, row_groups=[group], columns=columns)
                ),
            )


def read_text(path: Path) -> str:
    """Read a whole text file, decompressed and without a byte order mark.

    Raises:
        UserError: the file is truncated or is not UTF-8.
    """
    with reader_errors(path):
        return _read_utf8(path).decode()


def lines_of(path: Path) -> Iterator[str]:
    """Yield the lines of a text file, decompressed, one after the other; they end at line feeds and carriage returns alone.

    `str.splitlines` would also end them at characters that occur within text, such as U+2028 and U+0085.

    Raises:
        UserError: as for `read_text`.
    """
    with reader_errors(path), open_text(path) as text:
        yield from text


def read_start(path: Path) -> str:
    """Return the first 64 KiB of a text file, from which its layout can be recognised.

    Raises:
        UserError: the file is truncated.
    """
    with reader_errors(path), open_bytes(path) as file:
        return file.read(1 << 16).removeprefix(_MARK).decode(errors="replace")


@contextmanager
def reader_errors(path: Path) -> Iterator[None]:
    """Turn the errors of readers into a `UserError`."""
    import pyarrow as pa

    try:
        yield
    except UnicodeDecodeError:
        read_text(path)  # says on which line
        raise
    except PermissionError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}).") from error
    except (pa.ArrowException, OSError, EOFError, OverflowError, lzma.LZMAError, json.JSONDecodeError) as error:
        raise UserError(f"{path} cannot be read; is it cut short? ({one_line(error)})") from error


def _read_utf8(path: Path) -> bytes:
    with open_bytes(path) as file:
        content = file.read()
    content = content.removeprefix(_MARK)
    _check_text(path, content)
    return content


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading bytes, decompressed on the fly and within the limit of `storage.expansion`."""
    import pyarrow as pa

    if path.suffix.lower() == ".xz":
        with lzma.open(path) as file:
            yield bounded(file, path)
    else:
        with pa.input_stream(str(path), compression=_COMPRESSIONS.get(path.suffix.lower())) as stream:
            yield bounded(stream, path) if is_compressed(path) else stream


@contextmanager
def open_data_file(path: Path) -> Iterator[pa.NativeFile]:
    """Open a file for reading in any order: as it is on the disk, or decompressed into memory."""
    import pyarrow as pa

    if is_compressed(path):
        with open_bytes(path) as file:
            yield pa.BufferReader(file.read())
    else:
        with pa.memory_map(str(path)) as source:
            yield source


@contextmanager
def open_text(path: Path) -> Iterator[io.TextIOWrapper]:
    """Open a file for reading lines of UTF-8, without a byte order mark."""
    with open_bytes(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig") as text:
        yield text


def files_of(folders: Iterable[Path], names: Iterable[str], kinds: Sequence[str] = TABLES) -> list[Path]:
    """Find the files of a split, in order: the first of these names that exists, in the first folder that has it.

    A split is a file (`train.csv`), or else the Hub's parts of a file (`train-00000-of-00002.parquet`), or else a
    folder of files (`train/`). A name may begin with a folder (`qrels/test`).

    Args:
        kinds: suffixes of the files, in order of preference.

    Raises:
        UserError: some parts are missing or duplicated.
    """
    existing = [folder for folder in dict.fromkeys(folders) if folder.is_dir()]
    for name in names:
        for folder in existing:
            target = folder / name
            beside = _files_in(target.parent, kinds)
            single = _one_kind([file for file in beside if _stem_and_kind(file)[0] == target.name], kinds)
            if single:
                return single[:1]
            parts = [file for file in beside if (part := _part_of(file)) and part["split"] == target.name]
            inside = [file for file in _files_in(target, kinds) if file.name not in NO_TABLES]
            files = _one_kind(parts, kinds) or _one_kind(inside, kinds)
            if files:
                _check_parts(files)
                return files
    return []


def file_names_in(folders: Iterable[Path], kinds: Sequence[str] = TABLES) -> list[str]:
    """Return the names of the files of these kinds in these folders, for messages."""
    return [file.name for folder in dict.fromkeys(folders) for file in _files_in(folder, kinds)]


def _files_in(folder: Path, kinds: Sequence[str]) -> list[Path]:
    if not folder.is_dir():
        return []
    files = (file for file in folder.iterdir() if kind_of(file) in kinds and not file.name.startswith("."))
    return without_caches(sorted(file for file in files if file.is_file()))


def _one_kind(files: Sequence[Path], kinds: Sequence[str]) -> list[Path]:
    """Return those of these files that have the most preferred format among them."""
    ranks = [(kinds.index(kind_of(file)), is_compressed(file)) for file in files]
    return [file for file, rank in zip(files, ranks, strict=True) if rank == min(ranks)]


def _part_of(file: Path) -> re.Match[str] | None:
    return _PART.fullmatch(_stem_and_kind(file)[0])


def _check_parts(files: Sequence[Path]) -> None:
    parts = [part for part in map(_part_of, files) if part]
    if parts and sorted(int(part["number"]) for part in parts) != [*range(int(parts[0]["count"]))]:
        names = ", ".join(file.name for file in files)
        raise UserError(f"{files[0].parent}: parts of a split are missing, or there twice: {names}.")


def _stem_and_kind(path: Path) -> tuple[str, str]:
    """Return a file's name without its suffixes, and the suffix of its format."""
    inner = Path(path.name).with_suffix("") if is_compressed(path) else Path(path.name)
    return inner.stem, inner.suffix.lower()


def _check_text(path: Path, content: bytes) -> None:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{path}, line {line}: not UTF-8 text ({error.reason}, 0x{content[error.start]:02x}). Save the file as UTF-8."
        ) from error


def delimiter_of(content: bytes, kind: str) -> tuple[int, str]:
    """Return the offset of a CSV or TSV file's first row, and its delimiter.

    A first line `sep=;` states the delimiter. Otherwise, CSV without a comma in its first line is divided by tabs,
    semicolons (as Excel writes in many countries) or bars.
    """
    if stated := _DELIMITER_LINE.match(content):
        return stated.end(), stated[1].decode()
    first = re.sub(rb'"[^"]*"', b"", content.partition(b"\n")[0])
    signs = "\t;|" if kind == ".csv" and b"," not in first else ""
    return 0, next((sign for sign in signs if sign.encode() in first), DELIMITERS[kind])


def _read_separated(path: Path, content: bytes, header: Sequence[str] | None) -> pa.Table:
    """Read a CSV or TSV file. Fields that begin with a quotation mark must also end with one.

    TSV files such as GLUE's may break this rule: if any field does, quotation marks are ordinary characters.
    """
    import pyarrow as pa
    import pyarrow.compute
    import pyarrow.csv

    begin, delimiter = delimiter_of(content, kind_of(path))
    content = content[begin:]
    quoted, sign = True, re.escape(delimiter)
    if delimiter == "\t":
        fields = re.finditer(rf"(?:^|[\t\n]){_CLOSED}(\"?)([^\t\r\n]?)".encode(), content)
        quoted = all(field[1] and not field[2] for field in fields)
    else:
        for field in re.finditer(rf"(?:^|[{sign}\n]){_CLOSED}(\"?) *([^{sign}\r\n ]?)".encode(), content):
            # pyarrow accepts the end of the file as the end of a quoted field, so a truncated file would go unnoticed.
            if not field[1]:
                raise pa.ArrowInvalid("a quoted field has no end")
            if field[2]:
                line = content.count(b"\n", 0, field.end()) + 1
                raise UserError(
                    f"{path}, line {line}: a quoted field goes on behind its closing mark. Within such a field, write a quotation mark twice."
                )
    invalid: list[pyarrow.csv.InvalidRow] = []

    def refuse(row: pyarrow.csv.InvalidRow) -> str:
        invalid.append(row)
        return "error"

    # Columns are first called f0, f1 and so on, and none gets a guessed type: 007 is not 7, and NA is a word.
    types = {f"f{number}": pa.string() for number in range(min(content.count(delimiter.encode()) + 1, _MOST_COLUMNS))}
    marks = {"quote_char": '"' if quoted else False, "newlines_in_values": quoted}
    try:
        table = pyarrow.csv.read_csv(
            pa.BufferReader(content),
            # A block that holds the whole content, up to pyarrow's limit.
            pyarrow.csv.ReadOptions(
                block_size=min(max(len(content), 1 << 20), _LONGEST_BLOCK), autogenerate_column_names=True
            ),
            pyarrow.csv.ParseOptions(delimiter=delimiter, invalid_row_handler=refuse, **marks),
            pyarrow.csv.ConvertOptions(column_types=types),
        )
    except pa.ArrowInvalid as error:
        if not invalid:
            raise
        match = re.search(rb"(?:\A|[\r\n])" + re.escape(invalid[0].text.encode()) + rb"(?=[\r\n]|\Z)", content)
        where = content.count(b"\n", 0, match.start() + 1) + 1 if match else "unknown"
        raise pa.ArrowInvalid(
            f"line {where} has {invalid[0].actual_columns} fields and the first {invalid[0].expected_columns}: {clipped(invalid[0].text, 60)}"
        ) from error
    if table.num_columns > _MOST_COLUMNS:
        raise UserError(f"{path}: it has {table.num_columns:,} columns; at most {_MOST_COLUMNS:,} can be read.")
    first = [str(column[0]) for column in table.columns]
    if header is None or set(first) & set(header):
        table, header = table.slice(1), first
    elif len(first) != len(header):
        raise UserError(
            f"{path}: its first line has {len(first)} fields, none of them a name of the task's header, "
            f"which names {len(header)}: {', '.join(header)}."
        )
    repeated = reduce(pyarrow.compute.and_, map(pyarrow.compute.equal, table.columns, header))
    if len(header) > 1 and (row := pyarrow.compute.index(repeated, True).as_py()) >= 0:
        raise UserError(
            f"{path}: row {row + 1} repeats the header ({', '.join(header)}). Delete it: files were joined there."
        )
    # An empty column has no type, as in other formats. One that has no name either is dropped.
    filled = [pyarrow.compute.any(pyarrow.compute.not_equal(column, "")).as_py() for column in table.columns]
    nothing = pa.nulls(table.num_rows)
    columns = [column if has else nothing for column, has in zip(table.columns, filled, strict=True)]
    kept = [number for number, name in enumerate(header) if name.strip() or filled[number]]
    return pa.table([columns[number] for number in kept], names=[header[number] for number in kept])


def _plain(table: pa.Table) -> pa.Table:
    """Replace dictionary-encoded and view columns by plain ones."""
    import pyarrow as pa

    fields = [field.with_type(_plain_type(field.type)) for field in table.schema]
    return table.cast(pa.schema(fields, table.schema.metadata))


def _plain_type(kind: pa.DataType) -> pa.DataType:
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        inner = _plain_type(kind.value_type)
        return kind if inner == kind.value_type else pa.list_(inner)
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_plain_type(field.type)) for field in kind])
    return kind
