"""Objects of an object store (S3, Google Cloud, Azure) by fsspec: paths, and one function for all requests, which distinguishes answers from outages.

Files are complete or absent without a rename: an object appears under its name when its upload is complete, and not before.

Credentials and endpoints come from where fsspec and its packages look for them: AWS_ACCESS_KEY_ID,
FSSPEC_S3_ENDPOINT_URL, ~/.config/fsspec.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import fsspec

from mlmclm.errors import MissingBucket, MlmclmError, StorageFault, UserError, one_line, unknown
from mlmclm.storage.retrying import Availability, NoAnswer

S3, GOOGLE, AZURE = ("s3", "s3a"), ("gs", "gcs"), ("abfs", "abfss", "az")
PACKAGES = dict.fromkeys(S3, "s3fs") | dict.fromkeys(GOOGLE, "gcsfs") | dict.fromkeys(AZURE, "adlfs")
PROTOCOLS = (*PACKAGES, "memory")
"""File systems on which a put is atomic. `memory` is in this process's memory, for trying things out."""

S3_CLIENT = {"connect_timeout": 5, "read_timeout": 20, "retries": {"mode": "standard", "total_max_attempts": 2}}
"""Settings of the S3 client: seconds until it gives up a request, and one repetition. All further repetitions are those of `RetryPolicy`."""

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

    folders = False
    """Whether a file can only be written to a folder that exists."""

    def __init__(self, protocol: str, name: str, files: Any) -> None:
        self.name = f"{protocol}://{name}"
        self.files = files
        self.availability = Availability(self.name)
        self.conditional = protocol in S3
        self.reading: dict[str, Any] = {"max_concurrency": 1} if protocol in S3 else {}

    def path(self, url: str) -> str:
        """Return the name that the file system has for an address."""
        return url

    def ask(self, where: str, request: Callable[[Any], Answer], *, waits: float = math.inf) -> Answer:
        """Make a request on `files`, repeat it while the store does not answer, and return its value.

        Args:
            where: address of the object, for messages.
            waits: as in `Availability.keep_asking`.

        Raises:
            FileNotFoundError: the object isn't there.
            FileExistsError: the request's condition does not hold.
            MissingBucket: the bucket does not exist.
            StorageFault: the store refuses the request, or has not answered for as long as `RetryPolicy` allows.
        """

        def once() -> Answer:
            try:
                return request(self.files)
            except Exception as error:
                raised = self.told(where, error)
                raise raised from (None if raised is error else error)

        return self.availability.keep_asking(once, waits=waits)

    def told(self, where: str, error: Exception) -> Exception:
        """Return the error to raise in place of an error of fsspec or its packages; `ask` lists the errors to raise."""
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


class OtherFiles(Bucket):
    """A file system of fsspec on which half a file can be seen, such as file:// or sftp://; never a store's.

    Shards of corpora may be there, as their content is verified. A request that fails is not repeated.
    """

    folders = True

    def path(self, url: str) -> str:
        """Return the address without its protocol: not every file system takes it away by itself."""
        return str(self.files._strip_protocol(url))

    def ask(self, where: str, request: Callable[[Any], Answer], *, waits: float = math.inf) -> Answer:
        """Make a request on `files`, and return its value.

        Raises:
            FileNotFoundError: the file isn't there.
            StorageFault: the file system raised anything else.
        """
        self.files.invalidate_cache()  # other machines write here too
        try:
            return request(self.files)
        except (FileNotFoundError, MlmclmError):
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {one_line(error, 300)}"
            raise StorageFault(
                f"{where}: cannot be used ({reason}). What is finished is kept: run the same command again."
            ) from error


def protocol_fault(url: str, where: str) -> UserError | None:
    """Return the error for an address whose protocol fsspec doesn't know; None for others.

    In a chained address (`simplecache::s3://...`) it is that of the files.
    """
    protocol, allowed = url.partition("://")[0].rpartition("::")[2], fsspec.available_protocols()
    return None if protocol in allowed else unknown("protocol", protocol, allowed, where=where)


