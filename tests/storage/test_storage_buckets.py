"""An object store that is missing, refuses or does not answer: each is told from the others, and costs no result."""

from __future__ import annotations

import json
import os
import threading
import time
from typing import Any

import fsspec
import pytest

from mlmclm.errors import MissingBucket, StorageFault, UserError
from mlmclm.storage.leases import ObjectLeases
from mlmclm.storage.objects import ObjectPath, bucket_of, check_url, read_all
from mlmclm.storage.retrying import NoAnswer
from object_stores import DisturbedStore

LEASE = 0.6


def of_s3(code: str, status: int, error: type[Exception] = OSError) -> Exception:
    """Return an error as s3fs makes one of its client's."""

    made, cause = error(code), Exception(code)
    cause.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}  # type: ignore[attr-defined]
    made.__cause__ = cause
    return made


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (of_s3("NoSuchBucket", 404, FileNotFoundError), MissingBucket),
        (of_s3("NoSuchKey", 404, FileNotFoundError), FileNotFoundError),
        (FileNotFoundError("bucket/a"), FileNotFoundError),
        (of_s3("PreconditionFailed", 412, FileExistsError), FileExistsError),
        (of_s3("PreconditionFailed", 412), FileExistsError),
        (of_s3("ConditionalRequestConflict", 409), NoAnswer),
        (of_s3("SlowDown", 503), NoAnswer),
        (of_s3("InternalError", 500), NoAnswer),
        (of_s3("BadDigest", 400), NoAnswer),
        (of_s3("InvalidArgument", 400), StorageFault),
        (of_s3("AccessDenied", 403, PermissionError), StorageFault),
        (ConnectionResetError(), NoAnswer),
        (TimeoutError(), NoAnswer),
        (type("NoCredentialsError", (Exception,), {})(), StorageFault),
        (type("HttpError", (OSError,), {"code": 503})(), NoAnswer),
        (type("HttpResponseError", (Exception,), {"status_code": 403})(), StorageFault),
        (TypeError("a mistake of ours"), StorageFault),
    ],
)
def test_each_error_of_a_client_is_told_as_one_of_ours(error: Exception, kind: type[Exception]) -> None:
    assert type(bucket_of("memory://bucket").told("memory://bucket/a", error)) is kind


REQUESTS = {
    "exists": lambda path: path.exists(),
    "stat": lambda path: path.stat(),
    "list": lambda path: path.iterdir(),
    "read": lambda path: path.read_bytes(),
    "read all": lambda path: read_all([path]),
    "write": lambda path: path.write_bytes(b"1"),
    "create": lambda path: path.write_bytes(b"1", new=True),
    "delete": lambda path: path.unlink(missing_ok=True),
    "rename": lambda path: path.rename(path.parent / "other"),
    "check": lambda path: check_url(path.url),
    "lease": lambda path: ObjectLeases(path).attempt(["a"]).__enter__(),
    "wait": lambda path: ObjectLeases(path).wait(lambda: ["a"], lambda other: None).__enter__(),
    "holder": lambda path: ObjectLeases(path).holder("a"),
    "held": lambda path: ObjectLeases(path).held(""),
}


def test_a_missing_bucket_is_a_users_error_that_names_it_after_few_requests(disturbed: DisturbedStore) -> None:
    for name, request in REQUESTS.items():
        disturbed.proxy.clear()
        with pytest.raises(MissingBucket, match=r"there is no bucket s3://nowhere at http://.*--store") as found:
            request(ObjectPath("s3://nowhere/prefix/a"))
        assert isinstance(found.value, UserError) and len(disturbed.proxy.seen) <= 2, name


def test_a_bucket_that_vanishes_is_no_empty_one(disturbed: DisturbedStore) -> None:
    root = ObjectPath(disturbed.url)
    (root / "a").write_bytes(b"1")
    assert root.iterdir() and read_all([root / "a", root / "b"]) == [b"1", None] and not (root / "b").exists()
    files = fsspec.filesystem("s3", use_listings_cache=False, endpoint_url=disturbed.direct)
    files.rm("bucket", recursive=True)
    for name in ("exists", "list", "read all"):
        with pytest.raises(MissingBucket, match="nothing is computed again"):
            REQUESTS[name](root / "a")


