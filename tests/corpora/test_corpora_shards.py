"""Shards of a prepared corpus: their index, what is lost, interrupted, altered or elsewhere."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import pickle
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from small_corpora import BPE, LIMITS, SMALL, build, stream, tell

from mlmclm.corpora import filling, tokenising
from mlmclm.corpora.corpus_config import CorpusConfig
from mlmclm.corpora.prepare_corpus import find_corpus, prepare_corpus
from mlmclm.corpora.prepared_corpus import PreparedCorpus, StoredCorpus
from mlmclm.errors import EnvironmentFault, UserError
from mlmclm.storage.leases import Leases


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize(
    ("options", "key", "train", "validation"),
    [
        ({}, "d1b175830ddb2a08", "607ce136ba3c3770", "a0cbd927ce1b0123"),
        ({"max_tokens": 5000}, "a0d76470113d6d08", "5bdad40c07c40ab3", "a0cbd927ce1b0123"),
        ({"max_documents": 50}, "af16bf9b4b03fc5e", "8fd278146024d2e5", "a0cbd927ce1b0123"),
        ({"max_documents": 50, "max_tokens": 1000}, "d682d0b11be90ff5", "dae805611a9f9601", "a0cbd927ce1b0123"),
        ({"max_validation_tokens": None}, "4d6ff46ff04150f3", "607ce136ba3c3770", "454bcc36ba1ff14d"),
        ({"streaming": True}, "26ab1ca70180b8f5", "607ce136ba3c3770", "454bcc36ba1ff14d"),
        ({"streaming": True, "max_documents": 60}, "89fb17a4a127b441", "7bc3501bd26064a7", "8a2d0a7f46698694"),
        ({"seed": 1, "max_tokens": 3000}, "e2f9d197699fd88f", "57d37b30489bfe96", "d8bb0d3d0aef0922"),
    ],
)
def test_keys_and_tokens_are_those_of_corpora_prepared_before_there_were_shards(
    lines: Path, tmp_path: Path, options: dict[str, Any], key: str, train: str, validation: str
) -> None:
    prepared = build(lines, tmp_path, **options, shard_mib=SMALL)
    assert prepared.key == key
    for blocks, expected in ((prepared.train, train), (prepared.validation, validation)):
        tokens = np.array(stream(blocks), dtype="<u2").tobytes()
        assert hashlib.sha256(tokens).hexdigest().startswith(expected)


def test_neither_the_shards_size_nor_place_changes_the_key_or_a_token(lines: Path, tmp_path: Path) -> None:
    plain = build(lines, tmp_path / "plain", max_tokens=9000)
    for name, options in (
        ("small", {"shard_mib": SMALL}),
        ("folder", {"shards": str(tmp_path / "elsewhere"), "shard_mib": 2 * SMALL}),
        ("address", {"shards": f"memory://{uuid.uuid4().hex}", "cache": str(tmp_path / "cache"), "shard_mib": SMALL}),
    ):
        prepared = build(lines, tmp_path / name, max_tokens=9000, **options)
        assert prepared.key == plain.key
        assert len(prepared.train.shards) > 2
        assert len(plain.train.shards) == 1
        assert (stream(prepared.train), stream(prepared.validation)) == (stream(plain.train), stream(plain.validation))
    elsewhere = tmp_path / "folder" / "corpora" / plain.key / "shelf.json"
    stored = StoredCorpus(tmp_path / "folder", plain.key)
    assert stored.damage() is None and stored.shelf.folder == str(tmp_path / "elsewhere" / plain.key)
    elsewhere.write_bytes(elsewhere.read_bytes().replace(b"elsewhere", b"elsewherf"))
    with pytest.raises(UserError, match=rf"{elsewhere}: damaged .*Delete {elsewhere.parent} and run `mlmclm data`"):
        stored.damage()


def test_the_index_names_every_shard_with_size_checksum_and_what_it_was_made_from(lines: Path, tmp_path: Path) -> None:
    prepared = build(lines, tmp_path, shard_mib=SMALL)
    index = json.loads((prepared.folder / "index.json").read_text())
    assert (index["block_length"], index["dtype"], index["key"]) == (16, "<u2", prepared.key)
    assert index["corpus"]["source"] == str(lines)
    assert "shard_mib" not in index["corpus"]
    listed = [shard for part in ("train", "validation") for shard in index[part]["shards"]]
    for shard in listed:
        content = (prepared.folder / shard["file"]).read_bytes()
        assert shard["bytes"] == len(content) == shard["blocks"] * 32
        assert shard["sha256"] == hashlib.sha256(content).hexdigest()
    assert {"index.json", *(shard["file"] for shard in listed)} == files(prepared.folder).keys()
    assert (
        index["train"]["tokens"] == prepared.tokens == sum(shard["blocks"] for shard in index["train"]["shards"]) * 16
    )


class Stopped(Exception):
    """What ends a preparation."""


@pytest.mark.parametrize(
    ("options", "characters"),
    [
        ({}, 8),
        ({"max_tokens": 9000}, 0.1),
        ({"streaming": True, "max_tokens": 9000}, 8),
        ({"streaming": True, "max_documents": 60}, 8),
    ],
)
def test_a_preparation_that_ends_early_again_and_again_gives_the_same_files(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], characters: float
) -> None:
    monkeypatch.setattr(tokenising, "BATCH_CHARACTERS", 2000)
    monkeypatch.setattr(filling, "CHARACTERS_A_TOKEN", characters)
    once = build(lines, tmp_path / "once", shard_mib=SMALL, **options)
    config = CorpusConfig(source=str(lines), validation_fraction=0.1, shard_mib=SMALL, **options)
    folder = tmp_path / "often" / "corpora" / once.key
    written: dict[str, int] = {}

    def stop_at_the_next_shard(what: str, done: int, total: int | None, *_: object) -> None:
        now = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.bin")}
        assert all(now[name] == written[name] for name in written), "what is finished is not written again"
        if len(now) > len(written):
            written.update(now)
            raise Stopped

    tell(monkeypatch, stop_at_the_next_shard)
    prepared, attempts = None, 0
    while prepared is None:
        attempts += 1
        with contextlib.suppress(Stopped):
            prepared = prepare_corpus(config, BPE, block_length=16, store=tmp_path / "often")
    assert attempts > 3
    assert files(prepared.folder) == files(once.folder)


KILLED = """
import sys, time
from contextlib import nullcontext
from pathlib import Path
from mlmclm.corpora import filling, tokenising
from mlmclm.corpora.corpus_config import CorpusConfig, TokenizerConfig
from mlmclm.corpora.prepare_corpus import prepare_corpus

