"""Hugging Face folders of a study's models: export, lookup, and renewed export of damaged ones."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from pathlib import Path

from mlmclm.corpora.notes import EARLIER, read_remembered
from mlmclm.errors import UserError
from mlmclm.models.folder import weights_hashes
from mlmclm.models.stored_model import ExportedModel
from mlmclm.plans.names import ModelName
from mlmclm.pretraining import states
from mlmclm.progress import say
from mlmclm.storage.checksums import set_aside, write_sealed
from mlmclm.storage.files import read_json
from mlmclm.studies.exports import write_state
from mlmclm.studies.prepare import PreparedStudy
from mlmclm.sweeps.cells import SweepModel


def export_models(prepared: PreparedStudy) -> list[SweepModel]:
    """Export every model of the study to a Hugging Face folder, link its files into the study's, and return them all.

    Folders that exist and are intact are left alone.

    Raises:
        UserError: a model isn't trained yet.
    """
    return [_exported_once(prepared, name) for name in prepared.plan.models]


def _exported_once(prepared: PreparedStudy, name: ModelName) -> SweepModel:
    stored = ExportedModel(prepared.place.store, prepared.model_folder(name).parent.name)

    def there() -> bool:
        return stored.damage() is None

    # Studies share states, so another process may be exporting the same model.
    with stored.leased(there, title=f"{name}'s folder"):
        if not there():
            stored.set_aside()
        if not there():  # the store's address may have an intact one
            _export(prepared, name, stored.folder)
            stored.send()
    _link(prepared, name)
    return exported_model(prepared, name)


def _link(prepared: PreparedStudy, name: ModelName) -> None:
    link_files(prepared.model_folder(name), prepared.place.study_folder(prepared.study.name) / "models" / str(name))


def link_files(source: Path, target: Path) -> None:
    """Make `target` a folder of hard links to the files of `source`, which is complete wherever it is copied to.

    Links to replaced files are renewed. A card that was edited after its export stays, and so do files that people added.
    """
    # A folder without config.json is no model yet.
    for file in sorted(source.rglob("*"), key=lambda file: (file == source / "config.json", file)):
        own = target / file.relative_to(source)
        if file.is_dir() or (own.is_file() and _up_to_date(own, file)):
            continue
        own.parent.mkdir(parents=True, exist_ok=True)
        own.unlink(missing_ok=True)
        try:
            os.link(file, own)
        except OSError:  # studies/ is on another file system
            shutil.copy2(file, own)


def _up_to_date(own: Path, file: Path) -> bool:
    if own.samefile(file):
        return True
    ours, theirs = own.stat(), file.stat()
    if own.name == "README.md":
        return ours.st_mtime_ns >= theirs.st_mtime_ns
    return (ours.st_size, ours.st_mtime_ns) == (theirs.st_size, theirs.st_mtime_ns)  # a copy


def is_exported(prepared: PreparedStudy, name: ModelName) -> bool:
    """Return whether a model has been exported."""
    return ExportedModel(prepared.place.store, prepared.model_folder(name).parent.name).is_here()


def exported_model(prepared: PreparedStudy, name: ModelName) -> SweepModel:
    """Return a model that `export_models` has exported."""
    folder = prepared.model_folder(name)
    weights, *earlier = _remembered(folder)
    return SweepModel(str(name), folder, weights, tuple(earlier))


def _remembered(folder: Path) -> tuple[str, ...]:
    """Return the hashes of a model folder in the store; they are computed once and kept in a file beside the folder."""
    path = folder.with_name(f"{folder.name}.weights.json")
    known = read_remembered(path)
    if not known and path.is_file():
        say(f"{path} is not used: it is damaged. It is kept as {set_aside(path).name} and made again.")
    if not known or EARLIER not in read_json(path):
        # What an earlier version noted was verified then, and stays if the folder has changed since.
        found = weights_hashes(folder, read=not known)
        known = found if not known or known[0] in found else known
        write_sealed(path, {"weights": known[0], EARLIER: known[1:]})
    return known


def restore_exports(prepared: PreparedStudy, names: Collection[str]) -> None:
    """Verify the folders of models whose cells are about to be computed, and export damaged ones again.

    Raises:
        UserError: the new export has another hash, so its cells would have other keys.
    """
    for name in prepared.plan.models:
        stored = ExportedModel(prepared.place.store, prepared.model_folder(name).parent.name)
        folder = stored.folder
        if str(name) not in names:
            continue
        try:
            found = weights_hashes(folder)
        except UserError as error:
            say(f"{error} It is kept as {set_aside(folder).name} and exported again.")
            if not stored.is_here():
                _export(prepared, name, folder)
            _link(prepared, name)
            found = weights_hashes(folder)
        if not set(found) & set(_remembered(folder)):
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
