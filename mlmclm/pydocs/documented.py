"""Text functions shared by the four tasks from Python's documentation."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from mlmclm.corpora.hashing import text_hash
from mlmclm.pydocs.sections import Field, Parsed

Item = TypeVar("Item")
Rows = list[dict[str, Any]]
"""Rows of a table."""

# A word, which may have dots, apostrophes and hyphens inside, or a single punctuation mark.
_WORD = re.compile(r"\w+(?:[.'-]\w+)*|[^\w\s]")
_NOT_WORD = re.compile(r"[\W_]+")
# The spaces between an end of a sentence and a capital, quotation mark, backtick or bracket.
_SENTENCE_END = re.compile(r"(?<=[a-z0-9)\]'\"][.!?]) +(?=[A-Z`'\"(])")

EVALUATION_SPLITS = ("validation", "test")

LARGEST_SHARE = 0.15
"""Maximum share of a split's examples from one package, so that no package's style decides the score."""


class Documented(NamedTuple):
    """A parsed docstring, with the split of its package and its dotted name inside its module."""

    split: str
    package: str
    name: str
    parsed: Parsed


def split_words(text: str) -> list[str]:
    """Split text into words and single punctuation marks; `a.b`, `don't` and `well-known` are one word each."""
    return _WORD.findall(text)


def normal(text: str) -> str:
    """Reduce text to lower-case letters and digits: texts that differ only in layout or punctuation become equal."""
    return _NOT_WORD.sub(" ", text.lower()).strip()


def sentences(text: str) -> list[str]:
    """Split prose into sentences: at a full stop, or a question or exclamation mark, before a capital."""
    return [part for part in _SENTENCE_END.split(text) if part]


def first_sentences(text: str, limit: int) -> str:
    """Return the first sentences of a text that fit into `limit` words; if the first doesn't fit, cut it."""
    # A piece between spaces holds at least one word, so that nothing after the first `limit` pieces can fit.
    kept: list[str] = []
    left = limit
    for sentence in sentences(" ".join(text.split(maxsplit=limit)[:limit])):
        size = len(split_words(sentence))
        if size > left:
            if not kept:
                kept.append(_cut(sentence, limit))
            break
        kept.append(sentence)
        left -= size
    return " ".join(kept)


def _cut(sentence: str, limit: int) -> str:
    """Return the leading pieces of a sentence that fit into `limit` words."""
    pieces = sentence.split(" ")
    for number, piece in enumerate(pieces):
        limit -= len(split_words(piece))
        if limit < 0:
            return " ".join(pieces[:number])
    return sentence


def draw(text: str, purpose: str, choices: int) -> int:
    """Return a number in [0, choices) that depends only on the text and the purpose."""
    return text_hash(text, purpose=purpose, seed=0) % choices


def distinct(items: Iterable[Item], key: Callable[[Item], Hashable], taken: Iterable[Hashable] = ()) -> list[Item]:
    """Keep the first item of each key that is not in `taken`."""
    seen = set(taken)
    kept = []
    for item in items:
        value = key(item)
        if value not in seen:
            seen.add(value)
            kept.append(item)
    return kept


def new_entries(
    documents: Sequence[Documented], read: Callable[[Field], Item], description: Callable[[Item], str]
) -> Iterator[tuple[str, list[tuple[list[Item], str]]]]:
    """Yield each split with the entries of its docstrings, as `read` returns them, and each docstring's package.

    Notes are left out. Train may repeat itself; an evaluation split has only descriptions that occur in no earlier
    split.
    """
    taken: set[str] = set()
    for split in ("train", *EVALUATION_SPLITS):
        earlier = set(taken) if split in EVALUATION_SPLITS else set()
        by_document = []
        for document in documents:
            if document.split == split:
                entries = [read(field) for field in document.parsed.fields if field.role != "note"]
                keys = [normal(description(entry)) for entry in entries]
                taken.update(keys)
                fresh = [entry for entry, key in zip(entries, keys, strict=True) if key not in earlier]
                by_document.append((fresh, document.package))
        yield split, by_document


def select(
    items: Sequence[Item], count: int, *, key: Callable[[Item], str], package: Callable[[Item], str], salt: str
) -> list[Item]:
    """Choose up to `count` items in the order of a hash of their key, at most `LARGEST_SHARE` from one package."""
    limit = max(1, int(LARGEST_SHARE * count))
    used = Counter[str]()
    chosen: list[Item] = []
    # Hash order is as good as random, and the same on every machine.
    for item in sorted(items, key=lambda item: (text_hash(key(item), purpose=salt, seed=0), key(item))):
        if len(chosen) == count:
            break
        name = package(item)
        if used[name] < limit:
            used[name] += 1
            chosen.append(item)
    return chosen
