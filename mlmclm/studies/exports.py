"""Export of a study's models, and of any of its states, to Hugging Face folders; damaged folders are exported again."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlmclm.corpora.notes import EARLIER, UNTRAINED, read_remembered
from mlmclm.errors import UserError
from mlmclm.models.folder import weights_hashes
from mlmclm.models.stored_model import ExportedModel
from mlmclm.plans.names import ModelName
from mlmclm.plans.recipe import Recipe
from mlmclm.plans.stages import State
from mlmclm.pretraining import states
from mlmclm.pretraining.initial import StoredInitial, first_config
from mlmclm.progress import say
from mlmclm.storage.checksums import set_aside, write_sealed
from mlmclm.storage.files import read_json
from mlmclm.studies.prepare import PreparedStudy
from mlmclm.sweeps.cells import SweepModel

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class FoundState:
    """A state that a model of a study passes through in its training, as found in the store."""

    prepared: PreparedStudy
    name: ModelName
    """Name of these weights: the model's, with the step appended unless it is the last."""
    state: State
    folder: Path

    @property
    def key(self) -> str:
        """The state's key."""
        return self.state.key(self.prepared.fingerprint)

    @property
    def causal(self) -> bool:
        """Whether the last step was causal, so that there is a decoder, too."""
        last = self.name.last_objective
        return last is not None and last.causal

    @cached_property
    def _curve(self) -> list[dict[str, Any]]:
        return states.folder_curve(self.prepared.place.store, self.folder)

    def facts(self, state: State) -> dict[str, Any]:
        """Return the facts for the card of the state, or of an earlier one on the way to it."""
        from mlmclm.studies.facts import state_facts

        name, step, prepared = self.name, state.step, self.prepared
        if step < self.state.step:
            name = replace(name, checkpoint=step) if step else replace(name, phases=(), checkpoint=None)
        trained, study = [row for row in self._curve if row["step"] <= step], prepared.study
        initial = prepared.initial.get(state.size)
        return state_facts(name, state, study.recipe, prepared.corpus, study.sources, trained, initial)

    def write(self, target: Path, state: State, weights: dict[str, Tensor], **more: Any) -> None:
        """Write the weights of the state, or of an earlier one, as a Hugging Face folder; `more` is as in `write_state`."""
        prepared = self.prepared
        tokenizer, initial = prepared.corpus.tokenizer, prepared.initial.get(state.size)
        write_state(target, state, prepared.study.recipe, weights, initial, tokenizer, **more)


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


def write_state(
    target: Path,
    state: State,
    recipe: Recipe,
    weights: dict[str, Tensor] | None,
    initial: StoredInitial | None,
    tokenizer: Path,
    *,
    card: str,
    decoder_card: str | None,
    key: str | None = None,
) -> None:
    """Write a state as a Hugging Face folder (`models.exported_folder.export_folder`).

    Args:
        recipe: the study's.
        weights: None for a fresh initialisation.
        key: the state's, to note in the folder.
    """
    from mlmclm.models.architectures import weights_of
    from mlmclm.models.build import build_model
    from mlmclm.models.exported_folder import export_folder

    resolved = state.resolved(recipe)
    config = first_config(state.size, initial, tokenizer, resolved)
    export_folder(
        target,
        weights_of(build_model(config, resolved.seeds.weights)) if weights is None else weights,
        config,
        tokenizer,
        card=card,
        decoder_card=decoder_card,
        context=resolved.block_length,
        state=key,
        objective=str(state.segments[-1].objective) if state.segments else UNTRAINED,
        begins=resolved.rows == "chunks",
    )


def export_models(prepared: PreparedStudy) -> list[SweepModel]:
    """Export every model of the study to a Hugging Face folder, link its files into the study's, and return them all.

    Folders that exist and are intact are left alone.

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
    link_files(prepared.model_folder(name), prepared.place.study_folder(prepared.study.name) / "models" / str(name))


def link_files(source: Path, target: Path) -> None:
    """Make `target` a folder of hard links to the files of `source`, so that a copy of `target` has the files themselves.

    Links to replaced files are renewed. A card that was edited after its export stays, and so do files that people added.
    """
    # config.json is linked last, because a folder without it is no model yet.
    for file in sorted(source.rglob("*"), key=lambda file: (file == source / "config.json", file)):
        link = target / file.relative_to(source)
        if file.is_dir() or (link.is_file() and _up_to_date(link, file)):
            continue
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        try:
            os.link(file, link)
        except OSError:  # studies/ is on another file system
            shutil.copy2(file, link)


def _up_to_date(link: Path, file: Path) -> bool:
    if link.samefile(file):
        return True
    ours, theirs = link.stat(), file.stat()
    if link.name == "README.md":
        return ours.st_mtime_ns >= theirs.st_mtime_ns
    return (ours.st_size, ours.st_mtime_ns) == (theirs.st_size, theirs.st_mtime_ns)  # a copy


def exported_models(prepared: PreparedStudy) -> list[SweepModel]:
    """Return the models that `export_models` has exported already."""
    return [_exported(prepared, name) for name in prepared.plan.models if _stored(prepared, name).is_here()]


def _stored(prepared: PreparedStudy, name: ModelName) -> ExportedModel:
    return ExportedModel(prepared.place.store, prepared.target(name).key(prepared.fingerprint))


def _exported(prepared: PreparedStudy, name: ModelName) -> SweepModel:
    folder = prepared.model_folder(name)
    weights, *earlier = _remembered(folder)
    return SweepModel(str(name), folder, weights, tuple(earlier))


def _remembered(folder: Path) -> tuple[str, ...]:
    """Return the hashes of a model folder in the store; they are computed once and kept in a file beside the folder."""
    path = folder.with_name(f"{folder.name}.weights.json")
    hashes = read_remembered(path)
    if not hashes and path.is_file():
        say(f"{path} is not used: it is damaged. It is kept as {set_aside(path).name} and made again.")
    if not hashes or EARLIER not in read_json(path):
        # Hashes noted by an earlier version were verified then; they stay even if the folder has changed since.
        computed = weights_hashes(folder, read=not hashes)
        hashes = computed if not hashes or hashes[0] in computed else hashes
        write_sealed(path, {"weights": hashes[0], EARLIER: hashes[1:]})
    return hashes


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
        if not set(hashes) & set(_remembered(folder)):
            raise UserError(
                f"{folder}: it was damaged, and this version's export has other hashes, so it counts as another model. Put back a copy; or "
                f"delete {folder} and {folder.name}.weights.json beside it: the model's cells are then computed again."
            )


def _export(prepared: PreparedStudy, name: ModelName, folder: Path) -> None:
    from mlmclm.pretraining.checkpoints import read_weights
    from mlmclm.reports.model_card import model_cards
    from mlmclm.studies.facts import card_facts

    state, initial, objective = prepared.target(name), prepared.initial.get(name.size), name.last_objective
    weights = None
    if state.segments:
        key = state.key(prepared.fingerprint)
        if not states.exists(prepared.place.store, key):
            raise UserError(f"model {str(name)!r} is not trained yet: run `mlmclm pretrain` on this study first.")
        weights = read_weights(states.state_folder(prepared.place.store, key))
    elif initial is not None:  # a given model as it is
        initial.check()
        weights = dict(initial.weights())
    decoder = objective is not None and objective.causal
    card, decoder_card = model_cards(card_facts(prepared, name), decoder=decoder)
    write_state(
        folder,
        state,
        prepared.study.recipe,
        weights,
        initial,
        prepared.corpus.tokenizer,
        card=card,
        decoder_card=decoder_card,
    )
