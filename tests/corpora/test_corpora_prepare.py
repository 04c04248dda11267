"""From text to blocks, end to end on tiny corpora."""

from __future__ import annotations

import collections
import contextlib
import errno
import hashlib
import json
import os
import pickle
import re
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

from mlmclm.corpora import filling, prepare, pydocs, tokenising
from mlmclm.corpora.config import CorpusConfig, TokenizerConfig
from mlmclm.corpora.prepare import PreparedCorpus, describe, find_corpus, open_corpus, prepare_corpus, verify
from mlmclm.corpora.selection import held_out, sample
from mlmclm.corpora.tokenizer import load_tokenizer, special_ids
from mlmclm.errors import EnvironmentFault, UserError
from mlmclm.files import in_turn

BPE = TokenizerConfig(train_vocab_size=320)
SMALL = 0.004
"""MiB a shard: 131 blocks of 16 tokens."""


def build(
    source: Path | str,
    store: Path,
    *,
    workers: int = 1,
    length: int = 16,
    workers_setting: str = "auto",
    **options: Any,
) -> PreparedCorpus:
    options.setdefault("validation_fraction", 0.1)
    config = CorpusConfig(source=str(source), workers=workers_setting, **options)
    return prepare_corpus(config, BPE, block_length=length, store=store, workers=workers)


def stream(blocks: Any) -> list[int]:
    tokens: list[int] = blocks.take(np.arange(len(blocks))).ravel().tolist()
    return tokens


def documents_in(prepared: PreparedCorpus, part: str = "train") -> list[str]:
    """The documents that the blocks hold, the last one (cut by the end) left out."""
    tokens = stream(getattr(prepared, part))
    eos = special_ids(prepared.tokenizer)["eos"]
    tokenizer = load_tokenizer(prepared.tokenizer)
    found: list[list[int]] = [[]]
    for token in tokens:
        if token == eos:
            found.append([])
        else:
            found[-1].append(token)
    return [tokenizer.decode(document, skip_special_tokens=False) for document in found[:-1]]


def test_blocks_are_the_documents_joined_by_eos_in_order(lines: Path, texts: list[str], tmp_path: Path) -> None:
    prepared = build(lines, tmp_path, max_validation_tokens=None)
    training = [text for text in texts if not held_out(text, fraction=0.1, seed=0)]
    assert documents_in(prepared) == training[: len(documents_in(prepared))]
    assert len(documents_in(prepared)) >= len(training) - 1
    assert prepared.documents == len(training)
    assert prepared.tokens == len(prepared.train) * 16


def test_training_and_validation_documents_are_disjoint(lines: Path, tmp_path: Path) -> None:
    prepared = build(lines, tmp_path)
    train, validation = set(documents_in(prepared)), set(documents_in(prepared, "validation"))
    assert len(validation) > 10
    assert not train & validation


def test_the_number_of_workers_does_not_change_a_byte(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenising, "BATCH_CHARACTERS", 3000)
    one, three = (build(lines, tmp_path / str(count), workers=count, max_tokens=9000) for count in (1, 3))
    assert one.key == three.key
    for folder in ("folder", "tokenizer"):
        files = sorted(path.name for path in getattr(one, folder).iterdir())
        assert files == sorted(path.name for path in getattr(three, folder).iterdir())
        for name in files:
            assert (getattr(one, folder) / name).read_bytes() == (getattr(three, folder) / name).read_bytes()


def test_a_limited_corpus_holds_the_documents_with_the_smallest_hashes(
    lines: Path, texts: list[str], tmp_path: Path
) -> None:
    prepared = build(lines, tmp_path, max_documents=50)
    training = [text for text in texts if not held_out(text, fraction=0.1, seed=0)]
    chosen, left_out = sample(reversed(training), characters=None, documents=50, purpose="selection", seed=0)
    assert left_out
    assert prepared.documents == 50
    assert documents_in(prepared) == chosen[: len(documents_in(prepared))]


def test_max_tokens_is_reached_even_if_tokens_are_longer_than_expected(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filling, "CHARACTERS_A_TOKEN", 0.1)
    prepared = build(lines, tmp_path, max_tokens=5000)
    assert prepared.tokens == 5000 // 16 * 16
    monkeypatch.undo()
    plain = build(lines, tmp_path / "b", max_tokens=5000)
    assert plain.folder.name == prepared.folder.name
    assert stream(plain.train) == stream(prepared.train)


