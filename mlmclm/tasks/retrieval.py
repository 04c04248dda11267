"""Retrieval: queries and documents into one space, trained with the batch's other documents as negatives."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa
import pytrec_eval
import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from mlmclm.backends.packing import Packing
from mlmclm.models.encoder import pool
from mlmclm.tasks.family import (
    Array,
    Batch,
    Examples,
    Family,
    Linear,
    Lists,
    limited,
    means,
    objects,
    subset,
)
from mlmclm.tasks.load import RetrievalSet, TaskData
from mlmclm.tasks.search import Found, Ranking, by_id, search
from mlmclm.tasks.settings import TaskSettings
from mlmclm.tasks.texts import encode_texts

DEPTH = 10
"""Documents of each query that the metrics look at."""


class NoHead(nn.Module):
    """Retrieval has no parameters beyond the encoder."""


def rankings(query_ids: Sequence[str], document_ids: Sequence[str], qrels: dict[str, dict[str, int]]) -> list[Ranking]:
    """What `ndcg_at_10` and `study_ndcg_at_10` rank: all documents as trec_eval does, and the judged ones, those of one score in
    the corpus' order."""
    judged = {document for query in query_ids for document in qrels.get(query, {})}
    searched = np.array([document in judged for document in document_ids], dtype=bool)
    return [by_id(document_ids), Ranking(np.arange(len(document_ids)), searched)]


def ndcg_at_10(
    query_ids: Sequence[str], document_ids: Sequence[str], found: Found, qrels: dict[str, dict[str, int]]
) -> Array:
    """NDCG@10 of each query by pytrec_eval (trec_eval's definition: the ideal ranking is that of all judged documents).

    Args:
        found: the ten best of all documents.
        qrels: relevance by query and document; queries without a relevant document have NaN.
    """
    run = {
        query: {
            document_ids[number]: float(score)
            for number, score in zip(found.documents[row], found.scores[row], strict=True)
        }
        for row, query in enumerate(query_ids)
        if any(grade > 0 for grade in qrels.get(query, {}).values())
    }
    judged = {query: qrels[query] for query in run}
    results = pytrec_eval.RelevanceEvaluator(judged, {"ndcg_cut.10"}).evaluate(run)
    return np.array([results[query]["ndcg_cut_10"] if query in run else np.nan for query in query_ids])


def study_ndcg_at_10(
    query_ids: Sequence[str], document_ids: Sequence[str], found: Found, qrels: dict[str, dict[str, int]]
) -> Array:
    """The study's NDCG@10 (arXiv 2507.00994) of each query: only judged documents are searched, and the ideal ranking is that of the ten
    documents found, so that a relevant one that isn't among them costs nothing.

    Gains are the grades themselves, as trec_eval's. Arguments as `ndcg_at_10`'s, but for `found`, the ten best of the judged
    documents; the same queries have NaN.
    """
    discounts = 1 / np.log2(np.arange(found.documents.shape[1]) + 2)
    values = np.full(len(query_ids), np.nan)
    for row, query in enumerate(query_ids):
        grades = qrels.get(query, {})
        if not any(grade > 0 for grade in grades.values()):
            continue
        top = found.documents[row]
        gains = np.array([max(0, grades.get(document_ids[number], 0)) for number in top], dtype=np.float64)
        ideal = float(np.sort(gains)[::-1] @ discounts)
        values[row] = float(gains @ discounts) / ideal if ideal else 0.0
    return values


