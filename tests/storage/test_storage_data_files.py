"""Files as people have them hold the table that was written, whatever form it has."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pandas
import pyarrow as pa
import pyarrow.parquet
import pytest

from mlmclm.errors import UserError
from mlmclm.storage.data_files import files_of, open_table, open_text, read_table
from small_compressions import COMPRESSIONS

TEXTS = [
    "007",
    "7",
    "01",
    "NA",
    "null",
    "nan",
    "None",
    "true",
    "2020-01-02",
    "12:30",
    "1e5",
    " 1",
    "1.50",
    "9" * 23,
    "0x1F",
    "",
]
"""Text that libraries take for something else."""
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


def rows_of(kind: str) -> list[dict[str, Any]]:
    """The rows of a file of `KINDS`: CSV and TSV know text alone."""
    return [{**row, "label": str(row["label"])} if kind in ("csv", "tsv") else row for row in ROWS]


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_each_compression_can_be_read_and_one_cut_short_is_an_error(
    tmp_path: Path, kind: str, compression: str
) -> None:
    file = tmp_path / f"a.{kind}{compression}"
    for mark in (b"\xef\xbb\xbf", b""):
        content = COMPRESSIONS[compression](mark + KINDS[kind]())
        file.write_bytes(content)
        assert read_table(file).to_pylist() == rows_of(kind)
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


def test_a_split_is_read_once_however_often_it_is_there(tmp_path: Path) -> None:
    for name in (
        "train.csv", "train.jsonl", "train.jsonl.gz", "train.csv.gz", "train.csv.bz2", "train-00000-of-00001.csv", "train/0.csv",
        "train/dataset_info.json", "test-00000-of-00003.csv", "test-00002-of-00003.csv",
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert files_of([tmp_path], ["dev", "train"]) == [tmp_path / "train.jsonl"]
    with pytest.raises(
        UserError, match=r"parts of a split are missing, or there twice: test-00000-of-00003\.csv, test-"
    ):
        files_of([tmp_path], ["test"])
    for name in ("train.csv", "train.jsonl", "train.jsonl.gz"):
        (tmp_path / name).unlink()
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


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", "text,label\na,1\none, two,1\n", "line 3 has 3 fields and the first 2: one, two,1"),
        ("a.csv", 'text,label\n"a\nb",1\nc\n', "line 4 has 1 fields and the first 2: c"),
        ("a.tsv", "text\tlabel\na\rb\t1\n", "line 2 has 1 fields and the first 2: a"),
    ],
)
def test_a_row_of_another_width_is_named(tmp_path: Path, name: str, content: str, said: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=said):
        read_table(tmp_path / name)


def test_numbers_and_suffixes_that_are_out_of_the_ordinary(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(f'[{{"a": {2**70}}}]')
    assert read_table(tmp_path / "a.json").to_pylist() == [{"a": str(2**70)}]
    (tmp_path / "b.csv.GZ").write_bytes(COMPRESSIONS[".gz"](KINDS["csv"]()))
    assert read_table(tmp_path / "b.csv.GZ").to_pylist() == rows_of("csv")
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), sink)
    (tmp_path / "c.parquet.gz").write_bytes(COMPRESSIONS[".gz"](sink.getvalue()))
    assert read_table(tmp_path / "c.parquet.gz").to_pylist() == ROWS


@pytest.mark.parametrize("neighbours", [[], ["1", "2"], ["word"], [""]])
@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "json", "parquet", "arrow"])
def test_text_is_the_characters_in_the_file_whatever_it_looks_like(
    tmp_path: Path, suffix: str, neighbours: list[str]
) -> None:
    for value in TEXTS:
        frame = pandas.DataFrame({"text": ["a", *["b"] * len(neighbours)], "value": [value, *neighbours]}, dtype=str)
        file = tmp_path / f"a.{suffix}"
        if suffix in ("csv", "tsv"):
            delimiter = "," if suffix == "csv" else "\t"
            frame.to_csv(file, index=False, sep=delimiter)
            expected = pandas.read_csv(file, sep=delimiter, dtype=str, keep_default_na=False)
        elif suffix == "parquet":
            frame.to_parquet(file)
            expected = frame
        elif suffix == "arrow":
            table = pa.Table.from_pandas(frame).cast(pa.schema([("text", pa.string()), ("value", pa.string())]))
            with pa.ipc.new_file(str(file), table.schema) as writer:
                writer.write_table(table)
            expected = frame
        else:
            frame.to_json(file, orient="records", lines=suffix == "jsonl")
            expected = frame
        found = ["" if each is None else each for each in read_table(file)["value"].to_pylist()]
        assert found == expected["value"].tolist() == frame["value"].tolist()


@pytest.mark.parametrize(
    ("values", "read"),
    [
        ([1984, "name"], ["1984", "name"]),
        ([True, "name", 1.5], ["true", "name", "1.5"]),
        ([float("nan"), "name"], [None, "name"]),
        ([1, 2.5], [1.0, 2.5]),
        ([10**22 + 1, 7], [str(10**22 + 1), "7"]),
        (
            [{"title": 1984}, {"title": "name", "more": []}],
            [{"title": "1984", "more": None}, {"title": "name", "more": []}],
        ),
        ([["a", 1], None, []], [["a", "1"], None, []]),
        ([["a"], {"b": 1}, "c"], [b'["a"]', b'{"b": 1}', b'"c"']),
        ([{}, {}], [{}, {}]),
    ],
)
def test_a_column_of_json_may_mix_types(tmp_path: Path, values: list[Any], read: list[Any]) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"x": 1, "value": value}) + "\n" for value in values))
    assert read_table(tmp_path / "a.jsonl").to_pylist() == [{"x": 1, "value": value} for value in read]


FRAME = pandas.DataFrame({"text": ["one", "two", "three"], "label": ["a", "b", "a"]})


@pytest.mark.parametrize(
    "content",
    [
        FRAME.to_json(),
        FRAME.to_json(orient="split"),
        FRAME.to_json(orient="table"),
        FRAME.to_json(orient="index"),
        FRAME.to_json(orient="records"),
        FRAME.to_json(orient="records", lines=True),
        FRAME.set_index(pandas.Index(["x", "y", "z"])).to_json(),
        json.dumps(FRAME.to_dict(orient="list")),
        json.dumps({"version": "1.0", "data": FRAME.to_dict(orient="records")}, indent=1),
        "\n".join(json.dumps(row, indent=1) for row in FRAME.to_dict(orient="records")),
    ],
)
def test_the_forms_of_json_that_pandas_writes_are_one_table(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.json").write_text(content)
    assert read_table(tmp_path / "a.json").select(["text", "label"]).to_pydict() == FRAME.to_dict(orient="list")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a": {"x": 1, "y": 2}, "b": {"x": 3, "y": 4}}', "could be rows or columns"),
        ('{"train": [{"a": 1}], "test": [{"a": 2}]}', "train and test are a table each"),
        ('[["a", 1], ["b", 2]]', r'value 1 is \["a", 1\], where an object is expected'),
        ('{"columns": ["a"], "data": [[1], [2, 3]]}', r"value 2 is \[2, 3\], where an object is expected"),
        (json.dumps({f"q{n}": {f"d{n}": 1} for n in range(200)}), "its 200 objects have 201 different keys"),
    ],
)
def test_json_that_is_not_clearly_a_table_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(UserError, match=rf"a\.json: (its |it )?.*{message}"):
        read_table(tmp_path / "a.json")


def test_objects_keyed_by_ids_take_a_time_in_proportion_to_their_number(tmp_path: Path) -> None:
    """A time that grew with the square of their number would be hours."""
    keyed = {f"k{number}": {"text": "a", "label": number % 2} for number in range(40_000)}
    (tmp_path / "a.json").write_text(json.dumps(keyed))
    assert read_table(tmp_path / "a.json").to_pydict() == {
        "id": list(keyed),
        "text": ["a"] * len(keyed),
        "label": [row["label"] for row in keyed.values()],
    }
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"x": 1, "by_id": {key: keyed[key]}}) for key in keyed))
    assert json.loads(read_table(tmp_path / "a.jsonl")["by_id"][3].as_py()) == {"k3": keyed["k3"]}


def test_a_quoted_field_that_goes_on_and_columns_without_anything_are_told(tmp_path: Path) -> None:
    for text in ('text,label\n"a",1\n"he said \\"hi\\" there",1\n', 'text,label\n"a",1\n"b"c,2\n'):
        (tmp_path / "a.csv").write_text(text)
        with pytest.raises(UserError, match=r"a\.csv, line 3: a quoted field goes on behind its closing mark"):
            read_table(tmp_path / "a.csv")
    (tmp_path / "a.csv").write_text("text,label,,,note\na,1,,,\nb,2,,,\n")
    assert read_table(tmp_path / "a.csv").to_pydict() == {"text": ["a", "b"], "label": ["1", "2"], "note": [None, None]}


def test_a_line_that_names_the_delimiter_is_no_header(tmp_path: Path) -> None:
    for line, delimiter in (("sep=,", ","), ("sep=;", ";"), ('"sep=\t"', "\t")):
        (tmp_path / "a.csv").write_text(
            f"{line}\r\ntext{delimiter}label\r\na, b{delimiter}1\r\n".replace("a, b", '"a, b"')
        )
        assert read_table(tmp_path / "a.csv").to_pylist() == [{"text": "a, b", "label": "1"}]


@pytest.mark.parametrize("sign", [";", "\t", "|"])
def test_csv_that_is_divided_by_semicolons_tabs_or_bars_is_read_as_pandas_reads_it(tmp_path: Path, sign: str) -> None:
    frame = pandas.DataFrame({"a, name": ["x, y", 'say "so"', "1,5"], "label": ["p;q", "r", "s"]})
    frame.to_csv(
        tmp_path / "a.csv", index=False, sep=sign, encoding="utf-8-sig", lineterminator="\r\n", quoting=csv.QUOTE_ALL
    )
    expected = pandas.read_csv(tmp_path / "a.csv", sep=sign, dtype=str)
    assert read_table(tmp_path / "a.csv").to_pylist() == expected.to_dict("records") == frame.to_dict("records")
    (tmp_path / "b.csv").write_text("a;b,c\n1;2,3\n")  # a comma in the first line divides
    assert read_table(tmp_path / "b.csv").to_pylist() == [{"a;b": "1;2", "c": "3"}]


def test_a_folder_of_save_to_disk_holds_the_rows_and_names_that_were_saved(tmp_path: Path) -> None:
    data = datasets.Dataset.from_list([{**row, "more": [str(row["label"])]} for row in ROWS])
    data = data.cast_column("label", datasets.ClassLabel(names=["no", "yes"]))
    data.save_to_disk(tmp_path / "train", num_shards=2)
    datasets.load_from_disk(str(tmp_path / "train")).filter(lambda row: row["label"])  # leaves a cache beside the data
    files = files_of([tmp_path], ["train"])
    tables = [read_table(file) for file in files]
    assert [row for table in tables for row in table.to_pylist()] == data.to_list()
    assert b"ClassLabel" in tables[0].schema.metadata[b"huggingface"]


@pytest.mark.parametrize(
    ("column", "compression", "message"),
    [
        (pa.array(["a"] * 99), "zstd", "compressed Arrow files are not read"),
        (pa.array(["a"] * 99).dictionary_encode(), None, "the column 'x' is stored as dictionary"),
        (pa.array(["a"] * 99, pa.string_view()), None, "the column 'x' is stored as string_view"),
    ],
)
def test_an_arrow_file_whose_size_does_not_bound_what_it_holds_is_refused(
    tmp_path: Path, column: pa.Array, compression: str | None, message: str
) -> None:
    table, options = pa.table({"x": column}), pa.ipc.IpcWriteOptions(compression=compression)
    for make in (pa.ipc.new_file, pa.ipc.new_stream):
        with make(str(tmp_path / "a.arrow"), table.schema, options=options) as writer:
            writer.write_table(table)
        with pytest.raises(UserError, match=rf"a\.arrow: .*{message}"):
            read_table(tmp_path / "a.arrow")
    (tmp_path / "a.arrow").write_bytes((tmp_path / "a.arrow").read_bytes()[:90])
    with pytest.raises(UserError, match=r"a\.arrow cannot be read; is it cut short"):
        read_table(tmp_path / "a.arrow")


def test_a_parquet_file_that_is_cut_short_while_it_is_read_is_an_error_and_ends_no_process(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    table = pa.table({"text": [f"{number} " * 100 for number in range(20_000)]})
    pyarrow.parquet.write_table(table, file, row_group_size=2000, compression="none", use_dictionary=False)
    with pytest.raises(OSError, match="File too short"), open_table(file, ["text"]) as (_, batches):
        next(batches)
        os.truncate(file, 5000)
        list(batches)