def test_another_seed_chooses_and_holds_out_others(lines: Path, tmp_path: Path) -> None:
    first, second = (build(lines, tmp_path, max_documents=50, seed=seed) for seed in (0, 1))
    assert first.key != second.key
    assert set(documents_in(first)) != set(documents_in(second))


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("own_validation", [False, True])
def test_a_stream_is_taken_from_its_head(
    texts: list[str], lines: Path, tmp_path: Path, own_validation: bool, workers: int
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "train.jsonl").write_bytes(lines.read_bytes())
    if own_validation:
        (folder / "validation.txt").write_text("\n\n".join(f"Other {text}" for text in texts))
    prepared = build(folder, tmp_path, streaming=True, max_tokens=4000, max_validation_tokens=320, workers=workers)
    training = [text for text in texts if own_validation or not held_out(text, fraction=0.1, seed=0)]
    assert documents_in(prepared) == training[: len(documents_in(prepared))]
    assert prepared.tokens == 4000
    assert len(prepared.validation) > 0
    if not own_validation:
        # The stream ends with the first training document that is not wanted, whoever has read further.
        last = texts.index(training[prepared.documents])
        held = [text for text in texts[:last] if held_out(text, fraction=0.1, seed=0)]
        assert documents_in(prepared, "validation") == held[: len(documents_in(prepared, "validation"))]
        assert len(documents_in(prepared, "validation")) >= len(held) - 1
    if own_validation:
        assert len(prepared.validation) == 20
        assert all(document.startswith("Other") for document in documents_in(prepared, "validation"))


