"""Blocks of a corpus at an address that is larger than a node's copies may be."""

from __future__ import annotations

import os
import pickle
import shutil
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from small_corpora import SMALL, build, stream

from mlmclm.corpora.chunks import Chunks
from mlmclm.corpora.mixed_blocks import rows_of_length
from mlmclm.corpora.prepared_corpus import PreparedCorpus
from mlmclm.corpora.read_ahead import ReadAhead
from mlmclm.corpora.shelf import Shelf
from mlmclm.errors import UserError
from mlmclm.storage.objects import bucket_of
from object_stores import HURRY

TINY = 1e-6
"""A bound in GiB that is less than any corpus here."""


@pytest.fixture(scope="module")
def far() -> Iterator[str]:
    """An address in this process's memory."""
    name = uuid.uuid4().hex
    yield f"memory://{name}"
    fsspec.filesystem("memory").rm(f"/{name}", recursive=True)


def apart(lines: Path, folder: Path, far: str, **options: object) -> PreparedCorpus:
    """A corpus at an address, as a node without copies sees it."""
    values = {"shards": far, "max_tokens": 9000, "shard_mib": SMALL, "cache_gib": TINY} | options
    build(lines, folder, cache=str(folder / "maker"), **values)
    return build(lines, folder, cache=str(folder / "node"), **values)


def chunks_of(corpus: PreparedCorpus, length: int) -> Chunks:
    """The chunks of a corpus."""
    found = rows_of_length(corpus.train, length, "chunks", corpus.tokenizer)
    assert isinstance(found, Chunks)
    return found


def test_single_blocks_are_those_of_whole_shards(lines: Path, tmp_path: Path, far: str) -> None:
    plain = build(lines, tmp_path / "plain", max_tokens=9000, shard_mib=SMALL)
    corpus = apart(lines, tmp_path, far)
    assert len(corpus.train.shards) > 2
    for length in (16, 8, 32):
        assert stream(corpus.train.at_length(length)) == stream(plain.train.at_length(length))
    # Their checksums are all that was copied.
    assert {path.suffix for path in (tmp_path / "node").rglob("*") if path.is_file()} <= {".sums"}


def test_a_damaged_block_is_refused_and_the_others_are_not(lines: Path, tmp_path: Path) -> None:
    far = f"memory://{uuid.uuid4().hex}"
    blocks = apart(lines, tmp_path, far).train
    system, path = fsspec.core.url_to_fs(f"{blocks.shelf.address}/{blocks.shards[1].file}")
    content = bytearray(system.cat_file(path))
    content[40] ^= 1  # in block 1 of 16 tokens of two bytes
    system.pipe_file(path, bytes(content))
    first = blocks.shards[0].blocks
    assert len(blocks.take(np.array([first, first + 2]))) == 2
    with pytest.raises(UserError, match=r"-00001\.bin: blocks 1 to 1 are not what was written"):
        blocks.take(np.array([first + 1]))


