"""Export of a model's state, or of all its revisions, to folders and to the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from mlmclm.corpora.notes import STATE, read_notes
from mlmclm.errors import UserError, unknown
from mlmclm.models.hub_cache import CachedRepository, repositories_of
from mlmclm.plans.names import parse_name
from mlmclm.plans.segments import revision_steps
from mlmclm.plans.stages import State
from mlmclm.pretraining import states
from mlmclm.progress import Bar, say
from mlmclm.reports.model_card import eval_results, model_cards
from mlmclm.storage.temporary import swept_folder
from mlmclm.studies.exports import FoundState, exported_models, find_state
from mlmclm.studies.facts import reported_scores, study_card
from mlmclm.studies.prepare import find_prepared
from mlmclm.studies.study import Study

MAIN = "main"
EVAL_RESULTS = ".eval_results"
"""Folder in which the Hub looks for a model's scores."""


def check_hub(repository: str | None, *, dry_run: bool) -> None:
    """Check a repository's name and the access to it, so that an error comes before anything is written."""
    if repository is None:
        return
    from mlmclm.models.hub import check_access, check_repository

    check_repository(repository)
    if not dry_run:
        check_access()


def export_model(
    study: Study,
    model: str,
    to: Path,
    step: int | None,
    push_to_hub: str | None,
    *,
    dry_run: bool,
) -> tuple[FoundState, list[dict[str, object]]]:
    """Write a state as a Hugging Face folder: an encoder and, after a causal step, a decoder.

    Args:
        to: the folder; it must not exist yet.
        step: optimiser steps; None for the model's last.
        push_to_hub: the repository to upload to, if any.
        dry_run: whether to say what would be uploaded, and upload nothing.

    Returns:
        The state, and what was uploaded: repository, files with their sizes, and the commit's address.

    Raises:
        UserError: there is no such state, or the folder is not empty.
    """
    state, about = _located(study, model, step, push_to_hub)
    exported = {export.name: export for export in exported_models(state.prepared)}.get(str(state.name))
    # The model's folder is inside the folder of its last state; states at other steps have no scores.
    if exported is not None and exported.folder.resolve().parent == state.folder.resolve():
        about["scores"] = reported_scores(study.place, study.folder, exported)
    _write(state, to, about, push_to_hub)
    if push_to_hub is None:
        return state, []
    collection = study.name if len(study.trained_file.models) > 1 else None
    return state, _push(to, push_to_hub, str(state.name), collection, dry_run=dry_run)


def _write(state: FoundState, target: Path, about: Mapping[str, Any], repository: str | None) -> None:
    """Write a state with a model card; `about` has facts for the card in addition to those that the store has."""
    from mlmclm.pretraining.checkpoints import read_weights

    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"--to {target}: it exists and is not empty; name a new or an empty folder.")
    facts = state.facts(state.state)
    names = () if repository is None else repositories_of(repository, decoder=state.causal)
    card, decoder_card = model_cards({**facts, **about}, decoder=state.causal, repositories=names)
    state.write(target, state.state, read_weights(state.folder), card=card, decoder_card=decoder_card)
    if results := eval_results(about.get("scores", ())):
        (target / EVAL_RESULTS).mkdir()
        (target / EVAL_RESULTS / "mlmclm.yaml").write_text(results, encoding="utf-8")


def export_kept_revisions(
    study: Study,
    model: str,
    to: Path,
    repository: str | None,
    push_to_hub: str | None,
    *,
    dry_run: bool,
) -> tuple[str, Exported, dict[str, list[str]]]:
    """Write every revision that the recipe kept, as a repository in the layout of the Hub's cache.

    Args:
        repository: its name, OWNER/NAME.
        push_to_hub, dry_run: as in `export_model`.

    Returns:
        The model's name, what was written, and the uploaded tags by repository.
    """
    state, about = _located(study, model, None, push_to_hub)
    name, steps = str(state.name), revision_steps(state.state.segments, study.trained_file.recipe)
    exported = export_revisions(state, to, push_to_hub or repository or f"mlmclm/{name}", steps, about)
    if missing := exported.missing:
        named = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        say(
            f"{name}: {len(missing)} of its revisions are not in the store: {named}. Revisions are kept while their stage is trained, "
            f"and this model's were not. Train it again in another store: `mlmclm pretrain {study.source} --store NEW`."
        )
    return name, exported, {} if push_to_hub is None else _push_revisions(exported, to, name, dry_run=dry_run)


