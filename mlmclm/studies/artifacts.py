"""The artifacts of a store, of all kinds: what each is made from, which studies use it, and whether it is intact."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from mlmclm.corpora.documents import StoredText
from mlmclm.corpora.generated_task import GeneratedTask
from mlmclm.corpora.prepared_corpus import StoredCorpus
from mlmclm.corpora.tokenizer import StoredTokenizer
from mlmclm.errors import UserError, one_line, unknown
from mlmclm.finetuning.kept import KeptEncoder
from mlmclm.models.stored_model import ExportedModel
from mlmclm.numbers import plural
from mlmclm.pretraining.initial import StoredInitial, StoredSource
from mlmclm.pretraining.states import StoredRevision, StoredState
from mlmclm.progress import bars
from mlmclm.storage.addresses import discard, leases_of
from mlmclm.storage.artifact import Artifact, FolderArtifact, Origin
from mlmclm.storage.checksums import CHECKSUMS, Piece, parsed, pieces_in, seal_damage, sealed_in
from mlmclm.storage.files import only_one, remove_folder
from mlmclm.studies.study_record import FILE as LAST_RUN
from mlmclm.sweeps.manifest import FILE as MANIFEST
from mlmclm.sweeps.results_store import UNFILED, ResultsStore, StoredEvaluation, StoredResult
from mlmclm.sweeps.status import CellState, SweepStatus
from mlmclm.tasks.prepared_task import StoredPreparation

KINDS: tuple[type[Artifact], ...] = (
    StoredText, StoredTokenizer, StoredCorpus, GeneratedTask, StoredPreparation, StoredSource, StoredInitial, StoredState,
    ExportedModel, StoredRevision, KeptEncoder, StoredResult, StoredEvaluation,
)  # fmt: skip
"""The kinds of artifacts, in an order in which each is made from kinds before it."""
SHORTEST = 6
"""Minimum number of leading digits of a key that name an artifact."""


def studies_in(store: Path) -> list[str]:
    """Return the names of the studies and sweeps of a store, sorted."""
    return sorted(folder.name for folder in (store / "studies").glob("*") if folder.is_dir())


class Contents:
    """The artifacts of a store, which are listed when they are first needed."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self._origins: dict[Artifact, Origin | str] = {}

    @cached_property
    def all(self) -> tuple[Artifact, ...]:
        """Every artifact, in the order of `KINDS` and of the keys."""
        return tuple(artifact for kind in KINDS for artifact in kind.all(self.store))

    @cached_property
    def _known(self) -> frozenset[Artifact]:
        return frozenset(self.all)

    @cached_property
    def _models(self) -> list[ExportedModel]:
        return [artifact for artifact in self.all if isinstance(artifact, ExportedModel)]

    @cached_property
    def _by_weights(self) -> dict[str, list[Artifact]]:
        """Models by the hash of their weights and tokenizer, which two untrained models may share."""
        by_weights: dict[str, list[Artifact]] = defaultdict(list)
        for model in self._models:
            for weights in model.hashes:
                by_weights[weights].append(model)
        return by_weights

    @cached_property
    def _by_data(self) -> dict[str, list[Artifact]]:
        """Tokenised data by the fingerprint of the task's data, and generated data by the task's name."""
        by_data: dict[str, list[Artifact]] = defaultdict(list)
        for artifact in self.all:
            if isinstance(artifact, StoredPreparation | GeneratedTask):
                name = "task_data" if isinstance(artifact, StoredPreparation) else "name"
                by_data[str(self.origin(artifact).facts.get(name, ""))].append(artifact)
        return by_data

    def origin(self, artifact: Artifact) -> Origin:
        """Return what an artifact was made from; empty if its description is damaged."""
        origin = self._origin(artifact)
        return Origin() if isinstance(origin, str) else origin

    def _origin(self, artifact: Artifact) -> Origin | str:
        """Return what an artifact was made from, or why that is not known."""
        if artifact not in self._origins:
            try:
                self._origins[artifact] = artifact.origin()
            except (UserError, OSError, KeyError, TypeError) as error:
                self._origins[artifact] = f"{artifact.kind} {artifact.key}: {one_line(error)}"
        return self._origins[artifact]

    def needs(self, artifact: Artifact) -> list[Artifact]:
        """Return what an artifact was made from, as far as the store has it.

        A result names its model and its task's data by their hashes.
        """
        origin = self.origin(artifact)
        facts, needs = origin.facts, list(origin.needs)
        if isinstance(artifact, StoredResult):
            start = facts.get("start", {}).get("cell", "")
            needs += self._by_weights.get(str(facts.get("weights", "-")), [])
            needs += [StoredResult(self.store, start), KeptEncoder(self.store, start)]
            needs += self._by_data.get(str(facts.get("task_data", "-")), [])
        elif isinstance(artifact, StoredPreparation):
            needs += self._by_data.get(str(origin.free.get("task", "-")), [])
        elif isinstance(artifact, ExportedModel):
            needs.append(StoredState(self.store, artifact.key))
        return [need for need in dict.fromkeys(needs) if need in self._known]

    @cached_property
    def users(self) -> dict[Artifact, list[Artifact]]:
        """For each artifact, those that were made from it."""
        users: dict[Artifact, list[Artifact]] = defaultdict(list)
        for artifact in self.all:
            for need in self.needs(artifact):
                users[need].append(artifact)
        return users

    def of_study(self, study: str) -> frozenset[Artifact]:
        """Return a study's results and models, what these were made from, and the revisions of its trainings.

        Raises:
            UserError: the store has no study or sweep of this name; the message has the nearest one.
        """
        if study not in studies_in(self.store):
            raise unknown("study", study, studies_in(self.store), where=str(self.store))
        used = self.closure(self._roots(study))
        trainings = {self._training(artifact) for artifact in used if isinstance(artifact, StoredState)}
        revisions = (artifact for artifact in self.all if isinstance(artifact, StoredRevision))
        return used | {revision for revision in revisions if self._training(revision) in trainings}

    def _training(self, artifact: Artifact) -> tuple[str, str]:
        """Return the facts that all states and revisions of one training have in common: size and `shared`."""
        facts = self.origin(artifact).facts
        return str(facts.get("size")), str(facts.get("shared"))

    def closure(self, roots: Iterable[Artifact]) -> frozenset[Artifact]:
        """Return artifacts together with everything that they were made from."""
        reached, left = set[Artifact](), list(roots)
        while left:
            artifact = left.pop()
            if artifact in self._known and artifact not in reached:
                reached.add(artifact)
                left += self.needs(artifact)
        return frozenset(reached)

    def _roots(self, study: str) -> Iterator[Artifact]:
        folder = self.store / "studies" / study
        for cell in _listed(folder / MANIFEST, "cells"):
            key = str(cell.get("key"))
            yield from (StoredResult(self.store, key), KeptEncoder(self.store, key))
        for evaluation in _listed(folder / LAST_RUN, "evaluations"):
            yield StoredEvaluation(self.store, str(evaluation.get("key")))
        for model in (folder / "models").glob("*"):
            yield from self._exported(model)

    @cached_property
    def studies(self) -> dict[str, frozenset[Artifact]]:
        """The artifacts of each study."""
        return {study: self.of_study(study) for study in studies_in(self.store)}

    def check_studies(self, names: Iterable[str]) -> None:
        """Check that all artifacts that these studies use are known, so that all others can be deleted.

        Raises:
            UserError: a list or a description is damaged, or a study has neither models nor cells yet.
        """
        for name in names:
            folder = self.store / "studies" / name
            listed = {
                file: parsed(file.read_bytes) for file in (folder / MANIFEST, folder / LAST_RUN) if file.is_file()
            }
            wrong = [f"{file}: {reason}" for file, reason in listed.items() if isinstance(reason, str)]
            if "evaluations" not in (listed.get(folder / LAST_RUN) or {"evaluations"}):
                wrong.append(f"{folder / LAST_RUN}: an earlier version wrote it; run the study again")
            wrong += [reason for artifact in self.studies[name] if isinstance(reason := self._origin(artifact), str)]
            if wrong:
                raise UserError(f"{wrong[0]}. So it isn't known what study {name!r} uses; nothing is deleted.")
            if not (folder / MANIFEST).is_file() and not any((folder / "models").glob("*")):
                raise UserError(
                    f"study {name!r} is not finished, so it isn't known what it uses; nothing is deleted. Finish it, or delete {folder}."
                )

    def find(self, text: str) -> Artifact:
        """Return the artifact with a key, the beginning of a key, or a path in the store.

        Raises:
            UserError: no artifact or more than one matches.
        """
        path = Path(text)
        if path.exists():
            return self._at(path.resolve())
        if len(text) < SHORTEST:
            raise UserError(f"{text!r}: give at least {SHORTEST} characters of a key, or a path in {self.store}.")
        hits = [artifact for artifact in self.all if artifact.key.startswith(text)]
        # A state and the model exported from it have the same key, and so have a result and the encoder saved with it.
        sources: dict[type[Artifact], type[Artifact]] = {ExportedModel: StoredState, KeptEncoder: StoredResult}
        hits = [hit for hit in hits if type(hit) not in sources or sources[type(hit)](self.store, hit.key) not in hits]
        if len(hits) == 1:
            return hits[0]
        if not hits:
            keys = sorted({artifact.key for artifact in self.all})
            raise unknown("key", text, keys, where=str(self.store))
        named = ", ".join(f"{hit.key[:16]} ({hit.kind})" for hit in hits[:5])
        raise UserError(f"{text!r} begins several keys of {self.store}: {named}.")

    def _at(self, path: Path) -> Artifact:
        """Return the artifact that a file or folder belongs to, or that a study's model is linked to."""
        places: dict[Path, Artifact] = {}
        for artifact in self.all:
            if isinstance(artifact, FolderArtifact | StoredCorpus):
                places[artifact.folder.resolve()] = artifact
            elif isinstance(artifact, StoredResult):
                places[Path(str(artifact.results_store.path(artifact.key))).resolve()] = artifact
        for place in (path, path.with_suffix(".json"), *path.parents):
            artifacts = [places[place]] if place in places else self._exported(place)
            if artifacts:
                return artifacts[0]
        raise UserError(f"{path}: not the file of an artifact of {self.store}.")

    def _exported(self, folder: Path) -> list[ExportedModel]:
        """Return the exported models whose files a folder has as links or copies; several untrained models may be equal."""
        path = folder / CHECKSUMS
        sums = path.read_bytes() if path.is_file() else None
        places = ((model, model.folder / CHECKSUMS) for model in self._models) if sums is not None else ()
        return [model for model, file in places if file.is_file() and file.read_bytes() == sums]


