"""Data as people have them in files: Parquet, JSON lines, JSON arrays, CSV and TSV, compressed or in parts."""

from __future__ import annotations

import io
import json
import lzma
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from mlmclm.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa

TABLES = (".parquet", ".jsonl", ".json", ".csv", ".tsv")
"""Kinds of files that hold a table, the first before the others where a split is there as several."""
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
"""Those that pyarrow reads, by its names."""
_PART = re.compile(r"(?P<split>.*)-(?P<number>\d+)-of-(?P<count>\d+)(-[0-9a-f]+)?")
"""The Hub's own files of a split, such as `train-00000-of-00002.parquet`, without their suffix."""
NO_TABLES = ("dataset_info.json", "dataset_infos.json", "state.json")
"""Files about a data set that lie beside it."""
_CLOSED = r"\"(?:[^\"]++|\"\")*+"
"""A quoted field up to its closing mark; possessive, because there is nothing to try again."""
_LONGEST_BLOCK = 2**31 - 1
"""Bytes that pyarrow reads as one block, which a row must not exceed."""


def kind_of(path: Path) -> str:
    """The suffix that says what a file holds, without the one of its compression: `.csv` of `train.csv.gz`."""
    return _stem_and_kind(path)[1]


def is_compressed(path: Path) -> bool:
    """Whether a file's name ends in that of a compression."""
    return path.suffix.lower() in COMPRESSED


def read_table(path: Path) -> pa.Table:
    """The table that a file holds; text is text, however the file encodes it.

    Raises:
        UserError: the file is cut short, is not UTF-8, or is not what its name says.
    """
    import pyarrow as pa
    import pyarrow.parquet

    kind = kind_of(path)
    try:
        if kind == ".parquet" and not is_compressed(path):
            return _plain(pyarrow.parquet.read_table(path))
        with open_bytes(path) as file:
            content = file.read()
        if kind == ".parquet":
            return _plain(pyarrow.parquet.read_table(pa.BufferReader(content)))
        content = content.removeprefix(b"\xef\xbb\xbf")
        _check_text(path, content)
        if kind in (".csv", ".tsv"):
            return _plain(_read_separated(content, "," if kind == ".csv" else "\t"))
        return _plain(_read_json(content))
    except (pa.ArrowException, OSError, EOFError, OverflowError, lzma.LZMAError, json.JSONDecodeError) as error:
        raise UserError(f"{path} cannot be read; is it cut short? ({' '.join(str(error).split())})") from error


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """A file's content, decompressed as it is read."""
    import pyarrow as pa

    if path.suffix.lower() == ".xz":
        with lzma.open(path) as file:
            yield file
    else:
        with pa.input_stream(str(path), compression=_COMPRESSIONS.get(path.suffix.lower())) as stream:
            yield stream


@contextmanager
def open_text(path: Path) -> Iterator[io.TextIOWrapper]:
    """A file's lines as UTF-8, without the mark that some programs put before them."""
    with open_bytes(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig") as text:
        yield text


def files_of(folders: Iterable[Path], names: Iterable[str]) -> list[Path]:
    """The files of a split, in order: the first of these names that is there, in the first of these folders.

    A split is a file (`train.csv`), else the Hub's parts of one (`train-00000-of-00002.parquet`), else a folder of files
    (`train/`). A name may begin with a folder (`qrels/test`).

    Raises:
        UserError: some of the parts are missing, or there twice.
    """
    there = [folder for folder in dict.fromkeys(folders) if folder.is_dir()]
    for name in names:
        for folder in there:
            place = folder / name
            beside = _tables_in(place.parent)
            whole = _one_kind([file for file in beside if _stem_and_kind(file)[0] == place.name])
            if whole:
                return whole[:1]
            parts = [file for file in beside if (part := _part_of(file)) and part["split"] == place.name]
            inside = [file for file in _tables_in(place) if file.name not in NO_TABLES]
            found = _one_kind(parts) or _one_kind(inside)
            if found:
                _check_parts(found)
                return found
    return []


def names_in(folders: Iterable[Path]) -> list[str]:
    """The names of the tables in these folders, for messages."""
    return [file.name for folder in dict.fromkeys(folders) for file in _tables_in(folder)]


def _tables_in(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    files = (file for file in folder.iterdir() if kind_of(file) in TABLES and not file.name.startswith("."))
    return sorted(file for file in files if file.is_file())


def _one_kind(files: Sequence[Path]) -> list[Path]:
    """The files of the first kind that is there."""
    ranks = [(TABLES.index(kind_of(file)), is_compressed(file)) for file in files]
    return [file for file, rank in zip(files, ranks, strict=True) if rank == min(ranks)]


def _part_of(file: Path) -> re.Match[str] | None:
    return _PART.fullmatch(_stem_and_kind(file)[0])


def _check_parts(files: Sequence[Path]) -> None:
    parts = [part for part in map(_part_of, files) if part]
    if parts and sorted(int(part["number"]) for part in parts) != [*range(int(parts[0]["count"]))]:
        names = ", ".join(file.name for file in files)
        raise UserError(f"{files[0].parent}: parts of a split are missing, or there twice: {names}.")


def _stem_and_kind(path: Path) -> tuple[str, str]:
    """A file's name without its suffixes, and the one that says what it holds."""
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


def _read_separated(content: bytes, delimiter: str) -> pa.Table:
    """A CSV or TSV file with a header. Fields that begin with a quotation mark end with one too.

    In a TSV file as GLUE's they need not: where one doesn't, quotation marks are characters like others.
    """
    import pyarrow as pa

    if delimiter == "\t":
        return _parse(content, delimiter, quoted=_is_quoted(content))
    # pyarrow takes the end of a file for the end of a quoted field too.
    if any(not field[1] for field in re.finditer(rf"(?:^|[,\n]){_CLOSED}(\"?)".encode(), content)):
        raise pa.ArrowInvalid("a quoted field has no end")
    return _parse(content, delimiter, quoted=True)


def _is_quoted(content: bytes) -> bool:
    """Whether quotation marks around fields of a TSV file mean anything."""
    fields = re.finditer(rf"(?:^|[\t\n]){_CLOSED}(\"?)([^\t\r\n]?)".encode(), content)
    return all(field[1] and not field[2] for field in fields)


def _parse(content: bytes, delimiter: str, *, quoted: bool) -> pa.Table:
    import pyarrow as pa
    import pyarrow.csv

    return pyarrow.csv.read_csv(
        pa.BufferReader(content),
        read_options=pyarrow.csv.ReadOptions(block_size=_block(content)),
        parse_options=pyarrow.csv.ParseOptions(
            delimiter=delimiter, quote_char='"' if quoted else False, newlines_in_values=quoted
        ),
    )


def _block(content: bytes) -> int:
    """The size of block in which all of it is read at once, where pyarrow has one so large."""
    return min(max(len(content), 1 << 20), _LONGEST_BLOCK)


def _read_json(content: bytes) -> pa.Table:
    """An array of objects, or one object a line; both are called .json."""
    import pyarrow as pa
    import pyarrow.json

    if not content.lstrip().startswith(b"["):
        options = pyarrow.json.ReadOptions(block_size=_block(content))
        return pyarrow.json.read_json(pa.BufferReader(content), read_options=options)
    rows = json.loads(content)
    if not all(isinstance(row, dict) for row in rows):
        raise pa.ArrowInvalid("an array of objects is expected, one a row")
    names: dict[str, Any] = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: pa.array([row.get(name) for row in rows]) for name in names})


def _plain(table: pa.Table) -> pa.Table:
    """The table with text and numbers in place of dictionaries of them, and of views."""
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
