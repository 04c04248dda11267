"""NDCG@10 as trec_eval and as the study define it, and the values that a random or a fixed order reaches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mlmclm.results.measures import Array

if TYPE_CHECKING:
    from mlmclm.tasks.search import BestDocuments, Ranking

DISCOUNTS = 1 / np.log2(np.arange(10) + 2)
"""Discounts of the first ten ranks."""
DRAWS, FEWEST_DRAWS = 200_000, 20
"""Random draws of ten documents for the expectation of the study's NDCG: total over all queries, and minimum per query."""


def rankings(query_ids: Sequence[str], document_ids: Sequence[str], qrels: dict[str, dict[str, int]]) -> list[Ranking]:
    """Return the rankings for `ndcg_at_10` and for `study_ndcg_at_10`.

    The first ranks all documents as trec_eval does. The second ranks the judged documents only, and breaks ties by the
    order of the corpus.
    """
    from mlmclm.tasks.search import Ranking, by_id

    judged = {document for query in query_ids for document in qrels.get(query, {})}
    searched = np.array([document in judged for document in document_ids], dtype=bool)
    return [by_id(document_ids), Ranking(np.arange(len(document_ids)), searched)]


def ndcg_at_10(
    query_ids: Sequence[str], document_ids: Sequence[str], found: BestDocuments, qrels: dict[str, dict[str, int]]
) -> Array:
    """Compute NDCG@10 of each query, [queries], from the ten best of all documents, with pytrec_eval.

    By trec_eval's definition, the ideal ranking is that of all judged documents. Queries without a relevant document
    have NaN.
    """
    import pytrec_eval

    run = {
        query: {
            document_ids[number]: float(score)
            for number, score in zip(found.documents[row], found.scores[row], strict=True)
            if np.isfinite(score)
        }
        for row, query in enumerate(query_ids)
        if any(grade > 0 for grade in qrels.get(query, {}).values())
    }
    judged = {query: qrels[query] for query in run}
    results = pytrec_eval.RelevanceEvaluator(judged, {"ndcg_cut.10"}).evaluate(run)
    return np.array([results[query]["ndcg_cut_10"] if query in run else np.nan for query in query_ids])


def study_ndcg_at_10(
    query_ids: Sequence[str], document_ids: Sequence[str], found: BestDocuments, qrels: dict[str, dict[str, int]]
) -> Array:
    """Compute the study's NDCG@10 (arXiv 2507.00994), [queries], from the ten best of each query's judged documents.

    It differs from `ndcg_at_10` in two ways: only judged documents are searched, and the ideal ranking is that of the
    ten documents found, so a relevant document that is not among them costs nothing. As in trec_eval, gains are the
    grades themselves. Queries without a relevant document have NaN.
    """
    discounts = DISCOUNTS[: found.documents.shape[1]]
    values = np.full(len(query_ids), np.nan)
    for row, query in enumerate(query_ids):
        grades = qrels.get(query, {})
        if not any(grade > 0 for grade in grades.values()):
            continue
        top = found.documents[row]
        gains = np.array([max(0, grades.get(document_ids[number], 0)) for number in top], dtype=np.float64)
        gains[~np.isfinite(found.scores[row])] = 0
        ideal = float(np.sort(gains)[::-1] @ discounts)
        values[row] = float(gains @ discounts) / ideal if ideal else 0.0
    return values


def constant_order(query_ids: Sequence[str], document_ids: Sequence[str], qrels: dict[str, dict[str, int]]) -> Array:
    """Return the order of the documents, best first, that scores highest if it is the ranking of every query.

    A document's weight is the sum, over queries, of its gain divided by the query's ideal. The mean NDCG@10 (`ndcg_at_10`) is
    proportional to the sum, over ranks, of the rank's discount times its document's weight. So documents in order of falling
    weight have the highest mean. For the study's NDCG, whose ideal depends on the documents found, the order is a good one.

    Returns:
        Document numbers, int [documents]; equal weights keep the order of the corpus.
    """
    weight = dict.fromkeys(document_ids, 0.0)
    for query in query_ids:
        grades = qrels.get(query, {})
        ideal = _ideal(list(grades.values()))
        if ideal:
            for document in grades.keys() & weight.keys():
                weight[document] += max(grades[document], 0) / ideal
    return np.argsort([-value for value in weight.values()], kind="stable")