@dataclass(frozen=True)
class Share:
    """The disk that a study's artifacts of one kind take, in bytes.

    Attributes:
        own: bytes of artifacts that no other study uses, which `store prune` would free.
        shared: bytes of artifacts that other studies use, too.
    """

    study: str
    kind: str
    own: int
    shared: int


OTHER = "other files: reports, lists, logs, checkpoints, MLflow"


def artifact_size(artifact: Artifact) -> int:
    """Return the bytes of an artifact's files on disk; of files at an address, those whose size is recorded."""
    return sum(_files(artifact).values())


def _files(artifact: Artifact) -> dict[object, int]:
    """Return the sizes of an artifact's files; a file with several hard links is counted once."""
    return {inode_of(Path(piece.path)) or piece.path: piece.size for piece in artifact.files()}


def inode_of(path: Path) -> tuple[int, int] | None:
    """Return a file's device and inode, which all its hard links share; None if there is no such file."""
    with suppress(OSError):
        status = path.lstat()
        return status.st_dev, status.st_ino
    return None


def disk_by_study(contents: Contents) -> list[Share]:
    """Return the disk space of each study, by kind; study "" has artifacts that no study uses, and files of no artifact."""
    files = {artifact: _files(artifact) for artifact in contents.all}
    used: dict[Artifact, list[str]] = defaultdict(list)
    for study, artifacts in contents.studies.items():
        for artifact in artifacts:
            used[artifact].append(study)
    totals: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for artifact, sizes in files.items():
        for study in used.get(artifact, [""]):
            totals[study, artifact.kind][len(used.get(artifact, [])) > 1] += sum(sizes.values())
    on_disk = {inode_of(path): path.lstat().st_size for path in contents.store.rglob("*") if path.is_file()}
    other_files = on_disk.keys() - {file for sizes in files.values() for file in sizes}
    totals["", OTHER][0] = sum(on_disk[file] for file in other_files)
    return [Share(study, kind, own, shared) for (study, kind), (own, shared) in sorted(totals.items())]


