"""Verification of a store: every file that has a checksum is read and compared; nothing is changed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from mlmclm.corpora.process_map import Progress
from mlmclm.numbers import plural
from mlmclm.studies.store_pieces import AGAIN, NO_CHECKSUM, Piece

THREADS = 8
"""Files that are read side by side: hashing and waiting for an object store leave other threads free."""


@dataclass(frozen=True)
class Damaged:
    """A file that is not what was written."""

    kind: str
    path: str
    reason: str

    @property
    def again(self) -> str:
        """How the file is made again."""
        return AGAIN[self.kind]


@dataclass(frozen=True)
class Verified:
    """Findings in the files of one kind."""

    kind: str
    files: int
    bytes: int
    without_checksum: tuple[str, ...]
    """Paths of files that earlier versions wrote without a checksum."""
    damaged: tuple[Damaged, ...]


def verify(pieces: Iterable[Piece], progress: Progress) -> list[Verified]:
    """Check files and return what was found, by kind in the order of `AGAIN`.

    Raises:
        EnvironmentFault: an object store cannot be reached.
    """
    listed = list(pieces)
    total, read, reasons = sum(piece.size for piece in listed), 0, list[str | None]()
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        for piece, reason in zip(listed, pool.map(lambda piece: piece.check(), listed), strict=True):
            read += piece.size
            reasons.append(reason)
            progress(f"verifying {plural(len(listed), 'file')}", read >> 20, total >> 20, "MiB")
    return [found for kind in AGAIN if (found := _of_kind(kind, listed, reasons)).files]


def _of_kind(kind: str, pieces: Sequence[Piece], reasons: Sequence[str | None]) -> Verified:
    own = [(piece, reason) for piece, reason in zip(pieces, reasons, strict=True) if piece.kind == kind]
    return Verified(
        kind,
        len(own),
        sum(piece.size for piece, _ in own),
        tuple(piece.path for piece, reason in own if reason == NO_CHECKSUM),
        tuple(Damaged(kind, piece.path, reason) for piece, reason in own if reason not in (None, NO_CHECKSUM)),
    )
