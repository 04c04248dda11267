"""Post-processors of tokenizers, which put special tokens around a text and decide which characters a token covers."""

from __future__ import annotations

from typing import Any


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