def only_of(contents: Contents, study: str | None, *, results: bool) -> list[Artifact]:
    """Return the artifacts that `store prune` deletes: those that only this study uses or, for None, that no study uses.

    Artifacts at an address stay, because other stores may use them.

    Args:
        results: whether to include those that took the longest to make: results of cells and evaluations; texts of
            sources, which their packages may not provide again; and, without a study, the states that no study uses.

    Raises:
        UserError: the study is unknown, it isn't known what the others use, or the results are not in the store.
    """
    if study is not None:
        contents.of_study(study)  # raises for an unknown name
    if results and ResultsStore(contents.store).folder != contents.store / ResultsStore.part:
        raise UserError(
            f"--results: the results are in {ResultsStore(contents.store).folder}, which other stores may use. They are not deleted."
        )
    other_studies = [name for name in contents.studies if name != study]
    contents.check_studies(other_studies)
    lasting: tuple[type[Artifact], ...] = () if results else (StoredResult, StoredText)
    kept = frozenset[Artifact]().union(*(contents.studies[name] for name in other_studies))
    if study is None and not results:
        kept |= contents.closure(item for item in contents.all if isinstance(item, StoredState | StoredRevision))
    candidates = contents.all if study is None else contents.studies[study]
    unused = [artifact for artifact in contents.all if artifact in candidates and artifact not in kept]
    return [artifact for artifact in unused if not isinstance(artifact, lasting)]


