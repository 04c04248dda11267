"""Retrieval: embed queries and documents in one space, trained with in-batch and hard negatives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute

from mlmclm.errors import UserError
from mlmclm.progress import say_once
from mlmclm.results.examples import GROUP
from mlmclm.results.measures import Array
from mlmclm.tasks.columns import Columns, TaskData, check_filled
from mlmclm.tasks.declaration import Judged, Task
from mlmclm.tasks.family import Family, Read, limited, subset
from mlmclm.tasks.ndcg import (
    constant_order,
    expected_ndcg,
    expected_study_ndcg,
    findable_grades,
    ndcg_at_10,
    rankings,
    study_ndcg_at_10,
)
from mlmclm.tasks.negatives import mine_negatives
from mlmclm.tasks.prepared_task import Batch, Examples, Linear, Lists, PreparedTask, means, objects
from mlmclm.tasks.settings import TaskSettings
from mlmclm.tasks.texts import encode_texts

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerFast

    from mlmclm.backends.packing import Packing

DEPTH = 10
"""Number of top-ranked documents per query that the metrics use."""
OWN = "own_document"


@dataclass(frozen=True)
class RetrievalSet:
    """A retrieval evaluation set: queries (id, text), corpus (id, text) and qrels (query_id, corpus_id, score).

    Where queries are documents of the corpus, `queries` has the column `own_document`: true for a query that must not
    find the document of its id.
    """

    queries: pa.Table
    corpus: pa.Table
    qrels: pa.Table


@dataclass(frozen=True)
class _Evaluation:
    """An evaluation split by ids, in the order of its sequences: queries, then documents."""

    queries: list[str]
    documents: list[str]
    qrels: dict[str, dict[str, int]]
    skip: Array | None
    """Number of the document that each query must not find, int [queries], -1 for none; None if no query has such a document."""


class RetrievalTask(PreparedTask):
    """A task of retrieval, trained with cross-entropy over cosines divided by a temperature.

    Each query is to find its document among those of the whole batch, and their hard negatives if the task has any.
    """

    @cached_property
    def _negatives(self) -> tuple[Lists, Array] | None:
        """All rows' hard negatives end to end, and the number of those before each row, int [rows + 1]."""
        negatives = self.columns["train"].get("negative")
        if negatives is None:
            return None
        return negatives, self.table("train")["negative"].combine_chunks().offsets.to_numpy()

    @cached_property
    def _texts(self) -> Lists:
        """The numbers of each row's texts: query, positive, hard negatives. Texts with the same tokens have the same number."""
        numbers: dict[bytes, int] = {}

        def number(lists: Lists) -> Array:
            return np.array([numbers.setdefault(ids.tobytes(), len(numbers)) for ids in lists], dtype=np.int64)

        train = self.columns["train"]
        pairs = np.stack((number(train["query"]), number(train["positive"])), axis=1).ravel()
        if self._negatives is None:
            return Lists(pairs, np.arange(0, len(pairs) + 1, 2))
        negatives, ends = self._negatives
        values = np.insert(number(negatives), np.repeat(ends[:-1], 2), pairs)
        return Lists(values, ends + 2 * np.arange(len(ends)))

    @property
    def distinct(self) -> Lists | None:
        needed = self.settings.distinct_batches or self._negatives is not None
        return self._texts if needed else None

    @cached_property
    def _evaluation(self) -> dict[str, _Evaluation]:
        """The evaluation splits, validation and test."""
        splits = {}
        for split in ("validation", "test"):
            table = self.table(split)
            qrels: dict[str, dict[str, int]] = {}
            for row in self.table(f"{split}_qrels").to_pylist():
                qrels.setdefault(row["query_id"], {})[row["corpus_id"]] = int(row["score"])
            names, count, skip = table["id"].to_pylist(), int(table["is_query"].to_numpy().sum()), None
            queries, documents = names[:count], names[count:]
            if OWN in table.column_names:
                numbers = {document: number for number, document in enumerate(documents)}
                itself = table[OWN].to_pylist()
                skip = np.array([numbers.get(query, -1) if itself[row] else -1 for row, query in enumerate(queries)])
            splits[split] = _Evaluation(queries, documents, qrels, skip)
        return splits

    def batch(self, rows: Array) -> Batch:
        queries, positives, documents = (self.columns["train"][name] for name in ("query", "positive", "document"))
        sequences = [queries[row] for row in rows] + [positives[row] for row in rows]
        if self.distinct is None:
            return Batch(sequences, {"documents": documents[rows]})
        negatives, ends = self._negatives or (queries, np.zeros(len(queries) + 1, dtype=np.int64))
        sequences += [negatives[number] for row in rows for number in range(ends[row], ends[row + 1])]
        texts = [self._texts[row] for row in rows]
        parts = [np.array([row[1] for row in texts]), *(row[2:] for row in texts)]
        return Batch(sequences, {"documents": np.concatenate(parts), "queries": np.array([row[0] for row in texts])})

    def head(self, hidden: int, linear: Linear) -> nn.Module:
        """Return an identity: retrieval has no parameters beyond the encoder's."""
        from torch import nn

        return nn.Identity()

    def loss(self, head: nn.Module, hidden: Tensor, packing: Packing, targets: dict[str, Array]) -> Tensor:
        return self.loss_of(self.embeddings(hidden, packing), targets)

    def embeddings(self, hidden: Tensor, packing: Packing) -> Tensor:
        """Return one vector of unit length per sequence, [S, hidden], in fp32 at least."""
        import torch

        from mlmclm.models.encoder import pool

        pooled = pool(hidden, packing, self.settings.pooling)
        return torch.nn.functional.normalize(pooled.to(torch.promote_types(pooled.dtype, torch.float32)), dim=-1)

    def loss_of(self, vectors: Tensor, targets: dict[str, Array]) -> Tensor:
        """Compute the contrastive loss of a batch's embeddings.

        Args:
            vectors: embeddings of all queries, their documents and all hard negatives, [2B + negatives, hidden].
            targets: `documents`, numbers of the documents' and negatives' texts; in distinct batches also `queries`, numbers of theirs.
        """
        import torch
        import torch.nn.functional as functional

        from mlmclm.backends.choice import without_autocast

        candidates = targets["documents"]
        size = len(vectors) - len(candidates)
        queries, documents = vectors[:size], vectors[size:]  # [B, hidden], [B + negatives, hidden]
        # The division by a small temperature would magnify bfloat16's rounding of the cosines.
        with without_autocast(vectors.device):
            cosines = queries @ documents.t() / self.settings.temperature  # [B, B + negatives]
        # A document that occurs twice in the batch must not be a negative of its own query.
        positive = candidates[:size, None] == candidates[None, :]
        query_numbers = targets.get("queries", np.arange(size))
        if len(np.unique(query_numbers)) < size:  # neither must another positive of a repeated query
            positive |= (query_numbers[:, None] == query_numbers[None, :]) @ positive
        np.fill_diagonal(positive, False)
        cosines = cosines.masked_fill(torch.from_numpy(positive).to(cosines.device), float("-inf"))
        diagonal = torch.arange(size, device=cosines.device)
        loss = functional.cross_entropy(cosines, diagonal)
        if self.settings.symmetric:
            loss = (loss + functional.cross_entropy(cosines[:, :size].t(), diagonal)) / 2
        return loss

    def predict(self, head: nn.Module, hidden: Tensor, packing: Packing, split: str, rows: Array) -> list[Array]:
        return list(self.embeddings(hidden, packing).cpu().numpy())

    def examples(self, split: str, predictions: Sequence[Array]) -> Examples:
        from mlmclm.tasks.search import search

        evaluation = self._evaluation[split]
        queries, documents, qrels = evaluation.queries, evaluation.documents, evaluation.qrels
        ranked = rankings(queries, documents, qrels)
        vectors = predictions[: len(queries)], predictions[len(queries) :]
        best, judged = search(*vectors, ranked, DEPTH, own=evaluation.skip)
        finite = np.isfinite(best.scores)
        return {
            "ndcg@10": ndcg_at_10(queries, documents, best, qrels),
            "study.ndcg@10": study_ndcg_at_10(queries, documents, judged, qrels),
            "id": objects(queries),
            "documents": objects(
                [[documents[number] for number in row[keep]] for row, keep in zip(best.documents, finite, strict=True)]
            ),
            "document_scores": objects(
                [row[keep] for row, keep in zip(best.scores.astype(np.float32), finite, strict=True)]
            ),
        }

    def blind(self) -> Iterator[tuple[str, Examples]]:
        test = self._evaluation["test"]
        grades = [list(test.qrels.get(query, {}).values()) for query in test.queries]
        findable = findable_grades(test.queries, test.documents, test.qrels, test.skip)
        judged = np.asarray(rankings(test.queries, test.documents, test.qrels)[1].searched, dtype=bool)
        skip = np.full(len(grades), -1) if test.skip is None else test.skip
        everywhere = np.ones(len(test.documents), dtype=np.int64)
        ranked = [searched.sum() - (skip >= 0) * searched[skip] for searched in (everywhere, judged)]
        usual, study = expected_ndcg(grades, ranked[0], findable), expected_study_ndcg(grades, ranked[1], findable)
        yield "any order", {"ndcg@10": usual, "study.ndcg@10": study}
        yield "the same order for every query", self._ranked_alike()

    def _ranked_alike(self) -> Examples:
        """Return the test examples if all queries get the documents in the order of `constant_order`."""
        test = self._evaluation["test"]
        order = constant_order(test.queries, test.documents, test.qrels)
        vectors = np.zeros((len(order), 1), np.float64)
        vectors[order, 0] = np.arange(len(order), 0, -1)
        return self.examples("test", [*np.ones((len(test.queries), 1)), *vectors])