def findable_grades(
    query_ids: Sequence[str], document_ids: Sequence[str], qrels: dict[str, dict[str, int]], own: Array | None = None
) -> list[list[int]]:
    """Return each query's grades of the judged documents in the corpus, without the one that it must not find (`own`, see `search`)."""
    present = dict.fromkeys(document_ids, True)
    forbidden = [None if own is None or own[row] < 0 else document_ids[own[row]] for row in range(len(query_ids))]
    return [
        [grade for document, grade in qrels.get(query, {}).items() if document in present and document != itself]
        for query, itself in zip(query_ids, forbidden, strict=True)
    ]


def expected_ndcg(
    grades: Sequence[Sequence[int]], documents: int | Array, findable: Sequence[Sequence[int]] | None = None
) -> Array:
    """Return the expected NDCG@10 (`ndcg_at_10`) of each query if the documents are ranked at random, [queries].

    Each rank then holds a document of the mean grade. A query without a relevant document has NaN.

    Args:
        grades: the judgements of each query.
        documents: number of ranked documents, one number for all queries or one per query.
        findable: the judgements of ranked documents, if documents that are not ranked are judged too.
    """
    expected = np.full(len(grades), np.nan)
    ranked = np.broadcast_to(documents, len(grades))
    for row, (judged, pool) in enumerate(zip(grades, findable or grades, strict=True)):
        ideal = _ideal(judged)
        if ideal:
            expected[row] = np.maximum(pool, 0).sum() / max(ranked[row], 1) * DISCOUNTS[: ranked[row]].sum() / ideal
    return expected


def _ideal(grades: Sequence[int]) -> float:
    """Return the discounted gain of the best ranking of a query's judged documents."""
    best = np.sort(np.maximum(grades, 0))[::-1][: len(DISCOUNTS)]
    return float(best @ DISCOUNTS[: len(best)])


def expected_study_ndcg(
    grades: Sequence[Sequence[int]], judged: int | Array, findable: Sequence[Sequence[int]] | None = None
) -> Array:
    """Return the expected study's NDCG@10 (`study_ndcg_at_10`) of each query, estimated from random draws (`DRAWS`).

    Args:
        judged: number of documents that are judged for any query; these documents are ranked.
        grades, findable: as in `expected_ndcg`.
    """
    draw = np.random.default_rng(0)
    draws = max(FEWEST_DRAWS, DRAWS // max(1, len(grades)))
    cumulated = np.concatenate(([0.0], DISCOUNTS.cumsum()))
    expected = np.full(len(grades), np.nan)
    ranked = np.broadcast_to(judged, len(grades))
    for row, (all_grades, pool) in enumerate(zip(grades, findable or grades, strict=True)):
        if not any(grade > 0 for grade in all_grades):
            continue
        depth = min(int(ranked[row]), len(DISCOUNTS))
        levels, counts = np.unique(np.maximum(pool, 0), return_counts=True)
        if not levels.any():
            expected[row] = 0.0
            continue
        # Documents that are judged for other queries only have grade 0 here.
        levels, counts = np.append(0, levels)[::-1], np.append(ranked[row] - len(pool), counts)[::-1]  # best first
        taken = draw.multivariate_hypergeometric(counts, depth, size=draws)  # [draws, levels]
        ends = cumulated[taken.cumsum(axis=1)]
        ideal = np.diff(ends, axis=1, prepend=0.0) @ levels
        gain = taken @ levels / depth * cumulated[depth]  # mean over all orders of these documents
        expected[row] = np.divide(gain, ideal, out=np.zeros(draws), where=ideal > 0).mean()
    return expected
