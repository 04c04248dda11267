"""The YAML files that come with the package: search spaces, and protocols beside them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from mlmclm.errors import UserError, unknown
from mlmclm.storage.files import first_there, places_of

PACKAGED = "mlmclm.tune_spaces"
"""Where the wheel puts the checkout's top-level folder `tune_spaces/`."""


def spaces_folder() -> Path:
    """The folder of the packaged spaces: inside the installed package, or `tune_spaces/` of the checkout."""
    found = importlib.util.find_spec(PACKAGED)
    for location in (found.submodule_search_locations or []) if found else []:
        if Path(location).is_dir():
            return Path(location)
    checkout = Path(__file__).resolve().parents[2] / "tune_spaces"
    if checkout.is_dir():
        return checkout
    raise UserError("The packaged search spaces are not installed: give the path of a YAML file instead.")


def names_in(folder: Path) -> list[str]:
    """The names of a folder's YAML files, sorted."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def packaged_or_own(kind: str, name_or_path: str | Path, folder: Path, beside: Path | None = None) -> Path:
    """The file of a packaged name (`quickstart`), or of a path: whatever ends in .yaml or .yml, or has a folder in it.

    Args:
        beside: the folder of the file that names it, where a path is looked up first (`files.places_of`).

    Raises:
        UserError: no such name; the message has the nearest and all allowed. No such file; the message has where it was looked for.
    """
    text = str(name_or_path)
    if text.endswith((".yaml", ".yml")) or len(Path(text).parts) > 1:
        places = places_of(text, beside)
        found = first_there(places)
        if found is None:
            raise UserError(f"{kind} {text}: no such file; looked for {' and '.join(map(str, places))}.")
        return found
    if text not in names_in(folder):
        raise unknown(kind, text, names_in(folder))
    return folder / f"{text}.yaml"
