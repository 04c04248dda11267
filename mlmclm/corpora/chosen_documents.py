"""Which documents of a source are used: a pure function of the texts and the seed."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from mlmclm.corpora.hashing import text_hash

_VALIDATION = "validation"
"""Purpose of the hash that divides documents."""


def held_out(text: str, *, below: int, seed: int) -> bool:
    """Whether a document is held out for validation: copies of a text are never on both sides.

    Args:
        below: the first hash that is not (`share`, `divide`).
    """
    return text_hash(text, purpose=_VALIDATION, seed=seed) < below


def share(fraction: float) -> int:
    """The hash below which this fraction of all texts lies."""
    return math.ceil(fraction * 2.0**64)


class Division(NamedTuple):
    """Where documents are divided into validation text and training text, and what is known of both sides."""

    below: int
    """Documents with a smaller hash are held out."""
    held: int
    """UTF-8 bytes of the documents that are held out, and one more each for EOS; a lower bound where the pass ended early."""
    training: int
    """The same of the other documents."""
    several: bool
    """Whether there are two documents at least, copies not counted."""


def divide(texts: Iterable[str], *, fraction: float, seed: int, enough: int) -> Division:
    """A `fraction` of all texts is held out, and where that is none, the text with the smallest hash.

    One pass, which ends as soon as both sides have `enough` bytes.
    """
    below = share(fraction)
    held = training = of_smallest = 0
    smallest: int | None = None
    first: str | None = None
    several = False
    for text in texts:
        if not text.strip():
            continue
        first = text if first is None else first
        several = several or text != first
        key, size = text_hash(text, purpose=_VALIDATION, seed=seed), text_bytes(text)
        if key < below:
            held += size
        else:
            training += size
            if smallest is None or key < smallest:
                smallest, of_smallest = key, 0
            of_smallest += size * (key == smallest)
        if held >= enough and training >= enough:
            break
    if held or smallest is None:
        return Division(below, held, training, several)
    return Division(smallest + 1, of_smallest, training - of_smallest, several)


def text_bytes(text: str) -> int:
    """UTF-8 bytes of a document, and one more for its EOS: byte-level tokens are no more."""
    return len(text.encode("utf-8", "replace")) + 1


def sample(
    texts: Iterable[str], *, characters: int | None, documents: int | None, purpose: str, seed: int
) -> tuple[list[str], bool]:
    """The texts with the smallest hashes, as many as fit, in the order of their hashes; and whether any was left out.

    One pass; memory holds what is chosen. A short text may take the room that a longer one before it did not fit in.
    """
    chosen, left_out = _smallest(texts, characters, documents, purpose, seed)
    return [text for _, text in chosen], left_out is not None


def prefix(
    texts: Iterable[str], *, characters: int | None, documents: int | None, purpose: str, seed: int
) -> tuple[list[str], bool]:
    """`sample` up to the first text that was left out: larger limits give the same texts, and then more.

    Which texts these are does not depend on the order in which they come.
    """
    chosen, left_out = _smallest(texts, characters, documents, purpose, seed)
    return [text for key, text in chosen if left_out is None or key <= left_out], left_out is not None


def _smallest(
    texts: Iterable[str], characters: int | None, documents: int | None, purpose: str, seed: int
) -> tuple[list[tuple[int, str]], int | None]:
    """(hash, text) of what fits, in order; and the smallest hash of what was left out, None if nothing was."""
    chosen: list[tuple[int, str]] = []
    size = 0
    left_out: int | None = None
    for text in texts:
        if not text.strip():
            continue
        heapq.heappush(chosen, (-text_hash(text, purpose=purpose, seed=seed), text))
        size += len(text)
        while len(chosen) > 1 and (
            (documents is not None and len(chosen) > documents) or (characters is not None and size > characters)
        ):
            key, dropped = heapq.heappop(chosen)
            size -= len(dropped)
            left_out = -key if left_out is None else min(left_out, -key)
    return sorted((-key, text) for key, text in chosen), left_out


def head(texts: Iterable[str], *, characters: int) -> Iterator[str]:
    """The first texts of a stream, until `characters` are reached."""
    size = 0
    for text in texts:
        if size >= characters:
            return
        size += len(text)
        yield text
