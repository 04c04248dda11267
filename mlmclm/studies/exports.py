"""A study's models, and any state of their training, as Hugging Face folders: in the store, elsewhere, and on the Hub."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from mlmclm.analysis.results import records
from mlmclm.corpora.notes import STATE, read_notes
from mlmclm.errors import UserError, unknown
from mlmclm.models.folder import weights_hashes
from mlmclm.models.hub_cache import CachedRepository, repositories_of
from mlmclm.models.stored_model import ExportedModel
from mlmclm.plans.names import ModelName, parse_name
from mlmclm.plans.segments import revision_steps
from mlmclm.plans.stages import State
from mlmclm.pretraining import states
from mlmclm.progress import Bar, say
from mlmclm.reports.model_card import eval_results, model_cards
from mlmclm.storage.checksums import set_aside
from mlmclm.storage.files import read_json
from mlmclm.storage.place import Place
from mlmclm.storage.temporary import swept_folder
from mlmclm.studies.prepare import PreparedStudy, find_prepared
from mlmclm.studies.study_file import StudyFile
from mlmclm.sweeps.cells import SweepModel
from mlmclm.sweeps.results_store import ResultsStore
from mlmclm.tasks.declared_tasks import find_tasks
from mlmclm.tasks.splits import hub_data

MAIN = "main"
EVAL_RESULTS = ".eval_results"
"""Folder in which the Hub looks for a model's scores."""


def export_models(prepared: PreparedStudy) -> list[SweepModel]:
    """Export every model of the study to a Hugging Face folder, link its files into the study's, and return them all.

    Folders that exist and are intact are left alone; damaged ones are exported again.

    Raises:
        UserError: a model isn't trained yet.
    """
    return [_exported_once(prepared, name) for name in prepared.plan.models]


def _exported_once(prepared: PreparedStudy, name: ModelName) -> SweepModel:
    stored = _stored(prepared, name)

    def intact() -> bool:
        return stored.damage() is None

    # Studies share states, so another process may be exporting the same model.
    with stored.leased(intact, title=f"{name}'s folder"):
        if not intact():
            stored.set_aside()
        if not intact():  # the store's address may have an intact one
            _export(prepared, name, stored.folder)
            stored.send()
    _link(prepared, name)
    return _exported(prepared, name)


def _link(prepared: PreparedStudy, name: ModelName) -> None:
    _stored(prepared, name).link(prepared.place.study_folder(prepared.study.name) / "models" / str(name))


def exported_models(prepared: PreparedStudy) -> list[SweepModel]:
    """Return the models that `export_models` has exported already."""
    return [_exported(prepared, name) for name in prepared.plan.models if _stored(prepared, name).is_here()]


def _stored(prepared: PreparedStudy, name: ModelName) -> ExportedModel:
    return ExportedModel(prepared.place.store, prepared.target(name).key(prepared.fingerprint))


def _exported(prepared: PreparedStudy, name: ModelName) -> SweepModel:
    stored = _stored(prepared, name)
    weights, *earlier = stored.remembered()
    return SweepModel(str(name), stored.folder, weights, tuple(earlier))


def restore_exports(prepared: PreparedStudy, names: Collection[str]) -> None:
    """Verify the folders of models whose cells are about to be computed, and export damaged ones again.

    Raises:
        UserError: the new export has another hash, so its cells would have other keys.
    """
    for name in prepared.plan.models:
        stored = _stored(prepared, name)
        folder = stored.folder
        if str(name) not in names:
            continue
        try:
            hashes = weights_hashes(folder)
        except UserError as error:
            say(f"{error} It is kept as {set_aside(folder).name} and exported again.")
            if not stored.is_here():
                _export(prepared, name, folder)
            _link(prepared, name)
            hashes = weights_hashes(folder)
        if not set(hashes) & set(stored.remembered()):
            raise UserError(
                f"{folder}: it was damaged, and this version's export has other hashes, so it counts as another model. Put back a copy; or "
                f"delete {folder} and {folder.name}.weights.json beside it: the model's cells are then computed again."
            )


def _export(prepared: PreparedStudy, name: ModelName, folder: Path) -> None:
    from mlmclm.pretraining.checkpoints import read_weights

    state, initial = prepared.target(name), prepared.initial.get(name.size)
    weights = None
    if state.segments:
        key = state.key(prepared.fingerprint)
        if not states.exists(prepared.place.store, key):
            raise UserError(f"model {str(name)!r} is not trained yet: run `mlmclm pretrain` on this study first.")
        weights = read_weights(states.state_folder(prepared.place.store, key))
    elif initial is not None:  # a given model as it is
        initial.check()
        weights = dict(initial.weights())
    facts = prepared.card_facts(name) | _card_of_study(prepared.study, name)
    card, decoder_card = model_cards(facts, decoder=_causal(name))
    prepared.write(folder, state, weights, card=card, decoder_card=decoder_card)