class Retrieval(Family):
    """Scored by NDCG@10 over the corpus, which `max_evaluation_documents` may limit, and by the study's NDCG@10.

    The study's NDCG@10 searches only the judged documents.
    """

    name = "retrieval"
    title = "Retrieval"
    hub_task = "text-retrieval"
    prepared = RetrievalTask
    columns: ClassVar = {"query": pa.string(), "positive": pa.string()}
    # A document's `title`, if the task declares it, is put before its text.
    # A pair's hard negatives, if the task declares the column `negative`: one text, or a list of texts.
    more_columns = ("negative", "id", "title", "text", "query_id", "corpus_id", "score")
    metrics: ClassVar = {"ndcg@10": "NDCG@10", "study.ndcg@10": "study's NDCG@10"}
    study_metric = "study.ndcg@10"
    shown: ClassVar = {"id": "id", "documents": "documents", "scores": "document_scores"}
    judged = True
    framed = True
    embeds = True
    token_columns = ("input_ids", "query", "positive", "negative")

    @classmethod
    def training_source(cls, task: Task, read: Read) -> Columns:
        source = task.splits.train
        return (
            _pairs(task, read_judged(task, "train", source, read))
            if isinstance(source, Judged)
            else read(source, "train")
        )

    @classmethod
    def evaluation(cls, task: Task, split: str, source: Any, read: Read, names: tuple[str, ...]) -> RetrievalSet:
        return read_judged(task, split, source, read)

    @classmethod
    def table(cls, columns: Columns, names: tuple[str, ...]) -> pa.Table:
        table = super().table(columns, names)
        if "negative" not in columns.task.columns:
            return table
        one = not pa.types.is_nested(columns.plain("negative").type)
        column = columns.typed("negative", pa.string() if one else pa.list_(pa.string()))
        texts = [[text] for text in column.to_pylist()] if one else column.to_pylist()
        for row, (positive, negatives) in enumerate(zip(table["positive"].to_pylist(), texts, strict=True)):
            if negatives is None or None in negatives:
                raise UserError(f"{columns.where}: row {row}: negative is null.")
            if positive in negatives:
                raise UserError(f"{columns.where}: row {row}: the positive is among the negatives: {positive[:80]!r}.")
        return table.append_column("negative", pa.array(texts, pa.list_(pa.string())))

    @classmethod
    def held_out(cls, table: pa.Table) -> RetrievalSet:
        """Build an evaluation set from held-out pairs; their distinct documents are the corpus."""
        documents = table["positive"].combine_chunks().dictionary_encode()
        queries = table["query"].combine_chunks().dictionary_encode()
        judged = sorted(set(zip(queries.indices.to_pylist(), documents.indices.to_pylist(), strict=True)))
        return RetrievalSet(
            pa.table({"id": [f"q{n}" for n in range(len(queries.dictionary))], "text": queries.dictionary}),
            pa.table({"id": [f"d{n}" for n in range(len(documents.dictionary))], "text": documents.dictionary}),
            pa.table(
                {
                    "query_id": [f"q{query}" for query, _ in judged],
                    "corpus_id": [f"d{document}" for _, document in judged],
                    "score": pa.array([1.0] * len(judged), pa.float64()),
                }
            ),
        )

    @classmethod
    def divided(cls, split: RetrievalSet, held: Callable[[pa.Table], Array]) -> tuple[RetrievalSet, RetrievalSet]:
        """Divide the queries and their judgements; both parts search all documents."""
        parts = []
        for queries in super().divided(split.queries, held):
            mask = pa.compute.is_in(split.qrels["query_id"], queries["id"].combine_chunks())
            parts.append(RetrievalSet(queries, split.corpus, split.qrels.filter(mask)))
        return parts[0], parts[1]

    @classmethod
    def grouped(cls, split: RetrievalSet, groups: pa.Array) -> RetrievalSet:
        return replace(split, queries=super().grouped(split.queries, groups))

    @classmethod
    def groups(cls, data: TaskData, settings: TaskSettings) -> pa.ChunkedArray:
        return _limit(data.test, settings).queries[GROUP]

    @classmethod
    def tables(cls, split: RetrievalSet) -> dict[str, pa.Table]:
        return {"queries": split.queries, "documents": split.corpus, "judgements": split.qrels}

    @classmethod
    def show(cls, row: dict[str, Any], names: tuple[str, ...], text: Callable[[list[int]], str]) -> dict[str, Any]:
        pair = {side: text(row[side]) for side in ("query", "positive")}
        return {**pair, **({"negative": [text(ids) for ids in row["negative"]]} if "negative" in row else {})}

    @classmethod
    def encode(cls, data: TaskData, tokenizer: PreTrainedTokenizerFast, settings: TaskSettings) -> dict[str, pa.Table]:
        def ids(prefix: str, column: pa.ChunkedArray) -> pa.Array:
            texts = [prefix + text for text in column.to_pylist()]
            return encode_texts(texts, None, None, tokenizer, settings)["input_ids"]

        train = limited(data.train, settings.max_train_examples)
        columns = {
            "query": ids(settings.query_prefix, train["query"]),
            "positive": ids(settings.document_prefix, train["positive"]),
            "document": train["positive"].combine_chunks().dictionary_encode().indices.cast(pa.int64()),
        }
        if data.task.negatives is not None:
            where = f"task {data.task.name}, train"
            mined = mine_negatives(where, train["query"], data.train, data.task.negatives.bm25)
            train = train.append_column("negative", pa.array(mined, pa.list_(pa.string())))
        if "negative" in train.column_names:
            negatives = train["negative"].combine_chunks()
            inner = ids(settings.document_prefix, pa.chunked_array([negatives.flatten()]))
            ends = np.concatenate(([0], np.cumsum(pa.compute.list_value_length(negatives).to_numpy())))
            columns["negative"] = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), inner)
        tables = {"train": pa.table(columns)}
        for split, judged in (("validation", data.validation), ("test", data.test)):
            kept = _limit(judged, settings)
            sequences = pa.concat_arrays(
                [ids(settings.query_prefix, kept.queries["text"]), ids(settings.document_prefix, kept.corpus["text"])]
            )
            is_query = [True] * kept.queries.num_rows + [False] * kept.corpus.num_rows
            names = pa.chunked_array([*kept.queries["id"].chunks, *kept.corpus["id"].chunks], pa.string())
            extra = {}
            if OWN in kept.queries.column_names:
                extra = {OWN: [*kept.queries[OWN].to_pylist(), *[False] * kept.corpus.num_rows]}
            tables[split] = pa.table(
                {"input_ids": sequences, "id": names.combine_chunks(), "is_query": is_query, **extra}
            )
            tables[f"{split}_qrels"] = kept.qrels
        return tables

    @classmethod
    def scores(cls, examples: Examples, classes: int) -> dict[str, float]:
        return means(examples)