def test_a_store_that_refuses_is_not_asked_again(disturbed: DisturbedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(bucket_of(disturbed.url).files, "pipe_file", refuse)
    with pytest.raises(StorageFault, match=r"refuses the request \(Access Denied\)") as found:
        (ObjectPath(disturbed.url) / "a").write_bytes(b"1")
    assert not isinstance(found.value, NoAnswer)


def test_a_claim_that_nobody_holds_and_that_cannot_be_made_is_given_up(
    disturbed: DisturbedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlmclm.storage.leases.MOST_TRIES", 3)
    monkeypatch.setattr(ObjectPath, "write_bytes", lambda self, content, **options: None)  # and keeps nothing
    with pytest.raises(Exception, match=r"lease a: 3 times it could not be made although nobody holds it"):
        ObjectLeases(ObjectPath(disturbed.url)).attempt(["a"]).__enter__()


def test_a_claim_whose_answer_was_lost_is_our_own(disturbed: DisturbedStore) -> None:
    root = ObjectPath(disturbed.url)
    disturbed.proxy.inject("lost response", method="PUT")
    with ObjectLeases(root).attempt(["a"]) as other:
        assert other is None
        assert [method for method, _ in disturbed.proxy.seen].count("PUT") == 2
        with ObjectLeases(root).attempt(["a"]) as again:
            assert again is not None
    assert (root / "claims").iterdir() == []


def test_a_claim_that_could_not_be_renewed_in_an_outage_is_not_taken_over_after_it(disturbed: DisturbedStore) -> None:
    root = ObjectPath(disturbed.url)
    (root / "claims" / "a").write_bytes(json.dumps({"host": "h", "process": 1, "token": "t"}).encode())
    leases = ObjectLeases(root, seconds=LEASE)
    assert leases.holder("a") == "process 1 on h"
    disturbed.proxy.outage(3 * LEASE)
    assert leases.holder("a") == "process 1 on h"  # waits for the end of the outage
    assert bucket_of(root.url).availability.lost > LEASE
    # If its holder is dead, that is seen in time during which the store answers.
    while leases.holder("a") is not None:
        time.sleep(LEASE / 4)
    assert (root / "claims").iterdir() == []


def test_a_dead_claim_is_not_deleted_by_a_request_that_is_repeated_later(disturbed: DisturbedStore) -> None:
    root = ObjectPath(disturbed.url)
    (root / "claims" / "a").write_bytes(json.dumps({"host": "h", "process": 1, "token": "t"}).encode())
    leases = ObjectLeases(root, seconds=0.01)
    assert leases.holder("a") is not None
    disturbed.proxy.inject("503", method="DELETE", times=1000)
    for _ in range(6):
        time.sleep(0.01)
        assert leases.holder("a") == "process 1 on h"
    disturbed.proxy.clear()
    assert leases.holder("a") is None


def test_a_claim_that_changed_since_it_was_read_is_not_overwritten_by_a_renewal(disturbed: DisturbedStore) -> None:
    path = ObjectPath(disturbed.url) / "a"
    path.write_bytes(b"mine")
    tag = path.tag()
    path.write_bytes(b"mine again", tag=tag)
    with pytest.raises(FileExistsError):
        path.write_bytes(b"late", tag=tag)
    assert path.read_bytes() == b"mine again"


def test_a_claim_that_a_late_request_makes_anew_after_its_release_is_removed_by_its_maker(
    disturbed: DisturbedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlmclm.storage.leases.RENEWALS", 6000)
    disturbed.give_up_after(1.0)
    leases, late = ObjectLeases(ObjectPath(disturbed.url), seconds=600.0), threading.Event()
    disturbed.proxy.inject("delay", method="PUT", path="/claims/", act=late.wait)
    with leases.attempt(["cells-a"]) as other:
        assert other is None
    assert leases.held("") == {}
    late.set()
    disturbed.proxy.settle()
    while leases.held(""):
        time.sleep(0.05)


def test_a_claim_that_a_late_request_makes_although_another_had_it_is_removed_by_its_maker(
    disturbed: DisturbedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlmclm.storage.leases.RENEWALS", 6000)
    disturbed.give_up_after(1.0)
    root, late = ObjectPath(disturbed.url), threading.Event()
    mine, other = ObjectLeases(root, seconds=600.0), root / "claims" / "cells-a"
    theirs = json.dumps({"host": "h", "process": 1, "token": "t", "renewed": time.time()}).encode()
    # Another process makes its lease while our request is under way.
    held_up = disturbed.proxy.inject("delay", method="PUT", path="/claims/")
    held_up.act = lambda: (threading.Thread(target=other.write_bytes, args=[theirs]).start(), late.wait())
    with mine.attempt(["cells-a"]) as holder:
        assert holder == "process 1 on h"
    other.unlink()
    late.set()
    disturbed.proxy.settle()
    assert json.loads(other.read_bytes())["process"] == os.getpid(), "the late request has made it"
    while mine.held(""):
        time.sleep(0.05)


def test_a_claim_that_could_not_be_released_is_released_when_the_store_answers_again(
    disturbed: DisturbedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlmclm.storage.leases.SECONDS_FOR_RELEASE", 0.0)
    monkeypatch.setattr("mlmclm.storage.leases.RENEWALS", 6000)
    leases = ObjectLeases(ObjectPath(disturbed.url), seconds=600.0)
    with leases.attempt(["cells-a"]):
        disturbed.proxy.inject("503", method="DELETE", times=1_000_000)
    assert list(leases.held("")) == ["cells-a"]
    disturbed.proxy.clear()
    while leases.held(""):
        time.sleep(0.05)


def test_a_release_whose_answer_is_lost_does_not_remove_the_claim_that_another_makes_then(
    disturbed: DisturbedStore,
) -> None:
    root = ObjectPath(disturbed.url)
    # Not the lease of other tests, whose makers may still look for it.
    lease = root / "claims" / "cells-b"
    theirs = json.dumps({"host": "h", "process": 1, "token": "t", "renewed": time.time()}).encode()
    with ObjectLeases(root).attempt(["cells-b"]) as other:
        assert other is None
        disturbed.proxy.clear()
        # The client itself repeats a request at once if its connection was closed.
        disturbed.proxy.inject("lost response", method="DELETE", path="/claims/cells-b", times=2)
        # Whatever the maker asks next, the other process has been faster.
        for method, skip in (("GET", 1), ("DELETE", 0)):
            late = disturbed.proxy.inject("delay", method=method, path="/claims/cells-b", skip=skip)
            late.act = lambda: lease.write_bytes(theirs)
    disturbed.proxy.clear()
    assert lease.read_bytes() == theirs
