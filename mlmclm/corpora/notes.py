"""`mlmclm.json` of an exported model folder: facts that transformers' own files have no place for. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlmclm.errors import UserError
from mlmclm.storage.checksums import CHECKSUMS, damage, has_checksums, read_sealed, write_checksums
from mlmclm.storage.files import read_json, write_json

NOTES = "mlmclm.json"
CONTEXT = "context"
"""Length in tokens of the longest sequence that the study trained the model on."""
EARLIER = "earlier"
"""Key of hashes by earlier definitions, in a file beside a stored model folder; files of an earlier version lack it."""
STATE = "state"
"""Key of the checkpoint whose weights a revision has."""
OBJECTIVE = "objective"
"""Name of the objective of the last training step, or `UNTRAINED`."""
UNTRAINED = "untrained"


def read_notes(folder: Path) -> dict[str, Any]:
    """Return the notes of a folder, empty if there are none; raise a `UserError` if they are not a JSON object."""
    file = folder / NOTES
    noted = read_json(file) if file.is_file() else {}
    if not isinstance(noted, dict):
        raise UserError(f"{file}: not a JSON object. Delete the file if the folder isn't one that mlmclm exported.")
    return noted


def add_notes(folder: Path, values: Mapping[str, Any]) -> None:
    """Add to the notes of a folder; notes of the same names are replaced."""
    notes = read_notes(folder)
    if notes != {**notes, **values}:
        write_json(folder / NOTES, {**notes, **values})


def note_written(folder: Path) -> None:
    """Write the checksums of an exported model folder, without README.md (the model card), because people edit it."""
    write_checksums(folder, [file.name for file in folder.iterdir() if file.is_file() and file.name != "README.md"])


def damage_of_export(folder: Path) -> str | None:
    """Return what is wrong with an exported folder, None if nothing.

    Weights are checked by size, small files by checksum.
    """
    for part in (folder, folder / "decoder"):
        if has_checksums(part):
            fault = damage(part, read=False)
            if fault is None:
                # Only files with checksums: one that somebody has added is no damage.
                small = [name for name in read_json(part / CHECKSUMS) if name.endswith(".json")]
                fault = damage(part, names=small)
            if fault is not None:
                return fault
    return None


def read_remembered(path: Path) -> tuple[str, ...]:
    """Return the hashes in a file beside a stored model folder, the current one first; empty if the file is missing or damaged."""
    try:
        noted = read_sealed(path, "")
        return str(noted["weights"]), *map(str, noted.get(EARLIER, ()))
    except (UserError, KeyError, TypeError):
        return ()
