"""Schemes of entity tags: IOB1, as in CoNLL-2003's original files, is recognised and converted to IOB2.

In IOB2, each entity begins with B-. In IOB1 (Ramshaw and Marcus, 1995), it begins with I-, and with B- only directly
after another entity of its type.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


def is_iob1(sentences: Iterable[Sequence[str]]) -> bool:
    """Return whether tags are IOB1: an entity begins with I-, and none begins with B- where IOB1 has I-."""
    found = False
    for tags in sentences:
        for before, tag in _pairs(tags):
            if tag[:2] == "B-" and before[2:] != tag[2:]:
                return False
            found = found or _begins(before, tag)
    return found


def to_iob2(tags: Sequence[str]) -> list[str]:
    """Return a sentence's tags with B- at the beginning of each entity."""
    return [f"B-{tag[2:]}" if _begins(before, tag) else tag for before, tag in _pairs(tags)]


def _pairs(tags: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Return each tag after the one before it, which is O at the start of a sentence."""
    return zip(["O", *tags], tags, strict=False)


def _begins(before: str, tag: str) -> bool:
    """Return whether a tag with I- begins an entity."""
    return tag[:2] == "I-" and before[2:] != tag[2:]