def _limit(judged: RetrievalSet, settings: TaskSettings) -> RetrievalSet:
    """Apply the settings' limits to an evaluation set.

    Only queries with a relevant document are kept. A limited corpus holds all documents judged for these, and others chosen
    at random.
    """
    relevant = _relevant(judged.qrels)["query_id"].combine_chunks().unique()
    queries = judged.queries.filter(pa.compute.is_in(judged.queries["id"], relevant))
    queries = limited(queries, settings.max_evaluation_examples)
    qrels = judged.qrels.filter(pa.compute.is_in(judged.qrels["query_id"], queries["id"].combine_chunks()))
    corpus = judged.corpus
    # Judged documents are never left out, so a limit of 0 keeps only them.
    limit = 0 if settings.max_evaluation_documents == "judged" else settings.max_evaluation_documents
    if limit is not None and limit < corpus.num_rows:
        needed = pa.compute.is_in(corpus["id"], qrels["corpus_id"].combine_chunks()).to_numpy()
        others = np.flatnonzero(~needed)
        room = max(0, limit - int(needed.sum()))
        chosen = subset(len(others), room)
        rows = np.sort(np.concatenate((np.flatnonzero(needed), others if chosen is None else others[chosen])))
        corpus = corpus.take(pa.array(rows))
    return RetrievalSet(queries, corpus, qrels)


