"""Schemes of tags, and how each is read as entities.

- IOB2, IOBES and BILOU (also BMES and BMEWO): a letter before or after the type gives a word's position in its entity.
- IO, as in Few-NERD: types alone, and O. Neighbouring words of one type are an entity.
- Parts of speech and the like: tags alone, without O. Each word is a unit.
- IOB1 (Ramshaw and Marcus, 1995), as in CoNLL-2003's original files, is converted to IOB2. An entity begins with I-, and
  with B- only directly after another entity of its type.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

_PLACE = re.compile(r"([BIESLUMW])(?:[-_](.+))?")
_PLACE_LAST = re.compile(r"(?P<type>.+)[-_]([BIESLUMW])")
_LETTERS = {"L": "E", "U": "S", "M": "I", "W": "S"}
"""Letters of other schemes -> the letters of IOBES for the same position in an entity."""


def as_iobes(names: Sequence[str]) -> tuple[str, ...] | None:
    """Return tags with the letters of IOBES, which seqeval reads, in the same order; None for a mix of tags with and without letters."""
    others = [name for name in names if name != "O"]
    if all(map(_PLACE.fullmatch, others)):
        return tuple(_iobes(*match.groups()) if (match := _PLACE.fullmatch(name)) else name for name in names)
    if all(map(_PLACE_LAST.fullmatch, others)):
        return tuple(_iobes(match[2], match[1]) if (match := _PLACE_LAST.fullmatch(name)) else name for name in names)
    if any(re.match("[BIESLU]-.", name) for name in others):
        return None
    letter = "I" if "O" in names else "S"
    return tuple(name if name == "O" else f"{letter}-{name}" for name in names)


def _iobes(letter: str, kind: str | None) -> str:
    letter = _LETTERS.get(letter, letter)
    return letter if kind is None else f"{letter}-{kind}"


def is_iob1(sentences: Iterable[Sequence[str]]) -> bool:
    """Return whether tags are IOB1: an entity begins with I-, and none begins with B- where IOB1 has I-."""
    begun = False
    for tags in sentences:
        for before, tag in _pairs(tags):
            if tag[:2] == "B-" and before[2:] != tag[2:]:
                return False
            begun = begun or _begins(before, tag)
    return begun


def to_iob2(tags: Sequence[str]) -> list[str]:
    """Return a sentence's tags with B- at the beginning of each entity."""
    return [f"B-{tag[2:]}" if _begins(before, tag) else tag for before, tag in _pairs(tags)]


def _pairs(tags: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Return each tag after the one before it, which is O at the start of a sentence."""
    return zip(["O", *tags], tags, strict=False)


def _begins(before: str, tag: str) -> bool:
    """Return whether a tag with I- begins an entity."""
    return tag[:2] == "I-" and before[2:] != tag[2:]
