"""The counts of `benchmarks.scale`, held against what an S3 server has been asked and holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_corpora import SMALL, build, stream

from benchmarks.scale import (
    DOCUMENT,
    StoredTokens,
    brought,
    chunks_on_paper,
    rows_of_node,
    sent,
    shares,
    shares_of_state,
    trained,
    uploaded,
)
from mlmclm.corpora.chunks import chunk_starts
from mlmclm.corpora.corpus_config import CorpusConfig
from mlmclm.corpora.mixed_blocks import rows_of_length
from mlmclm.corpora.order import step_tokens
from mlmclm.corpora.prepare_corpus import blocks_a_shard
from mlmclm.corpora.prepared_corpus import PreparedCorpus
from mlmclm.corpora.shelf import Shelf
from mlmclm.corpora.tokenizer import special_ids
from mlmclm.models.architectures import weights_of
from mlmclm.models.build import hollow, model_config
from mlmclm.pretraining.checkpoints import TrainingState
from mlmclm.pretraining.parts import names_by_part
from mlmclm.storage.addresses import MANIFEST, fetch_folder
from mlmclm.storage.checksums import damage
from mlmclm.storage.objects import ObjectPath, bucket_of
from object_stores import DisturbedStore
from object_stores import disturbed as disturbed
from small_models import small_tokenizer
from state_writers import write_by_threads

LENGTH, BATCH = 16, 24


def held(url: str) -> dict[str, int]:
    """The sizes of the objects below an address, by name."""
    return {path.name: path.stat().st_size for path in ObjectPath(url).iterdir()}


def machine(url: str, place: Path) -> Path:
    """A machine's folder of the store at an address."""
    return place / url.replace("://", "++").replace("/", "+")


