"""The index: which record has become which MLflow run, and with what content, so that an unchanged one costs nothing.

A file of JSON lines, `store/mlflow/index.jsonl`; the last line of a key counts. Lines carry the identity of the
experiment they are about (a tag that the experiment got when it was made), so those of a deleted database or another
server are ignored.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from mlmclm.files import canonical_json, write_atomic


@dataclass(frozen=True)
class Entry:
    """A run that exists. `content` is the hash of what is in it, None while it is being filled; `points` and
    `points_hash` describe the metric points in it, `parent` is its parent run, `final` says that it was ended."""

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
        self._entries: dict[str, Entry] = {}
        self._cut_off = False
        self._load()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: str) -> Entry | None:
        """The entry of a record, None where it isn't known to have a run."""
        return self._entries.get(key)

    def set(self, entry: Entry) -> None:
        """Notes an entry, at once on disk."""
        self._entries[entry.key] = entry
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as handle:
            handle.write(("\n" if self._cut_off else "") + self._line(entry))
        self._cut_off = False

    def adopt(self, key: str, run_id: str) -> None:
        """Notes a run found at the server, of unknown content, unless its key has one."""
        if key not in self._entries:
            self.set(Entry(key, run_id))

    def drop(self, key: str) -> None:
        """The run is gone: the next export makes a new one."""
        self._entries.pop(key, None)

    def _line(self, entry: Entry) -> str:
        return canonical_json({"experiment": self._identity, **asdict(entry)}) + "\n"

    def _load(self) -> None:
        try:
            text = self._path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return
        lines = text.splitlines()
        self._cut_off = bool(text) and not text.endswith("\n")
        others = []
        for line in lines:
            try:
                value = json.loads(line)
                identity = value.pop("experiment")
                if identity == self._identity:
                    self._entries[value["key"]] = Entry(**value)
                else:
                    others.append(line)
            except (ValueError, KeyError, TypeError, AttributeError):
                continue  # a line cut off when its writer was killed: its run is found again by its tag
        if len(lines) > 2 * (len(self._entries) + len(others)) + 100:
            ours = "".join(self._line(entry) for entry in self._entries.values())
            write_atomic(self._path, "".join(f"{line}\n" for line in others) + ours)
            self._cut_off = False
