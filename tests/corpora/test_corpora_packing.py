"""Packing documents into shards."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlmclm.corpora.blocks import Blocks, token_type
from mlmclm.corpora.shard_writer import Position, Record, ShardWriter, read_shard_record
from mlmclm.corpora.shelf import Shelf
from mlmclm.errors import EnvironmentFault, UserError

LENGTH = 16


def documents(count: int = 100, vocabulary: int = 60_000, longest: int = 60) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, vocabulary, size=n) for n in generator.integers(1, longest, size=count)]


def write(
    folder: Path,
    made: list[np.ndarray],
    *,
    shard_blocks: int = 7,
    vocabulary: int = 60_000,
    max_blocks: int | None = None,
    max_documents: int | None = None,
    finished: list[Record] | None = None,
) -> ShardWriter:
    """Packs documents as if they came from pieces of ten."""
    with ShardWriter(
        Shelf(str(folder)), "train", LENGTH, token_type(vocabulary),
        shard_blocks=shard_blocks, max_blocks=max_blocks, max_documents=max_documents, finished=finished,
    ) as writer:  # fmt: skip
        for number, tokens in enumerate(made):
            writer.add(Position(number // 10, number % 10), tokens, size=3 * len(tokens), unknown=int(tokens[0] % 2))
    return writer


def stream(folder: Path, writer: ShardWriter, kind: str = "<u2") -> np.ndarray:
    blocks = Blocks(Shelf(str(folder)), [record.shard for record in writer.records], LENGTH, kind)
    assert not blocks.damaged()
    return blocks.take(np.arange(len(blocks))).ravel()


@pytest.mark.parametrize("vocabulary", [65_536, 65_537])
@pytest.mark.parametrize("shard_blocks", [1, 7, 10_000])
def test_packing_is_the_joined_documents_cut_into_blocks(tmp_path: Path, vocabulary: int, shard_blocks: int) -> None:
    made = documents(vocabulary=vocabulary)
    writer = write(tmp_path, made, shard_blocks=shard_blocks, vocabulary=vocabulary)
    joined = np.concatenate(made)
    whole = len(joined) // LENGTH
    assert writer.blocks == whole
    assert (stream(tmp_path, writer, token_type(vocabulary).str) == joined[: whole * LENGTH]).all()
    sizes = [record.shard.blocks for record in writer.records]
    assert sizes == [shard_blocks] * (whole // shard_blocks) + [whole % shard_blocks] * (whole % shard_blocks > 0)
    assert tuple(writer.counts) == (100, 3 * len(joined), len(joined), sum(d[0] % 2 for d in made), sum(len(d) == 1 for d in made))  # fmt: skip


def test_a_record_names_the_shards_checksum_and_the_token_that_it_ends_with(tmp_path: Path) -> None:
    made = documents()
    writer = write(tmp_path, made)
    ends = np.cumsum([len(document) for document in made])
    for number, record in enumerate(writer.records):
        path = tmp_path / f"train-{number:05d}.bin"
        assert record.shard.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
        assert record.bytes == path.stat().st_size
        cut = min(7 * (number + 1), writer.blocks) * LENGTH
        document = int(np.searchsorted(ends, cut))  # the document of token cut - 1
        assert record.document == divmod(document, 10)
        assert record.token == cut - (ends[document] - len(made[document]))
        assert record.counts.documents == document + 1
        file = tmp_path / f"train-{number:05d}.json"
        assert record == read_shard_record(Shelf(str(tmp_path)), "train", number)
        file.write_bytes(file.read_bytes().replace(b'"token": ', b'"token": 1', 1))
        assert read_shard_record(Shelf(str(tmp_path)), "train", number) is None, "damaged"


@pytest.mark.parametrize("longest", [60, 400])
@pytest.mark.parametrize(("max_blocks", "max_documents"), [(None, None), (30, None), (None, 13)])
def test_going_on_after_any_shard_gives_the_same_shards(
    tmp_path: Path, longest: int, max_blocks: int | None, max_documents: int | None
) -> None:
    made = documents(20, longest=longest)
    limits = {"max_blocks": max_blocks, "max_documents": max_documents, "shard_blocks": 2 if longest == 60 else 7}
    first = write(tmp_path / "once", made, **limits)
    assert len(first.records) > 4
    for kept in range(1, len(first.records) + 1):
        again = write(tmp_path / str(kept), made, **limits, finished=first.records[:kept])
        assert again.records == first.records
        assert again.counts == first.counts
        for record in first.records[kept:]:
            assert (tmp_path / str(kept) / record.shard.file).read_bytes() == (
                tmp_path / "once" / record.shard.file
            ).read_bytes()
        assert not (tmp_path / str(kept) / first.records[kept - 1].shard.file).exists(), "a finished one is not touched"


def test_the_limit_cuts_inside_a_document_and_counts_it(tmp_path: Path) -> None:
    made = [np.arange(7), np.arange(100), np.arange(5)]
    writer = write(tmp_path, made, max_blocks=3)
    assert writer.full
    assert (writer.tokens, writer.counts.documents) == (48, 2)
    assert (stream(tmp_path, writer) == np.concatenate(made)[:48]).all()
    assert writer.next == Position(0, 2)


def test_text_that_has_changed_since_is_an_error(tmp_path: Path) -> None:
    made = documents()
    first = write(tmp_path, made)
    last = first.records[2]
    assert last.token > 1
    changed = list(made)
    changed[last.document.piece * 10 + last.document.number] = np.arange(last.token - 1)
    with pytest.raises(UserError, match="text has changed"):
        write(tmp_path, changed, finished=first.records[:3])


@pytest.mark.parametrize("call", ["write", "fsync", "mkstemp"])
def test_on_a_full_disk_finished_shards_are_kept_and_the_fault_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    made = documents()
    whole = write(tmp_path / "whole", made)
    full = False

    def check() -> None:
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    class OnThatDisk(io.FileIO):
        def write(self, content: bytes) -> int:  # type: ignore[override]
            check()
            return super().write(content) or 0

    def checked(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*positional: Any, **named: Any) -> Any:
            check()
            return function(*positional, **named)

        return call

    if call == "write":
        monkeypatch.setattr(os, "fdopen", lambda descriptor, mode: OnThatDisk(descriptor, mode))
    elif call == "fsync":
        monkeypatch.setattr(os, "fsync", checked(os.fsync))
    else:
        monkeypatch.setattr(tempfile, "mkstemp", checked(tempfile.mkstemp))
    folder = tmp_path / "small"
    writer = ShardWriter(Shelf(str(folder)), "train", LENGTH, token_type(60_000), shard_blocks=7)
    with pytest.raises(EnvironmentFault, match=r"train-0000[23]\.(bin|json): the disk is full") as caught, writer:
        for number, tokens in enumerate(made):
            full = len(writer.records) == 2
            writer.add(Position(number // 10, number % 10), tokens, size=1)
    assert "what is finished is kept" in str(caught.value)
    full = False
    left = {path.name for path in folder.iterdir()}
    assert {"train-00000.bin", "train-00000.json", "train-00001.bin", "train-00001.json"} <= left
    assert not [name for name in left if name.startswith(".")], "no half of a file is left"
    again = write(folder, made, finished=writer.records)
    assert [record.shard for record in again.records] == [record.shard for record in whole.records]
