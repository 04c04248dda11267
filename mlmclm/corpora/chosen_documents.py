"""Choice of the documents to use and to hold out: a pure function of the texts and the seed."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from mlmclm.corpora.corpus_config import CorpusConfig
from mlmclm.corpora.documents import TRAIN, VALIDATION, Source
from mlmclm.corpora.hashing import text_hash
from mlmclm.errors import UserError
from mlmclm.progress import bars

_VALIDATION = "validation"
"""Purpose of the hash that divides documents into training and validation text."""


def is_held_out(text: str, *, below: int, seed: int) -> bool:
    """Return whether a text, and so each copy of it, is held out: its hash is smaller than `below` (from `divide`)."""
    return text_hash(text, purpose=_VALIDATION, seed=seed) < below


def hash_threshold(fraction: float) -> int:
    """Return the hash below which the hashes of this fraction of all texts are expected to be."""
    return math.ceil(fraction * 2.0**64)


class Division(NamedTuple):
    """The hash that divides documents into validation and training text, and the size of both sides."""

    below: int
    """Documents with a smaller hash are held out."""
    held: int
    """UTF-8 bytes of the held-out documents, plus one each for EOS; a lower bound if the pass ended early."""
    training: int
    """Bytes of the other documents, counted in the same way."""
    several: bool
    """True if there are at least two different documents."""


def divide(texts: Iterable[str], *, fraction: float, seed: int, enough: int) -> Division:
    """Hold out a `fraction` of all texts by their hashes or, if this selects none, the text with the smallest hash.

    Makes one pass, which ends as soon as both sides have `enough` bytes.
    """
    below = hash_threshold(fraction)
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
            of_smallest += size * (key == smallest)  # Copies of one text are held out together.
        if held >= enough and training >= enough:
            break
    if held or smallest is None:
        return Division(below, held, training, several)
    # "+ 1" because only hashes below the threshold are held out.
    return Division(smallest + 1, of_smallest, training - of_smallest, several)


def text_bytes(text: str) -> int:
    """Return a document's UTF-8 bytes plus one for its EOS: an upper bound of its byte-level tokens."""
    return len(text.encode("utf-8", "replace")) + 1


def smallest_hashes(
    texts: Iterable[str], *, characters: int | None, documents: int | None = None, purpose: str, seed: int
) -> tuple[list[tuple[int, str]], int | None]:
    """Choose the texts with the smallest hashes, as many as fit; return (hash, text) in hash order.

    Also return the smallest hash left out, or None. Makes one pass and keeps only the chosen texts in memory. A short
    text may fill room that was too small for a longer text before it. The choice does not depend on the texts' order.
    """
    chosen: list[tuple[int, str]] = []
    size = 0
    left_out: int | None = None
    for text in texts:
        if not text.strip():
            continue
        # A max-heap by negated hashes: the text with the largest hash is dropped first.
        heapq.heappush(chosen, (-text_hash(text, purpose=purpose, seed=seed), text))
        size += len(text)
        # One text stays even if it alone is over the limit, so that the choice is not empty.
        while len(chosen) > 1 and (
            (documents is not None and len(chosen) > documents) or (characters is not None and size > characters)
        ):
            key, dropped = heapq.heappop(chosen)
            size -= len(dropped)
            left_out = -key if left_out is None else min(left_out, -key)
    return sorted((-key, text) for key, text in chosen), left_out


def head(texts: Iterable[str], *, characters: int) -> Iterator[str]:
    """Yield the first texts of a stream until they hold at least `characters`."""
    size = 0
    for text in texts:
        if size >= characters:
            return
        size += len(text)
        yield text


_DOCUMENTS_A_REPORT = 10_000


def divide_source(corpus: CorpusConfig, source: Source, *, block_length: int, byte_level: bool) -> int | None:
    """Return the hash below which a document is held out, or None if the source has validation documents of its own.

    Reads the text of a few blocks, or all of a small source.

    Args:
        byte_level: whether a document never has more tokens than bytes. If so, a part that cannot fill one block is
            refused now; otherwise only an empty part is.

    Raises:
        UserError: a part has no text, or too little.
    """
    validation = source.validation()
    if validation is None:
        fraction, texts = corpus.validation_fraction, _followed(source.train())
        division = divide(texts, fraction=fraction, seed=corpus.seed, enough=block_length)
    else:
        # No hash is below 0: the documents of `train` are all for training.
        division = Division(0, _bytes(validation, block_length), _bytes(source.train(), block_length), True)
    # A source without any text and a source whose only text is held out are different errors.
    if not division.training and not (validation is None and division.held):
        raise no_text(corpus)
    if not division.training and division.several:
        raise UserError(
            f"corpus source {corpus.source!r}: all of its documents are held out for validation (validation_fraction "
            f"{corpus.validation_fraction:g}). Lower validation_fraction, or give more documents."
        )
    if not division.training:
        raise UserError(
            f"corpus source {corpus.source!r}: it is a single document, and at least one is held out for validation. Give more documents, or a "
            "validation part of its own (a file whose name begins with 'validation', or the name of one as validation_split). A text file is "
            "one document; with 'text_documents: paragraph' each of its paragraphs is one."
        )
    for part, size in ((TRAIN, division.training), (VALIDATION, division.held)):
        if size < block_length and (byte_level or not size):
            raise too_little(corpus, part, f"at most {size:,} tokens", block_length)
    return None if validation is not None else division.below


def no_text(corpus: CorpusConfig) -> UserError:
    return UserError(
        f"corpus source {corpus.source!r}: it has no text (split {corpus.split!r}, column {corpus.text_column!r})."
    )


def too_little(corpus: CorpusConfig, part: str, size: str, block_length: int) -> UserError:
    """Return the error for a part that doesn't fill one block."""
    problem = f"corpus source {corpus.source!r}: the {part} part has {size}, fewer than one block of {block_length}."
    if part == TRAIN:
        return UserError(f"{problem} Choose a shorter block, more text, or a larger max_tokens or max_documents.")
    return UserError(
        f"{problem} Choose a shorter block or more validation text: a larger validation_fraction (now {corpus.validation_fraction:g}; it counts where "
        "the source has no validation part of its own) or max_validation_tokens, or name a validation_split."
    )


def _bytes(texts: Iterable[str], enough: int) -> int:
    """Count the bytes of the first texts until there are `enough`."""
    size = 0
    for text in texts:
        size += text_bytes(text) if text.strip() else 0
        if size >= enough:
            break
    return size


def _followed(texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts, and show the number read every `_DOCUMENTS_A_REPORT`."""
    with bars() as report:
        for number, text in enumerate(texts):
            if number and number % _DOCUMENTS_A_REPORT == 0:
                report("looking for documents to validate on", number, None, "documents")
            yield text
