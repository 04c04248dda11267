"""Finding and reading the files of a source, and what is said where that cannot be done."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from mlmclm.corpora import documents
from mlmclm.corpora.corpus_config import CorpusConfig, TokenizerConfig
from mlmclm.corpora.documents import LONGEST_DOCUMENT, FileSource, open_source
from mlmclm.errors import UserError
from mlmclm.storage.files import hash_file, stable_hash
from small_compressions import COMPRESSIONS

KEPT = {"jsonl+txt": "2b9d06cebe165a8a", "md+txt": "09820a4f2fcd8a3d", "jsonl+README.md": "9e1111619a19a4fc"}
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


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("kind", ["tsv", "txt", "jsonl"])
def test_files_as_people_have_them_give_their_documents(kind: str, compression: str, tmp_path: Path) -> None:
    content = {
        "tsv": "text\tother\n" + "".join(f'"{row}"\t1\n' for row in ROWS),
        "txt": "\n\n".join(ROWS),
        "jsonl": "".join(json.dumps({"text": row}) + "\n" for row in ROWS),
    }[kind]
    path = tmp_path / f"corpus.{kind}{compression}"
    path.write_bytes(COMPRESSIONS[compression](b"\xef\xbb\xbf" + content.encode()))
    assert read(path, tmp_path, text_documents="paragraph") == ROWS
    if compression:
        path.write_bytes(path.read_bytes()[:-12])
        with pytest.raises(UserError, match=rf"corpus\.{kind}{compression} cannot be read; is it cut short\?"):
            read(path, tmp_path, text_documents="paragraph")


def test_all_kinds_in_one_folder_are_read_and_only_copies_lists_and_cards_are_left_out(tmp_path: Path) -> None:
    """As pandas, pyarrow and plain reading find the rows of each file."""
    folder, expected = tmp_path / "data", []
    kinds = [f"{kind}{end}" for kind in ("parquet", "jsonl", "json", "csv", "tsv", "txt", "md") for end in COMPRESSIONS]
    for number, kind in enumerate(kinds):
        whole = Path(kind).with_suffix("") if Path(kind).suffix in (".gz", ".bz2", ".xz", ".zst") else Path(kind)
        row, file = f"row {number}", folder / f"part-{number:02}.{whole}"
        if whole.name in ("csv", "tsv"):
            file.write_text(
                f"text{',' if whole.name == 'csv' else chr(9)}id\n{row}{',' if whole.name == 'csv' else chr(9)}1\n"
            )
        else:
            write(file, [row])
        if end := kind.removeprefix(whole.name):
            file.with_name(file.name + end).write_bytes(COMPRESSIONS[end](file.read_bytes()))
            file.unlink()
        expected.append(row)
    for name, content in {"d.csv": "id;text\n1;row d\n", "e.csv": "sep=;\nid;text\n1;row e\n"}.items():
        (folder / name).write_text(content)
        expected.append(f"row {name[0]}")
    copies = ("part-00.csv", "part-00.jsonl.gz")
    for name, content in {"list.csv": "file,kind\na,b\n", "README.md": "a card", "dataset_info.json": "{}"}.items():
        (folder / name).write_text(content)
    for name in copies:
        (folder / name).write_text("text\nrow 0\n")
    source = FileSource(folder, CorpusConfig(source="x"), tmp_path)
    assert sorted(source.train()) == sorted(expected)
    assert source.left_out() == (
        "2 about the data set (README.md, dataset_info.json), 1 without a column 'text' (list.csv), "
        "2 that repeat another file (part-00.csv, part-00.jsonl.gz)"
    )
    source.check()


def test_a_text_and_a_compressed_table_of_one_name_are_both_read(tmp_path: Path) -> None:
    write(tmp_path / "data/a.txt", ["text"])
    write(tmp_path / "data/a.jsonl", ["row"])
    (tmp_path / "data/a.jsonl.gz").write_bytes(gzip.compress((tmp_path / "data/a.jsonl").read_bytes()))
    (tmp_path / "data/a.jsonl").unlink()
    assert read(tmp_path / "data", tmp_path) == ["row", "text"]


def test_a_corpus_that_would_lose_a_tenth_of_its_bytes_is_refused_unless_that_is_allowed(tmp_path: Path) -> None:
    write(tmp_path / "data/train.jsonl", ["a" * 880])
    folder, size = tmp_path / "data", (tmp_path / "data/train.jsonl").stat().st_size
    for name in ("cover.png", "test.jsonl", "README.md", ".hidden.pdf", "train.jsonl.gz"):
        (folder / name).write_bytes(b"x" * 10_000)
    FileSource(folder, CorpusConfig(source="x"), tmp_path).check()
    for name, bytes_, refused in (("b.pdf", size // 10, False), ("b.pdf", size // 5, True), ("notes", size // 5, True)):
        (folder / name).write_bytes(b"x" * bytes_)
        source = FileSource(folder, CorpusConfig(source="x"), tmp_path)
        if refused:
            with pytest.raises(UserError, match=rf"data: 17 % of its bytes .* of a kind that is not read \(.*{name}"):
                source.check()
        else:
            source.check()
        (folder / name).unlink()
    folder = tmp_path / "other"
    write(folder / "c.txt", ["c"])
    (folder / "b.csv").write_text("name\nx\n")
    with pytest.raises(UserError, match=r"1 without a column 'text' \(b\.csv\)"):
        FileSource(folder, CorpusConfig(source="x"), tmp_path).check()
    FileSource(folder, CorpusConfig(source="x", max_left_out=1), tmp_path).check()


def test_a_folder_that_was_read_whole_keeps_its_identity(tmp_path: Path) -> None:
    """The fingerprints are those of before mixed folders were read whole."""
    for name, expected in KEPT.items():
        folder = tmp_path / name
        for number, file in enumerate(name.split("+")):
            write(folder / f"f{number}.{file}", [f"{file} {number}"]) if file != "README.md" else write(
                folder / file, ["c"]
            )
        assert FileSource(folder, CorpusConfig(source="x"), tmp_path).fingerprint() == expected, name


def test_the_card_of_a_data_set_in_csv_files_is_no_text_and_nor_are_hidden_files(tmp_path: Path) -> None:
    for name in ("README.md", "dataset_infos.json", ".ipynb_checkpoints/train.csv", "._train.csv"):
        write(tmp_path / "data" / name, ["other"])
    (tmp_path / "data" / "train.csv").write_text("text\none\ntwo\n")
    source = FileSource(tmp_path / "data", CorpusConfig(source="x"), tmp_path)
    assert list(source.train()) == ["one", "two"]
    assert source.left_out() == "2 about the data set (README.md, dataset_infos.json)"


def test_a_folder_of_save_to_disk_gives_the_text_that_was_saved(tmp_path: Path) -> None:
    data = datasets.DatasetDict({part: datasets.Dataset.from_dict({"text": ROWS}) for part in ("train", "validation")})
    data.save_to_disk(tmp_path / "data", num_shards={"train": 2, "validation": 1})
    saved = datasets.load_from_disk(str(tmp_path / "data"))
    saved["train"].map(lambda row: {"text": row["text"] + " more"})  # leaves a cache beside the data
    assert list((tmp_path / "data" / "train").glob("cache-*.arrow"))
    source = FileSource(tmp_path / "data", CorpusConfig(source="x"), tmp_path)
    assert list(source.train()) == list(saved["train"]["text"]) == ROWS
    assert list(source.validation() or []) == ROWS
    for file in (tmp_path / "data").rglob("*.arrow"):
        file.unlink()
    with pytest.raises(UserError, match="there is no file of text in this folder"):
        FileSource(tmp_path / "data", CorpusConfig(source="x"), tmp_path)


OTHERS = ["training_camp.jsonl", "values.jsonl", "devices.jsonl", "trains.jsonl"]
BOOKS = ["development/b.txt", "testing/a.md", "training.md", "valley.txt"]


@pytest.mark.parametrize(
    ("train", "validation", "others"),
    [
        (["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"], ["validation.parquet"], ["test.parquet"]),
        (["train/a.txt"], ["dev/a.txt"], []),
        (["a.jsonl", "b.txt"], [], []),
        # A split's name ends where a word does, and a title is no split.
        (["train.jsonl"], ["valid.jsonl"], OTHERS),
        (["training.jsonl"], ["valset.jsonl"], OTHERS),
        (["train-1.jsonl"], ["dev_2.jsonl"], OTHERS),
        (["trainset-01.jsonl"], ["validation.a.jsonl"], OTHERS),
        (BOOKS, [], [".pytest_cache/README.md"]),
        (["train-1.txt"], ["dev_2.txt"], BOOKS),
        # Without a file of the split's own name, those whose names begin with it are read.
        (["trainA.jsonl", "trainB.jsonl"], [], ["heldout.jsonl", "test.jsonl"]),
    ],
)
def test_a_folder_is_read_by_split(train: list[str], validation: list[str], others: list[str], tmp_path: Path) -> None:
    for name in (*train, *validation, *others):
        write(tmp_path / "data" / name, [name])
    source = open_source(CorpusConfig(source="data"), store=tmp_path, data_root=tmp_path)
    assert (list(source.train()), list(source.validation() or [])) == (train, validation)
    if "training.md" in others:
        assert source.left_out() == "4 of another split (development/b.txt, testing/a.md, training.md, valley.txt)"
    if "heldout.jsonl" in others:
        named = FileSource(tmp_path / "data", CorpusConfig(source="x", validation_split="held"), tmp_path)
        assert list(named.validation() or []) == ["heldout.jsonl"]


@pytest.mark.parametrize("suffix", ["txt", "md"])
def test_a_text_file_is_one_document_unless_paragraphs_are_asked_for(suffix: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"corpus.{suffix}", ROWS)
    assert read(path, tmp_path) == ["\n\n\n".join(ROWS)]
    assert read(path, tmp_path, text_documents="paragraph") == ROWS
    path.write_bytes(b"\xef\xbb\xbfWith a mark.\r\n\r\nAnd more.\r\n")
    assert read(path, tmp_path) == ["With a mark.\n\nAnd more."]


def test_the_identity_of_other_files_and_of_paragraphs_is_what_it_was(tmp_path: Path) -> None:
    prints = {}
    for suffix in ("jsonl", "txt"):
        path = write(tmp_path / f"corpus.{suffix}", ROWS)
        for way in ("file", "paragraph"):
            config = CorpusConfig.model_validate({"source": str(path), "text_documents": way})
            assert "text_documents" not in config.identity()
            prints[suffix, way] = FileSource(path, config, tmp_path).fingerprint()
    parts = [["train", ".txt", path.stat().st_size, hash_file(path)]]
    assert prints["txt", "paragraph"] == stable_hash(["text", parts])[:16], "as before there was a choice"
    assert prints["jsonl", "file"] == prints["jsonl", "paragraph"]
    assert prints["txt", "file"] != prints["txt", "paragraph"]


def test_files_that_are_not_read_are_named(tmp_path: Path) -> None:
    write(tmp_path / "data/a.jsonl", ROWS)
    for name in ("README.md", "a.pdf", "b.epub", "c/d.docx", "e.html", "f.xml", "g.doc", ".git/config"):
        write(tmp_path / "data" / name, ["other"])
    source = FileSource(tmp_path / "data", CorpusConfig(source="x"), tmp_path)
    assert list(source.train()) == ROWS, "Markdown beside tables is about them"
    assert source.left_out() == (
        "1 about the data set (README.md), 6 of a kind that is not read (a.pdf, b.epub, c/d.docx, e.html, f.xml and 1 more)"
    )


def test_a_text_file_that_is_too_long_for_one_document_is_refused_and_paragraphs_of_it_are_streamed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "long.txt"
    with path.open("w") as file:
        file.write("First.\n\n")
        file.truncate(LONGEST_DOCUMENT + 1)
    with pytest.raises(
        UserError, match=r"long\.txt: 16 MiB are too long for one document.*'text_documents: paragraph'"
    ):
        read(path, tmp_path)
    config = CorpusConfig(source=str(path), text_documents="paragraph")
    assert next(open_source(config, store=tmp_path).train()) == "First."


def test_many_small_texts_are_read_in_few_pieces_in_the_same_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "PIECE_BYTES", 10)
    names = [f"{number}.txt" for number in range(7)]
    for name in names:
        write(tmp_path / "data" / name, ["x" * (20 if name == "3.txt" else 3)])
    source = FileSource(tmp_path / "data", CorpusConfig(source="x"), tmp_path)
    pieces = [list(piece()) for piece in source.pieces("train") or []]
    assert [len(piece) for piece in pieces] == [2, 1, 1, 2, 1]
    assert [text for piece in pieces for text in piece] == list(source.train())
    (tmp_path / "data" / "+.txt").touch()  # before all others
    source = FileSource(tmp_path / "data", CorpusConfig(source="x"), tmp_path)
    assert [len(list(piece())) for piece in source.pieces("train")] == [3, 1, 1, 2, 1]


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
        ("a.json", b'["text"]', 'value 1 is "text", where an object is expected'),
        ("a.json", b'[{"text": "a"}', "cannot be read; is it cut short"),
        ("a.txt", b"caf\xe9 \xff\xfe", "line 1: not UTF-8"),
        ("a.parquet", b"nonsense", "cannot be read; is it cut short"),
    ],
)
def test_a_malformed_file_is_named(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        read(tmp_path / name, tmp_path)
    assert name in str(error.value)


def test_an_unknown_kind_of_file_names_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "a.docx").write_bytes(b"")
    with pytest.raises(
        UserError, match=r"Allowed: \.parquet, \.arrow, \.jsonl, \.json, \.csv, \.tsv, \.txt, \.md, each also with \.gz"
    ):
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


@pytest.mark.parametrize("suffix", ["json.gz", "jsonl"])
def test_a_split_within_the_names_of_files_is_the_one_that_datasets_takes(tmp_path: Path, suffix: str) -> None:
    folder = tmp_path / "c4"
    folder.mkdir()
    for split, count in (("train", 3), ("validation", 2)):
        for part in range(count):
            opened = gzip.open if suffix.endswith("gz") else open
            with opened(folder / f"c4-{split}.{part:05}-of-{count:05}.{suffix}", "wt") as file:
                file.write(json.dumps({"text": f"{split} {part}"}))
    source = open_source(CorpusConfig(source=str(folder)), store=tmp_path)
    found = datasets.load_dataset(str(folder), cache_dir=str(tmp_path / "cache"))
    assert [*source.train()] == list(found["train"]["text"])
    assert [*(source.validation() or ())] == list(found["validation"]["text"])
    for name in ("model-test.jsonl", "notes.jsonl"):
        (tmp_path / "own" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "own" / name).write_text(json.dumps({"text": name}))
    source = open_source(CorpusConfig(source=str(tmp_path / "own")), store=tmp_path)
    assert [*source.train()] == ["model-test.jsonl", "notes.jsonl"] and source.validation() is None, (
        "none is the training's"
    )


@pytest.mark.parametrize("form", ["records", "lines", "columns", "index", "split", "table"])
def test_a_corpus_may_be_whatever_json_pandas_writes(tmp_path: Path, form: str) -> None:
    frame = pandas.DataFrame({"text": ROWS, "number": range(len(ROWS))}, index=[f"r{n}" for n in range(len(ROWS))])
    frame.to_json(tmp_path / "a.json", orient="records" if form == "lines" else form, lines=form == "lines")
    assert read(tmp_path / "a.json", tmp_path) == ROWS
