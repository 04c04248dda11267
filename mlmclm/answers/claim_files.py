"""The claims that a study tests, from packaged files and the user's files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mlmclm.analysis.claim import ClaimFile, SourcedClaim
from mlmclm.configuration import load_config
from mlmclm.errors import for_each
from mlmclm.storage.packaged import packaged_names, packaged_or_path

CLAIMS = Path(__file__).parents[1] / "claims"
"""Folder of the packaged claims: in a checkout a link to the top-level folder `claims`, in a wheel the files themselves."""


def absolute_claims(name: str, beside: Path | None) -> str:
    """Return the absolute path of a file of claims, or the name of a packaged one."""
    path = packaged_or_path("claims", name, CLAIMS, beside)
    return name if path.parent == CLAIMS else str(path.resolve())


def read_claims(files: Sequence[str | Path] | None = None, beside: Path | None = None) -> tuple[SourcedClaim, ...]:
    """Read files of claims.

    Args:
        files: names of packaged files, such as `ettin`, or paths; None for all packaged ones.
        beside: the folder in which paths are looked up first.

    Raises:
        UserError: there is no such file, or it is invalid; the message names the file, the key, the value and what is allowed.
    """
    names = packaged_names(CLAIMS) if files is None else files
    paths = for_each(names, lambda name: packaged_or_path("claims", name, CLAIMS, beside))
    loaded = for_each(dict.fromkeys(paths), lambda path: load_config(ClaimFile, path))
    return tuple(SourcedClaim(name, file.source, claim) for file in loaded for name, claim in file.claims.items())
