"""Check that the files that are read are those that were hashed for a key; if they have changed, nothing is filed.

A file's mark is its size, its inode and its times. If the mark after reading equals the mark before hashing, the content that
was read counts as the content that was hashed. So nothing is hashed twice, and nothing is used before this comparison. If
only the time of the last change of status differs (a link, a mode, or a time that was set back), the content is hashed again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from mlmclm.errors import UserError
from mlmclm.storage.files import hash_file

Mark = tuple[int, int, int, int]


def mark_of(status: os.stat_result) -> Mark:
    """Return the mark of a file with this status; the time of the last change of status is last."""
    return status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns


def marked_hash(file: Path) -> tuple[Mark, str]:
    """Return a file's mark and the SHA-256 (hex) of its bytes; raise a `UserError` if it changed meanwhile."""
    with file.open("rb") as handle:
        mark = mark_of(os.fstat(handle.fileno()))
        sha256 = hashlib.file_digest(handle, "sha256").hexdigest()
        if mark_of(os.fstat(handle.fileno())) != mark:
            raise changed_file_error(file)
    return mark, sha256


def changed_file_error(file: Path) -> UserError:
    """Return the error for a file that is not what was hashed any more."""
    return UserError(
        f"{file}: it has changed since it was hashed, while it was in use. Nothing is filed under the old hash. Leave the file as "
        "it is, and run the same command again."
    )


class Unchanged:
    """The files of a folder as they are when this object is made, which must be before they are hashed.

    Files in subfolders, hidden files and cards (`*.md`), which people edit, are ignored.

    Args:
        holds: returns whether the hashes are still the same; called only if the marks leave that open.
    """

    def __init__(self, folder: Path, holds: Callable[[], bool]) -> None:
        self._folder, self._holds = folder, holds
        self._marks = self._now()

    def _now(self) -> dict[Path, Mark]:
        files = (file for file in self._folder.iterdir() if file.suffix != ".md" and not file.name.startswith("."))
        return {file: mark_of(file.stat()) for file in files if file.is_file()}

    def check(self) -> None:
        """Raise a `UserError` that names a file that is not what it was."""
        try:
            now = self._now()
        except FileNotFoundError as error:
            raise changed_file_error(Path(error.filename)) from error
        for file, mark in self._marks.items():
            if now.get(file, ())[:3] != mark[:3]:
                raise changed_file_error(file)
        unclear = next((file for file, mark in now.items() if self._marks.get(file) != mark), None)
        if unclear is not None and not self._still_holds(unclear):
            raise changed_file_error(unclear)
        self._marks = now

    def _still_holds(self, file: Path) -> bool:
        try:
            return self._holds()
        except UserError as error:  # it can't even be read
            raise changed_file_error(file) from error


def check_hashed(file: Path, mark: Mark, sha256: str) -> None:
    """Raise a `UserError` if a file is not what it was when it had this mark and this hash."""
    try:
        now = mark_of(file.stat())
        if now == mark or (now[:3] == mark[:3] and hash_file(file) == sha256):
            return
    except FileNotFoundError as error:
        raise changed_file_error(file) from error
    raise changed_file_error(file)


def as_hashed(texts: Iterable[str], check: Callable[[], None]) -> Iterator[str]:
    """Yield texts that are read from a file, each only once a `check` after its reading has passed.

    An error of the reader is raised after a check, which may show why the reader failed.
    """
    try:
        for text in texts:
            check()
            yield text
    except Exception:
        check()
        raise
    check()