def test_what_is_prepared_opens_at_once_and_reads_nothing(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build(lines, tmp_path)
    monkeypatch.setattr(prepare, "_make", None)
    monkeypatch.setattr(prepare, "prepare_tokenizer", None)
    start = time.monotonic()
    second = build(lines, tmp_path)
    assert time.monotonic() - start < 0.5
    assert (second.key, second.documents, second.tokens) == (first.key, first.documents, first.tokens)


def test_the_same_text_elsewhere_has_the_same_key_and_other_text_another(lines: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(lines.read_bytes())
    first, second = build(lines, tmp_path), build(copy, tmp_path)
    assert first.folder == second.folder
    copy.write_bytes(lines.read_bytes() + b'{"text": "One more document."}\n')
    assert build(copy, tmp_path).key != first.key


def test_special_tokens_written_in_the_text_stay_text(tmp_path: Path, texts: list[str]) -> None:
    source = tmp_path / "corpus.txt"
    source.write_text("\n\n".join(f"{text} <|mask|> and <|end_of_text|>" for text in texts))
    prepared = build(source, tmp_path)
    ids = special_ids(prepared.tokenizer)
    tokens = stream(prepared.train)
    assert ids["mask"] not in tokens
    assert ids["pad"] not in tokens
    assert documents_in(prepared)[0].endswith("<|mask|> and <|end_of_text|>")


def test_the_documentation_corpus_has_training_packages_in_train_only(
    environment: list[pydocs.Root], tmp_path: Path
) -> None:
    prepared = build("pydocs", tmp_path)
    folder = pydocs.prepare_pydocs(tmp_path)
    for part in ("train", "validation"):
        known = set(pydocs.read_texts(folder, part))
        assert set(documents_in(prepared, part)) <= known
        assert documents_in(prepared, part)


def test_description_names_sizes_and_shows_text(lines: Path, tmp_path: Path) -> None:
    prepared = build(lines, tmp_path)
    facts = describe(prepared, examples=2)
    assert facts["vocabulary"] == prepared.vocabulary == 320
    assert facts["train"] == {"documents": prepared.documents, "tokens": prepared.tokens, "blocks": len(prepared.train)}
    assert 1 < facts["bytes_per_token"] < 10
    assert len(facts["examples"]) == 2


def test_progress_is_reported(lines: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int | None]] = []
    config = CorpusConfig(source=str(lines), max_tokens=4000, validation_fraction=0.1)
    prepare_corpus(config, BPE, block_length=16, store=tmp_path, workers=1, progress=lambda *event: seen.append(event))
    assert ("tokenising", 4000, 4000) in seen


def test_importing_it_imports_nothing_heavy() -> None:
    code = (
        "import sys, mlmclm.corpora.prepare, mlmclm.tasks.pydocs\n"
        "heavy = {'torch', 'transformers', 'datasets', 'tokenizers', 'pyarrow', 'pandas'} & set(sys.modules)\n"
        "sys.exit(f'imports {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_too_little_text_for_one_block_is_an_error(tmp_path: Path, texts: list[str]) -> None:
    source = tmp_path / "corpus.txt"
    source.write_text("\n\n".join(texts[:60]))
    with pytest.raises(UserError, match=r"train part has .* fewer than one block of 100000") as error:
        build(source, tmp_path, length=100_000)
    assert "shorter block" in str(error.value)
    assert not [path for path in (tmp_path / "corpora").iterdir() if path.is_dir()]


def test_too_little_validation_text_says_how_to_get_more(tmp_path: Path, texts: list[str]) -> None:
    source = tmp_path / "corpus.txt"
    source.write_text("\n\n".join(texts[:60]))
    with pytest.raises(UserError, match=r"validation part.*validation_fraction"):
        build(source, tmp_path, validation_fraction=0.0001)


def test_a_corpus_without_text_is_an_error(tmp_path: Path, shared_tokenizer: Path) -> None:
    source = tmp_path / "corpus.jsonl"
    source.write_text('{"text": ""}\n{"text": null}\n{"text": "  "}\n')
    config = CorpusConfig(source=str(source))
    with pytest.raises(UserError, match="there is no text in it"):
        prepare_corpus(
            config, TokenizerConfig(path=str(shared_tokenizer)), block_length=8, store=tmp_path / "store", workers=1
        )


def test_a_vocabulary_that_the_text_cannot_fill_is_an_error(tmp_path: Path) -> None:
    source = tmp_path / "corpus.txt"
    source.write_text("only a few words\n\nand no more")
    with pytest.raises(UserError, match=r"train_vocab_size.*smaller vocabulary"):
        build(source, tmp_path)


def test_a_name_that_is_nothing_says_where_it_was_looked_for(tmp_path: Path) -> None:
    config = CorpusConfig(source="no-such-corpus")
    with pytest.raises(EnvironmentFault, match="neither 'pydocs' nor a file or folder") as error:
        prepare_corpus(config, BPE, block_length=16, store=tmp_path, data_root=tmp_path / "data")
    assert str(tmp_path / "data" / "no-such-corpus") in str(error.value)


def test_a_block_of_one_token_is_refused(lines: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at least 2"):
        build(lines, tmp_path, length=1)


@pytest.fixture
def shared_tokenizer(lines: Path, tmp_path: Path) -> Path:
    """A tokenizer that is there."""
    return build(lines, tmp_path / "tokenizer").tokenizer


def test_enwiki_is_found_by_name_and_by_path(shared_data: Path, tmp_path: Path) -> None:
    bpe = TokenizerConfig(train_vocab_size=1000)
    by_name = CorpusConfig(source="enwiki2015", max_tokens=50_000, max_validation_tokens=10_000)
    first = prepare_corpus(by_name, bpe, block_length=64, store=tmp_path, data_root=shared_data)
    by_path = by_name.model_copy(update={"source": str(shared_data / "enwiki2015")})
    second = prepare_corpus(by_path, bpe, block_length=64, store=tmp_path)
    assert first.folder == second.folder
    assert len(first.train) == 781
    assert len(first.validation) == 156


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
        ({"max_tokens": 9000}, 8),
        ({"max_tokens": 9000}, 0.1),
        ({"streaming": True}, 8),
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

    def stop_at_the_next_shard(what: str, done: int, total: int | None) -> None:
        now = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.bin")}
        assert all(now[name] == written[name] for name in written), "what is finished is not written again"
        if len(now) > len(written):
            written.update(now)
            raise Stopped

    prepared, attempts = None, 0
    while prepared is None:
        attempts += 1
        with contextlib.suppress(Stopped):
            prepared = prepare_corpus(
                config, BPE, block_length=16, store=tmp_path / "often", workers=1, progress=stop_at_the_next_shard
            )
    assert attempts > 3
    assert files(prepared.folder) == files(once.folder)


KILLED = """
import sys, time
from pathlib import Path
from mlmclm.corpora import tokenising
from mlmclm.corpora.config import CorpusConfig, TokenizerConfig
from mlmclm.corpora.prepare import prepare_corpus

tokenising.BATCH_CHARACTERS = 2000
prepare_corpus(
    CorpusConfig(source=sys.argv[1], validation_fraction=0.1, shard_mib=float(sys.argv[3])),
    TokenizerConfig(train_vocab_size=320), block_length=16, store=Path(sys.argv[2]), workers=2,
    progress=lambda *_: time.sleep(0.1),
)
"""


def test_a_preparation_that_is_killed_keeps_its_shards_and_goes_on_behind_them(lines: Path, tmp_path: Path) -> None:
    once = build(lines, tmp_path / "once", shard_mib=SMALL)
    folder = tmp_path / "killed" / "corpora" / once.key
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(lines), str(tmp_path / "killed"), str(SMALL)])
    try:
        deadline = time.monotonic() + 120
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


@pytest.mark.parametrize("damage", ["missing", "short"])
@pytest.mark.parametrize(
    "options",
    [{}, {"max_tokens": 9000}, {"streaming": True, "max_tokens": 9000}, {"streaming": True, "max_documents": 60}],
)
def test_a_lost_shard_is_named_and_it_alone_is_made_again(
    lines: Path, tmp_path: Path, damage: str, options: dict[str, Any]
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
    with pytest.raises(UserError, match=lost[0]):
        first.train.check()
    config = CorpusConfig(source=str(lines), validation_fraction=0.1, shard_mib=SMALL, **options)
    assert find_corpus(config, BPE, block_length=16, store=tmp_path) is None
    said: set[str] = set()
    prepare_corpus(config, BPE, block_length=16, store=tmp_path, workers=1, progress=lambda what, *_: said.add(what))
    assert all(any(file in what for what in said) for file in lost)
    assert files(first.folder) == before
    for name, written in times.items():
        assert ((first.folder / name).stat().st_mtime_ns == written) == (name not in lost)


def test_a_shard_that_was_altered_is_found_by_reading_and_named(lines: Path, tmp_path: Path) -> None:
    prepared = build(lines, tmp_path, shard_mib=SMALL)
    assert verify(prepared) == {}
    path = prepared.folder / prepared.train.shards[1].file
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    path.write_bytes(content)
    prepared.train.check()  # its size is right
    read: list[tuple[str, int, int | None]] = []
    (found,) = verify(prepared, lambda *event: read.append(event)).items()
    assert found[0] == str(path)
    assert prepared.train.shards[1].sha256 is not None and prepared.train.shards[1].sha256 in found[1]
    assert read[-1][1] == read[-1][2] == sum(path.stat().st_size for path in prepared.folder.glob("*.bin"))


def test_a_lost_shard_of_a_source_that_is_no_longer_the_same_is_not_made_up(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build(lines, tmp_path, shard_mib=SMALL)
    (first.folder / first.train.shards[2].file).unlink()
    monkeypatch.setattr(tokenising, "plain", lambda text: text.replace("a", "b"))
    with pytest.raises(UserError, match=r"no longer what it was made from|text has changed"):
        build(lines, tmp_path, shard_mib=SMALL)
    assert not (first.folder / first.train.shards[2].file).exists()


def test_a_corpus_of_an_earlier_version_opens_and_says_what_it_has_lost(lines: Path, tmp_path: Path) -> None:
    now = build(lines, tmp_path / "now")
    before = build(lines, tmp_path / "before")
    index = json.loads((before.folder / "index.json").read_text())
    for part in ("train", "validation"):
        (before.folder / index[part].pop("shards")[0]["file"]).rename(before.folder / f"{part}.bin")
    (before.folder / "index.json").unlink()
    (before.folder / "meta.json").write_text(json.dumps(index))
    opened = build(lines, tmp_path / "before")
    assert (stream(opened.train), stream(opened.validation)) == (stream(now.train), stream(now.validation))
    assert open_corpus(tmp_path / "before", opened.key)[0].tokens == now.tokens
    assert verify(opened) == {}
    (opened.folder / "train.bin").unlink()
    with pytest.raises(UserError, match=rf"train\.bin: no such file.\nAn earlier version .*{opened.folder}"):
        build(lines, tmp_path / "before")


READ = """
import pickle, sys
import numpy as np
blocks = pickle.load(sys.stdin.buffer)
assert (blocks.shelf.local / "train-00000.bin").exists() == (sys.argv[1] == "again")
sys.stdout.buffer.write(blocks.take(np.arange(len(blocks))).astype("<u2").tobytes())
"""


def test_shards_at_an_address_are_read_by_a_node_that_has_none_of_the_makers_folders(
    lines: Path, tmp_path: Path
) -> None:
    far = f"file://{tmp_path / 'far'}"
    made = build(lines, tmp_path / "maker", shards=far, cache="~/copies", shard_mib=SMALL)
    plain = build(lines, tmp_path / "plain")
    wanted = np.array(stream(plain.train), dtype="<u2").tobytes()
    home = tmp_path / "node"
    for what in ("first", "again"):
        found = subprocess.run(
            [sys.executable, "-c", READ, what], input=pickle.dumps(made.train), capture_output=True,
            env={**os.environ, "HOME": str(home)}, check=True,
        )  # fmt: skip
        assert found.stdout == wanted
    copies = home / "copies" / made.key
    assert files(copies).keys() - {f".{shard.file}.lock" for shard in made.train.shards} == {
        shard.file for shard in made.train.shards
    }
    assert open_corpus(tmp_path / "maker", made.key)[0].tokens == made.tokens


def test_a_preparation_at_an_address_goes_on_elsewhere_and_repairs_what_is_lost_there(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenising, "BATCH_CHARACTERS", 2000)
    far = f"memory://{uuid.uuid4().hex}/corpora"
    system = fsspec.filesystem("memory")
    config = CorpusConfig(source=str(lines), validation_fraction=0.1, shard_mib=SMALL, shards=far)

    def stop(what: str, done: int, total: int | None) -> None:
        if done > 6000:
            raise Stopped

    with pytest.raises(Stopped):
        prepare_corpus(
            config.model_copy(update={"cache": str(tmp_path / "a")}), BPE, block_length=16, store=tmp_path / "1",
            workers=1, progress=stop,
        )  # fmt: skip
    (key,) = (path.name for path in (tmp_path / "a").iterdir())
    begun = {file: system.cat_file(file) for file in system.ls(f"{far}/{key}", detail=False) if file.endswith(".bin")}
    assert len(begun) > 1
    second = config.model_copy(update={"cache": str(tmp_path / "b")})
    prepared = prepare_corpus(second, BPE, block_length=16, store=tmp_path / "2", workers=1)
    assert not any((tmp_path / "b" / key / file.rpartition("/")[2]).exists() for file in begun), (
        "they were not made again"
    )
    plain = build(lines, tmp_path / "plain")
    assert stream(prepared.train) == stream(plain.train)
    assert verify(prepared) == {}
    lost = f"{far}/{key}/{prepared.train.shards[1].file}"
    content = system.cat_file(lost)
    system.pipe_file(lost, content[:-4] + b"\0\0\0\0")
    assert list(verify(prepared)) == [lost]
    system.rm_file(lost)
    prepare_corpus(second, BPE, block_length=16, store=tmp_path / "2", workers=1)
    assert system.cat_file(lost) == content


def test_two_preparations_at_once_take_turns(lines: Path, tmp_path: Path) -> None:
    said: list[str] = []
    answers: list[PreparedCorpus] = []
    config = CorpusConfig(source=str(lines), validation_fraction=0.1, shard_mib=SMALL)

    def run() -> None:
        answers.append(
            prepare_corpus(
                config, BPE, block_length=16, store=tmp_path, workers=1, progress=lambda what, *_: said.append(what)
            )
        )

    with in_turn(tmp_path / "corpora" / f".{build(lines, tmp_path / 'key').key}.lock"):
        thread = threading.Thread(target=run)
        thread.start()
        deadline = time.monotonic() + 60
        while not any("waiting for another process" in what for what in said):
            assert time.monotonic() < deadline and thread.is_alive()
            time.sleep(0.01)
        assert "tokenising" not in said
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


def word_level(folder: Path, words: list[str], *, unknown: str | None = "[UNK]", gap: int = 0) -> TokenizerConfig:
    """A tokenizer that knows these words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", *([unknown] if unknown else [])]
    numbers = {word: number for number, word in enumerate([*special, *words])}
    numbers[words[-1]] += gap
    tokenizer = Tokenizer(models.WordLevel(numbers, unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return TokenizerConfig(path=str(path))


def known_words(texts: list[str], share: float) -> list[str]:
    """The most frequent words of the texts that make up at least this share of them."""
    counts = collections.Counter(word for text in texts for word in re.findall(r"\w+|[^\w\s]+", text))
    found, so_far = [], 0
    for word, count in counts.most_common():
        if so_far >= share * counts.total():
            break
        found.append(word)
        so_far += count
    return found


def test_a_tokenizer_that_knows_too_little_of_the_text_is_refused_with_the_share(
    texts: list[str], lines: Path, tmp_path: Path
) -> None:
    config = CorpusConfig(source=str(lines), validation_fraction=0.1)
    poor = word_level(tmp_path, known_words(texts, 0.5))
    with pytest.raises(
        UserError, match=r"doesn't fit the text of corpus source .*: (\d\d\.\d)% of .* doesn't know"
    ) as caught:
        prepare_corpus(config, poor, block_length=16, store=tmp_path, workers=1)
    share = float(re.search(r"([\d.]+)% of", str(caught.value))[1]) / 100  # type: ignore[index]
    known = set(known_words(texts, 0.5))
    words = [re.findall(r"\w+|[^\w\s]+", text) for text in texts if not held_out(text, fraction=0.1, seed=0)]
    unknown = sum(word not in known for text in words for word in text)
    assert share == pytest.approx(unknown / sum(len(text) + 1 for text in words), abs=1e-3)  # an EOS each
    allowed = config.model_copy(update={"max_unknown": 0.9})
    assert prepare_corpus(allowed, poor, block_length=16, store=tmp_path, workers=1).tokens
    good = word_level(tmp_path, known_words(texts, 0.95))
    assert prepare_corpus(config, good, block_length=16, store=tmp_path, workers=1).tokens


def test_a_tokenizer_that_drops_what_it_does_not_know_is_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    alphabet = "".join(map(chr, range(33, 127)))
    special = ["[PAD]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.BPE({token: n for n, token in enumerate([*special, *alphabet])}, []))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    source = tmp_path / "corpus.txt"
    source.write_text("\n\n".join(["日本語の文章です" * 5 + str(n) * (n % 3 == 0) for n in range(200)]))
    config = CorpusConfig(source=str(source), validation_fraction=0.1)
    with pytest.raises(UserError, match=r"% of the first \d+ documents of the train part have not a single token"):
        prepare_corpus(
            config, TokenizerConfig(path=str(tmp_path / "tokenizer.json")), block_length=4, store=tmp_path, workers=1
        )


def test_a_tokenizer_whose_ids_have_gaps_is_refused_before_anything_is_tokenised(
    texts: list[str], lines: Path, tmp_path: Path
) -> None:
    words = known_words(texts, 1.0)
    broken = word_level(tmp_path, words, gap=70_000)
    with pytest.raises(
        UserError, match=rf"token '{re.escape(words[-1])}' has id \d+, but the tokenizer has {len(words) + 5} tokens"
    ):
        prepare_corpus(CorpusConfig(source=str(lines)), broken, block_length=16, store=tmp_path, workers=1)
    assert not list((tmp_path / "corpora").glob("*/*.bin"))


def test_lone_surrogates_become_question_marks(texts: list[str], tmp_path: Path) -> None:
    source = tmp_path / "corpus.jsonl"
    source.write_text("".join(json.dumps({"text": f"{text} \ud800"}) + "\n" for text in texts))
    prepared = build(source, tmp_path)
    assert documents_in(prepared)[0].endswith(". ?")


def test_a_cache_goes_with_an_address() -> None:
    with pytest.raises(ValueError, match="cache goes with an address"):
        CorpusConfig(source="x", shards="/some/folder", cache="/cache")


def test_ray_that_is_asked_for_but_not_there_is_an_error(lines: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no Ray session"):
        build(lines, tmp_path, workers_setting="ray")
