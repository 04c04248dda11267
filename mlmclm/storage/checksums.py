"""Checksums of immutable data: for a folder, in a file beside its files; for a JSON object, inside the object.

FOLDER/checksums.json    size and SHA-256 of each file of the folder, by its name; written last
{"checksum": ..., ...}   SHA-256 of the object's other entries
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mlmclm.errors import UserError
from mlmclm.storage.files import hash_file, parse_json, read_json, stable_hash, write_json

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
