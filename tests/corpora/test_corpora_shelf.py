"""Files of a corpus in a folder, and at an address."""

from __future__ import annotations

import hashlib
import json
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest

from mlmclm.corpora.corpus_config import CorpusConfig
from mlmclm.corpora.shelf import Shelf
from mlmclm.errors import EnvironmentFault, UserError
from mlmclm.storage.files import hash_file
from mlmclm.storage.objects import bucket_of
from mlmclm.storage.retrying import RetryPolicy

CONTENT = b"0123456789" * 1000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture(params=["folder", "memory", "file", "simplecache::memory"])
def shelf(request: pytest.FixtureRequest, tmp_path: Path) -> Shelf:
    """An empty shelf of each kind."""
    root = tmp_path if request.param == "file" else uuid.uuid4().hex
    address = None if request.param == "folder" else f"{request.param}://{root}/corpora/key"
    return Shelf(str(tmp_path / "near"), address)


def put(shelf: Shelf, file: str, content: bytes = CONTENT) -> None:
    shelf.local.mkdir(exist_ok=True)
    (shelf.local / file).write_bytes(content)
    shelf.put(file)


def test_what_is_put_is_listed_fetched_hashed_and_removed(shelf: Shelf) -> None:
    assert shelf.sizes() == {}
    assert shelf.read("index.json") is None
    shelf.write_json("index.json", {"a": [1, "ü"]})
    put(shelf, "x.bin")
    assert json.loads(shelf.read("index.json") or b"") == {"a": [1, "ü"]}
    assert shelf.sizes()["x.bin"] == len(CONTENT)
    assert shelf.sizes().keys() == {"index.json", "x.bin"}
    assert hash_file(shelf.at("x.bin")) == SHA256
    assert shelf.fetch("x.bin", len(CONTENT), SHA256).read_bytes() == CONTENT
    shelf.at("x.bin").unlink()
    assert shelf.sizes().keys() == {"index.json"}
    shelf.clear()
    assert shelf.sizes() == {}


@pytest.fixture(params=["memory", "file"])
def far(request: pytest.FixtureRequest, tmp_path: Path) -> Shelf:
    """A shelf at an address that holds x.bin, on a node that has no copy."""
    address = f"{request.param}://{tmp_path if request.param == 'file' else uuid.uuid4().hex}/key"
    put(Shelf(str(tmp_path / "maker"), address), "x.bin")
    return Shelf(str(tmp_path / "node"), address)


def test_a_node_fetches_a_file_once_however_many_ask_at_once(far: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[str] = []
    system = type(bucket_of(far.address or "").files)
    original = system.get_file

    def counted(self: Any, path: str, *rest: Any, **options: Any) -> Any:
        fetched.append(path)
        return original(self, path, *rest, **options)

    monkeypatch.setattr(system, "get_file", counted)
    threads = [threading.Thread(target=far.fetch, args=("x.bin", len(CONTENT), SHA256)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fetched) == 1
    assert (far.local / "x.bin").read_bytes() == CONTENT
    assert [path.name for path in far.local.iterdir() if path.name != ".x.bin.lock"] == ["x.bin"]


def test_a_copy_that_was_cut_short_is_fetched_again(far: Shelf) -> None:
    far.fetch("x.bin", len(CONTENT), SHA256).write_bytes(b"short")
    assert far.fetch("x.bin", len(CONTENT), SHA256).read_bytes() == CONTENT


def test_a_file_that_is_not_what_was_written_is_named_and_not_kept(far: Shelf) -> None:
    with pytest.raises(UserError, match=r"/x\.bin: its content is not what was written") as caught:
        far.fetch("x.bin", len(CONTENT), "0" * 64)
    assert far.address is not None and far.address in str(caught.value)
    assert "Delete it and run `mlmclm data`" in str(caught.value)
    assert [path.name for path in far.local.iterdir()] == [".x.bin.lock"]


def test_a_file_that_is_not_there_is_named(far: Shelf) -> None:
    with pytest.raises(UserError, match=rf"{far.address}/y\.bin: no such file"):
        far.fetch("y.bin", 3, None)


def test_an_address_that_fails_is_the_environments_fault(far: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("out of order")

    bucket = bucket_of(far.address or "")
    monkeypatch.setattr(type(bucket.files), "get_file", refuse)
    monkeypatch.setattr(bucket.availability, "retry", RetryPolicy(seconds=0))
    said = r"x\.bin: (the object store .* \(out of order\)|cannot be used \(RuntimeError: out of order\))"
    with pytest.raises(EnvironmentFault, match=said):
        far.fetch("x.bin", len(CONTENT), SHA256)


def test_an_unknown_protocol_names_the_nearest() -> None:
    for use in (lambda: Shelf("x", "memry://bucket/key").sizes(), lambda: CorpusConfig(source="x", shards="memry://a")):
        with pytest.raises(Exception, match=r"unknown protocol 'memry'. Did you mean 'memory'\?"):
            use()


def test_an_address_whose_package_is_absent_says_what_to_install() -> None:
    with pytest.raises(UserError, match=r"gs://bucket/key: this needs a package: pip install gcsfs"):
        Shelf("x", "gs://bucket/key").sizes()
