"""Object stores for tests: fsspec's in memory, and a server of the S3 protocol on a free port, where its packages are."""

from __future__ import annotations

import importlib.util
import uuid
from collections.abc import Iterator

import fsspec
import pytest

from mlmclm.storage import objects


@pytest.fixture(params=["memory", "s3"])
def address(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An empty prefix of an object store."""
    if request.param == "memory":
        yield f"memory://{uuid.uuid4().hex}/prefix"
        return
    for package in ("moto", "s3fs"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}, which the extra dev brings")
    from moto.server import ThreadedMotoServer

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": f"http://{host}:{port}"})
    objects._file_system.cache_clear()
    fsspec.filesystem("s3", use_listings_cache=False).makedirs("bucket", exist_ok=True)
    try:
        yield f"s3://bucket/{uuid.uuid4().hex}/prefix"
    finally:
        server.stop()
        objects._file_system.cache_clear()