def test_an_answer_that_fails_is_asked_for_again(
    lines: Path, tmp_path: Path, far: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = apart(lines, tmp_path, far).train
    monkeypatch.setattr(bucket_of(far).availability, "retry", HURRY)
    system, _ = fsspec.core.url_to_fs(far)
    answer, failing = type(system).cat_file, [OSError("503")]

    def sometimes(files: Any, path: str, *args: Any, **options: Any) -> bytes:
        if failing and path.endswith(".bin"):
            raise failing.pop()
        return answer(files, path, *args, **options)

    monkeypatch.setattr(type(system), "cat_file", sometimes)
    assert blocks.take(np.array([0])).shape == (1, 16) and not failing


def test_a_missing_shard_is_an_error_that_names_it(lines: Path, tmp_path: Path) -> None:
    blocks = apart(lines, tmp_path, f"memory://{uuid.uuid4().hex}").train
    blocks.shelf.at("train-00001.bin").unlink()
    with pytest.raises(UserError, match=r"a shard is missing .*train-00001\.bin"):
        blocks.take(np.array([blocks.shards[0].blocks]))


def test_copies_of_other_corpora_make_room_and_those_of_this_one_stay(lines: Path, tmp_path: Path, far: str) -> None:
    shelf = apart(lines, tmp_path, far, cache_gib=3000 / 2**30).train.shelf
    for number, name in enumerate(("old", "new", shelf.local.name)):
        path = shelf.local.parent / name / "a.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(1000))
        os.utime(path, (number, number))
    assert shelf.has_room(0)
    assert shelf.has_room(500)
    assert sorted(path.parent.name for path in shelf.local.parent.glob("*/a.bin")) == sorted(["new", shelf.local.name])
    assert not shelf.has_room(2500)
    assert [path.parent.name for path in shelf.local.parent.glob("*/a.bin")] == [shelf.local.name]


@pytest.mark.parametrize(
    ("length", "gib", "kept"), [(5, TINY, 0), (16, TINY, 0), (40, TINY, 0), (3000, TINY, 0), (16, 1.0, 5)]
)
def test_chunks_are_those_of_a_folder_and_the_bound_holds(
    lines: Path, tmp_path: Path, far: str, length: int, gib: float, kept: int
) -> None:
    plain = build(lines, tmp_path / "plain", max_tokens=9000, shard_mib=SMALL)
    corpus = apart(lines, tmp_path, far, cache_gib=gib)
    wanted, found = (chunks_of(each, length) for each in (plain, corpus))
    order = np.random.default_rng(0).permutation(len(wanted))
    assert found.table == wanted.table and np.array_equal(found.take(order), wanted.take(order))
    again = pickle.loads(pickle.dumps(found))
    assert np.array_equal(again.take(order[:50]), wanted.take(order[:50]))
    copies = [path for path in (tmp_path / "node").rglob("train-*.*") if path.suffix != ".lock"]
    assert {path.suffix for path in copies} <= {".bin", ".sums", ".ends"}
    assert len([path for path in copies if path.suffix == ".bin"]) == kept


def test_a_damaged_range_of_a_chunk_and_damaged_ends_are_refused(lines: Path, tmp_path: Path) -> None:
    corpus = apart(lines, tmp_path, f"memory://{uuid.uuid4().hex}")
    chunks = chunks_of(corpus, 16)
    shelf, first = corpus.train.shelf, chunks.table.rows[0]
    system, path = fsspec.core.url_to_fs(str(shelf.address))
    for file, at, message in (
        ("train-00001.bin", 1, r"-00001\.bin: blocks 0 to \d+ are not what was written"),
        ("train-00001.ends", -1, r"-00001\.ends: not what was written\. Delete train-00001\.bin"),
    ):
        content = bytearray(intact := system.cat_file(f"{path}/{file}"))
        content[at] ^= 1
        system.pipe_file(f"{path}/{file}", bytes(content))
        shutil.rmtree(tmp_path / "node")
        with pytest.raises(UserError, match=message):
            pickle.loads(pickle.dumps(chunks)).take(np.array([first]))
        system.pipe_file(f"{path}/{file}", intact)
    assert len(pickle.loads(pickle.dumps(chunks)).take(np.array([first]))) == 1


@pytest.mark.parametrize("lost", ["ends", "sums"])
def test_a_file_lost_beside_a_shard_is_named_and_made_again_with_the_shard(
    lines: Path, tmp_path: Path, lost: str
) -> None:
    far = f"memory://{uuid.uuid4().hex}"
    corpus = apart(lines, tmp_path, far)
    wanted = chunks_of(build(lines, tmp_path / "plain", max_tokens=9000, shard_mib=SMALL), 24)
    every = np.arange(len(wanted))
    corpus.train.shelf.at(f"train-00001.{lost}").unlink()
    with pytest.raises(UserError, match=rf"00001\.{lost}: no such file\. Delete train-00001\.bin"):
        chunks_of(corpus, 24).take(every)
    corpus.train.shelf.at("train-00001.bin").unlink()
    shutil.rmtree(tmp_path / "node")
    again = chunks_of(apart(lines, tmp_path, far), 24)
    assert f"train-00001.{lost}" in again.blocks.shelf.sizes()
    assert np.array_equal(again.take(every), wanted.take(every))


def test_reading_ahead_gives_each_step_its_tokens_and_reads_no_step_twice() -> None:
    read, far_ahead = list[int](), threading.Event()

    def tokens(step: int) -> np.ndarray:
        read.append(step)
        if step == 5:
            far_ahead.set()
        return np.array([step])

    with ReadAhead(tokens, last=9, ahead=3) as ahead:
        assert ahead(2).tolist() == [2]
        assert far_ahead.wait(300)  # without step 3 being asked for
        assert [ahead(step).tolist() for step in range(3, 9)] == [[step] for step in range(3, 9)]
    assert read == list(range(2, 9))


def test_checksums_of_several_shards_are_read_side_by_side(
    lines: Path, tmp_path: Path, far: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = apart(lines, tmp_path, far).train
    monkeypatch.setattr(Shelf, "read", lambda shelf, file: pytest.fail(f"{file} was read alone"))
    assert len(blocks.shards) > 2
    assert blocks.take(np.arange(len(blocks))).shape == (len(blocks), 16)
