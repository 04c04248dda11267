"""All kinds of artifacts of a store together: what there is, what each depends on, and which study uses it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from mlmclm.corpora.documents import StoredText
from mlmclm.corpora.prepared_corpus import StoredCorpus
from mlmclm.corpora.tokenizer import StoredTokenizer
from mlmclm.errors import UserError, unknown
from mlmclm.evaluation.evaluations import StoredEvaluation
from mlmclm.finetuning.kept import KeptEncoder
from mlmclm.models.stored_model import ExportedModel
from mlmclm.pretraining.initial import StoredInitial, StoredSource
from mlmclm.pretraining.states import StoredRevision, StoredState
from mlmclm.storage.artifact import Artifact, FolderArtifact, Origin
from mlmclm.storage.checksums import CHECKSUMS
from mlmclm.storage.claims import Claims
from mlmclm.storage.files import remove_folder
from mlmclm.storage.pieces import parsed
from mlmclm.studies.zero_shot import LISTING
from mlmclm.sweeps.ledger import StoredResult
from mlmclm.sweeps.manifest import FILE as MANIFEST
from mlmclm.tasks.generator import GeneratedTask
from mlmclm.tasks.prepared_task import StoredPreparation

KINDS: tuple[type[Artifact], ...] = (
    StoredText, StoredTokenizer, StoredCorpus, GeneratedTask, StoredPreparation, StoredSource, StoredInitial, StoredState,
    ExportedModel, StoredRevision, KeptEncoder, StoredResult, StoredEvaluation,
)  # fmt: skip
"""In an order in which each may be made of those before it."""
SHORTEST = 6
"""Fewest digits of a key that name an artifact."""


def studies_in(store: Path) -> list[str]:
    """Return the names of the studies and sweeps of a store, sorted."""
    return sorted(folder.name for folder in (store / "studies").glob("*") if folder.is_dir())


class Contents:
    """The artifacts of a store as they were when they were first asked for; damaged descriptions are passed over."""

    def __init__(self, store: Path) -> None:
        self.store = store

    @cached_property
    def all(self) -> tuple[Artifact, ...]:
        """Every artifact, in the order of `KINDS` and of the keys."""
        return tuple(artifact for kind in KINDS for artifact in kind.all(self.store))

    @cached_property
    def _by_weights(self) -> dict[str, Artifact]:
        models = (artifact for artifact in self.all if isinstance(artifact, ExportedModel))
        return {model.weights: model for model in models if model.weights is not None}

    @cached_property
    def _by_data(self) -> dict[str, list[Artifact]]:
        """Tokenised data by the fingerprint of the task's data, and generated data by the task's name."""
        found: dict[str, list[Artifact]] = defaultdict(list)
        for artifact in self.all:
            if isinstance(artifact, StoredPreparation | GeneratedTask):
                name = "task_data" if isinstance(artifact, StoredPreparation) else "name"
                found[str(self.origin(artifact).facts.get(name))].append(artifact)
        return found

    def origin(self, artifact: Artifact) -> Origin:
        """Return what an artifact was made from; empty if its description is damaged."""
        with suppress(UserError, OSError, KeyError):
            return artifact.origin()
        return Origin()

    def needs(self, artifact: Artifact) -> list[Artifact]:
        """Return what an artifact was made from, as far as the store has it.

        A result names its model and its task's data by their hashes.
        """
        origin = self.origin(artifact)
        found = [each for each in origin.needs if each in self._known]
        if isinstance(artifact, StoredResult):
            model = self._by_weights.get(str(origin.facts.get("weights")))
            found += [model] if model is not None else []
            start = origin.facts.get("start")
            found += [StoredResult(self.store, str(start)), KeptEncoder(self.store, str(start))] if start else []
            found += self._by_data.get(str(origin.facts.get("task_data")), [])
        elif isinstance(artifact, StoredPreparation):
            found += self._by_data.get(str(origin.free.get("task")), [])
        elif isinstance(artifact, ExportedModel):
            found.append(StoredState(self.store, artifact.key))
        return [each for each in found if each in self._known]

    @cached_property
    def _known(self) -> frozenset[Artifact]:
        return frozenset(self.all)

    @cached_property
    def users(self) -> dict[Artifact, list[Artifact]]:
        """For each artifact, those that were made from it."""
        found: dict[Artifact, list[Artifact]] = defaultdict(list)
        for artifact in self.all:
            for need in self.needs(artifact):
                found[need].append(artifact)
        return found

    def of_study(self, study: str) -> frozenset[Artifact]:
        """Return a study's results and models, and everything that these were made from.

        Raises:
            UserError: the store has no study or sweep of this name; the message has the nearest one.
        """
        if study not in studies_in(self.store):
            raise unknown("study", study, studies_in(self.store), where=str(self.store))
        return self.closure(self._roots(study))

    def closure(self, roots: Iterable[Artifact]) -> frozenset[Artifact]:
        """Return artifacts together with everything that they were made from."""
        found, left = set[Artifact](), list(roots)
        while left:
            artifact = left.pop()
            if artifact in self._known and artifact not in found:
                found.add(artifact)
                left += self.needs(artifact)
        return frozenset(found)

    def _roots(self, study: str) -> Iterator[Artifact]:
        folder = self.store / "studies" / study
        for cell in _listed(folder / MANIFEST, "cells"):
            key = str(cell.get("key"))
            yield from (StoredResult(self.store, key), KeptEncoder(self.store, key))
        for each in _listed(folder / LISTING, "results"):
            yield StoredEvaluation(self.store, str(each.get("key")))
        # A study's models are links to the files of their states, or copies.
        found = (self._model(file.read_bytes()) for file in (folder / "models").glob(f"*/{CHECKSUMS}"))
        yield from (model for model in found if model is not None)

    @cached_property
    def studies(self) -> dict[str, frozenset[Artifact]]:
        """The artifacts of each study."""
        return {study: self.of_study(study) for study in studies_in(self.store)}

    def find(self, text: str) -> Artifact:
        """Return the artifact with a key, the beginning of a key, or a path in the store.

        Raises:
            UserError: there is none, or several kinds or keys begin so.
        """
        path = Path(text)
        if path.exists():
            return self._at(path.resolve())
        if len(text) < SHORTEST:
            raise UserError(f"{text!r}: give at least {SHORTEST} characters of a key, or a path in {self.store}.")
        found = [artifact for artifact in self.all if artifact.key.startswith(text)]
        # A state and the model that is exported from it have one key.
        found = [each for each in found if not isinstance(each, ExportedModel)] or found
        if len(found) == 1:
            return found[0]
        if not found:
            keys = sorted({artifact.key for artifact in self.all})
            raise unknown("key", text, keys, where=str(self.store))
        named = ", ".join(f"{each.key[:16]} ({each.kind})" for each in found[:5])
        raise UserError(f"{text!r} begins several keys of {self.store}: {named}.")

    def _at(self, path: Path) -> Artifact:
        """Return the artifact that a file or folder belongs to, or that a study's model is linked to."""
        places: dict[Path, Artifact] = {}
        for artifact in self.all:
            if isinstance(artifact, FolderArtifact | StoredCorpus):
                places[artifact.folder.resolve()] = artifact
            elif isinstance(artifact, StoredResult):
                places[Path(str(artifact.ledger.path(artifact.key))).resolve()] = artifact
        for place in (path, path.with_suffix(".json"), *path.parents):
            if place in places:
                return places[place]
            sums = place / CHECKSUMS
            model = self._model(sums.read_bytes()) if sums.is_file() else None
            if model is not None:
                return model
        raise UserError(f"{path}: not the file of an artifact of {self.store}.")

    def _model(self, sums: bytes) -> Artifact | None:
        """Return the exported model with these checksums."""
        for artifact in self.all:
            file = artifact.folder / CHECKSUMS if isinstance(artifact, ExportedModel) else None
            if file is not None and file.is_file() and file.read_bytes() == sums:
                return artifact
        return None


