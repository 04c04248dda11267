"""Checks of folders that others have made: which of their files are read, and what JSON in them may hold.

A file is read if it lies inside the folder. Names with `..`, and links that lead out, could make a reader's own files be read or
replaced; reading a named pipe would never end. Links into the blobs of the Hub's cache are fine, because downloads consist of them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from mlmclm.errors import UserError, clipped, one_line
from mlmclm.storage.checksums import CHECKSUMS

LARGEST = 4 << 30
"""Largest total size, in bytes, of a folder's files that are read into memory."""
LARGEST_NUMBER = 1e30
"""Largest number that is read. Larger ones overflow in sums of squares."""
SMALLEST_RATE = 1e-30
"""Smallest learning rate that is read. Ratios to smaller ones overflow."""
_MOST_DIGITS = 31
_DEEPEST = 50
"""Most levels of lists and objects in a JSON file. The files of this package have six."""
_LONGEST_NAME = 200
_WORD = r"\w[\w .@+-]*"
_NAME = re.compile(rf"(?:{_WORD}/)?{_WORD}")


def check_names(names: Iterable[str], allowed: re.Pattern[str], where: object) -> None:
    """Check that names of files have only letters, digits and ` .@+-_`, are at most one folder deep, and match `allowed`.

    Raises:
        UserError: a name is not allowed; the message starts with `where`.
    """
    for name in names:
        if len(name.encode()) > _LONGEST_NAME or _NAME.fullmatch(name) is None or allowed.fullmatch(name) is None:
            raise UserError(
                f"{where}: it names a file {clipped(name)!r}, which does not belong into such a folder. Allowed: {allowed.pattern}, "
                f"with names of letters, digits and ' .@+-_', at most {_LONGEST_NAME} bytes in all."
            )


def inside(folder: Path, path: Path) -> Path:
    """Return the path of a file below a folder.

    Raises:
        UserError: its name has control characters, it is a link that leads out of the folder, or no regular file.
    """
    if not str(path.relative_to(folder)).isprintable():
        raise UserError(f"{folder}: the name {str(path.relative_to(folder))!r} has characters that cannot be printed.")
    if not _check_place(folder, path).is_file():
        raise UserError(f"{path}: it is missing, or not a regular file.")
    return path


def _check_place(folder: Path, path: Path) -> Path:
    """Return the place that a path below a folder leads to; raise a `UserError` if that is outside of the folder."""
    try:
        place = path.resolve()
    except (OSError, RuntimeError) as error:  # links in a circle
        raise UserError(f"{path}: cannot be read ({one_line(error)}).") from error
    if not any(place.is_relative_to(root) for root in _roots(folder)):
        raise UserError(f"{path}: a link that leads out of the folder, to {place}. Put a copy in its place.")
    return place


def files_inside(folder: Path, pattern: str) -> list[Path]:
    """Return the files below a folder whose names match a pattern, in order; `inside` has checked each."""
    return [inside(folder, path) for path in sorted(folder.rglob(pattern)) if not path.is_dir()]


def _roots(folder: Path) -> Iterator[Path]:
    """Yield the folders that a folder's links may lead into: itself, and the blobs beside a snapshot of the Hub's cache."""
    yield folder.resolve()
    for snapshot in (folder.absolute(), *folder.absolute().parents):
        if snapshot.parent.name == "snapshots":
            yield snapshot.parent.parent.resolve() / "blobs"


def checked_files(folder: Path, allowed: re.Pattern[str], parts: Iterable[str]) -> dict[str, bytes]:
    """Return the contents of the files that a folder's checksums list, by name, once all agree with the checksums.

    Other files may lie beside them and are not read.

    Args:
        allowed: the names that such a folder may have.
        parts: subfolders in which every file must be listed.

    Raises:
        UserError: a name is not allowed, a link in the folder leads out, a file is missing, has been added, is too large or
            differs from its checksum.
    """
    sums = plain_json(inside(folder, folder / CHECKSUMS).read_bytes(), folder / CHECKSUMS)
    if not isinstance(sums, dict) or not all(_is_sum(recorded) for recorded in sums.values()):
        raise UserError(f"{folder / CHECKSUMS}: expected the bytes and sha256 of each file by its name.")
    check_names(sums, allowed, folder / CHECKSUMS)
    if sum(recorded["bytes"] for recorded in sums.values()) > LARGEST:
        raise UserError(f"{folder / CHECKSUMS}: the files have more than {LARGEST:,} bytes, the most that is read.")
    for path in _links(folder):
        _check_place(folder, path)
    for part in parts:
        for path in (folder / part).glob("*"):
            if f"{part}/{path.name}" not in sums:
                raise UserError(f"{path}: it has been added: {CHECKSUMS} does not list it. Remove it.")
    return {name: _content(folder, name, recorded) for name, recorded in sums.items()}


def _is_sum(recorded: Any) -> bool:
    return (
        isinstance(recorded, dict)
        and type(recorded.get("bytes")) is int
        and bool(recorded["bytes"] >= 0)
        and isinstance(recorded.get("sha256"), str)
    )


def _links(folder: Path) -> Iterator[Path]:
    """Yield the links below a folder, except in hidden folders, in which download programs keep files of their own."""
    for place, folders, files in os.walk(folder):
        yield from (path for name in (*folders, *files) if (path := Path(place, name)).is_symlink())
        folders[:] = [name for name in folders if not name.startswith(".")]


def _content(folder: Path, name: str, recorded: dict[str, Any]) -> bytes:
    path = inside(folder, folder / name)
    size = path.stat().st_size
    if size != recorded["bytes"]:
        raise UserError(f"{path}: it has {size:,} bytes instead of {recorded['bytes']:,}; the folder is damaged.")
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != recorded["sha256"]:
        raise UserError(f"{path}: it is not what was written: its checksum differs.")
    return content


def plain_json(content: bytes | str, where: object) -> Any:
    """Parse JSON in which no key of an object occurs twice, and all numbers are finite and of a size that can be computed with.

    Raises:
        UserError: it is something else; the message starts with `where`.
    """
    try:
        value = json.loads(
            content, parse_constant=_number, parse_float=_number, parse_int=_whole, object_pairs_hook=unique_keys
        )
        _check_depth(value)
    except RecursionError as error:
        raise UserError(f"{where}: not JSON that can be read (nested too deeply).") from error
    except ValueError as error:  # also an error of the text's encoding
        raise UserError(f"{where}: not JSON as it is expected here ({one_line(error, 300)}).") from error
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(_DEEPEST):
        inner = (part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list))
        level = list(chain.from_iterable(inner))
        if not level:
            return
    raise RecursionError


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number) or abs(number) > LARGEST_NUMBER:
        raise ValueError(f"the number {clipped(text, 40)}; numbers are finite, and at most {LARGEST_NUMBER:g}")
    return number


def _whole(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(text):,} digits")
    return int(text)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; raise a `ValueError` if a key occurs twice."""
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(
            f"the key {clipped(next(name for name in names if names.count(name) > 1), 40)!r} is there twice"
        )
    return value
