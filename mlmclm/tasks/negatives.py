"""Mining of hard negatives: for each query of a training table, the documents that BM25 ranks highest and that do not
answer it."""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa

from mlmclm.errors import UserError
from mlmclm.progress import bars

EVERY = 256
"""Number of queries between two reports of progress."""
WORD = re.compile(r"\w+")


def mine_negatives(where: str, queries: pa.ChunkedArray, table: pa.Table, most: int) -> list[list[str]]:
    """Return for each query the best `most` documents by BM25 that are not positives of the query, best first.

    Documents are the distinct texts of the table's column `positive`. A query's positives are those of all rows with its text.
    It has fewer negatives if fewer documents share a word with it. Documents of equal score are in the table's order.

    Raises UserError, whose text begins with `where`, if bm25s is not installed, or no query has a negative.

    Args:
        queries: queries of `table`, or some of them.
    """
    try:
        from bm25s import BM25
    except ImportError as error:
        raise UserError(
            f"{where}: `negatives: {{bm25: {most}}}` needs bm25s; install it: pip install 'mlmclm[evaluation]'."
        ) from error
    encoded = table["positive"].combine_chunks().dictionary_encode()
    documents: list[str] = encoded.dictionary.to_pylist()
    positives: dict[str, set[int]] = {}
    for query, number in zip(table["query"].to_pylist(), encoded.indices.to_pylist(), strict=True):
        positives.setdefault(query, set()).add(number)
    words_of = [_words(text) for text in documents]
    if not any(words_of):
        raise UserError(f"{where}: no positive has a word, so BM25 finds no negatives.")
    index = BM25()
    index.index(words_of, show_progress=False)
    negatives: dict[str, list[str]] = {}
    with bars() as progress:
        for done, query in enumerate(queries.to_pylist(), 1):
            if query not in negatives:
                words = _words(query)
                scores = index.get_scores(words) if words else np.zeros(len(documents), np.float32)
                negatives[query] = [documents[number] for number in _best(scores, positives[query], most)]
            if done % EVERY == 0:
                progress("mining negatives", done, len(queries), "queries")
    if not any(negatives.values()):
        raise UserError(f"{where}: BM25 finds no document that shares a word with a query and isn't its own positive.")
    return [negatives[query] for query in queries.to_pylist()]


def _words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def _best(scores: np.ndarray[tuple[int], np.dtype[np.float32]], positives: set[int], most: int) -> list[int]:
    """Return the numbers of the best documents with a score above 0, without the query's positives; ties by number."""
    scores = scores.copy()
    scores[list(positives)] = 0
    # A partial sort gives the same score at rank `most` on every machine, but not the same one of several equal documents.
    least = np.partition(scores, -most)[-most] if most < len(scores) else 0
    good = np.flatnonzero((scores >= least) & (scores > 0))
    order = np.argsort(-scores[good], kind="stable")[:most]
    return [int(number) for number in good[order]]
