"""Index of exported records: each record's MLflow run and a hash of its content, so that unchanged ones cost nothing.

The index is a JSON Lines file, `store/mlflow/index.jsonl`; the last line of a key counts. Each line carries the
identity of its experiment (a tag set when the experiment was created), so lines about a deleted database or another
server are ignored.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlmclm.storage.checksums import sealed, unsealed
from mlmclm.storage.files import canonical_json, in_turn, write_atomic


@dataclass(frozen=True)
class Entry:
    """A run that exists.

    `content` is the hash of the run's content, or None while the run is being filled. `points` and `points_hash`
    describe its metric points, `parent` is its parent run, and `final` says that it has ended.
    """

    key: str
    run_id: str
    content: str | None = None
    points: int = 0
    points_hash: str = ""
    parent: str | None = None
    final: bool = False


class Index:
    """The entries of one experiment."""

    def __init__(self, path: Path, identity: str) -> None:
        self._path = path
        self._identity = identity
        self.entries: dict[str, Entry] = {}
        self._locked = False
        self._read_from: tuple[int, int] = (0, 0)
        """The file's inode, and the number of bytes read so far."""
        self._cut_off = False
        with self.locked():
            self._compact()

    def get(self, key: str) -> Entry | None:
        """Return the entry of a record, or None if it is not known to have a run."""
        return self.entries.get(key)

    def set(self, *entries: Entry) -> None:
        """Store entries and append them to the file at once."""
        with self.locked():
            self.entries.update((entry.key, entry) for entry in entries)
            with self._path.open("a", encoding="utf-8") as handle:
                # After a line that was cut off, a newline keeps these entries from being appended to the fragment.
                handle.write(("\n" if self._cut_off else "") + "".join(map(self._line, entries)))
                handle.flush()
                status = os.fstat(handle.fileno())
            self._read_from = (status.st_ino, status.st_size)
            self._cut_off = False

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep the store's other processes from writing the index, and read what they have written; reentrant."""
        if self._locked:
            yield
            return
        with in_turn(self._path.with_name(f".{self._path.name}.lock")):
            self._locked = True
            try:
                self._read()
                yield
            finally:
                self._locked = False

    def drop(self, key: str) -> None:
        """Forget a run that no longer exists, so that the next export creates a new one."""
        self.entries.pop(key, None)

    def _line(self, entry: Entry) -> str:
        return canonical_json(sealed({"experiment": self._identity, **asdict(entry)})) + "\n"

    def _read(self) -> None:
        """Read the lines that were added since the last read."""
        try:
            handle = self._path.open("rb")
        except FileNotFoundError:
            return
        with handle:
            status = os.fstat(handle.fileno())
            known, offset = self._read_from
            # A different inode means that another process has compacted the file: read it from the start.
            handle.seek(offset if known == status.st_ino else 0)
            content = handle.read()
        self._read_from = (status.st_ino, status.st_size)
        for line in content.decode("utf-8", errors="replace").splitlines():
            value = _parsed(line)
            if value is not None and value.pop("experiment") == self._identity:
                with suppress(TypeError):
                    self.entries[value["key"]] = Entry(**value)
        if content:
            self._cut_off = not content.endswith(b"\n")

    def _compact(self) -> None:
        """Rewrite the file without superseded entries if most of its lines are superseded."""
        try:
            lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return
        values = [(line, _parsed(line)) for line in lines]
        others = [line for line, value in values if value is not None and value["experiment"] != self._identity]
        if len(lines) > 2 * (len(self.entries) + len(others)) + 100:
            ours = "".join(self._line(entry) for entry in self.entries.values())
            write_atomic(self._path, "".join(f"{line}\n" for line in others) + ours)
            self._read()


def _parsed(line: str) -> dict[str, Any] | None:
    """Return a line's values, or None if it is damaged or was cut off when its writer was killed.

    Nothing is lost with such a line: its run is found again by its tag.
    """
    try:
        value = unsealed(json.loads(line))
    except ValueError:
        return None
    return value if {"experiment", "key"} <= value.keys() else None
