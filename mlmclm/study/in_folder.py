"""Common part of study files and sweep files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic import PrivateAttr

from mlmclm.configuration import Frozen


class InFolder(Frozen):
    """A configuration that remembers the folder of its file, where the paths in it are looked up first."""

    _folder: Path | None = PrivateAttr(default=None)

    def model_post_init(self, context: Any) -> None:
        """Remember the file's folder."""
        self._folder = (context or {}).get("folder")

    @property
    def folder(self) -> Path | None:
        """The file's folder; None for a configuration that was not loaded from a file."""
        return self._folder


def plain_name(value: str, what: str) -> str:
    """Return a name that can be that of a folder and of an MLflow experiment.

    Args:
        what: what has the name, such as `a study`.

    Raises:
        ValueError: it can't be.
    """
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value) is None:
        raise ValueError(f"{what}'s name is letters, digits, '.', '_' and '-', and starts with a letter or digit")
    return value
