"""`mlmclm.json` of an exported model folder: facts that transformers' own files have no place for. Needs no torch.

An exported tokenizer adds to a text what the model was trained with (`models/exported_folder.py`), so its files are not the
corpus's. The notes say which of the corpus's files each one stands for. Hashes and keys are computed from those, so how
a model is exported changes neither the keys of its cells nor the key of a model that continues from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlmclm.errors import UserError
from mlmclm.storage.checksums import CHECKSUMS, damage, noted, read_sealed, write_checksums
from mlmclm.storage.files import hash_file, read_json, write_json

NOTES = "mlmclm.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
CONTEXT = "context"
"""Length in tokens of the longest sequence that the study trained the model on."""
STATE = "state"
"""Key of the state that a revision has the weights of."""
OBJECTIVE = "objective"
"""Name of the objective of the last training step, or `UNTRAINED`."""
UNTRAINED = "untrained"
TOKENIZER = "tokenizer"
"""`stands_for`: for each tokenizer file, its SHA-256 here and that of the corpus's. `post_processor` and `bos_token`:
the corpus's."""


def read_notes(folder: Path) -> dict[str, Any]:
    """Return the notes of a folder, empty if there are none; raise a `UserError` if they are not a JSON object."""
    file = folder / NOTES
    noted = read_json(file) if file.is_file() else {}
    if not isinstance(noted, dict):
        raise UserError(f"{file}: not a JSON object. Delete the file if the folder isn't one that mlmclm exported.")
    return noted


def add_notes(folder: Path, values: Mapping[str, Any]) -> None:
    """Add to the notes of a folder; notes of the same names are replaced."""
    there = read_notes(folder)
    if there != {**there, **values}:
        write_json(folder / NOTES, {**there, **values})


def corpus_tokenizer(folder: Path) -> dict[str, Any] | None:
    """Return the note `tokenizer`; None if the folder's tokenizer.json is not the one that was exported with it."""
    noted = read_notes(folder).get(TOKENIZER)
    name = "tokenizer.json"
    return noted if noted is not None and noted["stands_for"][name][0] == hash_file(folder / name) else None


def tokenizer_file_hash(file: Path) -> str:
    """Return the SHA-256 (hex) of a tokenizer's file; for an unchanged exported one, that of the corpus's file."""
    found = hash_file(file)
    exported, corpus = _stands_for(file)
    return corpus if found == exported else found


def is_exported(file: Path) -> bool:
    """Return whether a tokenizer's file is there and as it was exported."""
    exported, _ = _stands_for(file)
    return exported is not None and file.is_file() and hash_file(file) == exported


def _stands_for(file: Path) -> tuple[str | None, str]:
    """Return the noted hashes of an exported tokenizer's file and of the corpus's."""
    noted = read_notes(file.parent).get(TOKENIZER) or {"stands_for": {}}
    exported, corpus = noted["stands_for"].get(file.name, (None, ""))
    return exported, corpus


def note_written(folder: Path) -> None:
    """Write the checksums of an exported model folder; the card has none, because people edit it."""
    write_checksums(folder, [file.name for file in folder.iterdir() if file.is_file() and file.name != "README.md"])


def damage_of_export(folder: Path) -> str | None:
    """Return what is wrong with an exported folder, None if nothing.

    Weights are checked by size, small files by checksum.
    """
    for part in (folder, folder / "decoder"):
        if noted(part):
            found = damage(part, read=False)
            if found is None:
                # Of the files with checksums: one that somebody has added is no damage.
                small = [name for name in read_json(part / CHECKSUMS) if name.endswith(".json")]
                found = damage(part, names=small)
            if found is not None:
                return found
    return None


def read_remembered(path: Path) -> str | None:
    """Return the hash in a file beside a stored model folder; None if the file is missing or damaged."""
    try:
        return str(read_sealed(path, "")["weights"])
    except (UserError, KeyError):
        return None
