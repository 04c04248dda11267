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

    One pass; memory holds what is chosen. Which texts are chosen does not depend on the order in which they come.
    """
    chosen: list[tuple[int, str]] = []
    size = 0
    left_out = False
    for text in texts:
        if not text.strip():
            continue
        heapq.heappush(chosen, (-text_hash(text, purpose=purpose, seed=seed), text))
        size += len(text)
        while len(chosen) > 1 and (
            (documents is not None and len(chosen) > documents) or (characters is not None and size > characters)
        ):
            size -= len(heapq.heappop(chosen)[1])
            left_out = True
    return [text for _, text in sorted(chosen, key=lambda item: (-item[0], item[1]))], left_out


def head(texts: Iterable[str], *, characters: int) -> Iterator[str]:
    """The first texts of a stream, until `characters` are reached."""
    size = 0
    for text in texts:
        if size >= characters:
            return
        size += len(text)
        yield text