def prune_all(contents: Contents, unused: Iterable[Artifact], study: str | None) -> Iterator[Artifact]:
    """Delete artifacts, those made from others first, then a study's folder; yield each artifact before it is deleted.

    Raises:
        UserError: a process is working on a study or making something in the store.
        EnvironmentFault: something can't be deleted.
    """
    store = contents.store
    both = (leases_of(store), ResultsStore(store).leases)
    with ExitStack() as stack:
        for name in contents.studies:
            stack.enter_context(only_one(store / "studies" / name / ".lock", f"study {name!r}"))
        for holder in (holder for leases in both for holder in leases.held("").values()):
            if holder.alive:
                raise UserError(
                    f"{store}: process {holder.process} on {holder.host} is working on it; wait for it. Nothing is deleted."
                )
        for artifact in sorted(unused, key=lambda artifact: KINDS.index(type(artifact)), reverse=True):
            yield artifact
            artifact.remove()
        if study is not None:
            discard(store / "studies" / study)
            remove_folder(store / "studies" / study)


def _listed(path: Path, name: str) -> list[dict[str, object]]:
    values = parsed(path.read_bytes)
    entries = values.get(name) if isinstance(values, dict) else None
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


THREADS = 8
"""Number of files that are read at once: while one is hashed or awaited from an object store, other threads can run."""
UNCOVERED = (
    "reports", "model cards", "logs", "MLflow's database", "notes of failures (cells/failed)", "measured speeds (calibrations)",
    "what was set aside", "storage.json",
)  # fmt: skip
"""Files without a checksum: they are for people, can be rebuilt from files that have one, or, like `storage.json`, are set by a command."""


