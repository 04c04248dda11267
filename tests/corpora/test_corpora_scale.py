"""The counts of `benchmarks.scale`, held against what an S3 server has been asked and holds."""

from __future__ import annotations

from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from small_corpora import SMALL, build

from benchmarks.scale import Fit, StoredTokens, brought, fitted, memory, sent, shares, trained
from mlmclm.corpora.corpus_config import CorpusConfig
from mlmclm.corpora.order import step_tokens
from mlmclm.corpora.prepare_corpus import blocks_a_shard
from mlmclm.models.architectures import weights_of
from mlmclm.models.build import hollow, model_config
from mlmclm.pretraining.checkpoints import TrainingState, write_folder
from mlmclm.storage.buckets import bucket_of
from mlmclm.storage.checksums import damage
from mlmclm.storage.objects import ObjectPath
from mlmclm.storage.remote_folders import MANIFEST, bring, send
from object_stores import DisturbedStore, forget_buckets
from object_stores import disturbed as disturbed
from small_models import small_tokenizer

LENGTH, BATCH = 16, 24


def held(url: str) -> dict[str, int]:
    """The sizes of the objects below an address, by name."""
    return {path.name: path.stat().st_size for path in ObjectPath(url).iterdir()}


def machine(url: str, place: Path) -> Path:
    """A machine's folder of the store at an address."""
    return place / url.replace("://", "++").replace("/", "+")


def unhurried() -> None:
    """Let no request be given up and repeated, so that each is counted once."""
    fsspec.config.conf["s3"]["config_kwargs"] |= {"connect_timeout": 60, "read_timeout": 60}
    forget_buckets()


@pytest.mark.parametrize("size", ["1m", "ettin17m"])
def test_parameters_are_those_of_the_model_as_it_is_trained(size: str) -> None:
    tokenizer = small_tokenizer()
    weights = weights_of(hollow(model_config(size, tokenizer, LENGTH)))
    assert trained(size, len(tokenizer)) == sum(weight.numel() for weight in weights.values())


def test_a_state_takes_the_counted_bytes_and_requests(
    disturbed: DisturbedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unhurried()
    tokenizer = small_tokenizer()
    weights, count = weights_of(hollow(model_config("1m", tokenizer, LENGTH))), trained("1m", len(tokenizer))
    part = 5 << 20  # the smallest that S3 takes
    monkeypatch.setattr("s3fs.core.calculate_chunksize", lambda size, chunksize=None: part)
    monkeypatch.setattr(bucket_of(disturbed.url).files, "default_block_size", part)
    zeros = {name: torch.zeros_like(weight, device="cpu") for name, weight in weights.items()}
    others = [{name: value + number for name, value in zeros.items()} for number in (1, 2)]
    folder = machine(disturbed.url, tmp_path / "one") / "states" / "0123456789abcdef"
    write_folder(folder, TrainingState(1, zeros, *others), {"key": folder.name}, [])
    sizes = [path.stat().st_size for path in folder.iterdir()]
    assert max(sizes) == pytest.approx(12 * count, rel=0.01)  # the rest is the names of the weights
    disturbed.proxy.clear()
    send(folder)
    asked = len(disturbed.proxy.seen)
    objects = held(disturbed.url)
    assert sent(sizes, objects[MANIFEST]) == (sum(objects.values()), asked)
    disturbed.proxy.clear()
    there = machine(disturbed.url, tmp_path / "two") / "states" / folder.name
    assert bring(there)
    assert brought(sizes, objects[MANIFEST], part).requests == len(disturbed.proxy.seen)
    assert damage(there) is None


def test_shards_take_the_counted_bytes_and_requests(lines: Path, disturbed: DisturbedStore, tmp_path: Path) -> None:
    unhurried()
    options = {"shards": disturbed.url, "max_tokens": 9000, "shard_mib": SMALL, "cache_gib": 1e-6}
    corpus = build(lines, tmp_path, cache=str(tmp_path / "maker"), **options)
    written = [where for method, where in disturbed.proxy.seen if "/train-" in where and method in ("PUT", "DELETE")]
    blocks = corpus.train
    config = CorpusConfig(source="-", shard_mib=SMALL)
    stored = StoredTokens(
        len(blocks),
        LENGTH,
        corpus.vocabulary,
        blocks_a_shard(config, blocks.bytes_of(blocks.shards[0]) // blocks.shards[0].blocks),
    )
    assert stored.shards == len(blocks.shards) > 2
    files = {name: size for name, size in held(disturbed.url).items() if name.startswith("train-")}
    assert stored.total == (sum(files.values()), len(written)) and len(files) == 2 * stored.shards

    node = build(lines, tmp_path, cache=str(tmp_path / "node"), **options).train
    steps, workers = range(2, 9), shares(BATCH, 6)[:2]
    disturbed.proxy.clear()
    taken = 0
    for step in steps:
        for rows in workers:
            samples = range(step * BATCH, (step + 1) * BATCH)
            taken += step_tokens(node, samples, 0, np.arange(rows.start, rows.stop))[1].size
    moved, touched = stored.read(steps, BATCH, workers)
    sums = list((tmp_path / "node").rglob("*.sums"))
    assert moved.requests == len(disturbed.proxy.seen)
    assert moved.bytes == taken * 2 + sum(path.stat().st_size for path in sums) and touched == len(sums) > 1


def test_a_fit_finds_the_costs_that_made_the_runs() -> None:
    costs = Fit(cell=2e-3, pair=1e-5, second=0.02, wait=3e-4)
    runs = [
        {"workers": workers, "counted": counted, "seconds": 50.0, "driver": 50.0 * costs.busy(workers, counted / 50)}
        for workers, counted in ((4, 5000), (4, 100), (48, 4000), (48, 200), (16, 1000))
    ]
    found = fitted(runs)
    assert found == pytest.approx(costs, rel=1e-6)
    assert found.busy(500, found.most(500)) == pytest.approx(1)
    sizes = [
        {"cells": n, "workers": w, "driver_mib": 20 + 0.05 * n + 1.5 * w} for n, w in ((100, 4), (900, 8), (300, 60))
    ]
    assert memory(sizes) == pytest.approx((20, 0.05, 1.5))
