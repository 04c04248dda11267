"""Buckets of an object store by fsspec: one door for all requests, which tells an answer from an outage.

Credentials and endpoints come from where fsspec and its packages look for them: AWS_ACCESS_KEY_ID,
FSSPEC_S3_ENDPOINT_URL, ~/.config/fsspec.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import fsspec

from mlmclm.errors import MissingBucket, MlmclmError, StorageFault, one_line
from mlmclm.storage.patience import Availability, NoAnswer

S3, GOOGLE, AZURE = ("s3", "s3a"), ("gs", "gcs"), ("abfs", "abfss", "az")
PACKAGES = dict.fromkeys(S3, "s3fs") | dict.fromkeys(GOOGLE, "gcsfs") | dict.fromkeys(AZURE, "adlfs")
PROTOCOLS = (*PACKAGES, "memory")
"""File systems on which a put is atomic. `memory` is this process's own, for trying things out."""

S3_CLIENT = {"connect_timeout": 5, "read_timeout": 20, "retries": {"mode": "standard", "total_max_attempts": 2}}
"""Settings of the S3 client: seconds until it gives up a request, and one repetition. `Patience` rules all others."""

DAMAGED_ON_THE_WAY = {"BadDigest", "IncompleteBody", "RequestTimeout", "XAmzContentSHA256Mismatch"}
"""S3's error codes for requests that arrived damaged or too slowly; their status is that of a wrong request."""
CONFIGURATION = {"NoCredentialsError", "PartialCredentialsError", "ParamValidationError", "ProfileNotFound"}
"""Errors of the S3 client that come from how it is set up."""

MISTAKES = (PermissionError, ImportError, TypeError, AttributeError, LookupError, ValueError, NotImplementedError)
"""Errors without a status for which asking again would not help."""

Answer = TypeVar("Answer")


class Bucket:
    """A bucket as this process sees it.

    Attributes:
        name: its address, such as s3://bucket.
        files: fsspec's file system.
        availability: whether it answers, and how long it is waited for.
        conditional: whether it can replace an object on the condition that nobody has changed it (S3).
        reading: options of a read that save a request.
    """

    def __init__(self, protocol: str, name: str) -> None:
        self.name = f"{protocol}://{name}"
        self.files = _file_system(protocol)
        self.availability = Availability(self.name)
        self.conditional = protocol in S3
        self.reading: dict[str, Any] = {"max_concurrency": 1} if protocol in S3 else {}

    def ask(self, where: str, request: Callable[[Any], Answer], *, waits: float = math.inf) -> Answer:
        """Return what a request on `files` returns; it is repeated while the store does not answer.

        Args:
            where: address of the object, for messages.
            waits: as in `Availability.keep_asking`.

        Raises:
            FileNotFoundError: the object isn't there.
            FileExistsError: the request's condition does not hold.
            MissingBucket: the bucket does not exist.
            StorageFault: the store refuses the request, or has not answered for as long as `Patience` allows.
        """

        def once() -> Answer:
            try:
                return request(self.files)
            except Exception as error:
                told = self.told(where, error)
                raise told from (None if told is error else error)

        return self.availability.keep_asking(once, waits=waits)

    def told(self, where: str, error: Exception) -> Exception:
        """Return the error to raise in place of one of fsspec or its packages; `ask` says which there are."""
        if isinstance(error, MlmclmError):
            return error
        response = getattr(error.__cause__ or error, "response", None)
        response = response if isinstance(response, dict) else {}
        code = response.get("Error", {}).get("Code", "")
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode") or _status(error)
        reason = one_line(error) or type(error).__name__
        if code == "NoSuchBucket":
            endpoint = getattr(self.files, "endpoint_url", None)
            at = f" at {endpoint}" if endpoint else ""
            return MissingBucket(
                f"{where}: there is no bucket {self.name}{at}. Create it, or give the address of another with --store. "
                "If it held results and was deleted by mistake, restore it first: nothing is computed again meanwhile."
            )
        if isinstance(error, FileNotFoundError | FileExistsError):
            return error
        if status == 412:  # somebody has made or changed the object
            return FileExistsError(reason)
        if status is None:
            refused = isinstance(error, MISTAKES) or type(error).__name__ in CONFIGURATION
        else:
            refused = status < 500 and status not in (408, 409, 425, 429) and code not in DAMAGED_ON_THE_WAY
        if refused:
            return StorageFault(f"{where}: the object store refuses the request ({reason}).")
        return NoAnswer(f"{where}: the object store does not answer as it should ({reason}).")


def bucket_of(url: str) -> Bucket:
    """Return the bucket of an address; a process has one object for each.

    Raises:
        ImportError: the package for this kind of store is not installed.
    """
    protocol, _, rest = url.partition("://")
    return _bucket(protocol, rest.partition("/")[0])


@cache
def _bucket(protocol: str, name: str) -> Bucket:
    return Bucket(protocol, name)


@cache
def _file_system(protocol: str) -> Any:
    # With cached listings, what other machines write would not be seen.
    options: dict[str, Any] = {"use_listings_cache": False}
    if protocol in S3:
        options["config_kwargs"] = S3_CLIENT | fsspec.config.conf.get(protocol, {}).get("config_kwargs", {})
    files = fsspec.filesystem(protocol, **options)
    if protocol in S3:
        files.retries = 1  # s3fs repeats some requests by itself, in addition to its client
    return files


def _status(error: BaseException) -> int | None:
    """Return the HTTP status in an error of gcsfs (`code`) or Azure (`status_code`), if it has one."""
    for name in ("status_code", "code"):
        value = getattr(error, name, None)
        if isinstance(value, int):
            return value
    return None