def _causal(name: ModelName) -> bool:
    """Return whether the last step is causal, so that there is a decoder, too."""
    objective = name.last_objective
    return objective is not None and objective.causal


def _card_of_study(study: StudyFile, name: ModelName) -> dict[str, Any]:
    """Return the facts for a model's card that only the study file has."""
    siblings = [model for model in study.models if model != str(name)]
    return {**study.card.model_dump(), "siblings": siblings}


@dataclass(frozen=True)
class FoundState:
    """A state that a model of a study passes through in its training, as found in the store."""

    prepared: PreparedStudy
    name: ModelName
    """Name of these weights: the model's, with the step appended unless it is the last."""
    state: State
    folder: Path

    @property
    def causal(self) -> bool:
        """Whether the last step was causal, so that there is a decoder, too."""
        return _causal(self.name)


def find_state(prepared: PreparedStudy, name: ModelName, step: int | None = None) -> FoundState:
    """Return a model's state at a step; a damaged state is reported and skipped.

    Args:
        name: a model of the study, or a checkpoint on the way to it.
        step: optimiser steps; None for the last.

    Raises:
        UserError: there is no intact state.
    """
    candidates, wanted = list(_on_the_way(prepared, name)), step or name.steps
    for candidate in candidates:
        if candidate.state.step == wanted:
            damage = states.damage(candidate.folder)
            if damage is None:
                return candidate
            say(f"{candidate.folder} is not used: {damage}.")
    steps = ", ".join(str(step) for step in sorted({candidate.state.step for candidate in candidates}))
    hint = f"there are steps {steps}; --step exports one of them" if steps else "train it with `mlmclm pretrain`"
    raise UserError(f"{prepared.place.store}: no intact state of model {str(name)!r} at step {wanted}; {hint}.")


def _on_the_way(prepared: PreparedStudy, name: ModelName) -> Iterator[FoundState]:
    """Yield the states and checkpoints whose history is a prefix of the model's; saved states come first."""
    store, last = prepared.place.store, prepared.target(replace(name, checkpoint=None)).at(name.steps)

    def state_at(step: int, folder: Path) -> FoundState:
        model = replace(name, checkpoint=step) if step < name.phases[-1].until else name
        return FoundState(prepared, model, last.at(step), folder)

    for folder in sorted((store / "states").glob("[0-9a-f]*")):
        with suppress(UserError, KeyError):  # damaged, or the folder of an untrained model, which has no state.json
            step = int(read_json(folder / "step.json")["step"])
            if 0 < step <= last.step and folder.name == last.at(step).key(prepared.fingerprint):
                yield state_at(step, folder)
    for state in (state for stage in prepared.plan.stages for state in stage.states):
        for step, folder in states.checkpoints(store / "runs" / state.key(prepared.fingerprint)):
            if 0 < step <= last.step and state.at(step) == last.at(step):
                yield state_at(step, folder)


def check_hub(repository: str | None, *, dry_run: bool) -> None:
    """Check a repository's name and the access to it, so that an error comes before anything is written."""
    if repository is None:
        return
    from mlmclm.models.hub import check_access, check_repository

    check_repository(repository)
    if not dry_run:
        check_access()


def export_model(
    study: StudyFile,
    place: Place,
    model: str,
    to: Path,
    step: int | None,
    push_to_hub: str | None,
    *,
    source: str,
    dry_run: bool,
) -> tuple[FoundState, list[dict[str, object]]]:
    """Write a state as a Hugging Face folder: an encoder and, after a causal step, a decoder.

    Args:
        to: the folder; it must not exist yet.
        step: optimiser steps; None for the model's last.
        push_to_hub: the repository to upload to, if any.
        source: the study, for messages.
        dry_run: whether to say what would be uploaded, and upload nothing.

    Returns:
        The state, and what was uploaded: repository, files with their sizes, and the commit's address.

    Raises:
        UserError: there is no such state, or the folder is not empty.
    """
    from mlmclm.models.hub import check_repository
    from mlmclm.pretraining.checkpoints import read_weights

    found = _located(study, place, model, step, source)
    names = () if push_to_hub is None else repositories_of(push_to_hub, decoder=found.causal)
    for name in names:  # the encoder's may be too long where the decoder's is not
        check_repository(name)
    curve = states.folder_curve(place.store, found.folder)
    facts = found.prepared.card_facts(found.name, found.state, curve) | _card_of_study(study, found.name)
    exported = {export.name: export for export in exported_models(found.prepared)}.get(str(found.name))
    # The model's folder is inside the folder of its last state; states at other steps have no scores.
    scores = []
    if exported is not None and exported.folder.resolve().parent == found.folder.resolve():
        scores = facts["scores"] = _reported_scores(place, place.study_folder(study.name), exported)
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserError(f"--to {to}: it exists and is not empty; name a new or an empty folder.")
    card, decoder_card = model_cards(facts, decoder=found.causal, repositories=names)
    found.prepared.write(to, found.state, read_weights(found.folder), card=card, decoder_card=decoder_card)
    if results := eval_results(scores):
        (to / EVAL_RESULTS).mkdir()
        (to / EVAL_RESULTS / "mlmclm.yaml").write_text(results, encoding="utf-8")
    if push_to_hub is None:
        return found, []
    collection = study.name if len(study.models) > 1 else None
    return found, _push(to, names, str(found.name), collection, dry_run=dry_run)


