"""Why cells failed: one small file per cell, `store/cells/failed/<key>.json`, deleted when the cell gets its result.

It is a note for people. The results alone decide what is computed next.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path

from mlmclm.errors import EnvironmentFault
from mlmclm.progress import say_once
from mlmclm.storage.files import write_json
from mlmclm.storage.objects import ObjectPath

FOLDER = "failed"


@dataclass(frozen=True)
class FailureNote:
    """The last failure of a cell."""

    key: str
    reason: str
    """One line, as `outcome.describe` gives it."""
    kind: str
    """Class of the failure, which bounds its retries: `crash`, `out of memory`, `lost node`, `user error`, ..."""
    count: int
    """How often the cell has failed since it was first noted."""
    node: str
    """Name of the node, empty if unknown."""
    time: str
    """Time of the failure: UTC, ISO 8601, in seconds."""


def record(cells: Path | ObjectPath, key: str, reason: str, kind: str, node: str = "") -> None:
    """Note in the ledger's folder (`Ledger.folder`) that a cell failed.

    A note that cannot be written (a full disk) is reported once and doesn't raise, because it must not end a sweep.
    """
    path = _path(cells, key)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        before = _read(path)  # an object store may be out of reach
        failure = FailureNote(key, reason, kind, 1 + (before.count if before else 0), node, now)
        write_json(path, asdict(failure))
    except EnvironmentFault as error:
        say_once(f"failures of cells cannot be noted: {error}")


def forget(cells: Path | ObjectPath, key: str) -> None:
    """Remove the note on a cell, if there is one."""
    _path(cells, key).unlink(missing_ok=True)


def failures(cells: Path | ObjectPath) -> dict[str, FailureNote]:
    """Return all notes by the key of their cell; a file that cannot be read is left out."""
    folder = cells / FOLDER
    found = [_read(path) for path in folder.iterdir() if path.suffix == ".json"] if folder.is_dir() else []
    return {failure.key: failure for failure in found if failure is not None}


def _path(cells: Path | ObjectPath, key: str) -> Path | ObjectPath:
    return cells / FOLDER / f"{key}.json"


def _read(path: Path | ObjectPath) -> FailureNote | None:
    try:
        value = json.loads(path.read_bytes())
        return FailureNote(**{field.name: value[field.name] for field in fields(FailureNote)})
    except (OSError, ValueError, KeyError, TypeError):
        return None
