"""A small file that stands for a large one is refused before it fills the memory."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mlmclm.corpora.text_files import read_documents
from mlmclm.errors import UserError
from mlmclm.storage import expansion
from mlmclm.storage.data_files import read_table
from small_compressions import COMPRESSIONS

BOMB = 3 << 20
"""Bytes that a small file stands for in these tests, in which any file may stand for 1 MiB."""


@pytest.fixture(autouse=True)
def _a_mebibyte_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expansion, "FREE_BYTES", 1 << 20)


def refused(file: Path) -> None:
    """Both as a task's table and as a corpus."""
    assert file.stat().st_size < 50_000
    for read in (read_table, lambda file: list(read_documents(file, "text", paragraphs=False))):
        with pytest.raises(UserError) as caught:
            read(file)
        text = str(caught.value)
        assert text.startswith(f"{file}: its {file.stat().st_size:,} bytes expand to more than ")
        assert "100 times its size" in text and "uncompressed JSON lines or CSV" in text


@pytest.mark.parametrize("compression", [name for name in COMPRESSIONS if name])
@pytest.mark.parametrize("kind", ["csv", "jsonl", "json"])
def test_a_compressed_text_file_has_a_limit(tmp_path: Path, kind: str, compression: str) -> None:
    row = {"text": "x" * BOMB}
    content = {"csv": f"text\n{row['text']}\n", "jsonl": json.dumps(row), "json": json.dumps([row])}[kind]
    file = tmp_path / f"a.{kind}{compression}"
    file.write_bytes(COMPRESSIONS[compression](content.encode()))
    refused(file)


def repeated(count: int, size: int) -> pa.Table:
    """A table of the same text again and again, which Parquet stores once."""
    text = pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), pa.array(["x" * size]))
    return pa.table({"text": text})


@pytest.mark.parametrize(
    "table",
    [repeated(200_000, 100_000), repeated(300, 30_000)],
    ids=["more than any memory", "just above"],
)
def test_a_value_that_parquet_stores_once_counts_as_often_as_it_is_there(tmp_path: Path, table: pa.Table) -> None:
    file = tmp_path / "a.parquet"
    pq.write_table(table, file, compression="zstd", store_schema=False)
    refused(file)


@pytest.mark.parametrize("encoding", ["PLAIN", "DELTA_BYTE_ARRAY"])
def test_other_ways_in_which_parquet_is_small_are_seen_too(tmp_path: Path, encoding: str) -> None:
    rows = [f"{'y' * 3_000}{number}" for number in range(2_000)]
    file = tmp_path / "a.parquet"
    pq.write_table(
        pa.table({"text": rows}), file, compression="zstd", use_dictionary=False, column_encoding={"text": encoding}
    )
    refused(file)


def test_texts_in_lists_and_structs_and_rows_of_nothing_count(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    word = "w" * 1_000
    for table in (
        pa.table({"tokens": [[word] * 3_000]}),
        pa.table({"answers": [{"text": [word] * 3_000}]}),
        pa.table({"label": pa.array([None] * 1_000_000, pa.int64())}),
    ):
        pq.write_table(table, file)
        with pytest.raises(UserError, match="expand to more than"):
            read_table(file)


def test_a_compressed_parquet_file_is_held_to_the_size_that_it_has_on_disk(tmp_path: Path) -> None:
    plain, packed = tmp_path / "b.parquet", tmp_path / "a.parquet.gz"
    pq.write_table(repeated(300, 30_000), plain, store_schema=False)
    packed.write_bytes(COMPRESSIONS[".gz"](plain.read_bytes()))
    refused(packed)


def test_a_large_file_that_shrinks_as_texts_do_is_read(tmp_path: Path) -> None:
    """Its rows are above what any file may stand for, and below a hundred times its size."""
    rows = [f"{number:05} is a number like {number * number}" for number in range(60_000)]
    for name, compression in (("a.jsonl.gz", ".gz"), ("a.jsonl.zst", ".zst")):
        content = "".join(json.dumps({"text": row}) + "\n" for row in rows).encode()
        assert len(content) > 2 << 20
        (tmp_path / name).write_bytes(COMPRESSIONS[compression](content))
        assert read_table(tmp_path / name)["text"].to_pylist() == rows
    table = pa.table({"text": rows, "label": [0, 1] * 30_000, "tokens": [row.split() for row in rows]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=10_000)
    assert read_table(tmp_path / "a.parquet").equals(table)
    assert list(read_documents(tmp_path / "a.parquet", "text", paragraphs=False)) == rows
