"""Which documents of a source are used: a pure function of the texts and the seed."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from mlmclm.corpora.hashing import text_hash


def held_out(text: str, *, fraction: float, seed: int) -> bool:
    """Whether a document is held out for validation: copies of a text are never on both sides."""
    return text_hash(text, purpose="validation", seed=seed) < fraction * 2.0**64


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