@dataclass(frozen=True)
class Damaged:
    """A file that has changed since it was written, and the way to make it again."""

    kind: str
    path: str
    reason: str
    again: str


@dataclass(frozen=True)
class Verified:
    """The outcome of checking the files of one kind."""

    kind: str
    files: int
    bytes: int
    damaged: tuple[Damaged, ...]


def pieces_of(contents: Contents, study: str | None = None) -> Iterator[Piece]:
    """Yield the files of a store that can be verified; for a study, its files and those that they were made from.

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
        for piece in (piece for artifact in kept if study is None or artifact in chosen for piece in artifact.files()):
            if Path(piece.path).is_file():
                yield replace(piece, kind="unfiled results", again="the next run sets it aside and computes it again")
    for name in studies_in(store) if study is None else [study]:
        yield from _study(store, name)


def verify(pieces: Iterable[Piece]) -> list[Verified]:
    """Check files, show the progress, and return the outcome by kind.

    Raises:
        EnvironmentFault: an object store cannot be reached.
    """
    listed = list(pieces)
    total, read, reasons = sum(piece.size for piece in listed), 0, list[str | None]()
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool, bars() as report:
        for piece, reason in zip(listed, pool.map(lambda piece: piece.check(), listed), strict=True):
            read += piece.size
            reasons.append(reason)
            report(f"verifying {plural(len(listed), 'file')}", read >> 20, total >> 20, "MiB")
    return [_of_kind(kind, listed, reasons) for kind in dict.fromkeys(piece.kind for piece in listed)]


def _of_kind(kind: str, pieces: Sequence[Piece], reasons: Sequence[str | None]) -> Verified:
    checked = [(piece, reason) for piece, reason in zip(pieces, reasons, strict=True) if piece.kind == kind]
    damaged = (Damaged(kind, piece.path, reason, piece.again) for piece, reason in checked if reason is not None)
    return Verified(kind, len(checked), sum(piece.size for piece, _ in checked), tuple(damaged))


def _study(store: Path, name: str) -> Iterator[Piece]:
    """Yield the lists that a study's commands read, and the files of its models that are not links to those of states."""
    folder, again = store / "studies" / name, "the next run of the study or sweep, after it is deleted"
    for file in (folder / MANIFEST, folder / LAST_RUN):
        if file.is_file():
            yield Piece("studies", again, str(file), file.stat().st_size, partial(seal_damage, file.read_bytes))
    linked = {inode_of(path) for path in store.glob("states/*/model/**/*")}
    for model in sorted((folder / "models").glob("*")):
        for part in (model, model / "decoder"):
            again = "the next run of the study"
            yield from (piece for piece in pieces_in(part, "models", again) if inode_of(Path(piece.path)) not in linked)


def with_examples(found: SweepStatus, store: Path) -> SweepStatus:
    """Return the status, in which cells with damaged examples are marked as damaged; this reads all examples."""
    keys = (state.cell.key for state in found.states if state.result is not None)
    pieces = {key: StoredResult(store, key).examples() for key in keys}
    damaged = {file.path: file.reason for verified in verify(pieces.values()) for file in verified.damaged}
    reasons = {key: f"{piece.path}: {damaged[piece.path]}" for key, piece in pieces.items() if piece.path in damaged}
    states = (
        CellState(state.cell, "damaged", damage=reasons[state.cell.key]) if state.cell.key in reasons else state
        for state in found.states
    )
    return replace(found, states=tuple(states))