@pytest.mark.parametrize("size", ["1m", "ettin17m"])
def test_parameters_are_those_of_the_model_as_it_is_trained(size: str) -> None:
    tokenizer = small_tokenizer()
    weights = weights_of(hollow(model_config(size, tokenizer, LENGTH)))
    assert trained(size, len(tokenizer)) == sum(weight.numel() for weight in weights.values())
    (alone,) = shares_of_state(size, len(tokenizer), 1)
    assert sum(alone) == 12 * trained(size, len(tokenizer))


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_state_takes_the_counted_bytes_and_requests(
    disturbed: DisturbedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    tokenizer = small_tokenizer()
    weights, count = weights_of(hollow(model_config("1m", tokenizer, LENGTH))), trained("1m", len(tokenizer))
    part = 5 << 20  # the smallest that S3 takes
    monkeypatch.setattr("s3fs.core.calculate_chunksize", lambda size, chunksize=None: part)
    monkeypatch.setattr(bucket_of(disturbed.url).files, "default_block_size", part)
    zeros = {name: torch.zeros_like(weight, device="cpu") for name, weight in weights.items()}
    others = [{name: value + number for name, value in zeros.items()} for number in (1, 2)]
    folder = machine(disturbed.url, tmp_path / "one") / "states" / "0123456789abcdef"
    names = {f"{kind}/{name}": 4 * weight.numel() for kind in "mvw" for name, weight in zeros.items()}
    parts = names_by_part(names, 12 * count - (workers - 1))
    disturbed.proxy.clear()
    errors = write_by_threads(TrainingState(1, zeros, *others, parts=parts), [folder] * workers)
    asked, objects = len(disturbed.proxy.seen), held(disturbed.url)
    assert errors == [None] * workers
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    large = [size for name, size in sizes.items() if name.startswith("state") and name.endswith("safetensors")]
    assert len(large) == workers
    assert sum(large) == pytest.approx(12 * count, rel=0.01)  # the rest is the names of the weights
    expected = sent(list(sizes.values()), objects[MANIFEST])
    if workers > 1:
        expected += uploaded([])
    assert expected.bytes == sum(objects.values())
    # A worker asks less to list the contents where another one has sent some.
    assert expected.requests - 2 * (workers - 1) <= asked <= expected.requests
    disturbed.proxy.clear()
    there = machine(disturbed.url, tmp_path / "two") / "states" / folder.name
    assert fetch_folder(there)
    assert brought(list(sizes.values()), objects[MANIFEST], part).requests == len(disturbed.proxy.seen)
    assert damage(there) is None


def on_node(lines: Path, store: DisturbedStore, folder: Path, node: str) -> PreparedCorpus:
    """A corpus at an address, larger than the copies that a node may have."""
    options = {"shards": store.url, "max_tokens": 9000, "shard_mib": SMALL, "cache_gib": 1e-6}
    return build(lines, folder, cache=str(folder / node), **options)


def counted(corpus: PreparedCorpus) -> tuple[StoredTokens, np.ndarray]:
    """The counts of a corpus, and the positions of EOS in it."""
    blocks, shard = corpus.train, corpus.train.shards[0]
    ends = np.flatnonzero(np.array(stream(blocks)) == special_ids(corpus.tokenizer)["eos"])
    a_shard = blocks_a_shard(CorpusConfig(source="-", shard_mib=SMALL), blocks.bytes_of(shard) // shard.blocks)
    return StoredTokens(len(blocks), LENGTH, corpus.vocabulary, a_shard, len(ends)), ends


def test_shards_take_the_counted_bytes_and_requests(lines: Path, disturbed: DisturbedStore, tmp_path: Path) -> None:
    corpus = on_node(lines, disturbed, tmp_path, "maker")
    written = [where for method, where in disturbed.proxy.seen if "/train-" in where and method in ("PUT", "DELETE")]
    stored, _ = counted(corpus)
    assert stored.shards == len(corpus.train.shards) > 2
    files = {name: size for name, size in held(disturbed.url).items() if name.startswith("train-")}
    assert stored.total == (sum(files.values()), len(written)) and len(files) == 3 * stored.shards

    node = on_node(lines, disturbed, tmp_path, "node").train
    steps, workers = range(2, 9), shares(BATCH, 6)[:2]
    disturbed.proxy.clear()
    taken = 0
    for step in steps:
        for rows in workers:
            samples = range(step * BATCH, (step + 1) * BATCH)
            taken += step_tokens(node, samples, 0, np.arange(rows.start, rows.stop))[1].size
    first = LENGTH * rows_of_node(stored.blocks, steps, BATCH, workers)
    moved, touched = stored.read(first, first + LENGTH)
    sums = list((tmp_path / "node").rglob("*.sums"))
    assert moved.requests == len(disturbed.proxy.seen)
    assert moved.bytes == taken * 2 + sum(path.stat().st_size for path in sums) and touched == len(sums) > 1


def test_chunks_take_the_counted_bytes_and_requests(
    lines: Path, disturbed: DisturbedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = on_node(lines, disturbed, tmp_path, "maker")
    stored, ends = counted(corpus)
    length, begin = 10, 0
    first, end = list[int](), list[int]()
    for stop in [*(ends + 1).tolist(), stored.blocks * LENGTH]:
        whole = stop - (stop <= ends[-1] + 1)  # without EOS, which has no chunk of its own
        first += range(begin, whole, length - 2)
        end += [min(start + length - 2, stop) for start in range(begin, whole, length - 2)]
        begin = stop
    rows_of_length(corpus.train, length, "chunks", corpus.tokenizer)  # counts them, and keeps the count

    node = rows_of_length(on_node(lines, disturbed, tmp_path, "node").train, length, "chunks", corpus.tokenizer)
    assert len(node) == len(first)
    moved, ranges = list[int](), Shelf.ranges

    def measured(shelf: Shelf, wanted: Any) -> list[bytes]:
        found = ranges(shelf, wanted)
        moved.extend(map(len, found))
        return found

    monkeypatch.setattr(Shelf, "ranges", measured)
    disturbed.proxy.clear()
    steps, workers = range(2, 9), shares(BATCH, 6)[:2]
    for step in steps:
        for rows in workers:
            step_tokens(node, range(step * BATCH, (step + 1) * BATCH), 0, np.arange(rows.start, rows.stop))
    own = rows_of_node(len(node), steps, BATCH, workers)
    wanted, touched = stored.read(np.array(first)[own], np.array(end)[own], chunks=True)
    assert (sum(moved), len(disturbed.proxy.seen)) == wanted and touched == stored.shards


@pytest.mark.parametrize("length", [128, 1024])
def test_chunks_on_paper_are_those_of_equal_documents(length: int) -> None:
    number, places = chunks_on_paper(20 * DOCUMENT, length)
    ends = DOCUMENT * np.arange(1, 21) - 1
    starts, _ = chunk_starts(ends, 20 * DOCUMENT, length - 2, 0)
    first, end = places(np.arange(number))
    assert np.array_equal(first, starts)
    assert set(ends + 1) <= set(end.tolist()) and (end - first).max() == min(length - 2, DOCUMENT)