def read_judged(task: Task, split: str, source: Judged, read: Read) -> RetrievalSet:
    """Read a retrieval set and check it. Raises UserError, whose message names the table."""

    def table(part: str, *names: str) -> tuple[Columns, pa.Table]:
        columns = read(getattr(source, part), f"{split} {part}")
        kinds = [pa.float64() if name == "score" else pa.string() for name in names]
        values = {name: columns.typed(name, kind) for name, kind in zip(names, kinds, strict=True)}
        return columns, pa.table(values)

    _, queries = table("queries", "id", "text")
    columns, corpus = table("corpus", "id", "text")
    plain = corpus
    if "title" in (*task.columns, *columns.renamed):
        titles = pa.compute.fill_null(columns.typed("title", pa.string()), "")
        texts = pa.compute.binary_join_element_wise(titles, corpus["text"].combine_chunks(), " ")
        corpus = corpus.set_column(1, "text", pa.compute.utf8_trim_whitespace(texts))
    _, qrels = table("qrels", "query_id", "corpus_id", "score")
    where = f"task {task.name}, {split}"
    judged = RetrievalSet(_once(f"{where} queries", queries), _once(f"{where} corpus", corpus), qrels)
    _check(where, judged)
    judged = _without_absent(where, judged)
    skip = _own_documents(task, where, judged, plain)
    return replace(judged, queries=judged.queries.append_column(OWN, pa.array(skip))) if any(skip) else judged