class Retrieval(Family):
    """Cross-entropy over cosines divided by a temperature; NDCG@10 over the full corpus, and the study's."""

    framed = True

    @classmethod
    def encode(cls, data: TaskData, tokenizer: PreTrainedTokenizerFast, settings: TaskSettings) -> dict[str, pa.Table]:
        def ids(prefix: str, column: pa.ChunkedArray) -> pa.Array:
            texts = [prefix + text for text in column.to_pylist()]
            return encode_texts(texts, None, None, tokenizer, settings)["input_ids"]

        train = limited(data.train, settings.max_train_examples)
        tables = {
            "train": pa.table(
                {
                    "query": ids(settings.query_prefix, train["query"]),
                    "positive": ids(settings.document_prefix, train["positive"]),
                    "document": train["positive"].combine_chunks().dictionary_encode().indices.cast(pa.int64()),
                }
            )
        }
        for split, judged in (("validation", data.validation), ("test", data.test)):
            assert isinstance(judged, RetrievalSet)
            kept = _limit(judged, settings)
            sequences = pa.concat_arrays(
                [ids(settings.query_prefix, kept.queries["text"]), ids(settings.document_prefix, kept.corpus["text"])]
            )
            is_query = [True] * kept.queries.num_rows + [False] * kept.corpus.num_rows
            names = pa.chunked_array([*kept.queries["id"].chunks, *kept.corpus["id"].chunks], pa.string())
            tables[split] = pa.table({"input_ids": sequences, "id": names.combine_chunks(), "is_query": is_query})
            tables[f"{split}_qrels"] = kept.qrels
        return tables

    @cached_property
    def _train(self) -> tuple[Lists, Lists, Array]:
        table = self.prepared.table("train")
        return Lists.of(table, "query"), Lists.of(table, "positive"), table["document"].to_numpy()

    @cached_property
    def _evaluation(self) -> dict[str, tuple[Lists, list[str], int, dict[str, dict[str, int]]]]:
        """Of validation and test: queries then documents, their ids, the number of queries, judgements."""
        splits = {}
        for split in ("validation", "test"):
            table = self.prepared.table(split)
            qrels: dict[str, dict[str, int]] = {}
            for row in self.prepared.table(f"{split}_qrels").to_pylist():
                qrels.setdefault(row["query_id"], {})[row["corpus_id"]] = int(row["score"])
            queries = int(table["is_query"].to_numpy().sum())
            splits[split] = (Lists.of(table, "input_ids"), table["id"].to_pylist(), queries, qrels)
        return splits

    @property
    def train_size(self) -> int:
        return len(self._train[0])

    def batch(self, rows: Array) -> Batch:
        queries, positives, documents = self._train
        sequences = [queries[row] for row in rows] + [positives[row] for row in rows]
        return Batch(sequences, {"documents": documents[rows]})

    def head(self, hidden: int, linear: Linear) -> nn.Module:
        return NoHead()

    def loss(self, head: nn.Module, hidden: Tensor, packing: Packing, targets: dict[str, Array]) -> Tensor:
        return self.loss_of(self.embeddings(hidden, packing), targets)

    def embeddings(self, hidden: Tensor, packing: Packing) -> Tensor:
        """One vector of length 1 a sequence, [S, hidden], in fp32 at least."""
        pooled = pool(hidden, packing, self.settings.pooling)
        return functional.normalize(pooled.to(torch.promote_types(pooled.dtype, torch.float32)), dim=-1)

    def loss_of(self, vectors: Tensor, targets: dict[str, Array]) -> Tensor:
        """The loss of a batch's embeddings, those of its queries and then those of their documents."""
        queries, documents = vectors.chunk(2)  # [B, hidden] each
        with torch.autocast(vectors.device.type, enabled=False):
            cosines = queries @ documents.t() / self.settings.temperature  # [B, B]
        # The same document drawn twice is no negative of itself.
        same = torch.from_numpy(targets["documents"][:, None] == targets["documents"][None, :]).to(cosines.device)
        cosines = cosines.masked_fill(same & ~torch.eye(len(same), dtype=torch.bool, device=same.device), float("-inf"))
        wanted = torch.arange(len(same), device=same.device)
        loss = functional.cross_entropy(cosines, wanted)
        if self.settings.symmetric:
            loss = (loss + functional.cross_entropy(cosines.t(), wanted)) / 2
        return loss

    def evaluation_sequences(self, split: str) -> Lists:
        return self._evaluation[split][0]

    def predict(self, head: nn.Module, hidden: Tensor, packing: Packing, split: str, rows: Array) -> list[Array]:
        return list(self.embeddings(hidden, packing).cpu().numpy())

    def examples(self, split: str, predictions: Sequence[Array]) -> Examples:
        _, names, queries, qrels = self._evaluation[split]
        asked, documents = names[:queries], names[queries:]
        ranked = rankings(asked, documents, qrels)
        every, judged = search(predictions[:queries], predictions[queries:], ranked, DEPTH)
        return {
            "ndcg@10": ndcg_at_10(asked, documents, every, qrels),
            "study.ndcg@10": study_ndcg_at_10(asked, documents, judged, qrels),
            "id": objects(asked),
            "documents": objects([[documents[number] for number in row] for row in every.documents]),
            "document_scores": objects(list(every.scores.astype(np.float32))),
        }

    def scores(self, examples: Examples) -> dict[str, float]:
        return means(examples)


def _limit(judged: RetrievalSet, settings: TaskSettings) -> RetrievalSet:
    """The judged queries, limited; the corpus, limited to their judged documents and others at random."""
    relevant = judged.qrels.filter(pa.compute.greater(judged.qrels["score"], 0))["query_id"].combine_chunks().unique()
    queries = judged.queries.filter(pa.compute.is_in(judged.queries["id"], relevant))
    queries = limited(queries, settings.max_evaluation_examples)
    qrels = judged.qrels.filter(pa.compute.is_in(judged.qrels["query_id"], queries["id"].combine_chunks()))
    corpus = judged.corpus
    limit = settings.max_evaluation_documents
    if limit is not None and limit < corpus.num_rows:
        needed = pa.compute.is_in(corpus["id"], qrels["corpus_id"].combine_chunks()).to_numpy()
        others = np.flatnonzero(~needed)
        room = max(0, limit - int(needed.sum()))
        chosen = subset(len(others), room)
        rows = np.sort(np.concatenate((np.flatnonzero(needed), others if chosen is None else others[chosen])))
        corpus = corpus.take(pa.array(rows))
    return RetrievalSet(queries, corpus, qrels)
