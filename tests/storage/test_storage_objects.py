"""Object stores: what is written is whole or absent, and a lease has one holder who loses it when it is gone."""

from __future__ import annotations

import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

from mlmclm.errors import EnvironmentFault, UserError
from mlmclm.storage.files import hash_file, write_atomic
from mlmclm.storage.leases import ObjectLeases
from mlmclm.storage.objects import ObjectPath, bucket_of, check_url, read_all
from mlmclm.storage.retrying import RetryPolicy

LEASE = 0.6


def test_a_path_has_the_parts_of_its_name() -> None:
    path = ObjectPath("s3://bucket/cells") / "ab" / "abc.json"
    assert (str(path), path.name, path.stem, path.suffix) == (
        "s3://bucket/cells/ab/abc.json",
        "abc.json",
        "abc",
        ".json",
    )
    assert str(path.with_suffix(".parquet")) == "s3://bucket/cells/ab/abc.parquet"
    assert path.parent.name == "ab"
    assert ObjectPath("s3://b/.hidden").suffix == ""


def test_objects_are_written_read_listed_moved_and_deleted(address: str) -> None:
    root = check_url(address)
    path = root / "ab" / "one.json"
    assert not path.exists() and root.iterdir() == []
    write_atomic(path, "one")
    assert path.exists() and path.read_bytes() == b"one" and path.stat().st_size == 3
    assert hash_file(path) == "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed"
    with pytest.raises(FileExistsError):
        path.write_bytes(b"two", new=True)
    assert [each.parent.name + "/" + each.name for each in root.iterdir()] == ["ab/one.json"]
    assert read_all([path, root / "none"]) == [b"one", None]
    path.rename(root / "moved")
    assert not path.exists() and (root / "moved").read_bytes() == b"one"
    (root / "moved").unlink()
    (root / "moved").unlink(missing_ok=True)
    with pytest.raises(FileNotFoundError):
        (root / "moved").read_bytes()


def test_a_package_that_may_overwrite_what_it_should_create_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_registry, "gs", MemoryFileSystem)  # as obstore.fsspec.register("gs") puts its own there
    with pytest.raises(UserError, match=r"fsspec is registered .* gcsfs only"):
        check_url("gs://bucket/store")


def test_a_store_that_fails_is_a_fault_that_names_the_object(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = check_url(address) / "a"

    def fail(*args: Any, **options: Any) -> None:
        raise OSError("SlowDown: reduce your request rate")

    monkeypatch.setattr(bucket_of(address).files, "pipe_file", fail)
    monkeypatch.setattr(bucket_of(address).availability, "retry", RetryPolicy(seconds=0))
    with pytest.raises(EnvironmentFault, match=r"prefix/a: the object store .*SlowDown"):
        write_atomic(path, "one")
    assert not path.exists()


def test_a_kind_of_store_whose_files_may_be_halves_is_refused() -> None:
    with pytest.raises(UserError, match=r"unknown kind of object store 'ftp'.*Allowed: s3"):
        check_url("ftp://host/folder")


def test_of_many_threads_one_gets_a_claim_and_the_others_hear_of_it(address: str) -> None:
    root = check_url(address)
    got, begin = [], threading.Barrier(6)

    def want(_: int) -> None:
        begin.wait()
        with ObjectLeases(root).attempt(["cells-a", "cells-b"]) as other:
            if other is None:
                got.append(1)
            assert other in (None, f"process {os.getpid()} on {os.uname().nodename}")
            begin.wait()  # nobody lets go before all have tried

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(want, range(6)))
    # `memory` looks before it writes, so that two may collide and none or both of them hold the lease for a moment.
    assert sum(got) == 1 or address.startswith("memory")
    assert ObjectLeases(root).holder("cells-a") is None
    assert (root / "claims").iterdir() == []


def test_a_claim_is_renewed_while_it_is_held_and_shown_to_everyone(address: str) -> None:
    root = check_url(address)
    with ObjectLeases(root, seconds=LEASE).attempt(["cells-a"]) as other:
        assert other is None
        contents = set[bytes]()
        while len(contents) < 4:
            contents.add((root / "claims" / "cells-a").read_bytes())
            assert ObjectLeases(root).holder("cells-a") is not None
            time.sleep(LEASE / 20)
        (holder,) = ObjectLeases(root).held("cells-").values()
        assert (holder.process, holder.host, holder.alive) == (os.getpid(), os.uname().nodename, True)
        assert ObjectLeases(root).held("other-") == {}
    assert ObjectLeases(root).held("cells-") == {}


def test_the_claim_of_a_holder_that_is_gone_is_taken_over_and_left_alone_if_it_comes_back(address: str) -> None:
    root = check_url(address)
    lease = root / "claims" / "a"
    lease.write_bytes(json.dumps({"host": "node7", "process": 12, "token": "gone", "renewed": 0}).encode())
    leases = ObjectLeases(root, seconds=LEASE)
    assert leases.holder("a") == "process 12 on node7"
    assert leases.held("")["a"].alive is False
    said: list[str] = []
    with leases.wait(lambda: ["a"], said.append):
        assert said == ["process 12 on node7"]
        mine = json.loads(lease.read_bytes())
        assert mine["process"] == os.getpid()
        # Another process takes it over, as if this one had been suspended.
        lease.write_bytes(json.dumps({**mine, "token": "theirs"}).encode())
        time.sleep(LEASE / 2)  # four renewals
    assert json.loads(lease.read_bytes())["token"] == "theirs"
