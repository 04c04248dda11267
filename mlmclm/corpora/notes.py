"""`mlmclm.json` of an exported model folder: facts that transformers' own files have no place for. Needs no torch.

An exported tokenizer adds the special tokens that the model was trained with (`models/exported_folder.py`), so its files
differ from those of the corpus's tokenizer. The notes record which corpus file each one replaces. Hashes and keys are computed
from the corpus files, so the export changes neither the keys of a model's cells nor the key of a model that continues from it.
A note is believed only if the corpus's file can be made again from it and the exported file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlmclm.corpora.post_processors import is_exported_processor
from mlmclm.errors import UserError
from mlmclm.storage.checksums import CHECKSUMS, damage, has_checksums, read_sealed, write_checksums
from mlmclm.storage.files import canonical_json, hash_file, parse_json, read_json, readable, write_json

NOTES = "mlmclm.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
CONTEXT = "context"
"""Length in tokens of the longest sequence that the study trained the model on."""
EARLIER = "earlier"
"""Key of hashes by earlier definitions, in a file beside a stored model folder; files of an earlier version lack it."""
STATE = "state"
"""Key of the checkpoint whose weights a revision has."""
OBJECTIVE = "objective"
"""Name of the objective of the last training step, or `UNTRAINED`."""
UNTRAINED = "untrained"
UNLIMITED = 1_000_000
"""`model_max_length` of a corpus's tokenizer, which truncates nothing."""
EMPTY: Mapping[str, Any] = {"type": "WordLevel", "vocab": {}, "unk_token": ""}
"""The model of a tokenizer without tokens."""
TOKENIZER = "tokenizer"
"""`stands_for`: for each tokenizer file, the SHA-256 of the exported one and of the corpus's. `post_processor` and `bos_token`:
those of the corpus's tokenizer."""


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


def corpus_tokenizer(folder: Path) -> dict[str, Any] | None:
    """Return the note `tokenizer`; None if the folder's tokenizer.json is not the one that was exported with it."""
    exported = hash_of_corpus(folder / "tokenizer.json") is not None
    return dict(read_notes(folder)[TOKENIZER]) if exported else None


def tokenizer_file_hash(file: Path) -> str:
    """Return the SHA-256 (hex) of a tokenizer's file; for an unchanged exported one, that of the corpus's file."""
    return hash_of_corpus(file) or hash_file(file)


def hash_of_corpus(file: Path) -> str | None:
    """Return the SHA-256 of the corpus's file that an exported tokenizer's file replaces; None for another file.

    Anybody can write a note. So the corpus's file is made again from the exported one, and must have the noted hash.
    """
    noted = read_notes(file.parent).get(TOKENIZER)
    try:
        exported, corpus = noted["stands_for"][file.name]  # type: ignore[index]
        original = {"post_processor": noted["post_processor"], "bos_token": noted["bos_token"]}  # type: ignore[index]
        key = str(exported), str(corpus), canonical_json(original)
    except (KeyError, TypeError, ValueError):
        return None
    content = file.read_bytes() if file.is_file() else b""
    if hashlib.sha256(content).hexdigest() != exported:
        return None
    if key not in _checked:
        candidates = _originals(parse_json(content, file), original)
        _checked[key] = any(hashlib.sha256(text.encode()).hexdigest() == corpus for text in candidates)
    return str(corpus) if _checked[key] else None


_checked: dict[tuple[str, ...], bool] = {}
"""Cache, by both hashes and the note: whether a corpus's file can be made from an exported one. Large ones take a second."""


def _originals(exported: Any, original: Mapping[str, Any]) -> Iterator[str]:
    """Yield the files that an exported tokenizer's file (`exported_tokenizer.write_tokenizer`) may have been made from."""
    from tokenizers import Tokenizer

    if not isinstance(exported, dict):
        return
    if "model" not in exported:
        for length in (UNLIMITED, exported.get("model_max_length")):
            yield readable({**exported, "bos_token": original["bos_token"], "model_max_length": length})
        return
    # The corpus's file can't show that the exported one changes character offsets, on which spans of words and answers depend.
    if not is_exported_processor(exported.get("post_processor"), original["post_processor"]):
        return
    try:
        # The library writes the keys of a post-processor in an order of its own, and the note has them sorted.
        small = {**exported, "added_tokens": [], "model": EMPTY, "post_processor": original["post_processor"]}
        processor = json.loads(Tokenizer.from_str(json.dumps(small)).to_str())["post_processor"]
        content = json.dumps({**exported, "post_processor": processor}, ensure_ascii=False, separators=(",", ":"))
        yield content
        yield Tokenizer.from_str(content).to_str()  # which writes some floating-point numbers otherwise than Python
    except Exception:  # The library raises bare Exception.
        return


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
