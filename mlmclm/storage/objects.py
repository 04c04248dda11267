"""Paths on an object store (S3, Google Cloud, Azure), where files are whole or absent without a rename.

An object appears under its name when its upload is complete, and not before.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from mlmclm.errors import UserError, unknown
from mlmclm.storage.buckets import PACKAGES, PROTOCOLS, Bucket, bucket_of

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class ObjectStat:
    """The size of an object in bytes, under the name that `os.stat_result` has for it."""

    st_size: int


@dataclass(frozen=True)
class ObjectPath:
    """A path of an object store, with the part of `pathlib.Path` that results and claims need.

    Every method but those that only handle the name waits for a store that does not answer (`patience`), and raises
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
        own, other = (path.url.partition("://")[2].strip("/") for path in (self, prefix))
        return own.removeprefix(f"{other}/")

    def with_suffix(self, suffix: str) -> ObjectPath:
        """Return the path with another suffix."""
        return self.parent / f"{self.stem}{suffix}"

    @property
    def bucket(self) -> Bucket:
        """The bucket that holds the object."""
        return bucket_of(self.url)

    def hurried(self, seconds: float = 0.0) -> ObjectPath:
        """Return the same path, which waits at most so long for a store that does not answer."""
        return replace(self, waits=seconds)

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
        try:
            return self._ask(lambda files: [ObjectPath(files.unstrip_protocol(name)) for name in files.find(self.url)])
        except FileNotFoundError:
            return []

    def open(self, mode: str = "rb") -> io.BytesIO:
        """Open the whole content for reading."""
        return io.BytesIO(self.read_bytes())

    def read_bytes(self) -> bytes:
        """Return the content."""
        return self._ask(lambda files: bytes(files.cat_file(self.url, **self.bucket.reading)))

    def write_bytes(self, content: bytes, *, new: bool = False, tag: str | None = None) -> None:
        """Upload an object, which is seen when it is complete.

        Args:
            new: an object that is there already is a `FileExistsError`. S3 refuses it atomically; with other stores
                this may be a look before the write. It can be the one that this call has uploaded, if the store's
                answer was lost.
            tag: an object that has another version is a `FileExistsError`; None for no such condition.
        """
        options = {} if tag is None else {"IfMatch": tag}
        mode = "create" if new else "overwrite"
        self._ask(lambda files: files.pipe_file(self.url, content, mode=mode, **options))

    def upload(self, path: Path) -> None:
        """Upload a file of this machine, large ones in parts. The object is seen when it is complete."""
        self._ask(lambda files: files.put_file(str(path), self.url))

    def download(self, path: Path) -> None:
        """Copy the object to a file of this machine, large ones in parts. The caller verifies the content."""
        self._ask(lambda files: files.get_file(self.url, str(path)))

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the object; some stores don't say that it isn't there."""
        try:
            self._ask(lambda files: files.rm_file(self.url))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def rename(self, target: ObjectPath) -> None:
        """Copy the object to another name, and delete it here."""
        self._ask(lambda files: files.cp_file(self.url, target.url))
        self.unlink(missing_ok=True)

    def _info(self) -> dict[str, Any]:
        return self._ask(lambda files: dict(files.info(self.url)))

    def _ask(self, request: Callable[[Any], Answer]) -> Answer:
        return self.bucket.ask(self.url, request, waits=self.waits)


def read_all(paths: Sequence[ObjectPath]) -> list[bytes | None]:
    """Return the contents of objects of one bucket, fetched side by side; None for those that aren't there.

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
        left = {files._strip_protocol(path.url): path.url for path in paths if path.url not in contents}
        if not left:
            return
        failed = None
        for name, content in files.cat(list(left.values()), on_error="return", **bucket.reading).items():
            if not isinstance(content, Exception):
                contents[left[name]] = bytes(content)
            elif isinstance(bucket.told(name, content), FileNotFoundError):
                contents[left[name]] = None
            else:
                failed = content
        if failed is not None:
            raise failed

    bucket.ask(paths[0].parent.url, read, waits=paths[0].waits)
    return [contents[path.url] for path in paths]


def check_url(url: str) -> ObjectPath:
    """Return the path of an address, after one look at it, which does not wait.

    Raises:
        UserError: the kind of store is not supported, its package is not installed, or there is no such bucket.
        EnvironmentFault: the store cannot be reached.
    """
    protocol = url.partition("://")[0]
    if protocol not in PROTOCOLS:
        raise unknown("kind of object store", protocol, PROTOCOLS, where=url)
    path = ObjectPath(url.rstrip("/"))
    try:
        path.bucket  # noqa: B018  # opens the file system
    except ImportError as error:
        raise UserError(f"{url}: this needs a package: pip install {PACKAGES[protocol]}") from error
    path.hurried().exists()
    return path
