"""Storage of a prepared corpus: a folder, or an fsspec address with a folder of copies on every node."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlmclm.errors import UserError
from mlmclm.storage.checksums import set_aside
from mlmclm.storage.files import (
    disk_fault,
    expanded,
    hash_file,
    in_turn,
    readable,
    temporary_file,
    usual_mode,
    write_atomic,
)
from mlmclm.storage.objects import ObjectPath

INDEX = "index.json"
CACHE = "~/.cache/mlmclm/corpora"
"""A node's folder for its copies of shards from an address, unless the study names another."""
CACHE_GIB = 64.0
"""Bound of a node's copies in GiB, unless the study names another."""
AGAIN = "Run `mlmclm data` on the study to have it made again: intact files are kept."


@dataclass(frozen=True)
class Shelf:
    """The files of one corpus; a plain value that means the same on every node.

    Without an address, `folder` holds the files. With an address (`s3://bucket/corpora/KEY`, or any that fsspec knows) the files are there, and
    `folder` (in which ~ is the node's own home) holds the copies that a node has fetched: whole files whose checksum was verified
    when they were copied. Requests wait for an object store that doesn't answer (`storage.retrying`).
    """

    folder: str
    address: str | None = None
    gib: float = CACHE_GIB
    """Maximum size in GiB of this node's copies, of all corpora in the same folder; see `has_room`."""

    @property
    def local(self) -> Path:
        """The folder on this node."""
        return expanded(self.folder)

    def at(self, file: str) -> Path | ObjectPath:
        """Return the path of a file in the folder, or at the address."""
        return self.local / file if self.address is None else ObjectPath(self.address) / file

    def where(self, file: str) -> str:
        """Return a file's path or address, for messages."""
        return str(self.at(file))

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of each existing file, from one listing of the folder or address."""
        if self.address is not None:
            return ObjectPath(self.address).sizes()
        with suppress(FileNotFoundError), os.scandir(self.local) as entries:
            return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
        return {}

    def read(self, file: str) -> bytes | None:
        """Read a file; None if it does not exist."""
        with suppress(FileNotFoundError):
            return self.at(file).read_bytes()
        return None

    def write_json(self, file: str, value: Any) -> None:
        """Write a JSON file, completely or not at all."""
        write_atomic(self.at(file), readable(value))

    def has_room(self, size: int) -> bool:
        """Return whether this node's copies may take `size` more bytes, after removing copies that are not needed.

        Copies of other corpora in the same folder are removed, the least recently opened first.
        """
        copies = [path for path in self.local.parent.glob("*/*.bin") if not path.name.startswith(".")]
        stats = {path: status for path in copies if (status := _status(path)) is not None}
        free = int(self.gib * 2**30) - sum(status.st_size for status in stats.values())
        others = (path for path in stats if path.parent != self.local)
        for path in sorted(others, key=lambda path: stats[path].st_mtime):
            if free >= size:
                break
            path.unlink(missing_ok=True)
            free += stats[path].st_size
        return free >= size

    def has(self, file: str, size: int) -> bool:
        """Return whether this node has a complete copy of a file."""
        return _size(self.local / file) == size

    def ranges(self, wanted: Sequence[tuple[str, int, int | None]]) -> list[bytes]:
        """Read parts of files at the address in parallel, each given by its file, first byte and end (None: the file's).

        Raises:
            UserError: a file is missing.
            EnvironmentFault: the address cannot be reached.
        """

        if not wanted or self.address is None:
            return []
        files, starts, ends = (list(column) for column in zip(*wanted, strict=True))
        paths = [(ObjectPath(self.address) / file).path for file in files]
        try:
            # By default an error is returned in place of a part.
            return ObjectPath(self.address).ask(
                lambda system: list(map(bytes, system.cat_ranges(paths, starts, ends, on_error="raise")))
            )
        except FileNotFoundError as error:
            raise UserError(f"{self.address}: a shard is missing ({error}). {AGAIN}") from error

    def put(self, file: str) -> None:
        """Copy a file from the folder to the address, if there is one."""
        if self.address is not None:
            (ObjectPath(self.address) / file).upload(self.local / file)

    def clear(self) -> None:
        """Remove all files, and this node's copies."""
        for file in self.sizes():
            self.at(file).unlink(missing_ok=True)
        shutil.rmtree(self.local, ignore_errors=True)

    def fetch(self, file: str, size: int, sha256: str) -> Path:
        """Return a file's path on this node. If the node has no complete copy, one of its processes fetches and checks the file.

        Raises:
            UserError: the file is missing, has the wrong size, or (when fetched) the wrong checksum.
            EnvironmentFault: the address cannot be reached, or this node's disk is full.
        """
        path = self.local / file
        actual = _size(path)
        if self.address is not None and actual != size:
            with in_turn(path.with_name(f".{file}.lock")):
                if _size(path) != size:  # Another process may have fetched it while this one waited.
                    self._copy(file, sha256)
            actual = _size(path)
        if actual is None:
            raise UserError(f"{path}: no such file. {AGAIN}")
        if actual != size:
            raise UserError(f"{path}: {actual:,} bytes, but it was written with {size:,}. {AGAIN}")
        return path

    def check(self, file: str, sha256: str) -> None:
        """Raise UserError if a fetched file has another checksum.

        The file is renamed, so that the same command makes or fetches it again.
        """
        path = self.local / file
        try:
            if hash_file(path) == sha256:
                return
            aside = set_aside(path)
        except FileNotFoundError as error:  # Another worker has found the damage and renamed the file.
            raise UserError(
                f"{path}: not what was written. Run the same command again: only this file is made again."
            ) from error
        again = "made" if self.address is None else "fetched"
        raise UserError(
            f"{path}: its checksum is not the one that it was written with. It is kept as {aside.name}: run the same command again, and "
            f"only this file is {again} again."
        )

    def _copy(self, file: str, sha256: str) -> None:
        """Copy a file from the address into the folder, and verify its checksum before it gets its name."""
        temporary = None
        try:
            descriptor, temporary = temporary_file(self.local, file)
            (ObjectPath(self.address or "") / file).download(Path(temporary))
            actual = hash_file(Path(temporary))
            if actual != sha256:
                raise UserError(
                    f"{self.where(file)}: its content is not what was written (SHA-256 {actual}, not {sha256}). Delete it and run `mlmclm data` on the "
                    "study: only this file is made again."
                )
            Path(temporary).chmod(usual_mode())
            Path(temporary).replace(self.local / file)
        except FileNotFoundError as error:
            raise UserError(f"{self.where(file)}: no such file. {AGAIN}") from error
        except OSError as error:
            raise disk_fault(error, self.local / file, choose="another folder as corpus.cache") from error
        finally:
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)
                os.close(
                    descriptor
                )  # Open until now, so that no other process takes it for a dead one's and removes it.


def _size(path: Path) -> int | None:
    status = _status(path)
    return None if status is None else status.st_size


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None