def _located(study: StudyFile, place: Place, model: str, step: int | None, source: str) -> FoundState:
    """Return a model's state in the store; arguments as in `export_model`."""
    try:
        name = parse_name(model, study.sizes)
        is_listed = str(replace(name, checkpoint=None)) in study.models
    except UserError:
        is_listed = False
    if not is_listed:
        raise unknown("model", model, study.models, where=source)
    if not name.phases:
        raise UserError(f"model {model!r}: an untrained model has no state; `mlmclm pretrain` exports it.")
    prepared = find_prepared(study, place)
    if prepared is None:
        raise UserError(
            f"{place.store}: study {study.name!r} has nothing there yet; run `mlmclm pretrain {source}` first."
        )
    return find_state(prepared, name, step)


def _reported_scores(place: Place, folder: Path, model: SweepModel) -> list[dict[str, Any]]:
    """Return a model's rows of the last report's `best.csv` that have a score, with the Hub's data set of each, if any, as `data`.

    The list is empty if the report was made for other weights.
    """
    best, cells = folder / "best.csv", folder / "results.csv"
    if not best.is_file() or not cells.is_file():
        return []
    keys = [row["key"] for row in records(pd.read_csv(cells)) if row["model"] == model.name]
    result = ResultsStore(place.store).find(keys[0]) if keys else None
    if result is None or result["weights"] not in model.hashes:
        return []
    rows = pd.read_csv(best, dtype={"learning_rates": str, "setting": str}).fillna({"setting": ""})
    scored = [row for row in records(rows) if row["model"] == model.name and row["n"] > 0]
    on_hub = {name: hub_data(task) for name, task in find_tasks(place.task_dirs).items()}
    return [row | {"data": on_hub.get(row["task"], {})} for row in scored]


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
    study: StudyFile,
    place: Place,
    model: str,
    to: Path,
    repository: str | None,
    push_to_hub: str | None,
    *,
    source: str,
    dry_run: bool,
) -> tuple[str, Exported, dict[str, list[str]]]:
    """Write every revision that the recipe kept, as a repository in the layout of the Hub's cache; existing ones stay.

    `main` is the model itself. A model whose last objective is causal becomes two repositories: `repository` has it as a
    decoder, and `repository`-encoder as an encoder.

    Args:
        to: the folder that `from_pretrained` takes as `cache_dir`.
        repository: its name, OWNER/NAME.
        push_to_hub, source, dry_run: as in `export_model`.

    Returns:
        The model's name, what was written, and the uploaded tags by repository.

    Raises:
        UserError: no revisions were asked for, the repository's name is refused, or the folder has a repository of this
            name with other weights.
    """
    found = _located(study, place, model, None, source)
    name, steps = str(found.name), revision_steps(found.state.segments, study.recipe)
    names = repositories_of(push_to_hub or repository or f"mlmclm/{name}", decoder=found.causal)
    if not steps:
        raise UserError(
            f"model {name!r}: neither recipe.revisions_every nor revisions_every_tokens is set, so no revisions were kept. Set one in "
            "the study file before the model is trained."
        )
    before = [found.state.at(step) for step in steps if step < found.state.step]
    fingerprint = found.prepared.fingerprint
    folders = {_tag(state): states.weights_folder(place.store, state.key(fingerprint)) for state in before}
    missing = tuple(tag for tag, folder in folders.items() if folder is None)
    here = {
        _tag(state): FoundState(found.prepared, found.name, state, folder)
        for state in before
        if (folder := folders[_tag(state)])
    }
    here[_tag(found.state)] = found
    about = {**_card_of_study(study, found.name), "revisions": tuple(here), "missing": missing}
    writer = _Writer(found, [CachedRepository(to, name) for name in names], about)
    # All are compared before any is written, so that a folder with another model's revisions stays as it is.
    lacking = [tag for tag, revision in here.items() if not writer.is_there(revision)]
    for tag in lacking:
        writer.write(here[tag], to)
    if missing:
        named = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        say(
            f"{name}: {len(missing)} of its revisions are not in the store: {named}. Revisions are kept while their stage is trained, "
            f"and this model's were not. Train it again in another store: `mlmclm pretrain {source} --store NEW`."
        )
    exported = Exported(names, tuple(here), tuple(lacking), missing)
    return name, exported, {} if push_to_hub is None else _push_revisions(exported, to, name, dry_run=dry_run)


