"""Exhaustive search for the documents with the highest inner product with each query, one tile of scores at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from mlmclm.results.measures import Array

QUERIES_AT_ONCE, DOCUMENTS_AT_ONCE = 1024, 8192
"""Size of the largest tile of the score matrix: 32 MiB in fp32."""
MANY = 4
"""Ratio of candidates to results above which ties are thinned out before sorting. A model that gives all texts the same
vector makes every document a candidate."""


@dataclass(frozen=True)
class Ranking:
    """A ranking rule: highest score first, ties broken by `places`."""

    places: Array
    """int [documents]: each document's rank if all scores were equal."""
    searched: Array | None = None
    """bool [documents]: whether a document can be found; None for all."""


@dataclass(frozen=True)
class BestDocuments:
    """The best documents of each query, best first."""

    documents: Array
    """Document numbers, int [queries, found]."""
    scores: Array
    """float [queries, found]."""


def by_id(ids: Sequence[str]) -> Ranking:
    """Return a ranking of all documents that breaks ties as trec_eval does (`comp_sim_docno`): greater id first."""
    places = np.empty(len(ids), np.int64)
    places[sorted(range(len(ids)), key=ids.__getitem__, reverse=True)] = np.arange(len(ids))
    return Ranking(places)


def search(
    queries: Sequence[Array],
    documents: Sequence[Array],
    rankings: Sequence[Ranking],
    count: int,
    *,
    own: Array | None = None,
    queries_at_once: int = QUERIES_AT_ONCE,
    documents_at_once: int = DOCUMENTS_AT_ONCE,
) -> list[BestDocuments]:
    """Find the first `count` documents of each query by each ranking, or all that it searches if they are fewer.

    Queries and documents are finite vectors [width]. One pass over the score matrix serves all rankings, a tile at a
    time, which bounds the memory beyond the vectors. The tile's size does not affect the result.

    Args:
        own: number of the document that each query must not find, int [queries], -1 for none. If there are too few others,
            that document is returned in the last place, with a score of -inf.
    """
    vectors = torch.from_numpy(np.stack(queries))  # [Q, width]
    best = [_Best(ranking, len(vectors), count, vectors.dtype) for ranking in rankings]
    for columns in _parts(len(documents), documents_at_once):
        part = torch.from_numpy(np.stack(documents[columns])).t()  # [width, D]
        for rows in _parts(len(vectors), queries_at_once):
            scores = vectors[rows] @ part  # [Q', D]
            if own is not None:
                forbidden = np.flatnonzero((own[rows] >= columns.start) & (own[rows] < columns.stop))
                scores[forbidden, own[rows][forbidden] - columns.start] = -torch.inf
            for top in best:
                top.add(rows, columns, scores)
    return [BestDocuments(top.documents, top.scores.numpy()) for top in best]


def _parts(length: int, most: int) -> Iterator[slice]:
    """Split `length` positions into slices of nearly equal size, at most `most` each.

    A leftover slice of one position must not arise: a product with a single row or column is summed in another order,
    so its scores would differ in the last bits from the others'.
    """
    bounds = np.linspace(0, length, -(-length // most) + 1).astype(int).tolist()
    return (slice(start, stop) for start, stop in pairwise(bounds))


class _Best:
    """The best documents by one ranking among those added so far."""

    def __init__(self, ranking: Ranking, queries: int, count: int, dtype: torch.dtype) -> None:
        searched = ranking.searched
        count = min(count, len(ranking.places) if searched is None else int(searched.sum()))
        self.ranking = ranking
        # Placeholders: any finite score displaces them, and `count` documents at least are added in the end.
        self.scores = torch.full((queries, count), -torch.inf, dtype=dtype)
        self.documents = np.zeros((queries, count), np.int64)

    def add(self, rows: slice, columns: slice, scores: Tensor) -> None:
        """Merge a tile of scores, [queries of `rows`, documents of `columns`]."""
        documents = np.arange(columns.start, columns.stop)
        if self.ranking.searched is not None:
            chosen = self.ranking.searched[columns]
            documents, scores = documents[chosen], scores[:, torch.from_numpy(chosen)]
        count = self.scores.shape[1]
        if not count or not len(documents):
            return
        merged = torch.cat((self.scores[rows], scores), 1)  # [Q', count + D']
        threshold = merged.topk(count).values[:, -1:]
        # topk breaks ties arbitrarily, so it only gives the threshold. Keep all that tie with it, and sort them below.
        keep = merged >= threshold
        if int(keep.sum()) > MANY * count * len(merged):
            # Among the new documents that tie with the last one, the first `count` by the ranking are enough.
            ranked = torch.from_numpy(np.argsort(self.ranking.places[documents]))
            tied = (scores == threshold)[:, ranked]
            keep[:, count + ranked] &= ~(tied & (tied.cumsum(1, dtype=torch.int32) > count))
        # Candidates in order of rows, at least `count` in each.
        row, column = (index.numpy() for index in keep.nonzero(as_tuple=True))
        score, new = merged.numpy()[row, column], column >= count
        number = np.empty(len(row), np.int64)
        number[new] = documents[column[new] - count]
        number[~new] = self.documents[rows][row[~new], column[~new]]
        # The last key of lexsort is the primary one: by row, then falling score, then place.
        order = np.lexsort((self.ranking.places[number], -score, row))
        first = np.searchsorted(row, np.arange(len(merged)))
        kept = order[first[:, None] + np.arange(count)]  # [Q', count]
        self.scores[rows] = torch.from_numpy(score[kept])
        self.documents[rows] = number[kept]