def bucket_of(url: str) -> Bucket:
    """Return the bucket of an address; a process has one object for each.

    Raises:
        UserError: fsspec doesn't know the protocol, or its package is not installed.
    """
    protocol, _, rest = url.partition("://")
    if (fault := protocol_fault(url, url)) is not None:
        raise fault
    try:
        return _bucket(protocol, rest.partition("/")[0])
    except ImportError as error:
        package = f"pip install {PACKAGES[protocol]}" if protocol in PACKAGES else one_line(error)
        raise UserError(f"{url}: this needs a package: {package}") from error
    except (ValueError, OSError) as error:
        raise StorageFault(f"{url}: cannot be used ({type(error).__name__}: {one_line(error, 300)}).") from error


@cache
def _bucket(protocol: str, name: str) -> Bucket:
    if protocol in PROTOCOLS:
        return Bucket(protocol, name, _file_system(protocol))
    return OtherFiles(protocol, name, fsspec.core.url_to_fs(f"{protocol}://{name}")[0])


@cache
def _file_system(protocol: str) -> Any:
    # With cached listings, what other machines write would not be seen.
    options: dict[str, Any] = {"use_listings_cache": False}
    if protocol in S3:
        options["config_kwargs"] = S3_CLIENT | fsspec.config.conf.get(protocol, {}).get("config_kwargs", {})
    files = fsspec.filesystem(protocol, **options)
    package = type(files).__module__.partition(".")[0]
    if package != PACKAGES.get(protocol, package):
        # Another package may overwrite an object that it should only create, as obstore.fsspec (0.12) does: leases would have two holders.
        raise UserError(
            f"{protocol}://: {package} is registered with fsspec for such addresses; stores are read and written by "
            f"{PACKAGES[protocol]} only. Don't register {package} in this process."
        )
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


@dataclass(frozen=True)
class ObjectStat:
    """The size of an object in bytes, under the name that `os.stat_result` has for it."""

    st_size: int