@dataclass(frozen=True)
class Share:
    """The disk that a study's artifacts of one kind take, in bytes.

    Attributes:
        own: of those that no other study uses, which `store prune` would free.
        shared: of those that other studies use, too.
    """

    study: str
    kind: str
    own: int
    shared: int


def size_of(artifact: Artifact) -> int:
    """Return the bytes of an artifact's files on disk; of files on an object store, those whose size is recorded."""
    return sum(piece.size for piece in artifact.files())


def shares(contents: Contents) -> list[Share]:
    """Return the disk that each study takes, by kind, and what no study uses (study "")."""
    sizes = {artifact: size_of(artifact) for artifact in contents.all}
    used: dict[Artifact, list[str]] = defaultdict(list)
    for study, artifacts in contents.studies.items():
        for artifact in artifacts:
            used[artifact].append(study)
    totals: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for artifact, size in sizes.items():
        for study in used.get(artifact, [""]):
            totals[study, artifact.kind][len(used.get(artifact, [])) > 1] += size
    return [Share(study, kind, own, shared) for (study, kind), (own, shared) in sorted(totals.items())]


def prune_all(contents: Contents, unused: Iterable[Artifact], study: str | None) -> Iterator[Artifact]:
    """Delete artifacts, what was made of others first, and a study's own folder; yield each artifact before it goes.

    Raises:
        UserError: a process is making something in the store.
    """
    held = Claims(contents.store).held("")
    busy = [f"process {holder.process} on {holder.host}" for holder in held.values() if holder.alive]
    if busy:
        raise UserError(f"{contents.store}: {busy[0]} is working on it; wait for it.")
    for artifact in sorted(unused, key=lambda each: KINDS.index(type(each)), reverse=True):
        yield artifact
        artifact.remove()
    if study is not None:
        remove_folder(contents.store / "studies" / study)


def only_of(contents: Contents, study: str | None, *, results: bool) -> list[Artifact]:
    """Return what only this study uses, or without a study what none uses: what `store prune` deletes.

    Args:
        results: whether results of cells and evaluations count, too. They are small, and took the longest to compute.
    """
    if study is not None:
        contents.of_study(study)  # raises for an unknown name
    kept = frozenset[Artifact]().union(*(own for name, own in contents.studies.items() if name != study))
    candidates = contents.all if study is None else contents.studies[study]
    found = [artifact for artifact in contents.all if artifact in candidates and artifact not in kept]
    return [artifact for artifact in found if results or not isinstance(artifact, StoredResult)]


def _listed(path: Path, name: str) -> list[dict[str, object]]:
    found = parsed(path.read_bytes)
    entries = found.get(name) if isinstance(found, dict) else None
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
