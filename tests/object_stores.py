"""Object stores for tests: fsspec's in memory, and an S3 server on a free port if its packages are installed."""

from __future__ import annotations

import importlib.util
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import fsspec
import pytest

from fault_proxy import FaultProxy
from mlmclm.storage import objects as buckets
from mlmclm.storage.addresses import PARTED, SLASH
from mlmclm.storage.objects import bucket_of
from mlmclm.storage.retrying import RetryPolicy

HURRY = RetryPolicy(seconds=300.0, first=0.01, most=0.1, silent=0.0)
"""Retry policy of tests, with short waits."""


@dataclass(frozen=True)
class DisturbedStore:
    """An S3 server behind a proxy that causes faults.

    Attributes:
        url: an empty prefix.
        direct: endpoint of the server itself.
    """

    url: str
    proxy: FaultProxy
    direct: str

    def give_up_after(self, seconds: float) -> None:
        """Let this process give up a request after `seconds`."""
        use_endpoint(self.proxy.endpoint, seconds)

    def be_patient(self, **changes: float) -> None:
        """Change the retry policy of this process."""
        availability = bucket_of(self.url).availability
        availability.retry = replace(availability.retry, **changes)


def store_at(folder: Path, url: str) -> Path:
    """Return the path, below the folder of local copies, of the store at an address."""
    return folder / url.replace("://", PARTED).replace("/", SLASH)


def forget_buckets() -> None:
    """Clear the caches, so that buckets and file systems are opened again with the present configuration."""
    buckets._bucket.cache_clear()
    buckets._file_system.cache_clear()


def use_endpoint(endpoint: str, seconds: float = 60.0) -> None:
    """Let this process use an S3 server, with one attempt for each request.

    Args:
        seconds: timeout of a request. In a test that counts requests, it must be so long that a slow machine does not
            reach it.
    """
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        os.environ[name] = "test"
    once = {
        "connect_timeout": seconds,
        "read_timeout": seconds,
        "retries": {"mode": "standard", "total_max_attempts": 1},
    }
    fsspec.config.conf["s3"] = {"endpoint_url": endpoint, "config_kwargs": once}
    forget_buckets()
    bucket_of("s3://bucket").availability.retry = HURRY


@contextmanager
def s3_server() -> Iterator[str]:
    """Run an S3 server with a bucket named `bucket` in this process; yield its endpoint."""
    from moto.server import ThreadedMotoServer

    before = {name: os.environ.get(name) for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
    configured = fsspec.config.conf.get("s3")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        use_endpoint(f"http://{host}:{port}")
        # In this process the server of an earlier test may have created it.
        fsspec.filesystem("s3", use_listings_cache=False).makedirs("bucket", exist_ok=True)
        yield f"http://{host}:{port}"
    finally:
        server.stop()
        fsspec.config.conf.pop("s3", None)
        if configured is not None:
            fsspec.config.conf["s3"] = configured
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        forget_buckets()


def need_s3() -> None:
    """Skip the test if the packages of an S3 server and client are missing."""
    for package in ("moto", "s3fs"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}, which the extra dev brings")


@pytest.fixture(params=["memory", "s3"])
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    """An empty prefix of an object store."""
    yield from an_address(request.param)


def an_address(kind: str) -> Iterator[str]:
    """Yield an empty prefix of an object store of this kind."""
    if kind == "memory":
        url = f"memory://{uuid.uuid4().hex}/prefix"
        bucket_of(url).availability.retry = HURRY
        yield url
        return
    need_s3()
    with s3_server():
        yield f"s3://bucket/{uuid.uuid4().hex}/prefix"


@pytest.fixture
def disturbed() -> Iterator[DisturbedStore]:
    """An S3 server behind a proxy that causes faults on demand."""
    need_s3()
    with s3_server() as endpoint, FaultProxy(endpoint) as proxy:
        use_endpoint(proxy.endpoint)
        yield DisturbedStore(f"s3://bucket/{uuid.uuid4().hex}/prefix", proxy, endpoint)
