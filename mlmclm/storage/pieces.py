"""Files of a store that can be verified, each with its check; nothing is changed.

Every file has its checksum in one of three places (docs/store.md): in the `checksums.json` of its folder, in its own entry
`checksum`, or in the file beside it that describes it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mlmclm.errors import UserError, one_line
from mlmclm.storage.checksums import CHECKSUMS, damage, unsealed
from mlmclm.storage.files import hash_file, parse_json
from mlmclm.storage.objects import ObjectPath

MISSING, DIFFERS = "it is missing", "it is not what was written: its checksum differs"
UNSEALED = "its checksum is missing"


@dataclass(frozen=True)
class Piece:
    """A file that is verified as a whole.

    Attributes:
        kind: the kind of artifact that it belongs to.
        again: what makes a damaged one again.
        path: path or address.
        size: bytes that the check reads, as far as known.
        check: returns what is wrong with the file, or None for an intact one.
    """

    kind: str
    again: str
    path: str
    size: int
    check: Callable[[], str | None]


def pieces_in(folder: Path, kind: str, again: str) -> Iterator[Piece]:
    """Yield the files that a folder's `checksums.json` lists, and that file."""
    if not folder.is_dir():
        return
    sums = folder / CHECKSUMS
    try:
        names = sorted(json.loads(sums.read_bytes()))
    except (OSError, ValueError, TypeError):
        names = []
    yield Piece(kind, again, str(sums), file_size(sums), partial(damage, folder, names=()))
    for name in names:
        path = folder / name
        yield Piece(kind, again, str(path), file_size(path), partial(damage, folder, names=(name,)))


def sealed_in(folder: Path, kind: str, again: str, pattern: str = "*.json") -> Iterator[Piece]:
    """Yield the JSON files of a folder, each of which has its own checksum."""
    for path in sorted(folder.glob(pattern)):
        if not path.name.startswith("."):
            yield Piece(kind, again, str(path), file_size(path), partial(seal_damage, path.read_bytes))


def file_size(path: Path | ObjectPath) -> int:
    """Return the size of a file in bytes; 0 if it isn't there or isn't on a disk."""
    with suppress(OSError):
        return path.stat().st_size if isinstance(path, Path) else 0
    return 0


def seal_damage(read: Callable[[], bytes | None]) -> str | None:
    """Return what is wrong with a JSON file that has its own checksum; None if nothing is."""
    result = parsed(read)
    return result if isinstance(result, str) else None


def parsed(read: Callable[[], bytes | None], *, sealed: bool = True) -> dict[str, Any] | str:
    """Return the object of a JSON file, or what is wrong with it; `sealed`: whether it has its own checksum."""
    try:
        content = read()
        if content is None:
            return MISSING
        value = parse_json(content, "it")
        if sealed:
            unsealed(value)
    except FileNotFoundError:
        return MISSING
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    except UserError as error:
        return one_line(error, 200)
    except ValueError as error:
        return str(error)
    return dict(value)


def described_damage(by: Path | ObjectPath, path: Path | ObjectPath, entry: str) -> str | None:
    """Return what is wrong with a file whose checksum is an entry of the JSON file beside it; None if nothing is."""
    described = parsed(by.read_bytes)
    if isinstance(described, str):
        return f"it cannot be verified: {by.name}, which has its checksum, is damaged"
    if described.get("status") == "diverged" and not path.exists():
        return None
    if entry not in described:
        return UNSEALED
    try:
        return None if hash_file(path) == described[entry] else DIFFERS
    except FileNotFoundError:
        return MISSING
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
