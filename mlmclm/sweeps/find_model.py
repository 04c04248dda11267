"""Lookup of a model by its folder, by the name that a study in the store gave it, or on the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

from mlmclm.errors import UserError, meant, meant_path, unknown
from mlmclm.models.folder import weights_hashes
from mlmclm.models.sources import HUB_NAME, fetch_source, hub_hint, local_folder
from mlmclm.storage.checksums import CHECKSUMS, has_checksums
from mlmclm.storage.files import hash_file
from mlmclm.sweeps.cells import SweepModel


def find_model(model: str, store: Path, *, data_root: Path | None = None, beside: Path | None = None) -> SweepModel:
    """Find a model by folder, by its name in `store/studies/*/models/`, or on the Hub, in this order.

    `STUDY/NAME` picks one study's model. On the Hub, a name is OWNER/NAME or OWNER/NAME@REVISION.

    Args:
        data_root: folder that stands in for the Hub, if any.
        beside: folder of the file that names the model; folders are looked up there first.

    Raises:
        UserError: there is no such model (the message has the nearest name), or several studies have different models
            of that name.
        EnvironmentFault: the Hub can't provide it.
    """
    folder = local_folder(model, data_root, beside)
    if folder is not None and folder.is_dir():
        return model_in(folder, folder.name or folder.resolve().name)
    by_name: dict[str, dict[object, tuple[str, Path]]] = {}
    for folder in sorted((store / "studies").glob("*/models/*")):
        study, identity = folder.parent.parent.name, identity_of(folder)
        for name in (folder.name, f"{study}/{folder.name}"):
            by_name.setdefault(name, {}).setdefault(identity, (study, folder.resolve()))
    owner = model.partition("/")[0]
    if model not in by_name and HUB_NAME.fullmatch(model) and not (store / "studies" / owner / "models").is_dir():
        folder = fetch_source(model)
        return model_in(folder, Path(model).name)
    if model not in by_name:
        names = [name for name in by_name if "/" not in name]
        error = unknown("model", model, names, where=f"{model} is no folder; studies of {store}")
        near = "" if meant(model, names) else meant_path((beside or Path()) / model)
        raise UserError(f"{error}{near}{hub_hint(model)}")
    matches = by_name[model]
    if len(matches) > 1:
        studies = ", ".join(sorted(f"{study}/{model}" for study, _ in matches.values()))
        raise UserError(f"{store}: several studies have a model {model!r}; name one of {studies}.")
    _, target = next(iter(matches.values()))
    return model_in(target, Path(model).name)


def model_in(folder: Path, name: str) -> SweepModel:
    """Return the model in a folder; raises what `weights_hashes` does."""
    weights, *earlier = weights_hashes(folder)
    return SweepModel(name, folder, weights, tuple(earlier))


def identity_of(folder: Path) -> object:
    """Return a value that is equal for two folders of the same export: studies share models, but not their folders."""
    return hash_file(folder / CHECKSUMS) if has_checksums(folder) else folder.resolve()


def models_of_study(study: str, store: Path) -> list[str]:
    """Return the names of all models that a study in the store has exported, sorted.

    Raises:
        UserError: there is no such study, or it has none.
    """
    names = sorted(link.name for link in (store / "studies" / study / "models").glob("*"))
    if not names:
        studies = sorted({link.parent.parent.name for link in (store / "studies").glob("*/models/*")})
        raise unknown("study with models", study, studies, where=str(store))
    return names
