"""Finding and reading the files of a source, and what is said where that cannot be done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from mlmclm.corpora.config import CorpusConfig, TokenizerConfig
from mlmclm.corpora.documents import FileSource, open_source
from mlmclm.errors import UserError

ROWS = ["First document.", "Second one.\nTwo lines.", "Third: ünïcode."]


def read(path: Path, store: Path, **options: Any) -> list[str]:
    return list(open_source(CorpusConfig(source=str(path), **options), store=store).train())


def write(path: Path, rows: list[str], column: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"id": range(len(rows)), column: rows}), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps([{column: row} for row in rows]))
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps({column: row}) for row in rows) + "\n\n")
    else:
        path.write_text("\n\n\n".join(rows) + "\n")
    return path


@pytest.mark.parametrize("suffix", ["parquet", "json", "jsonl", "txt"])
def test_every_kind_of_file_gives_its_documents(suffix: str, tmp_path: Path) -> None:
    assert read(write(tmp_path / f"corpus.{suffix}", ROWS), tmp_path) == ROWS


def test_a_json_file_may_hold_one_object_a_line(tmp_path: Path) -> None:
    lines = write(tmp_path / "corpus.jsonl", ROWS)
    assert read(lines.rename(tmp_path / "corpus.json"), tmp_path) == ROWS


def test_a_folder_is_read_by_split(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    write(folder / "train-00000-of-00002.parquet", ROWS[:1])
    write(folder / "train-00001-of-00002.parquet", ROWS[1:2])
    write(folder / "validation.parquet", ROWS[2:])
    write(folder / "test.parquet", ["never"])
    source = open_source(CorpusConfig(source="data"), store=tmp_path, data_root=tmp_path)
    assert list(source.train()) == ROWS[:2]
    assert list(source.validation() or []) == ROWS[2:]


def test_splits_may_be_folders(tmp_path: Path) -> None:
    write(tmp_path / "data/train/a.txt", ROWS[:1])
    write(tmp_path / "data/dev/a.txt", ROWS[1:2])
    source = FileSource(tmp_path / "data", CorpusConfig(source="x"), tmp_path)
    assert list(source.train()) == ROWS[:1]
    assert list(source.validation() or []) == ROWS[1:2]


def test_a_folder_without_split_names_is_all_train(tmp_path: Path) -> None:
    write(tmp_path / "data/b.txt", ROWS[1:])
    write(tmp_path / "data/a.jsonl", ROWS[:1])
    source = FileSource(tmp_path / "data", CorpusConfig(source="x"), tmp_path)
    assert list(source.train()) == ROWS
    assert source.validation() is None


def test_a_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ROWS)
    other = write(tmp_path / "elsewhere/b.jsonl", ROWS)
    prints = [FileSource(file, CorpusConfig(source="x"), tmp_path).fingerprint() for file in (path, other)]
    assert prints[0] == prints[1]
    write(path, ROWS[:2])
    assert FileSource(path, CorpusConfig(source="x"), tmp_path).fingerprint() != prints[0]


@pytest.mark.parametrize("suffix", ["parquet", "json", "jsonl"])
def test_a_missing_column_names_those_that_are_there_and_the_nearest(suffix: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"corpus.{suffix}", ROWS, column="texts")
    with pytest.raises(UserError, match=r"no column 'text'. Did you mean 'texts'\? Its columns: .*texts"):
        read(path, tmp_path)
    assert read(path, tmp_path, text_column="texts") == ROWS


def test_a_column_that_is_not_text_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="column 'id' holds int, not text"):
        read(write(tmp_path / "corpus.parquet", ROWS), tmp_path, text_column="id")


@pytest.mark.parametrize("source", ["./nothing", "/nowhere/at/all", "a/b/c", "corpus.parquet"])
def test_a_missing_path_is_an_error(source: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no file or folder"):
        open_source(CorpusConfig(source=source), store=tmp_path, data_root=tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text"\n', "line 2: not valid JSON"),
        ("a.jsonl", b'"text"\n', "expected an object"),
        ("a.json", b'["text"]', "entry 0: expected an object"),
        ("a.txt", b"caf\xe9 \xff\xfe", "not UTF-8"),
        ("a.parquet", b"nonsense", "not a Parquet file"),
    ],
)
def test_a_malformed_file_is_named(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        read(tmp_path / name, tmp_path)
    assert name in str(error.value)


def test_an_unknown_kind_of_file_names_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "a.docx").write_bytes(b"")
    with pytest.raises(UserError, match=r"Allowed: \.parquet, \.jsonl, \.json, \.txt"):
        read(tmp_path / "a.docx", tmp_path)


def test_a_folder_without_text_files_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with pytest.raises(UserError, match="no file of text"):
        read(tmp_path / "data", tmp_path)


def test_an_unknown_split_names_the_files(tmp_path: Path) -> None:
    write(tmp_path / "data/train.txt", ROWS)
    with pytest.raises(UserError, match=r"no file of split 'valid'.*train.txt"):
        open_source(CorpusConfig(source=str(tmp_path / "data"), validation_split="valid"), store=tmp_path)


@pytest.mark.parametrize("values", [{}, {"name": "a", "path": "b"}, {"path": "b", "revision": "c"}])
def test_a_tokenizer_has_exactly_one_origin(values: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match=r"exactly one of|revision goes with name"):
        TokenizerConfig.model_validate(values)
