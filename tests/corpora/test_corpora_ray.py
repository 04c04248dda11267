"""Tokenising by Ray Data: the same bytes as by this machine's processes."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import small_corpora
from small_corpora import BPE, LIMITS, SMALL, tell

from mlmclm.cluster.ray_cluster import ray_session
from mlmclm.corpora import tokenising
from mlmclm.corpora.corpus_config import CorpusConfig, TokenizerConfig
from mlmclm.corpora.prepare_corpus import prepare_corpus
from mlmclm.corpora.prepared_corpus import PreparedCorpus
from mlmclm.errors import UserError
from mlmclm.launches import ray_tokenising
from mlmclm.storage.place import Place
from mlmclm.studies.prepare import prepare_study
from mlmclm.studies.study_file import load_study
from small_study import write_study


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A Ray cluster of two processors."""
    with ray_session(tmp_path_factory.mktemp("session"), num_cpus=2):
        yield


@pytest.fixture
def folder(texts: list[str], tmp_path: Path) -> Path:
    """The documents in five files; one of them holds a lone surrogate."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(5):
        rows = [{"text": text} for text in texts[number::5]]
        rows[3]["text"] += " \ud800" if number == 2 else ""
        (folder / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(autouse=True)
def many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in small pieces, so that a tiny corpus is a hundred of them."""
    monkeypatch.setattr(ray_tokenising, "BLOCK_BYTES", 2000)
    monkeypatch.setattr(tokenising, "BATCH_CHARACTERS", 1000)


def build(folder: Path, store: Path, workers: str, **options: Any) -> PreparedCorpus:
    return small_corpora.build(folder, store, workers_setting=workers, shard_mib=SMALL, **options)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    "options",
    [
        {"validation_fraction": 1e-9, "streaming": True, "max_tokens": 9000},
        *(pytest.param(each, marks=pytest.mark.slow) for each in [*LIMITS[1:3], {"validation_fraction": 1e-9}]),
    ],
)
def test_shards_and_index_are_the_same_bytes_as_without_ray(
    session: None, folder: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    local = build(folder, tmp_path / "local", "local", **options)
    on_ray = build(folder, tmp_path / "ray", "ray", **options)
    assert on_ray.key == local.key
    assert len(local.train.shards) > 3
    assert files(on_ray.folder) == files(local.folder)


def test_a_running_session_is_used_and_goes_on_where_local_processes_stopped(
    session: None, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = build(folder, tmp_path / "whole", "local")

    class Stopped(Exception):
        pass

    def stop(what: str, done: int, total: int | None, *_: object) -> None:
        if done > 20_000:
            raise Stopped

    config = CorpusConfig(source=str(folder), validation_fraction=0.1, workers="local", shard_mib=0.004)
    with pytest.raises(Stopped), monkeypatch.context() as patched:
        tell(patched, stop)
        prepare_corpus(config, BPE, block_length=16, store=tmp_path / "two")
    begun = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "two" / "corpora" / whole.key).glob("*.bin")}
    assert len(begun) > 3
    used: list[str] = []
    original = ray_tokenising._dataset
    monkeypatch.setattr(ray_tokenising, "_dataset", lambda *args: used.append("ray") or original(*args))
    finished = build(folder, tmp_path / "two", "auto")
    assert used
    assert files(finished.folder) == files(whole.folder)
    assert all((finished.folder / name).stat().st_mtime_ns == written for name, written in begun.items())


def test_a_study_that_asks_for_ray_gets_the_session_that_is_there_or_one_of_its_own(
    session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = load_study(write_study(tmp_path))
    corpus = study.corpus.model_copy(update={"workers": "ray"})
    used: list[str] = []
    original = ray_tokenising._dataset
    monkeypatch.setattr(ray_tokenising, "_dataset", lambda *args: used.append("ray") or original(*args))
    prepared = prepare_study(study.model_copy(update={"corpus": corpus}), Place(tmp_path / "ray", tmp_path / "data"))
    assert used
    monkeypatch.setattr(ray_tokenising, "_dataset", None)
    corpus = study.corpus.model_copy(update={"workers": "local"})
    local = prepare_study(study.model_copy(update={"corpus": corpus}), Place(tmp_path / "local", tmp_path / "data"))
    assert files(prepared.corpus.folder) == files(local.corpus.folder)
    assert prepared.fingerprint == local.fingerprint


def test_a_mistake_in_the_source_is_the_users_error_and_nothing_else_is_printed(
    session: None, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tokenizer = build(folder, tmp_path, "local", max_tokens=2000).tokenizer
    (folder / "3.jsonl").write_text('{"words": "no text"}\n')
    config = CorpusConfig(source=str(folder), validation_fraction=0.1, workers="ray")
    capfd.readouterr()
    with pytest.raises(UserError, match=r"3\.jsonl, line 1: there is no column 'text'"):
        prepare_corpus(
            config, TokenizerConfig(path=str(tokenizer)), block_length=16, store=tmp_path / "b",
            elsewhere=ray_tokenising.on_cluster(None),
        )  # fmt: skip
    assert capfd.readouterr() == ("", "")
    assert ray.is_initialized()
    assert all(handler.level < logging.CRITICAL for handler in logging.getLogger("ray.data").handlers)
