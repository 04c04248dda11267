"""A corpus is of the text that its key was hashed from, or there is none: files that change meanwhile are refused by name."""

from __future__ import annotations

import csv
import gzip
import json
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from small_corpora import SMALL, build

from mlmclm.corpora import documents, tokenizer
from mlmclm.corpora.corpus_config import CorpusConfig
from mlmclm.corpora.documents import TRAIN, FileSource
from mlmclm.corpora.prepared_corpus import PreparedCorpus
from mlmclm.errors import UserError
from mlmclm.storage.files import hash_file
from mlmclm.storage.unchanged import Unchanged, as_hashed, check_hashed, mark_of, marked_hash
from small_models import small_tokenizer


def write(path: Path, texts: list[str]) -> None:
    """Write texts in the format of a name."""
    kind = "".join(path.suffixes)
    if kind == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=40)
    elif kind == ".csv":
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([["text"], *([text] for text in texts)])
    elif kind == ".json":
        path.write_text(json.dumps([{"text": text} for text in texts]))
    elif kind == ".txt":
        path.write_text("\n\n".join(texts))
    else:
        content = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        path.write_bytes(gzip.compress(content.encode(), mtime=0) if kind.endswith(".gz") else content.encode())


def content(prepared: PreparedCorpus, store: Path) -> dict[str, str]:
    return {file.name: hash_file(file) for file in (store / "corpora" / prepared.key).glob("*.bin")}


@pytest.fixture
def disturb(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any], int], None]:
    """Has something happen just before a document of the next reading of a file, given its number."""

    def arrange(happen: Callable[[], Any], number: int) -> None:
        read = documents.read_documents
        left = [happen]

        def disturbed(*args: Any, **more: Any) -> Iterator[str]:
            for count, text in enumerate(read(*args, **more)):
                if count == number and left:
                    left.pop()()
                yield text

        monkeypatch.setattr(documents, "read_documents", disturbed)

    return arrange


@pytest.mark.parametrize("name", ["all.csv", "all.parquet", "all.txt", "all.jsonl.gz"])
def test_a_file_that_changes_while_it_is_read_leaves_no_corpus_and_the_old_text_gives_the_right_one(
    name: str, texts: list[str], tmp_path: Path, disturb: Callable[..., None]
) -> None:
    source, other = tmp_path / name, [text.swapcase() for text in texts]
    options: dict[str, Any] = {"shard_mib": SMALL, "text_documents": "paragraph"}
    write(source, texts)
    expected = content(build(source, tmp_path / "undisturbed", **options), tmp_path / "undisturbed")
    before = source.read_bytes()
    disturb(lambda: write(source, other), 30)
    with pytest.raises(UserError, match=rf"{source}: it has changed since it was hashed"):
        build(source, tmp_path / "store", **options)
    assert not list((tmp_path / "store").glob("corpora/*/index.json"))
    source.write_bytes(before)
    assert content(build(source, tmp_path / "store", **options), tmp_path / "store") == expected


def test_a_time_that_was_set_back_hides_no_change(
    texts: list[str], tmp_path: Path, disturb: Callable[..., None]
) -> None:
    source = tmp_path / "all.jsonl"
    write(source, texts)
    status = source.stat()

    def swap() -> None:
        write(source, [text.swapcase() for text in texts])
        os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert (source.stat().st_size, source.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)

    disturb(swap, 30)
    with pytest.raises(UserError, match="it has changed since it was hashed"):
        build(source, tmp_path / "store")
    # Nor does the note of its hash, in a later run.
    write(source, texts)
    config = CorpusConfig(source=str(source))
    first = FileSource(source, config, tmp_path / "store").fingerprint()
    swap()
    assert FileSource(source, config, tmp_path / "store").fingerprint() != first


def test_a_link_or_a_mode_is_no_change(texts: list[str], tmp_path: Path, disturb: Callable[..., None]) -> None:
    source = tmp_path / "all.jsonl"
    write(source, texts)

    def touched() -> None:
        (tmp_path / "link").hardlink_to(source)
        source.chmod(0o600)

    disturb(touched, 30)
    build(source, tmp_path / "store")


