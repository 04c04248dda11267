"""Tokenizers of exported folders, which add the special tokens that surrounded texts in training.

- The encoder's adds only EOS, after the text, as fine-tuning does (`tasks/family.py`).
- The decoder's adds nothing: a prompt is continued, and in pretraining no token marked the start of a document. The token
  before a document was the EOS of the previous one, so EOS is also the decoder's BOS, which evaluations and `generate`
  use if a prompt is empty.
- Models that were trained on chunks (`recipe.rows`) have seen BOS before each chunk, so both tokenizers add it.

The corpus's tokenizer has a template of its own, usually with a BOS that the model was never trained with. Fine-tuning
uses that template if a protocol says so (`special_tokens: tokenizer`), so it is kept in the notes.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from mlmclm.corpora.notes import TOKENIZER, TOKENIZER_FILES, add_notes, corpus_tokenizer
from mlmclm.corpora.post_processors import post_processor
from mlmclm.storage.files import hash_file, read_json, readable, write_atomic, write_json


def write_tokenizer(
    source: Path, target: Path, *, decoder: bool, begins: bool = False, context: int | None = None
) -> None:
    """Write the exported tokenizer of the encoder's or the decoder's folder, with a note of the files that it replaces.

    Whenever this is interrupted, the folder's hashes are those of the corpus's tokenizer: the note is written first,
    and applies only to files that match it.

    Args:
        source: the corpus's tokenizer, a prepared folder.
        begins: whether the model was trained on texts that begin with BOS.
        context: tokens of the longest sequence, at which tokenizers truncate by default (`model_max_length`); None keeps
            the value of the corpus's tokenizer, which truncates nothing.
    """
    tokenizer = read_json(source / TOKENIZER_FILES[0])
    settings = read_json(source / TOKENIZER_FILES[1])
    original = {"post_processor": tokenizer.get("post_processor"), "bos_token": settings.get("bos_token")}
    if context is not None:
        settings["model_max_length"] = context
    if decoder and not begins:
        settings["bos_token"] = settings["eos_token"]
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    begin, end = ((text, ids[text]) for text in (_text(settings["bos_token"]), _text(settings["eos_token"])))
    tokenizer["post_processor"] = post_processor(
        original["post_processor"], start=begin if begins else None, end=None if decoder else end
    )
    contents = {
        TOKENIZER_FILES[0]: json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":")),
        TOKENIZER_FILES[1]: readable(settings),
    }
    stands_for = {
        name: [hashlib.sha256(content.encode()).hexdigest(), hash_file(source / name)]
        for name, content in contents.items()
    }
    add_notes(target, {TOKENIZER: {**original, "stands_for": stands_for}})
    if decoder:
        write_json(target / "generation_config.json", {"bos_token_id": begin[1], "eos_token_id": end[1]})
    for name in reversed(TOKENIZER_FILES):  # tokenizer.json last: with it, the export is complete
        write_atomic(target / name, contents[name])


def original_text(file: Path) -> str:
    """Return the content of a tokenizer.json, with the corpus's post-processor if it is an exported one."""
    noted = corpus_tokenizer(file.parent) if file.name == TOKENIZER_FILES[0] else None
    if noted is None:
        return file.read_text(encoding="utf-8")
    return json.dumps({**read_json(file), "post_processor": noted["post_processor"]}, ensure_ascii=False)


def _text(token: str | dict[str, Any]) -> str:
    return str(token["content"] if isinstance(token, dict) else token)
