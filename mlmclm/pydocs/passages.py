"""Finding the rest of a docstring, given its summary.

The rest: the paragraphs after the summary and what the sections say, without the object's name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from mlmclm.pydocs.documented import (
    EVALUATION_SPLITS,
    Documented,
    Rows,
    distinct,
    first_sentences,
    normal,
    select,
    sentences,
    split_words,
)

TRAIN = 8000
QUERIES = 400
"""Maximum number of queries in each evaluation split."""
CORPUS = 1500
"""Maximum number of texts in each evaluation split's corpus, including the queries' positives."""
QUERY_WORDS = (4, 24)
BODY_WORDS = (12, 64)

_IDENTIFIER = re.compile(r"\w+")


class _Pair(NamedTuple):
    """A summary and the rest of its docstring."""

    query: str
    body: str
    package: str


def make(documents: Sequence[Documented]) -> dict[str, Rows]:
    """Make the table train (query, positive), and for each evaluation split queries and corpus (id, text) and qrels."""
    pools: dict[str, list[_Pair]] = {}
    queries: set[str] = set()
    bodies: set[str] = set()
    for split in ("train", *EVALUATION_SPLITS):
        pairs = [pair for document in documents if document.split == split and (pair := _pair(document)) is not None]
        # Neither a query nor a body may occur twice, in one split or in two: a second positive would count as wrong.
        pairs = distinct(
            distinct(pairs, key=lambda p: normal(p.query), taken=queries), key=lambda p: normal(p.body), taken=bodies
        )
        queries |= {normal(pair.query) for pair in pairs}
        bodies |= {normal(pair.body) for pair in pairs}
        pools[split] = pairs
    train: Rows = [{"query": pair.query, "positive": pair.body} for pair in _select(pools["train"], TRAIN)]
    tables = {"train": train}
    for split in EVALUATION_SPLITS:
        tables.update(_evaluation(split, _select(pools[split], CORPUS)))
    return tables


def _select(pairs: list[_Pair], count: int) -> list[_Pair]:
    return select(pairs, count, key=lambda pair: pair.query, package=lambda pair: pair.package, salt="retrieval")


def _evaluation(split: str, pairs: list[_Pair]) -> dict[str, Rows]:
    """Return the queries, corpus and relevance judgements of a split.

    The corpus is sorted by text, so that a text's position doesn't reveal its query.
    """
    order = sorted(range(len(pairs)), key=lambda number: pairs[number].body)
    place = {number: f"d{position}" for position, number in enumerate(order)}
    numbers = range(min(QUERIES, len(pairs)))
    return {
        f"{split}_queries": [{"id": f"q{number}", "text": pairs[number].query} for number in numbers],
        f"{split}_corpus": [{"id": place[number], "text": pairs[number].body} for number in order],
        f"{split}_qrels": [{"query_id": f"q{number}", "corpus_id": place[number], "score": 1} for number in numbers],
    }


def _without(name: str, pieces: list[str]) -> str:
    """Join the pieces, leaving out those with the name as a whole word (also in a dotted path)."""
    if not name:
        return " ".join(pieces)
    # The substring test is cheap and settles most pieces.
    kept = (piece for piece in pieces if name not in piece or name not in _IDENTIFIER.findall(piece))
    return " ".join(kept)


def _pair(document: Documented) -> _Pair | None:
    """Make the pair of a docstring; None if a side is too short, or the body contains the query."""
    first, *others = sentences(document.parsed.summary) or [""]
    query = first_sentences(first, QUERY_WORDS[1])
    parts = [*others, document.parsed.body]
    parts += [f"{field.name} {field.type} {field.description}" for field in document.parsed.fields]
    name = document.name.rpartition(".")[2]
    # The longest body has no more pieces than words; twice as many leave room for occurrences of the name.
    pieces = " ".join(part for part in parts if part).split(maxsplit=2 * BODY_WORDS[1])[: 2 * BODY_WORDS[1]]
    body = first_sentences(_without(name, pieces), BODY_WORDS[1])
    if (
        len(split_words(query)) < QUERY_WORDS[0]
        or len(split_words(body)) < BODY_WORDS[0]
        or normal(query) in normal(body)
    ):
        return None
    return _Pair(query, body, document.package)
