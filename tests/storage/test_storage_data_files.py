"""Files as people have them hold the table that was written, whatever form it has."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from mlmclm.errors import UserError
from mlmclm.storage.data_files import files_of, open_text, read_table
from small_compressions import COMPRESSIONS

ROWS = [
    {"text": "plain", "label": 0},
    {"text": 'with "quotes", commas', "label": 1},
    {"text": "Grüße, 世界", "label": 1},
    {"text": "two\nlines", "label": 0},
]


def separated(delimiter: str) -> Callable[[], bytes]:
    def make() -> bytes:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, ["text", "label"], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(ROWS)
        return text.getvalue().encode()

    return make


KINDS: dict[str, Callable[[], bytes]] = {
    "jsonl": lambda: "".join(json.dumps(row) + "\n" for row in ROWS).encode(),
    "json": lambda: json.dumps(ROWS, indent=1).encode(),
    "csv": separated(","),
    "tsv": separated("\t"),
}


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_file_holds_the_rows_that_were_written(tmp_path: Path, kind: str, mark: bytes) -> None:
    (tmp_path / f"a.{kind}").write_bytes(mark + KINDS[kind]())
    assert read_table(tmp_path / f"a.{kind}").to_pylist() == ROWS


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_each_compression_can_be_read_and_one_cut_short_is_an_error(
    tmp_path: Path, kind: str, compression: str
) -> None:
    file = tmp_path / f"a.{kind}{compression}"
    content = COMPRESSIONS[compression](KINDS[kind]())
    file.write_bytes(content)
    assert read_table(file).to_pylist() == ROWS
    with open_text(file) as lines:
        assert lines.read() == KINDS[kind]().decode().replace("\r\n", "\n")
    if compression:
        file.write_bytes(content[:-12])
        with pytest.raises(UserError, match=rf"a\.{kind}{compression} cannot be read; is it cut short\?"):
            read_table(file)


def test_a_row_may_be_longer_than_a_block_that_is_read(tmp_path: Path) -> None:
    long = "line\n" * 500_000
    for kind, content in (
        ("csv", f'text\n"{long}"\nb\n'),
        ("jsonl", f'{{"text": {json.dumps(long)}}}\n{{"text": "b"}}\n'),
    ):
        (tmp_path / f"a.{kind}").write_text(content)
        assert read_table(tmp_path / f"a.{kind}")["text"].to_pylist() == [long, "b"]


def test_quotation_marks_of_a_tsv_file_as_glue_s_are_characters_like_others(tmp_path: Path) -> None:
    texts = ['"Hi," he said', 'an inch (12")', '"whole"']
    (tmp_path / "a.tsv").write_text("text\tlabel\n" + "".join(f"{text}\t1\n" for text in texts))
    assert read_table(tmp_path / "a.tsv")["text"].to_pylist() == texts


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "json"])
def test_text_that_is_not_utf_8_is_an_error_with_file_and_line(tmp_path: Path, kind: str) -> None:
    (tmp_path / f"a.{kind}").write_bytes(KINDS[kind]().replace(b"\\u00fc", "ü".encode()).replace("ü".encode(), b"\xfc"))
    line = 1 + KINDS[kind]().decode().replace("\\u00fc", "ü").partition("ü")[0].count("\n")
    with pytest.raises(UserError, match=rf"a\.{kind}, line {line}: not UTF-8 text \(.*0xfc\)"):
        read_table(tmp_path / f"a.{kind}")


def test_dictionaries_and_views_become_text(tmp_path: Path) -> None:
    words, kind = [["a", "b"], ["b"]], pa.list_(pa.dictionary(pa.int32(), pa.string()))
    table = pa.table(
        {
            "dictionary": pa.array(["x", "y"]).dictionary_encode(),
            "view": pa.array(["x", "y"], pa.string_view()),
            "lists": pa.array(words, kind),
            "structs": pa.array([{"text": each} for each in words], pa.struct([("text", kind)])),
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    found = read_table(tmp_path / "a.parquet")
    assert found.to_pylist() == table.to_pylist()
    plain = pa.list_(pa.string())
    assert found.schema.types == [pa.string(), pa.string(), plain, pa.struct([("text", plain)])]


@pytest.mark.parametrize(
    "files",
    [
        ["train.csv"],
        ["train.jsonl.gz"],
        ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"],
        ["data/train-00000-of-00001-a09b74b3ef9c3b56.parquet"],
        ["train/0000.parquet", "train/0001.parquet"],
    ],
)
def test_the_files_of_a_split_are_found_in_order_and_no_others(tmp_path: Path, files: list[str]) -> None:
    for name in [*files, "training.csv", "train_more.csv", "test.csv", ".train.csv", "train.md"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = files_of([tmp_path, tmp_path / "data"], ["train"])
    assert [str(file.relative_to(tmp_path)) for file in found] == files
    assert files_of([tmp_path], ["validation"]) == []


def test_of_several_kinds_the_first_is_taken_and_parts_that_are_missing_are_an_error(tmp_path: Path) -> None:
    for name in ("train.csv", "train.jsonl", "train.jsonl.gz", "test-00000-of-00003.csv", "test-00002-of-00003.csv"):
        (tmp_path / name).touch()
    assert files_of([tmp_path], ["dev", "train"]) == [tmp_path / "train.jsonl"]
    with pytest.raises(
        UserError, match=r"parts of a split are missing, or there twice: test-00000-of-00003\.csv, test-"
    ):
        files_of([tmp_path], ["test"])


def test_a_split_is_read_once_however_often_it_is_there(tmp_path: Path) -> None:
    for name in ("train.csv.gz", "train.csv.bz2", "train-00000-of-00001.csv", "train/0.csv", "train/dataset_info.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert files_of([tmp_path], ["train"]) == [tmp_path / "train.csv.bz2"]
    for name in ("train.csv.gz", "train.csv.bz2"):
        (tmp_path / name).unlink()
    assert files_of([tmp_path], ["train"]) == [tmp_path / "train-00000-of-00001.csv"]
    (tmp_path / "train-00000-of-00001-0a.csv").touch()
    with pytest.raises(UserError, match="there twice"):
        files_of([tmp_path], ["train"])
    for file in tmp_path.glob("train-*"):
        file.unlink()
    assert files_of([tmp_path], ["train"]) == [tmp_path / "train" / "0.csv"]


@pytest.mark.parametrize("kind", ["csv", "tsv"])
def test_a_quoted_field_must_have_an_end_wherever_the_file_ends(tmp_path: Path, kind: str) -> None:
    delimiter = "," if kind == "csv" else "\t"
    file = tmp_path / f"a.{kind}"
    file.write_text(f'id{delimiter}text\n1{delimiter}"a\nb"')
    assert read_table(file)["text"].to_pylist() == ["a\nb"]
    if kind == "csv":
        for cut in ('id,text\n1,"a\nb\n', 'id,text\n1,"a', 'id,text\n1,"a""', 'id,text\n1,"a\n2,b\n3,c\n'):
            file.write_text(cut)
            with pytest.raises(UserError, match="a quoted field has no end"):
                read_table(file)


def test_numbers_and_suffixes_that_are_out_of_the_ordinary(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(f'[{{"a": {2**70}}}]')
    with pytest.raises(UserError, match=r"a\.json cannot be read"):
        read_table(tmp_path / "a.json")
    (tmp_path / "b.csv.GZ").write_bytes(COMPRESSIONS[".gz"](KINDS["csv"]()))
    assert read_table(tmp_path / "b.csv.GZ").to_pylist() == ROWS
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), sink)
    (tmp_path / "c.parquet.gz").write_bytes(COMPRESSIONS[".gz"](sink.getvalue()))
    assert read_table(tmp_path / "c.parquet.gz").to_pylist() == ROWS
