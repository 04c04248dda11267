"""Checksums of immutable data: for a folder, in a file beside its files; for a JSON object, inside the object.

FOLDER/checksums.json    size and SHA-256 of each file of the folder, by its name; written last
{"checksum": ..., ...}   SHA-256 of the object's other entries

A few files have theirs in the JSON file beside them that describes them. A `Piece` is a file of a store with its check.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlmclm.errors import UserError, one_line
from mlmclm.storage.files import hash_file, parse_json, read_json, stable_hash, write_json

if TYPE_CHECKING:
    from mlmclm.storage.objects import ObjectPath

CHECKSUMS = "checksums.json"
CHECKSUM = "checksum"


def write_checksums(folder: Path, names: Iterable[str] | None = None) -> None:
    """Record size and SHA-256 of a folder's files (`names`; None for all) beside them, and flush the files to disk."""
    if names is None:
        names = (path.name for path in folder.iterdir() if path.is_file())
    write_json(folder / CHECKSUMS, sums_of(folder, names))


def sums_of(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return size and SHA-256 of files of a folder by their names, and flush the files to disk."""
    sums = {}
    for name in sorted(names):
        path = folder / name
        # A checksum must not reach the disk before the content that it vouches for.
        with path.open("rb") as handle:
            os.fsync(handle.fileno())
        sums[name] = {"bytes": path.stat().st_size, "sha256": hash_file(path)}
    return sums


def damage(folder: Path, *, read: bool = True, names: Iterable[str] | None = None) -> str | None:
    """Return what is wrong with a folder that has checksums, or None if it is intact.

    Args:
        read: whether to compare checksums too. Otherwise only sizes are compared, which takes no time.
        names: the files to check; None for all. A file without a recorded checksum counts as damage.
    """
    if not folder.is_dir():
        return "it is not there"
    try:
        sums = read_json(folder / CHECKSUMS)
        for name in sums if names is None else names:
            if name not in sums:
                return f"{name} has been added: it is not among the files that were written"
            path, recorded = folder / name, sums[name]
            if not path.is_file():
                return f"{name} is missing"
            size = path.stat().st_size
            if size != recorded["bytes"]:
                return f"{name} has {size:,} bytes instead of {recorded['bytes']:,}"
            if read and hash_file(path) != recorded["sha256"]:
                return f"{name} is not what was written: its checksum differs"
    # The file of checksums may itself be damaged, in any way.
    except (UserError, OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        return f"{CHECKSUMS} cannot be read ({type(error).__name__})"
    return None


def checked(folder: Path, names: Iterable[str] | None, remedy: str) -> None:
    """Verify files of a folder against its checksums; a folder without checksums, which others wrote, passes.

    Raises:
        UserError: a file differs from what was written; the message names the file and the remedy.
    """
    reason = damage(folder, names=names) if has_checksums(folder) else None
    if reason is not None:
        raise UserError(f"{folder}: {reason}. {remedy}")


def has_checksums(folder: Path) -> bool:
    """Return whether a folder has checksums; a model folder that others wrote has none."""
    return (folder / CHECKSUMS).is_file()


def set_aside(path: Path) -> Path:
    """Rename a damaged file or folder so that it can be made again; return its new path."""
    aside = path.with_name(f"{path.name}.damaged")
    # Only the latest damaged copy is kept.
    shutil.rmtree(aside, ignore_errors=True)
    aside.unlink(missing_ok=True)
    path.rename(aside)
    return aside


def sealed(value: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON object with its checksum among its entries."""
    return {**value, CHECKSUM: stable_hash(value)}


def unsealed(value: Any) -> dict[str, Any]:
    """Return a JSON object without its checksum, after verifying it.

    Raises:
        ValueError: the checksum is wrong or missing, or this is not an object.
    """
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    content = {name: entry for name, entry in value.items() if name != CHECKSUM}
    if CHECKSUM not in value:
        raise ValueError("it has no checksum")
    if value[CHECKSUM] != stable_hash(content):
        raise ValueError("its checksum differs from its content")
    return content


def parse_sealed(content: bytes, where: object, remedy: str) -> dict[str, Any]:
    """Parse a JSON file's content and return the object without its checksum.

    Raises:
        UserError: it is damaged; the message names the file (`where`) and the remedy.
    """
    try:
        return unsealed(parse_json(content, where))
    except UserError as error:
        raise UserError(f"{error} {remedy}") from error
    except ValueError as error:
        raise UserError(f"{where}: damaged ({error}). {remedy}") from error


def read_sealed(path: Path, remedy: str) -> dict[str, Any]:
    """Read the object of a JSON file, without its checksum.

    Raises:
        UserError: the file is missing or damaged; the message names the file and the remedy.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file. {remedy}") from error
    return parse_sealed(content, path, remedy)


def write_sealed(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON object with its checksum, atomically."""
    write_json(path, sealed(value))


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