def _located(
    trained: Study, model: str, step: int | None, push_to_hub: str | None
) -> tuple[FoundState, dict[str, Any]]:
    """Return a model's state in the store, and its study's facts for the card; arguments as in `export_model`."""
    study, place = trained.trained_file, trained.place
    try:
        name = parse_name(model, study.sizes)
        is_listed = str(replace(name, checkpoint=None)) in study.models
    except UserError:
        is_listed = False
    if not is_listed:
        raise unknown("model", model, study.models, where=trained.source)
    if not name.phases:
        raise UserError(f"model {model!r}: an untrained model has no state; `mlmclm pretrain` exports it.")
    prepared = find_prepared(study, place)
    if prepared is None:
        raise UserError(
            f"{place.store}: study {study.name!r} has nothing there yet; run `mlmclm pretrain {trained.source}` first."
        )
    state = find_state(prepared, name, step)
    if push_to_hub is not None:
        from mlmclm.models.hub import check_repository

        for repository in repositories_of(push_to_hub, decoder=state.causal):
            check_repository(repository)
    return state, study_card(study, name)


@dataclass(frozen=True)
class Revision:
    """A model's weights at a step of its training."""

    state: State
    folder: Path | None
    """Folder of the weights in the store; None if they were not kept."""

    @property
    def tag(self) -> str:
        """The name by which `from_pretrained(..., revision=TAG)` finds it: `step1000`, or `ext200` in a later phase."""
        phase = self.state.segments[-1].phase if self.state.segments else None
        if phase is None or phase.start == 0:
            return f"step{self.state.step}"
        return f"{phase.name}{self.state.step - phase.start}"


@dataclass(frozen=True)
class Exported:
    """The outcome of `export_revisions`."""

    repositories: tuple[str, ...]
    tags: tuple[str, ...]
    written: tuple[str, ...]
    """Tags for which something was written; the others existed already."""
    missing: tuple[str, ...]
    """Tags whose weights the store does not have."""


def export_revisions(
    found: FoundState, cache: Path, repository: str, steps: Sequence[int], about: Mapping[str, Any]
) -> Exported:
    """Write a trained model's revisions as a repository in the layout of the Hub's cache; existing ones stay.

    `main` is the model itself. A model whose last objective is causal becomes two repositories: `repository` has it as a
    decoder, and `repository`-encoder as an encoder.

    Args:
        found: the model's last state.
        cache: the folder that `from_pretrained` takes as `cache_dir`.
        steps: those of its revisions (`plans.segments.revision_steps`); empty if the recipe asks for none.
        about: facts for the cards in addition to those that the store has (`facts.study_card`).

    Raises:
        UserError: no revisions were asked for, the repository's name is refused, or the folder has a repository of this
            name with other weights.
    """
    names = repositories_of(repository, decoder=found.causal)
    repositories = [CachedRepository(cache, name) for name in names]
    if not steps:
        raise UserError(
            f"model {str(found.name)!r}: neither recipe.revisions_every nor revisions_every_tokens is set, so no revisions were kept. Set one in "
            "the study file before the model is trained."
        )
    before = [found.state.at(step) for step in steps if step < found.state.step]
    earlier = [
        Revision(state, states.weights_folder(found.prepared.place.store, state.key(found.prepared.fingerprint)))
        for state in before
    ]
    revisions = [*earlier, Revision(found.state, found.folder)]
    available = [revision for revision in revisions if revision.folder is not None]
    missing = tuple(revision.tag for revision in revisions if revision.folder is None)
    tags = tuple(revision.tag for revision in available)
    writer = _Writer(found, repositories, {**about, "revisions": tags, "missing": missing})
    # All are compared before any is written, so that a folder with another model's revisions stays as it is.
    lacking = [revision for revision in available if not writer.is_there(revision)]
    for revision in lacking:
        writer.write(revision, cache)
    return Exported(names, tags, tuple(revision.tag for revision in lacking), missing)


