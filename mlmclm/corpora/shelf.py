"""Where the files of a prepared corpus lie: a folder, or an fsspec address with a folder of copies on every node."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mlmclm.errors import EnvironmentFault, MlmclmError, UserError, unknown
from mlmclm.storage.checksums import set_aside
from mlmclm.storage.files import disk_fault, expanded, hash_file, in_turn, readable, temporary_file, write_json

INDEX = "index.json"
CACHE = "~/.cache/mlmclm/corpora"
"""Where a node keeps its copies of shards that lie at an address, unless the study says otherwise."""
AGAIN = "Run `mlmclm data` on the study to have it made again: what is whole is kept."
_READ_BYTES = 8 << 20


@dataclass(frozen=True)
class Shelf:
    """The files of one corpus; a plain value that means the same on every node.

    Without an address they lie in `folder`. With one (`s3://bucket/corpora/KEY`, anything that fsspec knows) they lie there,
    and `folder` (in which ~ is the node's own home) holds the copies that a node has fetched: whole files, checked once.
    """

    folder: str
    address: str | None = None

    @property
    def local(self) -> Path:
        """The folder, on this node."""
        return expanded(self.folder)

    def where(self, file: str) -> str:
        """A file's path or address, for people."""
        return f"{self.address or self.local}/{file}"

    def sizes(self) -> dict[str, int]:
        """Bytes of each file that is there; one look at the folder or address."""
        if self.address is None:
            with suppress(FileNotFoundError), os.scandir(self.local) as entries:
                return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
            return {}
        system, path = file_system(self.address)
        with _reached(self.address), suppress(FileNotFoundError):
            system.invalidate_cache()
            return {
                str(entry["name"]).rpartition("/")[2]: int(entry["size"] or 0) for entry in system.ls(path, detail=True)
            }
        return {}

    def read(self, file: str) -> bytes | None:
        """The content of a file, None where there is none."""
        try:
            if self.address is None:
                return (self.local / file).read_bytes()
            system, path = file_system(self.address)
            with _reached(self.where(file)):
                content: bytes = system.cat_file(f"{path}/{file}")
            return content
        except FileNotFoundError:
            return None

    def write_json(self, file: str, value: Any) -> None:
        """Writes a JSON file, whole or not at all as far as the file system can."""
        if self.address is None:
            write_json(self.local / file, value)
            return
        system, path = file_system(self.address)
        with _reached(self.where(file)):
            system.makedirs(path, exist_ok=True)
            system.pipe_file(f"{path}/{file}", readable(value).encode())

    def put(self, file: str) -> None:
        """Copies a file that was written into the folder to the address, if there is one."""
        if self.address is not None:
            system, path = file_system(self.address)
            with _reached(self.where(file)):
                system.makedirs(path, exist_ok=True)
                system.put_file(str(self.local / file), f"{path}/{file}")

    def remove(self, file: str) -> None:
        """Removes a file if it is there."""
        if self.address is None:
            (self.local / file).unlink(missing_ok=True)
            return
        system, path = file_system(self.address)
        with _reached(self.where(file)), suppress(FileNotFoundError):
            system.rm_file(f"{path}/{file}")

    def clear(self) -> None:
        """Removes all files, and this node's copies."""
        for file in self.sizes():
            self.remove(file)
        shutil.rmtree(self.local, ignore_errors=True)

    def fetch(self, file: str, size: int, sha256: str | None) -> Path:
        """A file's path on this node; fetched and checked, by one process a node, where the node has no whole copy yet.

        Raises:
            UserError: it is missing, cut short, or (when fetched) not what was written.
            EnvironmentFault: the address cannot be reached, or this node's disk is full.
        """
        path = self.local / file
        found = _size(path)
        if self.address is not None and found != size:
            with in_turn(path.with_name(f".{file}.lock")):
                if _size(path) != size:
                    self._copy(file, sha256)
            found = _size(path)
        if found is None:
            raise UserError(f"{path}: no such file. {AGAIN}")
        if found != size:
            raise UserError(f"{path}: {found:,} bytes, but it was written with {size:,}. {AGAIN}")
        return path

    def check(self, file: str, sha256: str) -> Path:
        """Reads a file that was fetched; returns its path on this node.

        Raises:
            UserError: it is not what was written. It is renamed then, so that the same command makes it again, or fetches it.
        """
        path = self.local / file
        try:
            if hash_file(path) == sha256:
                return path
            aside = set_aside(path)
        except FileNotFoundError as error:  # another worker was faster
            raise UserError(
                f"{path}: not what was written. Run the same command again: it alone is made again."
            ) from error
        again = "made" if self.address is None else "fetched"
        raise UserError(
            f"{path}: its checksum is not the one that it was written with. It is kept as {aside.name}: run the same command again, and it "
            f"alone is {again} again."
        )

    def checksum(self, file: str, read: Callable[[int], None]) -> str:
        """SHA-256 (hex) of a file where it lies; `read` is told of the bytes as they are read.

        Raises:
            FileNotFoundError: it is not there.
        """
        if self.address is None:
            with (self.local / file).open("rb") as handle:
                return _digest(handle, read)
        system, path = file_system(self.address)
        with _reached(self.where(file)), system.open(f"{path}/{file}", "rb") as handle:
            return _digest(handle, read)

    def _copy(self, file: str, sha256: str | None) -> None:
        """Brings a file from the address into the folder."""
        system, path = file_system(self.address or "")
        temporary = None
        try:
            descriptor, temporary = temporary_file(self.local, file)
            with _reached(self.where(file)):
                system.get_file(f"{path}/{file}", temporary)
            with Path(temporary).open("rb") as handle:
                found = hashlib.file_digest(handle, "sha256").hexdigest()
            if sha256 is not None and found != sha256:
                raise UserError(
                    f"{self.where(file)}: its content is not what was written (SHA-256 {found}, not {sha256}). Delete it and run `mlmclm data` on the "
                    "study: it alone is made again."
                )
            Path(temporary).replace(self.local / file)
        except FileNotFoundError as error:
            raise UserError(f"{self.where(file)}: no such file. {AGAIN}") from error
        except OSError as error:
            raise disk_fault(error, self.local / file, choose="another folder as corpus.cache") from error
        finally:
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)
                os.close(descriptor)


def file_system(address: str) -> tuple[Any, str]:
    """fsspec's file system of an address, and the path in it.

    Raises:
        UserError: fsspec doesn't know it, or the package that it needs is not installed.
    """
    import fsspec

    protocol = address.partition("://")[0].rpartition("::")[2]
    try:
        return fsspec.core.url_to_fs(address)
    except ImportError as error:
        raise UserError(
            f"corpus.shards: {address!r}: {protocol}:// needs a package that is not installed ({error}); s3fs for s3://, gcsfs for gs://, adlfs for az://."
        ) from error
    except ValueError as error:
        if protocol in fsspec.available_protocols():
            raise UserError(f"corpus.shards: {address!r}: {error}") from error
        raise unknown("protocol", protocol, fsspec.available_protocols(), where="corpus.shards") from error


@contextmanager
def _reached(where: str) -> Iterator[None]:
    """Turns what a remote file system raises, which may be anything, into an `EnvironmentFault`; a missing file stays one."""
    try:
        yield
    except (FileNotFoundError, MlmclmError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise EnvironmentFault(
            f"{where}: cannot be used ({type(error).__name__}: {reason}). What is finished is kept: run the same command again."
        ) from error


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _digest(handle: BinaryIO, read: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    while chunk := handle.read(_READ_BYTES):
        digest.update(chunk)
        read(len(chunk))
    return digest.hexdigest()
