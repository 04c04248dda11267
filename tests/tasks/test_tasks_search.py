"""What is found a part at a time is what the whole matrix of scores, ranked at once, has first, ties included."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import pytrec_eval
import torch

from mlmclm.tasks.ndcg import ndcg_at_10, rankings, study_ndcg_at_10
from mlmclm.tasks.search import Ranking, _Best, by_id, search

QUERIES, DOCUMENTS = 37, 211
Row = np.ndarray[Any, Any]


def vectors(seed: int, rows: int, width: int = 6) -> list[Row]:
    """Of small whole numbers: their products are exact, and many are equal."""
    return list(np.random.default_rng(seed).integers(-2, 3, (rows, width)).astype(np.float32))


def names(rows: int) -> list[str]:
    """In no order, neither of numbers nor of bytes; some beyond ASCII."""
    marks = np.random.default_rng(2).choice(["d", "D", "é", "Ω", "文", "10-", "9"], rows)
    return [f"{mark}{number}" for number, mark in enumerate(marks)]


def whole(asked: list[Row], documents: list[Row]) -> Row:
    """[queries, documents]."""
    return np.stack(asked) @ np.stack(documents).T


@pytest.mark.parametrize("width", [1, 6])  # with one number a vector most documents tie
@pytest.mark.parametrize(("queries_at_once", "documents_at_once"), [(1, 7), (8, 64), (1000, 1), (1000, DOCUMENTS)])
def test_parts_of_any_size_find_what_the_whole_matrix_has_first(
    documents_at_once: int, queries_at_once: int, width: int
) -> None:
    asked, documents, ids = vectors(0, QUERIES, width), vectors(1, DOCUMENTS, width), names(DOCUMENTS)
    some = np.random.default_rng(3).random(DOCUMENTS) < 0.3
    orders = [by_id(ids), Ranking(np.arange(DOCUMENTS), some)]
    found = search(
        asked, documents, orders, 10, queries_at_once=queries_at_once, documents_at_once=documents_at_once
    )  # fmt: skip
    for row, scores in enumerate(whole(asked, documents)):
        by_bytes = sorted(range(DOCUMENTS), key=lambda number: ids[number].encode(), reverse=True)
        first = sorted(by_bytes, key=lambda number: -scores[number])[:10]
        second = sorted(np.flatnonzero(some).tolist(), key=lambda number: (-scores[number], number))[:10]
        for expected, each in zip((first, second), found, strict=True):
            assert each.documents[row].tolist() == expected
            assert each.scores[row].tolist() == scores[expected].tolist()
    tied = [len(set(row)) < 10 for row in found[0].scores.tolist()]
    assert all(tied)


def test_the_part_that_is_there_at_once_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, add = [], _Best.add

    def watched(self: _Best, rows: slice, columns: slice, scores: torch.Tensor) -> None:
        shapes.append(tuple(scores.shape))
        add(self, rows, columns, scores)

    monkeypatch.setattr(_Best, "add", watched)
    search(
        vectors(0, QUERIES),
        vectors(1, DOCUMENTS),
        [by_id(names(DOCUMENTS))],
        10,
        queries_at_once=8,
        documents_at_once=50,
    )
    assert max(rows for rows, _ in shapes) == 8
    assert {columns for _, columns in shapes} == {42, 43}  # of nearly one size
    assert sum(rows * columns for rows, columns in shapes) == QUERIES * DOCUMENTS


def test_where_there_are_fewer_documents_than_asked_for_all_are_found() -> None:
    asked, documents = vectors(0, 3), vectors(1, 4)
    one = np.array([False, False, True, False])
    orders = [Ranking(np.arange(4)), Ranking(np.arange(4), one), Ranking(np.arange(4), one & False)]
    for documents_at_once in (1, 3, 10):
        every, judged, none = search(asked, documents, orders, 10, documents_at_once=documents_at_once)
        expected = np.argsort(-whole(asked, documents), axis=1, kind="stable")
        assert every.documents.tolist() == expected.tolist()
        assert judged.documents.tolist() == [[2]] * 3
        assert none.documents.shape == (3, 0)


def study_ndcg(scores: Row, ids: list[str], qrels: dict[str, dict[str, int]], queries: list[str]) -> list[float]:
    """Of each query: the judged documents in order of score, ties in the corpus' order; the ideal is of the ten that were found."""
    judged = [place for place, name in enumerate(ids) if any(name in grades for grades in qrels.values())]
    values = []
    for row, query in enumerate(queries):
        if not any(qrels[query].values()):
            values.append(math.nan)
            continue
        first = sorted(judged, key=lambda place: (-scores[row, place], place))[:10]
        gains = [qrels[query].get(ids[place], 0) for place in first]
        best = sum(gain / math.log2(rank + 2) for rank, gain in enumerate(sorted(gains, reverse=True)))
        values.append(sum(gain / math.log2(rank + 2) for rank, gain in enumerate(gains)) / best if best else 0.0)
    return values


@pytest.mark.parametrize("kind", ["many ties", "all tied", "no ties"])
def test_both_metrics_of_what_is_found_are_those_of_the_whole_ranking(kind: str) -> None:
    """pytrec_eval gets every document with its score; where all are tied, more than it is ever given otherwise."""
    ids, queries = names(DOCUMENTS), [f"q{number}" for number in range(QUERIES)]
    asked, documents = vectors(0, QUERIES), vectors(1, DOCUMENTS)
    if kind == "all tied":
        documents = documents[:1] * DOCUMENTS
    elif kind == "no ties":
        generator = np.random.default_rng(4)
        asked, documents = (list(generator.normal(size=(rows, 6)).astype(np.float32)) for rows in (QUERIES, DOCUMENTS))
    generator = np.random.default_rng(5)
    qrels = {
        query: {ids[place]: int(generator.integers(0, 3)) for place in generator.choice(DOCUMENTS, 30, replace=False)}
        for query in queries
    }
    qrels["q3"] = {ids[5]: 0}
    scores = whole(asked, documents)
    run = {query: dict(zip(ids, map(float, row), strict=True)) for query, row in zip(queries, scores, strict=True)}
    each = pytrec_eval.RelevanceEvaluator(qrels, {"ndcg_cut.10"}).evaluate(run)
    expected = np.array([each[query]["ndcg_cut_10"] if query != "q3" else np.nan for query in queries])
    of_study = pytest.approx(study_ndcg(scores, ids, qrels, queries), nan_ok=True)
    for documents_at_once in (50, 1000):
        every, judged = search(
            asked, documents, rankings(queries, ids, qrels), 10, documents_at_once=documents_at_once
        )  # fmt: skip
        np.testing.assert_array_equal(ndcg_at_10(queries, ids, every, qrels), expected)
        assert study_ndcg_at_10(queries, ids, judged, qrels) == of_study
    assert 0.01 < np.nanmean(expected) < 0.9


def test_equal_documents_have_equal_scores_wherever_they_lie() -> None:
    """Real embeddings: texts that occur twice in a corpus must tie, or chance would order them."""
    generator = np.random.default_rng(6)
    asked, some = (generator.normal(size=(rows, 96)).astype(np.float32) for rows in (5, 7))
    documents = list(np.concatenate([some] * 143)[:1000])
    for documents_at_once in (64, 333, 8192):
        (found,) = search(list(asked), documents, [Ranking(np.arange(1000))], 142, documents_at_once=documents_at_once)
        best = (asked @ some.T).argmax(1)
        assert (found.documents % 7 == best[:, None]).all()
        assert (np.diff(found.documents, axis=1) == 7).all()
