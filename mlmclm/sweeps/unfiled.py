"""Computed results that are not in the ledger yet: `unfiled/<part>/<key>.json` of the store, each with its examples beside it.

A result for an object store is first kept here, so that it is not lost if the object store or the worker fails before it
is filed. Whoever uses the store next files it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlmclm.errors import UserError
from mlmclm.progress import say
from mlmclm.storage.checksums import read_sealed, sealed, set_aside
from mlmclm.storage.files import canonical_json, disk_faults, write_atomic

FOLDER = "unfiled"
RESULT, EXAMPLES = "result", "examples"


@dataclass(frozen=True)
class Unfiled:
    """The unfiled results of one store for one `part` of its ledger: cells or evaluations."""

    store: Path
    part: str

    @property
    def folder(self) -> Path:
        """The folder that holds them."""
        return self.store / FOLDER / self.part

    def keys(self) -> list[str]:
        """Return the keys of all unfiled results, in order."""
        return sorted(path.stem for path in self.folder.glob("*.json"))

    def keep(self, result: dict[str, Any], examples: bytes | None) -> None:
        """Keep a result and the Parquet file of its examples, if it has one.

        Raises:
            EnvironmentFault: the disk is full or not writable.
        """
        path = self._path(result["key"])
        if examples is not None:
            write_atomic(path.with_suffix(".parquet"), examples)
        # The result last: without it, examples count for nothing.
        value = {RESULT: result, EXAMPLES: None if examples is None else hashlib.sha256(examples).hexdigest()}
        write_atomic(path, canonical_json(sealed(value)) + "\n")

    def read(self, key: str) -> tuple[dict[str, Any], bytes | None] | None:
        """Return an unfiled result and its examples; None if there is none, or it is damaged, which is said."""
        path = self._path(key)
        if not path.is_file():
            return None
        try:
            value = read_sealed(path, "The cell is computed again.")
            examples = None if value[EXAMPLES] is None else path.with_suffix(".parquet").read_bytes()
            if examples is not None and hashlib.sha256(examples).hexdigest() != value[EXAMPLES]:
                raise UserError(f"{path.with_suffix('.parquet')}: its checksum differs. The cell is computed again.")
            return value[RESULT], examples
        except (UserError, OSError, KeyError) as error:
            if path.is_file():  # or another process has filed it meanwhile
                say(f"{error} It is kept as {set_aside(path).name}.")
            return None

    def drop(self, key: str) -> None:
        """Remove a result that has been filed.

        Raises:
            EnvironmentFault: the disk is not writable.
        """
        path = self._path(key)
        with disk_faults(path):
            path.unlink(missing_ok=True)
            path.with_suffix(".parquet").unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"
