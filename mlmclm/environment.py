"""Environment variables: defaults for libraries, and values for the duration of a block."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

PROXIES, NO_PROXY = ("http_proxy", "https_proxy", "all_proxy"), ("no_proxy", "NO_PROXY")
"""Variables that name proxies (in lower or upper case), and those that list hosts without a proxy; of the latter, the first that is set counts."""
OWN_HOSTS = ("127.0.0.1", "localhost", "::1", "169.254.169.254")
"""Addresses of this machine, and of the cloud's metadata service, which Ray asks when it starts."""


@contextmanager
def environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables for the block, or unset those that are None."""
    before = {name: os.environ.get(name) for name in values}
    _put(values)
    try:
        yield
    finally:
        _put(before)


def _put(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def set_library_defaults() -> None:
    """Set variables of Ray and tokenizers that aren't set: report no usage, and start no threads that a fork would break.

    If the environment names a proxy, `OWN_HOSTS` are excluded from it: the proxy could not reach them, and must not see
    tokens. Call this before anything imports these libraries.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    variables = [name for name in NO_PROXY if os.environ.get(name)]
    hosts = [host.strip() for host in os.environ[variables[0]].split(",")] if variables else []
    if any(name.lower() in PROXIES for name in os.environ) and "*" not in hosts:
        os.environ.update(dict.fromkeys(NO_PROXY, ",".join(dict.fromkeys((*hosts, *OWN_HOSTS)))))
