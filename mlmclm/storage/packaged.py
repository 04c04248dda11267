"""The YAML files that come with the package: search spaces and protocols."""

from __future__ import annotations

from pathlib import Path

from mlmclm.errors import UserError, meant_path, unknown
from mlmclm.storage.files import first_existing, places_of

SPACES = Path(__file__).parents[1] / "tune_spaces"
"""Folder of the packaged spaces: in a checkout a link to its top-level folder, in a wheel the files themselves."""
PROTOCOLS = SPACES / "protocols"


def packaged_names(folder: Path) -> list[str]:
    """Return the names of a folder's YAML files, sorted."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def packaged_or_path(kind: str, name_or_path: str | Path, folder: Path, beside: Path | None = None) -> Path:
    """Return the file of a packaged name (`quickstart`) or of a path.

    A name that ends in .yaml or .yml, or contains a folder, is a path.

    Args:
        beside: the folder of the file that gives the name; paths are looked up there first (`files.places_of`).

    Raises:
        UserError: there is no such name (the message has the nearest one and all that are allowed), or no such file
            (the message says where it was looked for).
    """
    text = str(name_or_path)
    if text.endswith((".yaml", ".yml")) or len(Path(text).parts) > 1:
        places = places_of(text, beside)
        path = first_existing(places)
        if path is None:
            near = next(filter(None, map(meant_path, places)), "")
            raise UserError(f"{kind} {text}: no such file; looked for {' and '.join(map(str, places))}.{near}")
        return path
    if text not in packaged_names(folder):
        raise unknown(kind, text, packaged_names(folder))
    return folder / f"{text}.yaml"