@pytest.mark.parametrize("change", ["replaced", "deleted", "appended"])
def test_a_file_that_is_no_longer_the_same_is_refused_in_another_process_too(
    change: str, texts: list[str], tmp_path: Path
) -> None:
    source = tmp_path / "all.jsonl"
    write(source, texts)
    read = FileSource(source, CorpusConfig(source=str(source)), tmp_path / "store")
    read.fingerprint()
    (piece,) = pickle.loads(pickle.dumps(read.pieces(TRAIN)))
    assert list(piece()) == texts
    if change == "appended":
        with source.open("a") as file:
            file.write('{"text": "more"}\n')
    else:
        source.unlink()
        if change == "replaced":
            write(source, texts)
    for part in (piece, read.pieces(TRAIN)[0]):
        with pytest.raises(UserError, match=rf"{source}: it has changed since it was hashed"):
            next(part())


def test_a_file_that_changes_after_it_was_read_is_named_before_the_corpus_is_filed(
    texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "all.jsonl"
    write(source, texts)
    from mlmclm.corpora import prepare_corpus as module

    fill = module.fill

    def filled(*args: Any) -> None:
        fill(*args)
        write(source, texts[:-1])

    monkeypatch.setattr(module, "fill", filled)
    with pytest.raises(UserError, match=rf"{source}: it has changed"):
        build(source, tmp_path / "store")
    assert not list((tmp_path / "store").glob("corpora/*/index.json"))


def test_a_tokenizer_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = tmp_path / "given"
    small_tokenizer().save_pretrained(given)
    read = tokenizer._from_path

    def disturbed(path: Path) -> Any:
        found = read(path)
        (given / "tokenizer.json").write_text((given / "tokenizer.json").read_text() + " ")
        return found

    monkeypatch.setattr(tokenizer, "_from_path", disturbed)
    with pytest.raises(UserError, match=rf"{given / 'tokenizer.json'}: it has changed"):
        tokenizer.prepare_tokenizer(tokenizer.TokenizerConfig(path=str(given)), store=tmp_path / "store")
    assert not list((tmp_path / "store" / "tokenizers").glob("[0-9a-f]*"))


def test_texts_before_a_reader_s_error_come_first_and_each_follows_a_check() -> None:
    checked: list[int] = []
    read: list[int] = []

    def reader() -> Iterator[str]:
        for number in range(5):
            read.append(number)
            yield "x" * 50_000
        raise ValueError("broken")

    found = as_hashed(reader(), lambda: checked.append(len(read)))
    taken = []
    with pytest.raises(ValueError, match="broken"):
        for text in found:
            taken.append(text)
            assert checked[-1] >= len(taken), "the last check came after this text was read"
    assert len(taken) == 5


def test_a_folder_s_files_are_compared_and_cards_are_not(tmp_path: Path) -> None:
    asked: list[bool] = []
    for name in ("weights", "README.md", ".hidden"):
        (tmp_path / name).write_text(name)

    def holds() -> bool:
        asked.append(True)
        return len(asked) == 1

    files = Unchanged(tmp_path, holds=holds)
    (tmp_path / "README.md").write_text("a card")
    (tmp_path / ".hidden").write_text("more")
    files.check()
    assert not asked
    (tmp_path / "added").write_text("a file that may change what is loaded")
    files.check()
    files.check()
    assert len(asked) == 1
    (tmp_path / "other").write_text("and one that does")
    with pytest.raises(UserError, match="other: it has changed"):
        files.check()
    (tmp_path / "weights").write_text("changed")
    with pytest.raises(UserError, match="weights: it has changed"):
        files.check()


def test_the_hash_and_the_mark_are_of_the_same_bytes(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("text")
    mark, found = marked_hash(file)
    assert (mark, found) == (mark_of(file.stat()), hash_file(file))
    check_hashed(file, mark, found)
    file.write_text("next")
    with pytest.raises(UserError, match="it has changed"):
        check_hashed(file, mark, found)