def _own_documents(task: Task, where: str, judged: RetrievalSet, corpus: pa.Table) -> list[bool]:
    """Return which queries must not find the document of their id (`Task.ignore_identical_ids`).

    Args:
        corpus: the documents without titles.
    """
    rows = list(zip(judged.queries["id"].to_pylist(), judged.queries["text"].to_pylist(), strict=True))
    shared = corpus.filter(pa.compute.is_in(corpus["id"], judged.queries["id"].combine_chunks()))
    texts = dict(zip(shared["id"].to_pylist(), shared["text"].to_pylist(), strict=True))
    same = [query in texts for query, _ in rows]
    if task.ignore_identical_ids is not None or not any(same):
        return [itself and bool(task.ignore_identical_ids) for itself in same]
    self_relevant = set(_relevant(judged.qrels, to_itself=True)["query_id"].to_pylist())
    skip = [query not in self_relevant and texts.get(query) == text for query, text in rows]
    left = "are documents of the corpus, by id and text, which they are not to find"
    kept = "have a document's id and another text, or are judged relevant to themselves, and may find it"
    numbers = {left: sum(skip), kept: sum(same) - sum(skip)}
    counts = "; ".join(f"{number:,} of {len(rows):,} queries {what}" for what, number in numbers.items() if number)
    say_once(f"{where}: {counts} (ignore_identical_ids: true, or false, in the declaration decides for all).")
    return skip


