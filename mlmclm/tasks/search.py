"""Exhaustive search: the best documents of each query by the product of their vectors, a part of the matrix of scores at a
time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from mlmclm.tasks.family import Array

QUERIES_AT_ONCE, DOCUMENTS_AT_ONCE = 1024, 8192
"""Largest part of the matrix of scores that there is at a time: 32 MiB in fp32."""
MANY = 4
"""Times as many candidates as are kept of them, beyond which they are thinned out before they are sorted: where a model gives all
texts one vector, every document is one."""


@dataclass(frozen=True)
class Ranking:
    """An order of the documents of each query: by score, the highest first, and where scores are equal by `places`."""

    places: Array
    """int [documents]: each document's place among all of them if all had one score."""
    searched: Array | None = None
    """bool [documents], True for those that can be found; None for all."""


@dataclass(frozen=True)
class Found:
    """The best documents of each query, best first."""

    documents: Array
    """int [queries, found], by number."""
    scores: Array
    """float [queries, found]."""


def by_id(ids: Sequence[str]) -> Ranking:
    """All documents; of two with one score the greater id comes first, as trec_eval has it (`comp_sim_docno`)."""
    places = np.empty(len(ids), np.int64)
    places[sorted(range(len(ids)), key=ids.__getitem__, reverse=True)] = np.arange(len(ids))
    return Ranking(places)


def search(
    queries: Sequence[Array],
    documents: Sequence[Array],
    rankings: Sequence[Ranking],
    count: int,
    *,
    queries_at_once: int = QUERIES_AT_ONCE,
    documents_at_once: int = DOCUMENTS_AT_ONCE,
) -> list[Found]:
    """The first `count` documents of each query by each ranking, or all that it searches where they are fewer.

    Memory beyond the vectors is bounded by the part of the matrix that is worked on at once; what is found is that of the
    whole matrix whatever its size.

    Args:
        queries: vectors [width], finite.
        documents: vectors [width], finite.
    """
    asked = torch.from_numpy(np.stack(queries))  # [Q, width]
    best = [_Best(ranking, len(asked), count, asked.dtype) for ranking in rankings]
    for columns in _parts(len(documents), documents_at_once):
        part = torch.from_numpy(np.stack(documents[columns])).t()  # [width, D]
        for rows in _parts(len(asked), queries_at_once):
            scores = asked[rows] @ part  # [Q', D]
            for each in best:
                each.add(rows, columns, scores)
    return [Found(each.documents, each.scores.numpy()) for each in best]


def _parts(length: int, most: int) -> Iterator[slice]:
    """Slices that cover `length` places, of nearly one size: a product with a single row or column would be summed in another
    order than its neighbours."""
    bounds = np.linspace(0, length, -(-length // most) + 1).astype(int).tolist()
    return (slice(start, stop) for start, stop in pairwise(bounds))


class _Best:
    """The best documents by one ranking among those that were added."""

    def __init__(self, ranking: Ranking, queries: int, count: int, dtype: torch.dtype) -> None:
        searched = ranking.searched
        count = min(count, len(ranking.places) if searched is None else int(searched.sum()))
        self.ranking = ranking
        self.scores = torch.full((queries, count), -torch.inf, dtype=dtype)
        self.documents = np.zeros((queries, count), np.int64)

    def add(self, rows: slice, columns: slice, scores: Tensor) -> None:
        """Scores [queries of `rows`, documents of `columns`]."""
        documents = np.arange(columns.start, columns.stop)
        if self.ranking.searched is not None:
            chosen = self.ranking.searched[columns]
            documents, scores = documents[chosen], scores[:, torch.from_numpy(chosen)]
        count = self.scores.shape[1]
        if not count or not len(documents):
            return
        every = torch.cat((self.scores[rows], scores), 1)  # [Q', count + D']
        least = every.topk(count).values[:, -1:]
        wanted = every >= least  # all that ties with the last one too
        if int(wanted.sum()) > MANY * count * len(every):
            # Of new ones that tie with the last, the first by the ranking are enough.
            ranked = torch.from_numpy(np.argsort(self.ranking.places[documents]))
            tied = (scores == least)[:, ranked]
            wanted[:, count + ranked] &= ~(tied & (tied.cumsum(1, dtype=torch.int32) > count))
        # One row after the other, at least `count` of each.
        row, column = (index.numpy() for index in wanted.nonzero(as_tuple=True))
        found, new = every.numpy()[row, column], column >= count
        number = np.empty(len(row), np.int64)
        number[new] = documents[column[new] - count]
        number[~new] = self.documents[rows][row[~new], column[~new]]
        order = np.lexsort((self.ranking.places[number], -found, row))
        first = np.searchsorted(row, np.arange(len(every)))
        kept = order[first[:, None] + np.arange(count)]  # [Q', count]
        self.scores[rows] = torch.from_numpy(found[kept])
        self.documents[rows] = number[kept]
