"""A limit on what a data file expands to when it is read, so that a small hostile file cannot fill the memory or the disk.

A file may expand to `RATIO` times its size, and in any case to `FREE_BYTES`. Compression
shrinks text to a third or a tenth. An uncompressed text file has no limit: it is as large on disk as when it is read.

The sizes that a Parquet file declares are checked before it is read. It stores repeated values once, and no declared size
shows how often they are repeated. So the lengths of all texts are added up as well, while the values are still stored once.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from mlmclm.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.parquet import ColumnChunkMetaData, ParquetFile

FREE_BYTES = 1 << 30
RATIO = 100
_CHUNK = 1 << 20
_ROWS = 65_536
"""Most rows of a table whose lengths are added up at once; with few rows at once, each batch would hold the stored values again."""
_FEWEST_ROWS = 1_024
_AT_ONCE = 64 << 20
"""Bytes that these rows take on average as they are stored."""
_STORED_ONCE = {"RLE_DICTIONARY", "PLAIN_DICTIONARY"}
"""Parquet's encodings that store a repeated value once."""
_PREFIXES = "DELTA_BYTE_ARRAY"
"""Parquet's encoding that stores only once a prefix that consecutive texts share."""


def bounded(stream: IO[bytes], path: Path) -> io.BufferedReader:
    """Return the decompressed stream of a file, which raises a `UserError` where it exceeds the file's limit."""
    return io.BufferedReader(_Bounded(stream, path), _CHUNK)


def bounded_groups(
    source: Path | pa.BufferReader, path: Path, columns: Sequence[str] | None = None
) -> Iterator[tuple[ParquetFile, int]]:
    """Yield an open Parquet file and the number of each of its row groups, in order, once the group is within the limit.

    Args:
        source: the file, or its decompressed content.
        path: the file, whose size sets the limit.
        columns: the columns that will be read; None for all.

    Raises:
        UserError: the columns expand to more than the limit.
        pyarrow.ArrowException, OSError: this is not a Parquet file.
    """
    from pyarrow.parquet import ParquetFile

    size = 0
    with ParquetFile(source) as file:
        schema, metadata = file.schema, file.metadata
        leaves = [
            leaf
            for leaf in range(len(schema))
            if columns is None or schema.column(leaf).path.partition(".")[0] in columns
        ]
        texts = [leaf for leaf in leaves if schema.column(leaf).physical_type == "BYTE_ARRAY"]
        with ParquetFile(source, read_dictionary=[schema.column(leaf).path for leaf in texts]) as encoded:
            for group in range(metadata.num_row_groups):
                chunks = {leaf: metadata.row_group(group).column(leaf) for leaf in leaves}
                for leaf, chunk in chunks.items():
                    width = max(schema.column(leaf).length or 0, 8)
                    size += chunk.total_uncompressed_size + width * chunk.num_values
                check_expansion(size, path)
                for leaf in texts:
                    encodings, name = set(chunks[leaf].encodings), schema.column(leaf).path
                    if _PREFIXES in encodings:
                        # No text is longer than the chunk, so this many rows stay below the limit even if all are as long.
                        rows = max(1, min(_ROWS, FREE_BYTES // max(1, chunks[leaf].total_uncompressed_size)))
                        size = _added(file, group, name, rows, size, path)
                    elif encodings & _STORED_ONCE:
                        size = _added(encoded, group, name, _rows(chunks[leaf]), size, path)
                yield file, group


def _rows(chunk: ColumnChunkMetaData) -> int:
    """Return how many rows of a column of texts to read at once."""
    bytes_a_row = max(1, chunk.total_uncompressed_size // max(1, chunk.num_values))
    return max(_FEWEST_ROWS, min(_ROWS, _AT_ONCE // bytes_a_row))


def _added(file: ParquetFile, group: int, column: str, rows: int, size: int, path: Path) -> int:
    """Return `size` with the bytes of a column's texts in a row group; raise a `UserError` above the limit."""
    for batch in file.iter_batches(batch_size=rows, row_groups=[group], columns=[column]):
        size += sum(map(_text_bytes, batch.columns))
        check_expansion(size, path)
    return size


def _text_bytes(array: pa.Array) -> int:
    """Return the number of bytes of all texts of an array, each repeated value counted as often as it occurs."""
    import pyarrow as pa
    import pyarrow.compute

    kind = array.type
    if pa.types.is_dictionary(kind):
        lengths = pa.compute.binary_length(array.dictionary).take(array.indices)
        return int(pa.compute.sum(lengths.cast(pa.int64())).as_py() or 0)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _text_bytes(array.flatten())
    if pa.types.is_map(kind):
        return _text_bytes(array.keys) + _text_bytes(array.items)
    if pa.types.is_struct(kind):
        return sum(map(_text_bytes, array.flatten()))
    return int(array.nbytes)


def check_expansion(size: int, path: Path) -> None:
    """Raise a `UserError` if this many bytes are more than a file may expand to."""
    stored = path.stat().st_size
    most = max(FREE_BYTES, RATIO * stored)
    if size > most:
        raise UserError(
            f"{path}: its {stored:,} bytes expand to more than {most:,}, the most that is read of it ({RATIO} times its size, and "
            f"{FREE_BYTES / 2**30:g} GiB of any file). If that is no mistake, write the data as uncompressed JSON lines or CSV, which "
            "have no limit."
        )


class _Bounded(io.RawIOBase):
    """A decompressed stream that counts what is read."""

    def __init__(self, stream: IO[bytes], path: Path) -> None:
        self._stream, self._path, self._size = stream, path, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self._stream.read(min(len(buffer), _CHUNK))
        self._size += len(content)
        check_expansion(self._size, self._path)
        buffer[: len(content)] = content
        return len(content)

    def readall(self) -> bytes:
        return b"".join(iter(lambda: self.read(_CHUNK), b""))
