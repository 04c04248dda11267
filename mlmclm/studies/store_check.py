"""Verification of a store: every file that has a checksum is read and compared; nothing is changed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from mlmclm.corpora.process_map import Progress
from mlmclm.numbers import plural
from mlmclm.storage.pieces import Piece, pieces_in, seal_damage, sealed_in, size_of
from mlmclm.studies.artifacts import Contents, inode_of, studies_in
from mlmclm.studies.last_run import FILE as LAST_RUN
from mlmclm.sweeps.manifest import FILE as MANIFEST
from mlmclm.sweeps.results_store import UNFILED, StoredEvaluation, StoredResult
from mlmclm.sweeps.status import CellState, SweepStatus

THREADS = 8
"""Files that are read side by side: hashing and waiting for an object store leave other threads free."""
UNCOVERED = (
    "reports", "model cards", "logs", "MLflow's database", "notes of failures (cells/failed)", "measured speeds (calibrations)",
    "what was set aside", "storage.json",
)  # fmt: skip
"""Files without a checksum: written again from what has one, for people, or, like `storage.json`, by the user's command."""


@dataclass(frozen=True)
class Damaged:
    """A file that is not what was written, and what makes it again."""

    kind: str
    path: str
    reason: str
    again: str


@dataclass(frozen=True)
class Verified:
    """Findings in the files of one kind."""

    kind: str
    files: int
    bytes: int
    damaged: tuple[Damaged, ...]


def pieces_of(contents: Contents, study: str | None = None) -> Iterator[Piece]:
    """Yield the files of a store that can be verified; of a study, its own and what they were made from.

    Raises:
        UserError: the store has no such study.
        EnvironmentFault: the object store of results or shards cannot be reached.
    """
    store = contents.store
    chosen = contents.all if study is None else contents.of_study(study)
    for artifact in contents.all:
        if artifact in chosen:
            yield from artifact.files()
    data = "`mlmclm data` on its study, after it is deleted"
    for part, kind in {
        "corpora": "corpora",
        "corpora/sources": "corpora",
        "hub": "corpora",
        "task-data": "tasks",
        "initial/sources": "given models",
    }.items():
        yield from sealed_in(store / part, kind, data)
    if study is None:
        for folder in sorted(store.glob("runs/*/ray_train/*/checkpoint_[0-9]*")):
            yield from pieces_in(folder, "checkpoints", "`mlmclm pretrain` on its study resumes from an earlier one")
    for filed in (StoredResult, StoredEvaluation):
        unfiled = filed.stored_as(store, root=store / UNFILED)
        kept = (filed(store, key, unfiled) for key in sorted(unfiled.keys()))
        for piece in (piece for each in kept if study is None or each in chosen for piece in each.files()):
            if Path(piece.path).is_file():
                yield replace(piece, kind="unfiled results", again="the next run sets it aside and computes it again")
    for name in studies_in(store) if study is None else [study]:
        yield from _study(store, name)


def verify(pieces: Iterable[Piece], progress: Progress) -> list[Verified]:
    """Check files and return what was found, by kind.

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
    return [_of_kind(kind, listed, reasons) for kind in dict.fromkeys(piece.kind for piece in listed)]


def _of_kind(kind: str, pieces: Sequence[Piece], reasons: Sequence[str | None]) -> Verified:
    own = [(piece, reason) for piece, reason in zip(pieces, reasons, strict=True) if piece.kind == kind]
    damaged = (Damaged(kind, piece.path, reason, piece.again) for piece, reason in own if reason is not None)
    return Verified(kind, len(own), sum(piece.size for piece, _ in own), tuple(damaged))


def _study(store: Path, name: str) -> Iterator[Piece]:
    """Yield the lists that a study's commands read, and those files of its models that are no links to the states'."""
    folder, again = store / "studies" / name, "the next run of the study or sweep, after it is deleted"
    for file in (folder / each for each in (MANIFEST, LAST_RUN)):
        if file.is_file():
            yield Piece("studies", again, str(file), size_of(file), partial(seal_damage, file.read_bytes))
    linked = {inode_of(path) for path in store.glob("states/*/model/**/*")}
    for model in sorted((folder / "models").glob("*")):
        for part in (model, model / "decoder"):
            again = "the next run of the study"
            yield from (piece for piece in pieces_in(part, "models", again) if inode_of(Path(piece.path)) not in linked)


def with_examples(found: SweepStatus, store: Path, progress: Progress) -> SweepStatus:
    """Return the states in which a cell whose examples are damaged is damaged too; this reads all examples."""
    keys = (state.cell.key for state in found.states if state.result is not None)
    pieces = {key: StoredResult(store, key).examples() for key in keys}
    damaged = {one.path: one.reason for each in verify(pieces.values(), progress) for one in each.damaged}
    reasons = {key: f"{piece.path}: {damaged[piece.path]}" for key, piece in pieces.items() if piece.path in damaged}
    states = (
        CellState(state.cell, "damaged", damage=reasons[state.cell.key]) if state.cell.key in reasons else state
        for state in found.states
    )
    return replace(found, states=tuple(states))