@dataclass(frozen=True)
class ObjectPath:
    """A path of an object store, with the part of `pathlib.Path` that results and leases need.

    Every method but those that only handle the name waits for a store that does not answer (`retrying`), and raises
    `StorageFault` if that takes too long or the store refuses the request, and `MissingBucket` if there is no such
    bucket. Like `pathlib.Path` it raises a `FileNotFoundError` if it needs an object that isn't there.

    Attributes:
        url: the address, such as s3://bucket/prefix/name.
        waits: the longest time in seconds to wait for a store that does not answer, if it is less than the user allows.
            Paths that are made from this one have no such limit.
    """

    url: str
    waits: float = field(default=math.inf, compare=False, repr=False)

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(f"{self.url.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        """The last part."""
        return self.url.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The end of the name from its last dot."""
        return PurePosixPath(self.name).suffix

    @property
    def stem(self) -> str:
        """The name without the suffix."""
        return self.name.removesuffix(self.suffix)

    @property
    def parent(self) -> ObjectPath:
        """The path without its last part."""
        return ObjectPath(self.url.rpartition("/")[0])

    def below(self, prefix: ObjectPath) -> str:
        """Return the rest of the path after a prefix of it."""
        full, root = (path.url.partition("://")[2].strip("/") for path in (self, prefix))
        return full.removeprefix(f"{root}/")

    def with_suffix(self, suffix: str) -> ObjectPath:
        """Return the path with another suffix."""
        return self.parent / f"{self.stem}{suffix}"

    @property
    def bucket(self) -> Bucket:
        """The bucket that holds the object."""
        return bucket_of(self.url)

    def hurried(self) -> ObjectPath:
        """Return this path with `waits` 0: its requests do not wait for a store that does not answer."""
        return replace(self, waits=0.0)

    def exists(self) -> bool:
        """Return whether there is an object of this name."""
        try:
            return bool(self._info()["type"] == "file")
        except FileNotFoundError:
            return False

    is_file = exists

    def stat(self) -> ObjectStat:
        """Return the object's size."""
        return ObjectStat(int(self._info()["size"]))

    def tag(self) -> str | None:
        """Return the version of the object's content, for `write_bytes`; None where the store has no such condition."""
        return str(self._info()["ETag"]) if self.bucket.conditional else None

    def is_dir(self) -> bool:
        """Return True: every prefix can be listed."""
        return True

    def iterdir(self) -> list[ObjectPath]:
        """List the objects at any depth below this prefix, in the order of their names."""
        files = self.bucket.files
        return [ObjectPath(files.unstrip_protocol(name)) for name in self._listed()]

    def sizes(self) -> dict[str, int]:
        """Return the sizes in bytes of the objects below this prefix, by the rest of their names, from one listing."""
        root = str(self.bucket.files._strip_protocol(self.url)).strip("/")
        return {name.strip("/").removeprefix(f"{root}/"): size for name, size in self._listed().items()}

    def open(self, mode: str = "rb") -> io.BytesIO:
        """Open the whole content for reading."""
        return io.BytesIO(self.read_bytes())

    def read_bytes(self) -> bytes:
        """Return the content."""
        return self.ask(lambda files: bytes(files.cat_file(self.path, **self.bucket.reading)))

    def write_bytes(self, content: bytes, *, new: bool = False, tag: str | None = None) -> None:
        """Upload an object, which becomes visible when it is complete.

        Args:
            new: raise a `FileExistsError` if the object exists. S3 checks this atomically; other stores may look before
                they write. The existing object can be the one that this call has uploaded, if the store's answer
                was lost.
            tag: raise a `FileExistsError` if the object has another version; None for no such condition.
        """
        options = {} if tag is None else {"IfMatch": tag}
        mode = "create" if new else "overwrite"
        self._write(lambda files: files.pipe_file(self.path, content, mode=mode, **options))

    def upload(self, path: Path) -> None:
        """Upload a file of this machine, large ones in parts. The object becomes visible when it is complete."""
        self._write(lambda files: files.put_file(str(path), self.path))

    def download(self, path: Path) -> None:
        """Copy the object to a file of this machine, large ones in parts. The caller verifies the content."""
        self.ask(lambda files: files.get_file(self.path, str(path)))

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the object; some stores don't report that it is missing."""
        try:
            self.ask(lambda files: files.rm_file(self.path))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def rename(self, target: ObjectPath) -> None:
        """Copy the object to another name, and delete it here."""
        self.ask(lambda files: files.cp_file(self.url, target.url))
        self.unlink(missing_ok=True)

    @property
    def path(self) -> str:
        """The name that the bucket's file system has for the object."""
        return self.bucket.path(self.url)

    def _write(self, request: Callable[[Any], object]) -> None:
        def write(files: Any) -> None:
            if self.bucket.folders:
                files.makedirs(self.parent.path, exist_ok=True)
            request(files)

        self.ask(write)

    def _listed(self) -> dict[str, int]:
        def find(files: Any) -> dict[str, int]:
            return {name: int(entry["size"] or 0) for name, entry in files.find(self.path, detail=True).items()}

        try:
            return self.ask(find)
        except FileNotFoundError:
            return {}

    def _info(self) -> dict[str, Any]:
        return self.ask(lambda files: dict(files.info(self.path)))

    def ask(self, request: Callable[[Any], Answer]) -> Answer:
        """Return what a request to the bucket's file system returns; see `Bucket.ask`."""
        return self.bucket.ask(self.url, request, waits=self.waits)


def read_all(paths: Sequence[ObjectPath]) -> list[bytes | None]:
    """Return the contents of objects of one bucket, fetched concurrently; None for missing ones.

    Raises:
        StorageFault: the store has not answered for too long, or refuses a request.
        MissingBucket: there is no such bucket.
    """
    if not paths:
        return []
    bucket = paths[0].bucket
    contents: dict[str, bytes | None] = {}

    def read(files: Any) -> None:
        # What has been read before the store stopped answering is not read again.
        remaining = {files._strip_protocol(path.url): path.url for path in paths if path.url not in contents}
        if not remaining:
            return
        failed = None
        for name, content in files.cat(list(remaining.values()), on_error="return", **bucket.reading).items():
            if not isinstance(content, Exception):
                contents[remaining[name]] = bytes(content)
            elif isinstance(bucket.told(name, content), FileNotFoundError):
                contents[remaining[name]] = None
            else:
                failed = content
        if failed is not None:
            raise failed

    bucket.ask(paths[0].parent.url, read, waits=paths[0].waits)
    return [contents[path.url] for path in paths]


def check_url(url: str) -> ObjectPath:
    """Return the path of an address, after one request to it, which is not repeated.

    Raises:
        UserError: the kind of store is not supported, its package is not installed, or there is no such bucket.
        EnvironmentFault: the store cannot be reached.
    """
    protocol = url.partition("://")[0]
    if protocol not in PROTOCOLS:
        raise unknown("kind of object store", protocol, PROTOCOLS, where=url)
    path = ObjectPath(url.rstrip("/"))
    path.hurried().exists()
    return path