def _relevant(qrels: pa.Table, *, to_itself: bool = False) -> pa.Table:
    """Return the judgements above 0, of all documents or only of those with the query's id."""
    relevant = qrels.filter(pa.compute.greater(qrels["score"], 0))
    return relevant.filter(pa.compute.equal(relevant["query_id"], relevant["corpus_id"])) if to_itself else relevant


def _without_absent(where: str, judged: RetrievalSet) -> RetrievalSet:
    """Return the set with only the judgements of its queries; print how many judgements are about absent queries or documents.

    As in trec_eval, an absent document counts as not retrieved, and an absent query is not evaluated.

    Raises:
        UserError: no query or no document of a judgement above 0 is in the set.
    """
    qrels = judged.qrels
    has_query = pa.compute.is_in(qrels["query_id"], judged.queries["id"].combine_chunks())
    kept = qrels.filter(has_query)
    relevant = _relevant(kept)
    retrievable = pa.compute.is_in(relevant["corpus_id"], judged.corpus["id"].combine_chunks())
    for column, part, present in (
        ("query_id", "queries", len(relevant)),
        ("corpus_id", "corpus", pa.compute.any(retrievable).as_py()),
    ):
        if not present:
            example = _relevant(qrels if part == "queries" else kept)[column][0].as_py()
            raise UserError(f"{where} qrels: no {column} of a relevant document is in {part}, such as {example!r}.")
    documents = pa.compute.is_in(kept["corpus_id"], judged.corpus["id"].combine_chunks())
    absent = {
        "queries, which are left out": qrels.filter(pa.compute.invert(has_query))["query_id"],
        "documents, which count as not retrieved": kept.filter(pa.compute.invert(documents))["corpus_id"],
    }
    counts = " and ".join(
        f"{len(column.unique()):,} absent {what} ({len(column):,} judgements, such as of {column[0].as_py()!r})"
        for what, column in absent.items()
        if len(column)
    )
    if counts:
        say_once(f"{where} qrels: it judges {counts}, as in trec_eval.")
    return replace(judged, qrels=kept)


def _once(where: str, texts: pa.Table) -> pa.Table:
    """Return a table of texts whose repeated rows count once. Raises UserError for an id with several texts."""
    if len(texts["id"].unique()) == len(texts):
        return texts
    distinct = texts.group_by(texts.column_names, use_threads=False).aggregate([])
    name, times = Counter(distinct["id"].to_pylist()).most_common(1)[0]
    if times > 1:
        raise UserError(f"{where}: the id {name!r} occurs twice, with different texts.")
    say_once(f"{where}: {len(texts) - len(distinct):,} rows are repeated, and count once.")
    return distinct


def _check(where: str, judged: RetrievalSet) -> None:
    """Raise UserError for an empty table, a null, an invalid score, or two scores of one pair."""
    for part in ("queries", "corpus", "qrels"):
        check_filled(f"{where} {part}", getattr(judged, part))
    score = judged.qrels["score"].to_numpy()
    if not (score > 0).any():
        raise UserError(f"{where} qrels: no document is judged relevant (score above 0).")
    if (score != np.round(score)).any():
        raise UserError(f"{where} qrels: scores must be whole numbers.")
    pairs = judged.qrels.group_by(["query_id", "corpus_id"], use_threads=False).aggregate([("score", "count_distinct")])
    several = pairs.filter(pa.compute.greater(pairs["score_count_distinct"], 1))
    if several.num_rows:
        query, document = (several[name][0].as_py() for name in ("query_id", "corpus_id"))
        raise UserError(f"{where} qrels: the document {document!r} has several scores for the query {query!r}.")


def _pairs(task: Task, judged: RetrievalSet) -> Columns:
    """Return training pairs of a query and each document judged relevant to it, in the judgements' order."""
    relevant = _relevant(judged.qrels)
    relevant = relevant.filter(pa.compute.is_in(relevant["corpus_id"], judged.corpus["id"].combine_chunks()))
    columns = {
        task.column(name): texts["text"].take(
            pa.compute.index_in(relevant[key], value_set=texts["id"].combine_chunks())
        )
        for name, key, texts in (("query", "query_id", judged.queries), ("positive", "corpus_id", judged.corpus))
    }
    return Columns(task, "train", pa.table(columns), "judged pairs")
