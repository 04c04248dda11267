"""Tokenizers of exported folders, which add the special tokens that surrounded texts in training.

- The encoder's adds only EOS, after the text, as fine-tuning does (`tasks/family.py`).
- The decoder's adds nothing: a prompt is continued, and in pretraining no token marked the start of a document. The token
  before a document was the EOS of the previous one, so EOS is also the decoder's BOS, which evaluations and `generate`
  use if a prompt is empty.
- Models that were trained on chunks (`recipe.rows`) have seen BOS before each chunk, so both tokenizers add it.

The corpus's tokenizer has a template of its own, usually with a BOS that the model was never trained with. Fine-tuning
uses that template if a protocol says so (`special_tokens: tokenizer`), so it is kept in the notes.

The notes (`notes`) also record which file of the corpus's tokenizer each exported one replaces. Hashes and keys are computed from
the corpus's files, so the export changes neither the keys of a model's cells nor the key of a model that continues from it. A
note is believed only if the corpus's file can be made again from it and the exported file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlmclm.corpora.notes import add_notes, read_notes
from mlmclm.storage.files import canonical_json, hash_file, parse_json, read_json, readable, write_atomic, write_json

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
UNLIMITED = 1_000_000
"""`model_max_length` of a corpus's tokenizer, which truncates nothing."""
EMPTY: Mapping[str, Any] = {"type": "WordLevel", "vocab": {}, "unk_token": ""}
"""The model of a tokenizer without tokens."""
TOKENIZER = "tokenizer"
"""`stands_for`: for each tokenizer file, the SHA-256 of the exported one and of the corpus's. `post_processor` and `bos_token`:
those of the corpus's tokenizer."""


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


def post_processor(
    own: dict[str, Any] | None, *, start: tuple[str, int] | None = None, end: tuple[str, int] | None
) -> dict[str, Any]:
    """Return a post-processor that puts tokens around each text and treats offsets of characters as `own` does.

    Args:
        own: the tokenizer's post-processor, as in tokenizer.json.
        start: text and id of the token before a text, or before two; None for none.
        end: text and id of the token behind a text, and behind each of two; None for none.
    """
    kept = [part for part in map(_positions, _parts(own)) if part is not None]
    around = [token for token in (start, end) if token is not None]
    special = {text: {"id": text, "ids": [index], "tokens": [text]} for text, index in around}

    def form(*parts: str) -> list[dict[str, Any]]:
        pieces = [] if start is None else [{"SpecialToken": {"id": start[0], "type_id": 0}}]
        for number, part in enumerate(parts):
            pieces.append({"Sequence": {"id": part, "type_id": number}})
            if end is not None:
                pieces.append({"SpecialToken": {"id": end[0], "type_id": number}})
        return pieces

    template = {"type": "TemplateProcessing", "single": form("A"), "pair": form("A", "B"), "special_tokens": special}
    return {"type": "Sequence", "processors": [*kept, template]} if kept else template


def is_exported_processor(processor: Any, own: dict[str, Any] | None) -> bool:
    """Return whether a post-processor is one that `post_processor` makes of `own`, with any tokens around a text."""
    try:
        template = _parts(processor)[-1]
        ids = template["special_tokens"]
        names = [template["single"][place].get("SpecialToken", {}).get("id") for place in (0, -1)]
        start, end = (None if name is None else (name, ids[name]["ids"][0]) for name in names)
        return bool(processor == post_processor(own, start=start, end=end))
    except (AttributeError, KeyError, TypeError, IndexError):
        return False


def _parts(processor: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the single processors of one that may be a sequence."""
    if processor is None:
        return []
    if processor["type"] != "Sequence":
        return [processor]
    return [part for inner in processor["processors"] for part in _parts(inner)]


def _positions(processor: dict[str, Any]) -> dict[str, Any] | None:
    """Return the part of a processor that changes character offsets; None if it only adds tokens.

    That part trims the spaces of byte-level tokens.
    """
    if processor["type"] == "ByteLevel":
        return processor
    if processor["type"] == "RobertaProcessing" and processor["trim_offsets"]:
        prefix = processor["add_prefix_space"]
        return {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": True}
    return None