class _Writer:
    """Writes a model's revisions into its repositories; if there are two, the decoder's is the first."""

    def __init__(self, model: FoundState, repositories: Sequence[CachedRepository], about: Mapping[str, Any]) -> None:
        self.model, self.repositories, self.about = model, repositories, about

    def is_there(self, revision: Revision) -> bool:
        """Return whether all repositories have a revision with this card; a `UserError` if one has other weights."""
        complete = True
        for repository, card in zip(self.repositories, self._cards(revision), strict=True):
            for tag in self._tags(revision):
                folder = repository.snapshot(tag)
                if folder is not None and read_notes(folder).get(STATE) != self._key(revision):
                    raise UserError(
                        f"{repository.folder}: its revision {tag!r} has the weights of another model or training. Give another --repository or "
                        "--to, or delete this folder."
                    )
                complete &= folder is not None and (folder / "README.md").read_text(encoding="utf-8") == card
        return complete

    def write(self, revision: Revision, cache: Path) -> None:
        """Write a revision, completely or not at all; a `UserError` if its weights in the store are damaged."""
        from mlmclm.pretraining.checkpoints import read_tensors

        stored = cast(Path, revision.folder)
        damage = states.damage(stored)
        if damage is not None:
            raise UserError(f"{stored}: {damage}. Put back a copy, or delete this folder to leave {revision.tag} out.")
        weights, cards, key = dict(read_tensors(stored).weights), self._cards(revision), self._key(revision)
        with swept_folder(cache, ".revision-") as temporary:
            folder = temporary / "model"
            *decoder_card, card = cards
            self.model.write(
                folder, revision.state, weights, card=card, decoder_card=next(iter(decoder_card), None), key=key
            )
            parts = [folder / "decoder", folder] if self.model.causal else [folder]
            for repository, part in zip(self.repositories, parts, strict=True):
                commit = repository.commit(part, sorted(path for path in part.iterdir() if path.is_file()))
                for tag in self._tags(revision):
                    repository.tag(tag, commit)

    def _key(self, revision: Revision) -> str:
        return revision.state.key(self.model.prepared.fingerprint)

    def _tags(self, revision: Revision) -> list[str]:
        return [revision.tag, *([MAIN] if revision.state == self.model.state else [])]

    def _cards(self, revision: Revision) -> list[str]:
        """Return the cards of a revision in each of the repositories."""
        tag = None if MAIN in self._tags(revision) else revision.tag
        facts = {**self.model.facts(revision.state), **self.about, "revision": tag}
        card, decoder_card = model_cards(
            facts, decoder=self.model.causal, repositories=[repository.name for repository in self.repositories]
        )
        return [card] if decoder_card is None else [decoder_card, card]


def _push_revisions(exported: Exported, cache: Path, name: str, *, dry_run: bool) -> dict[str, list[str]]:
    """Upload the revisions in a cache; return the uploaded tags by repository (in a dry run, all tags)."""
    from mlmclm.models.hub import files_to_upload, push_revisions

    pushed = {}
    for repository in exported.repositories:
        cached = CachedRepository(cache, repository)
        folders = {tag: folder for tag in exported.tags if (folder := cached.snapshot(tag)) is not None}
        size = sum(sum(files_to_upload(folder).values()) for folder in folders.values())
        say(
            f"{'would upload' if dry_run else 'uploading'} to {repository} on the Hugging Face Hub (created as private if it doesn't exist): "
            f"{len(folders)} revisions, {size:,} bytes, except for those already there"
        )
        if dry_run:
            pushed[repository] = list(folders)
            continue
        with Bar(f"uploading {repository}", len(folders), unit="revisions") as bar:
            pushed[repository] = push_revisions(
                folders, repository, f"{name}, exported by mlmclm", lambda tag, done: bar.update(done, note=tag)
            )
            bar.update(len(folders))
    return pushed


def _push(
    folder: Path, repository: str, name: str, collection: str | None, *, dry_run: bool
) -> list[dict[str, object]]:
    """Upload an exported folder, and its `decoder/` to a repository of its own; return each repository with its files.

    Args:
        collection: the Hub's collection to which the repositories are added, if any.
    """
    from mlmclm.models.hub import add_to_collection, files_to_upload, push

    decoder = folder / "decoder"
    parts = [decoder, folder] if decoder.is_dir() else [folder]
    pushed: list[dict[str, object]] = []
    for target, part in zip(repositories_of(repository, decoder=len(parts) == 2), parts, strict=True):
        files = files_to_upload(part)
        verb = "would upload" if dry_run else "uploading"
        say(f"{verb} to {target} on the Hugging Face Hub (created as private if it doesn't exist), as one commit:")
        for path, size in files.items():
            say(f"  {path} ({size:,} bytes)")
        say(
            f"  {len(files)} files, {sum(files.values()):,} bytes; a file of the same name there is replaced, others stay"
        )
        if collection is not None:
            say(f"  in your collection {collection!r} (created as private if it doesn't exist)")
        address = None if dry_run else push(part, target, f"{name}, exported by mlmclm")
        if collection is not None and not dry_run:
            add_to_collection(target, collection)
        pushed.append({"repository": target, "files": files, "commit": address})
    return pushed
