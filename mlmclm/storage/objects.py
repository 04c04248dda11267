"""Paths on an object store (S3, Google Cloud, Azure) by fsspec, where files are whole or absent without a rename.

An object appears under its name when its upload is complete, and not before. Credentials and endpoints come from where
fsspec and its packages look for them: AWS_ACCESS_KEY_ID, FSSPEC_S3_ENDPOINT_URL, ~/.config/fsspec.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import PurePosixPath
from typing import Any

import fsspec

from mlmclm.errors import EnvironmentFault, UserError, one_line, unknown

S3, GOOGLE, AZURE = ("s3", "s3a"), ("gs", "gcs"), ("abfs", "abfss", "az")
PACKAGES = dict.fromkeys(S3, "s3fs") | dict.fromkeys(GOOGLE, "gcsfs") | dict.fromkeys(AZURE, "adlfs")
PROTOCOLS = (*PACKAGES, "memory")
"""File systems on which a put is atomic. `memory` is this process's own, for trying things out."""


@dataclass(frozen=True)
class ObjectStat:
    """The size of an object in bytes, under the name that `os.stat_result` has for it."""

    st_size: int


@dataclass(frozen=True)
class ObjectPath:
    """A path of an object store, with the part of `pathlib.Path` that results and claims need.

    Every method but those that only handle the name raises `EnvironmentFault` if the store cannot be reached, and like
    `pathlib.Path` a `FileNotFoundError` if it needs an object that isn't there.

    Attributes:
        url: the address, such as s3://bucket/prefix/name.
    """

    url: str

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

    def with_suffix(self, suffix: str) -> ObjectPath:
        """Return the path with another suffix."""
        return self.parent / f"{self.stem}{suffix}"

    def exists(self) -> bool:
        """Return whether there is an object of this name."""
        with self._reached() as files:
            return bool(files.exists(self.url))

    is_file = exists

    def stat(self) -> ObjectStat:
        """Return the object's size."""
        with self._reached() as files:
            return ObjectStat(int(files.size(self.url)))

    def is_dir(self) -> bool:
        """Return True: every prefix can be listed."""
        return True

    def iterdir(self) -> list[ObjectPath]:
        """List the objects at any depth below this prefix, in the order of their names."""
        with suppress(FileNotFoundError), self._reached() as files:
            return [ObjectPath(files.unstrip_protocol(name)) for name in files.find(self.url)]
        return []

    def open(self, mode: str = "rb") -> io.BytesIO:
        """Open the whole content for reading."""
        return io.BytesIO(self.read_bytes())

    def read_bytes(self) -> bytes:
        """Return the content."""
        with self._reached() as files:
            return bytes(files.cat_file(self.url))

    def write_bytes(self, content: bytes, *, new: bool = False) -> None:
        """Upload an object, which is seen when it is complete.

        With `new`, an object that is there already is a `FileExistsError`. S3 refuses it atomically; with other stores
        this may be a look before the write.
        """
        with self._reached() as files:
            files.pipe_file(self.url, content, mode="create" if new else "overwrite")

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the object; some stores don't say that it isn't there."""
        try:
            with self._reached() as files:
                files.rm_file(self.url)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def rename(self, target: ObjectPath) -> None:
        """Copy the object to another name, and delete it here."""
        with self._reached() as files:
            files.cp_file(self.url, target.url)
            files.rm_file(self.url)

    @contextmanager
    def _reached(self) -> Iterator[Any]:
        """Yield the file system; an error but that of a missing or existing object becomes an `EnvironmentFault`."""
        try:
            yield _file_system(self.url.partition("://")[0])
        except (FileNotFoundError, FileExistsError, EnvironmentFault):
            raise
        except Exception as error:
            reason = one_line(error) or type(error).__name__
            raise EnvironmentFault(f"{self.url}: the object store does not answer as it should ({reason}).") from error


def read_all(paths: Sequence[ObjectPath]) -> list[bytes | None]:
    """Return the contents of objects, which are fetched side by side; None for those that aren't there.

    Raises:
        EnvironmentFault: the store cannot be reached.
    """
    if not paths:
        return []
    with paths[0]._reached() as files:
        found = files.cat([path.url for path in paths], on_error="return")
        contents = []
        for path in paths:
            content = found[files._strip_protocol(path.url)]
            if isinstance(content, Exception) and not isinstance(content, FileNotFoundError):
                raise content
            contents.append(None if isinstance(content, Exception) else bytes(content))
        return contents


def check_url(url: str) -> ObjectPath:
    """Return the path of an address, after looking at it.

    Raises:
        UserError: the kind of store is not supported, or its package is not installed.
        EnvironmentFault: the store cannot be reached.
    """
    protocol = url.partition("://")[0]
    if protocol not in PROTOCOLS:
        raise unknown("kind of object store", protocol, PROTOCOLS, where=url)
    try:
        _file_system(protocol)
    except ImportError as error:
        raise UserError(f"{url}: this needs a package: pip install {PACKAGES[protocol]}") from error
    path = ObjectPath(url.rstrip("/"))
    with suppress(FileNotFoundError), path._reached() as files:
        files.ls(path.url)
    return path


@cache
def _file_system(protocol: str) -> Any:
    # With cached listings, what other machines write would not be seen.
    return fsspec.filesystem(protocol, use_listings_cache=False)