def work(*_):
    # Whoever kills it finds it at work.
    time.sleep(600 if len([*Path(sys.argv[2]).glob("corpora/*/train-*.json")]) >= 3 else 0)

filling.bars = lambda: nullcontext(work)
tokenising.BATCH_CHARACTERS = 2000
prepare_corpus(
    CorpusConfig(source=sys.argv[1], validation_fraction=0.1, shard_mib=float(sys.argv[3])),
    TokenizerConfig(train_vocab_size=320), block_length=16, store=Path(sys.argv[2]),
)
"""


def test_a_preparation_that_is_killed_keeps_its_shards_and_goes_on_behind_them(lines: Path, tmp_path: Path) -> None:
    once = build(lines, tmp_path / "once", shard_mib=SMALL)
    folder = tmp_path / "killed" / "corpora" / once.key
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(lines), str(tmp_path / "killed"), str(SMALL)])
    try:
        deadline = time.monotonic() + 300
        while len(list(folder.glob("train-*.json"))) < 3:
            assert time.monotonic() < deadline and child.poll() is None
            time.sleep(0.01)
    finally:
        child.kill()
        child.wait()
    records = {path.stem for path in folder.glob("*.json")}
    kept = {name: (folder / f"{name}.bin").stat().st_mtime_ns for name in records}
    assert not (folder / "index.json").exists()
    assert 3 <= len(kept) < len(once.train.shards)
    prepared = build(lines, tmp_path / "killed", shard_mib=SMALL)
    assert files(prepared.folder) == files(once.folder)
    assert all((folder / f"{name}.bin").stat().st_mtime_ns == time for name, time in kept.items())


@pytest.mark.parametrize(("damage", "options"), [("short", LIMITS[0]), *(("missing", limits) for limits in LIMITS)])
def test_a_lost_shard_is_named_and_it_alone_is_made_again(
    lines: Path, tmp_path: Path, damage: str, options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    first = build(lines, tmp_path, shard_mib=SMALL, **options)
    before = files(first.folder)
    times = {path.name: path.stat().st_mtime_ns for path in first.folder.glob("*.bin")}
    lost = [first.train.shards[2].file, first.train.shards[-1].file, first.validation.shards[0].file]
    for file in lost:
        if damage == "missing":
            (first.folder / file).unlink()
        else:
            (first.folder / file).write_bytes(before[file][:-2])
    assert lost[0] in first.train.damaged()
    config = CorpusConfig(source=str(lines), validation_fraction=0.1, shard_mib=SMALL, **options)
    assert find_corpus(config, BPE, block_length=16, store=tmp_path) is None
    prepare_corpus(config, BPE, block_length=16, store=tmp_path)
    said = capsys.readouterr().err
    assert all(f"making {file} again ({'no such file' if damage == 'missing' else ''}" in said for file in lost)
    assert files(first.folder) == before
    for name, written in times.items():
        assert ((first.folder / name).stat().st_mtime_ns == written) == (name not in lost)


def damaged(store: Path, corpus: PreparedCorpus) -> list[str]:
    """The files of a stored corpus that are not what was written."""
    return [piece.path for piece in StoredCorpus(store, corpus.key).files() if piece.check() is not None]


def test_a_shard_that_was_altered_is_found_by_reading_and_named(lines: Path, tmp_path: Path) -> None:
    prepared = build(lines, tmp_path, shard_mib=SMALL)
    assert damaged(tmp_path, prepared) == []
    path = prepared.folder / prepared.train.shards[1].file
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    path.write_bytes(content)
    assert not prepared.train.damaged()  # its size is right
    assert damaged(tmp_path, prepared) == [str(path)]
    path.unlink()
    path.mkdir()
    found = {piece.path: piece.check() for piece in StoredCorpus(tmp_path, prepared.key).files()}
    assert found.pop(str(path)) == "it cannot be read (Is a directory)" and set(found.values()) == {None}


def test_a_lost_shard_of_a_source_that_is_no_longer_the_same_is_not_made_up(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build(lines, tmp_path, shard_mib=SMALL)
    (first.folder / first.train.shards[2].file).unlink()
    monkeypatch.setattr(tokenising, "without_surrogates", lambda text: text.replace("a", "b"))
    with pytest.raises(UserError, match="text has changed"):
        build(lines, tmp_path, shard_mib=SMALL)
    assert not (first.folder / first.train.shards[2].file).exists()


def test_shards_at_an_address_are_read_by_a_node_that_has_none_of_the_makers_folders(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = f"memory://{uuid.uuid4().hex}/corpora"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    made = build(lines, tmp_path / "maker", shards=far, cache="~/copies", shard_mib=SMALL)
    plain = build(lines, tmp_path / "plain")
    monkeypatch.setenv("HOME", str(tmp_path / "node"))
    copies = tmp_path / "node" / "copies" / made.key
    for there in (False, True):
        blocks = pickle.loads(pickle.dumps(made.train))
        assert (copies / "train-00000.bin").exists() == there
        assert stream(blocks) == stream(plain.train)
    assert files(copies).keys() - {f".{shard.file}.lock" for shard in made.train.shards} == {
        shard.file for shard in made.train.shards
    }
    assert StoredCorpus(tmp_path / "maker", made.key).damage() is None


def test_a_preparation_at_an_address_goes_on_elsewhere_and_repairs_what_is_lost_there(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenising, "BATCH_CHARACTERS", 2000)
    far = f"memory://{uuid.uuid4().hex}/corpora"
    system = fsspec.filesystem("memory")
    config = CorpusConfig(source=str(lines), validation_fraction=0.1, shard_mib=SMALL, shards=far)

    def stop(what: str, done: int, total: int | None, *_: object) -> None:
        if done > 6000:
            raise Stopped

    with pytest.raises(Stopped), monkeypatch.context() as patched:
        tell(patched, stop)
        first = config.model_copy(update={"cache": str(tmp_path / "a")})
        prepare_corpus(first, BPE, block_length=16, store=tmp_path / "1")
    (key,) = (path.name for path in (tmp_path / "a").iterdir())
    begun = {file: system.cat_file(file) for file in system.ls(f"{far}/{key}", detail=False) if file.endswith(".bin")}
    assert len(begun) > 1
    second = config.model_copy(update={"cache": str(tmp_path / "b")})
    prepared = prepare_corpus(second, BPE, block_length=16, store=tmp_path / "2")
    assert not any((tmp_path / "b" / key / file.rpartition("/")[2]).exists() for file in begun), (
        "they were not made again"
    )
    plain = build(lines, tmp_path / "plain")
    assert stream(prepared.train) == stream(plain.train)
    assert damaged(tmp_path / "2", prepared) == []
    lost = f"{far}/{key}/{prepared.train.shards[1].file}"
    content = system.cat_file(lost)
    system.pipe_file(lost, content[:-4] + b"\0\0\0\0")
    assert damaged(tmp_path / "2", prepared) == [lost]
    system.rm_file(lost)
    prepare_corpus(second, BPE, block_length=16, store=tmp_path / "2")
    assert system.cat_file(lost) == content


def test_two_preparations_at_once_take_turns(
    lines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    answers: list[PreparedCorpus] = []
    config = CorpusConfig(source=str(lines), validation_fraction=0.1, shard_mib=SMALL)

    def run() -> None:
        answers.append(prepare_corpus(config, BPE, block_length=16, store=tmp_path))

    key = build(lines, tmp_path / "key").key
    tell(monkeypatch, lambda what, *_: done.append(what))
    with Leases(tmp_path).attempt([f"corpora-{key}"]):
        thread = threading.Thread(target=run)
        thread.start()
        deadline = time.monotonic() + 300
        while "waiting for process" not in capsys.readouterr().err:
            assert time.monotonic() < deadline and thread.is_alive()
            time.sleep(0.01)
        assert "tokenising" not in done
    thread.join()
    assert len(answers) == 1


def test_on_a_full_disk_the_file_is_named_and_what_is_finished_is_kept(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = build(lines, tmp_path / "once", shard_mib=SMALL)
    folder = tmp_path / "full" / "corpora" / once.key
    sync, room = os.fsync, 9

    def fill(descriptor: int) -> None:
        nonlocal room
        room -= 1
        if room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fill)
    with pytest.raises(EnvironmentFault, match=rf"{folder}/train-0000\d\.(bin|json): the disk is full"):
        build(lines, tmp_path / "full", shard_mib=SMALL)
    kept = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.bin")}
    assert kept
    assert not list(folder.glob(".*"))
    room = 10_000
    assert files(build(lines, tmp_path / "full", shard_mib=SMALL).folder) == files(once.folder)
    recorded = {name: written for name, written in kept.items() if name != max(kept)}  # the last may lack its record
    assert all((folder / name).stat().st_mtime_ns == written for name, written in recorded.items())
