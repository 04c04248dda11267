"""The studies that come with the package: examples, and replications of papers."""

from __future__ import annotations

from pathlib import Path

from mlmclm.errors import UserError, meant
from mlmclm.storage.packaged import names_in

EXAMPLES, REPLICATIONS = (Path(__file__).parents[1] / name for name in ("examples", "replications"))
"""Folders of the packaged studies: in a checkout links to its top-level folders, in a wheel the files themselves."""


def packaged_studies() -> dict[str, Path]:
    """Return the files of the packaged studies and replications by name."""
    return {name: folder / f"{name}.yaml" for folder in (EXAMPLES, REPLICATIONS) for name in names_in(folder)}


def file_of(path: Path) -> Path:
    """Return the path of a study or sweep file; the bare name of a packaged study (`quickstart`) stands for its file.

    Raises:
        UserError: a bare name is neither that of a packaged study nor that of a file here.
    """
    name, packaged = str(path), packaged_studies()
    if path.suffix or len(path.parts) != 1 or path.is_file():
        return path
    if name not in packaged:
        raise UserError(
            f"{name}: no such file, and no packaged study.{meant(name, packaged)} Packaged studies: {', '.join(packaged)}."
        )
    return packaged[name]