def _tag(state: State) -> str:
    """Return the name by which `from_pretrained(..., revision=TAG)` finds a state: `step1000`, or `ext200` in a later phase."""
    phase = state.segments[-1].phase if state.segments else None
    if phase is None or phase.start == 0:
        return f"step{state.step}"
    return f"{phase.name}{state.step - phase.start}"


class _Writer:
    """Writes a model's revisions into its repositories; if there are two, the decoder's is the first."""

    def __init__(self, model: FoundState, repositories: Sequence[CachedRepository], about: Mapping[str, Any]) -> None:
        self.model, self.repositories, self.about = model, repositories, about
        self.curve = states.folder_curve(model.prepared.place.store, model.folder)

    def is_there(self, revision: FoundState) -> bool:
        """Return whether all repositories have a revision with this card; a `UserError` if one has other weights."""
        complete, key = True, revision.state.key(revision.prepared.fingerprint)
        for repository, card in zip(self.repositories, self._cards(revision.state), strict=True):
            for tag in self._tags(revision.state):
                folder = repository.snapshot(tag)
                if folder is not None and read_notes(folder).get(STATE) != key:
                    raise UserError(
                        f"{repository.folder}: its revision {tag!r} has the weights of another model or training. Give another --repository or "
                        "--to, or delete this folder."
                    )
                complete &= folder is not None and (folder / "README.md").read_text(encoding="utf-8") == card
        return complete

    def write(self, revision: FoundState, cache: Path) -> None:
        """Write a revision, completely or not at all; a `UserError` if its weights in the store are damaged."""
        from mlmclm.pretraining.checkpoints import read_tensors

        state, damage = revision.state, states.damage(revision.folder)
        if damage is not None:
            raise UserError(
                f"{revision.folder}: {damage}. Put back a copy, or delete this folder to leave {_tag(state)} out."
            )
        *more, card = self._cards(state)
        decoder_card = more[0] if more else None
        weights, key = dict(read_tensors(revision.folder).weights), state.key(revision.prepared.fingerprint)
        with swept_folder(cache, ".revision-") as temporary:
            folder = temporary / "model"
            revision.prepared.write(folder, state, weights, card=card, decoder_card=decoder_card, state_key=key)
            parts = [folder / "decoder", folder] if self.model.causal else [folder]
            for repository, part in zip(self.repositories, parts, strict=True):
                commit = repository.commit(part, sorted(path for path in part.iterdir() if path.is_file()))
                for tag in self._tags(state):
                    repository.tag(tag, commit)

    def _tags(self, state: State) -> list[str]:
        return [_tag(state), *([MAIN] if state == self.model.state else [])]

    def _cards(self, state: State) -> list[str]:
        """Return the cards of a revision in each of the repositories."""
        name, step, last = self.model.name, state.step, state == self.model.state
        if not last:
            name = replace(name, checkpoint=step) if step else replace(name, phases=(), checkpoint=None)
        curve = [row for row in self.curve if row["step"] <= step]
        facts = self.model.prepared.card_facts(name, state, curve)
        card, decoder_card = model_cards(
            {**facts, **self.about, "revision": None if last else _tag(state)},
            decoder=self.model.causal,
            repositories=[repository.name for repository in self.repositories],
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
    folder: Path, repositories: Sequence[str], name: str, collection: str | None, *, dry_run: bool
) -> list[dict[str, object]]:
    """Upload an exported folder, and its `decoder/` to a repository of its own; return each repository with its files.

    Args:
        collection: the Hub's collection to which the repositories are added, if any.
    """
    from mlmclm.models.hub import add_to_collection, files_to_upload, push

    parts = [folder / "decoder", folder] if len(repositories) == 2 else [folder]
    pushed: list[dict[str, object]] = []
    for target, part in zip(repositories, parts, strict=True):
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
