"""Arrow files, as `Dataset.save_to_disk` writes them, in Arrow's stream or file format.

The size of an Arrow file bounds the memory that its content takes, unless it is compressed, or its columns repeat
stored values (dictionaries, views). Such files are refused.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mlmclm.errors import UserError
from mlmclm.storage.expansion import check_expansion

if TYPE_CHECKING:
    import pyarrow as pa

ARROW = ".arrow"
_STATE = "state.json"
_FILE = b"ARROW1\0\0"
"""The start of the file format, after which the stream format follows."""


def without_caches(files: Iterable[Path]) -> list[Path]:
    """Return files without those Arrow files that the `state.json` beside them doesn't name, such as caches of `map`."""
    named: dict[Path, set[str]] = {}
    kept = []
    for file in files:
        state = file.parent / _STATE
        if file.suffix == ARROW and state not in named:
            named[state] = _names_in(state) if state.is_file() else set()
        if file.suffix != ARROW or not state.is_file() or file.name in named[state]:
            kept.append(file)
    return kept


def _names_in(state: Path) -> set[str]:
    try:
        return {str(entry["filename"]) for entry in json.loads(state.read_bytes())["_data_files"]}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{state}: not what save_to_disk writes: no list of files '_data_files'.") from error


def arrow_batches(source: pa.NativeFile, path: Path) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Return the schema of an Arrow file and its batches, each checked.

    Args:
        source: the file, or its decompressed content.
        path: the file, for messages.

    Raises:
        UserError: the file is compressed, or has types that repeat stored values.
        pyarrow.ArrowException: this is no Arrow file.
    """
    import pyarrow as pa

    if source.read(len(_FILE)) != _FILE:
        source.seek(0)
    messages = iter(pa.ipc.MessageReader.open_stream(source))
    first = next(messages, None)
    if first is None:
        raise pa.ArrowInvalid("it is empty")
    schema = pa.ipc.read_schema(first)
    unsupported = next((field for field in schema if not _is_plain(field.type)), None)
    if unsupported is not None:
        raise UserError(
            f"{path}: the column {unsupported.name!r} is stored as {unsupported.type}, which is not read from Arrow files. Save it as Parquet."
        )
    return schema, _checked(messages, schema, path)


def _checked(messages: Iterable[pa.Message], schema: pa.Schema, path: Path) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    size = 0
    for message in messages:
        if _is_compressed(message.metadata):
            raise UserError(f"{path}: compressed Arrow files are not read. Save it without compression, or as Parquet.")
        batch = pa.ipc.read_record_batch(message, schema)
        size += batch.nbytes + 8 * batch.num_rows  # columns may share a buffer, or need none
        check_expansion(size, path)
        batch.validate(full=True)
        yield batch


def _is_plain(kind: pa.DataType) -> bool:
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return all(_is_plain(field.type) for field in kind)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _is_plain(kind.value_type)
    texts = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())
    return bool(pa.types.is_primitive(kind) or pa.types.is_null(kind) or kind in texts)


def _is_compressed(metadata: pa.Buffer) -> bool:
    """Return whether the header of a message, a flatbuffer, says that the body is compressed (field 3 of a RecordBatch)."""
    content = metadata.to_pybytes()

    def field(table: int, number: int) -> int:
        """Return the offset of a field from its table; 0 if the table lacks it."""
        (back,) = struct.unpack_from("<i", content, table)
        (size,) = struct.unpack_from("<H", content, table - back)
        place = 4 + 2 * number
        return int(struct.unpack_from("<H", content, table - back + place)[0]) if place < size else 0

    (message,) = struct.unpack_from("<I", content, 0)
    header = message + field(message, 2)
    (batch,) = struct.unpack_from("<I", content, header)
    return field(header + batch, 3) != 0
