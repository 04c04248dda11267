"""Retrieval sets as they are published are scored as trec_eval, BEIR and mteb score them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytrec_eval

from mlmclm.finetuning.protocol import Protocol
from mlmclm.progress import say_once
from mlmclm.tasks.declaration import Task
from mlmclm.tasks.declared_tasks import get_task
from mlmclm.tasks.load import load_task
from mlmclm.tasks.prepare_task import prepare_data
from mlmclm.tasks.prepared_task import PreparedTask
from small_models import save_small_model, write_table

PAIRS = {"query": [f"case {n}" for n in range(40)], "positive": [f"number {n}" for n in range(40)]}
DOCUMENTS = [f"{kind}{n}" for n in range(15) for kind in "dq"]  # those called q have the ids of queries
QUERIES = [f"q{n}" for n in range(20)]
Judged = dict[str, dict[str, int]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_model(tmp_path_factory.mktemp("model"))


def judgements(*, relevant_to_themselves: bool = False) -> Judged:
    """Grades from -2 to 3, also of documents and queries that are not there, and of relevant documents that all lack."""
    draw = np.random.default_rng(1)
    names = [*DOCUMENTS, *(f"absent{n}" for n in range(6))]
    judged = {
        query: {
            name: int(draw.integers(-2, 4)) for name in map(str, draw.choice(names, 12, replace=False)) if name != query
        }
        for query in [*QUERIES, "absent query"]
    }
    judged["q3"] = {"absent1": 2, "d0": 0}
    judged["q4"] = {name: 1 for name in DOCUMENTS if name != "q4"}
    if relevant_to_themselves:
        judged["q5"]["q5"] = 3
    return judged


def prepare(
    root: Path,
    model: Path,
    judged: Judged,
    *,
    ignore: bool | None,
    texts: dict[str, str] | None = None,
    times: int = 1,
    **settings: Any,
) -> PreparedTask:
    folder = root / "own"
    write_table(folder, "train", PAIRS)
    write_table(folder, "queries", {"_id": QUERIES * times, "text": [f"text of {name}" for name in QUERIES * times]})
    text = [(texts or {}).get(name, f"text of {name}") for name in DOCUMENTS]
    titles = ["a title"] * len(DOCUMENTS)
    write_table(folder, "corpus", {"_id": DOCUMENTS * times, "title": titles * times, "text": text * times})
    rows = [(query, document, grade) for query, own in judged.items() for document, grade in own.items()] * times
    ids, documents, grades = zip(*rows, strict=True)
    write_table(folder, "qrels", {"query-id": ids, "corpus-id": documents, "score": grades})
    declared = {
        **get_task("reqa_squad").model_dump(exclude={"name", "folder"}),
        "name": "own",
        "folder": "own",
        "columns": {"id": "_id", "query_id": "query-id", "corpus_id": "corpus-id", "title": "title"},
        "splits": {"train": "train", "validation_fraction": 0.2, "test": {"qrels": "qrels"}},
        "ignore_identical_ids": ignore,
    }
    data = load_task(Task.model_validate(declared), store=root / "store", data_root=root)
    return prepare_data(data, model, Protocol(max_length=32, stride=8, **settings), root / "store")


def by_pytrec_eval(made: PreparedTask, vectors: list[Any], judged: Judged, left_out: set[str]) -> list[float]:
    """NDCG@10 of the whole ranking, without the documents that have the id of one of the queries `left_out`."""
    names, count = made.table("test")["id"].to_pylist(), int(made.table("test")["is_query"].to_numpy().sum())
    assert set(names[:count]) == {query for query in QUERIES if any(grade > 0 for grade in judged[query].values())}
    run = {
        query: {
            document: float(vectors[row] @ vectors[count + place])
            for place, document in enumerate(names[count:])
            if query != document or query not in left_out
        }
        for row, query in enumerate(names[:count])
    }
    found = pytrec_eval.RelevanceEvaluator(judged, {"ndcg_cut.10"}).evaluate(run)
    return [found[query]["ndcg_cut_10"] for query in names[:count]]


def embedded(made: PreparedTask) -> list[Any]:
    """Vectors of the test split: that of a query is nearest to the document with its id."""
    draw = np.random.default_rng(7)
    of_names: dict[str, Any] = {}
    names = made.table("test")["id"].to_pylist()
    return [of_names.setdefault(name, draw.normal(size=8).astype(np.float32)) for name in names]


@pytest.mark.parametrize(
    ("ignore", "texts", "left_out", "limit", "to_themselves", "times"),
    [
        (None, {}, set(DOCUMENTS), None, False, 1),
        (None, {"q2": "another text"}, set(DOCUMENTS) - {"q2"}, "judged", False, 1),
        (True, {name: f"another {name}" for name in DOCUMENTS}, set(DOCUMENTS), 12, False, 1),
        (False, {}, set(), None, False, 1),
        # A query that is judged relevant to itself may find itself unless declared; what is repeated counts once.
        (None, {}, set(QUERIES) - {"q5"}, None, True, 1),
        (True, {}, set(QUERIES), None, True, 3),
    ],
)
def test_a_query_does_not_find_itself_and_what_is_absent_or_below_0_counts_as_trec_eval_counts_it(
    tmp_path: Path,
    model: Path,
    ignore: bool | None,
    texts: dict[str, str],
    left_out: set[str],
    limit: Any,
    to_themselves: bool,
    times: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    say_once.cache_clear()
    judged = judgements(relevant_to_themselves=to_themselves)
    made = prepare(tmp_path, model, judged, ignore=ignore, texts=texts, times=times, max_evaluation_documents=limit)
    said = capsys.readouterr().err
    assert "6 absent documents, which count as not retrieved" in said
    assert times == 1 or "test corpus: 60 rows are repeated, and count once" in said
    if ignore is None and not texts and not to_themselves:
        assert "15 of 20 queries are documents of the corpus, by id and text, which they are not to find" in said
        assert "1 absent queries, which are left out (12 judgements, such as of 'absent query')" in said
    vectors = embedded(made)
    found = made.examples("test", vectors)
    assert found["ndcg@10"] == pytest.approx(by_pytrec_eval(made, vectors, judged, left_out), abs=1e-6)
    for query, documents, scores in zip(found["id"], found["documents"], found["document_scores"], strict=True):
        assert len(documents) == len(scores) and np.isfinite(scores).all()
        assert query not in documents or query not in left_out
    assert found["study.ndcg@10"][list(found["id"]).index("q3")] == 0, "its only relevant document is absent"


def test_the_level_of_any_order_is_the_mean_over_random_orders_by_pytrec_eval(tmp_path: Path, model: Path) -> None:
    judged = judgements()
    made = prepare(tmp_path, model, judged, ignore=None)
    count = int(made.table("test")["is_query"].to_numpy().sum())
    draw, totals, study = np.random.default_rng(0), np.zeros(count), np.zeros(count)
    draws = 200
    for _ in range(draws):
        vectors = [*np.ones((count, 1), np.float32), *draw.random((len(DOCUMENTS), 1)).astype(np.float32)]
        found = made.examples("test", vectors)
        totals += by_pytrec_eval(made, vectors, judged, set(QUERIES))
        study += found["study.ndcg@10"]
    (how, levels), *_ = made.blind()
    assert how == "any order"
    assert levels["ndcg@10"] == pytest.approx(totals / draws, abs=0.05)
    assert levels["study.ndcg@10"] == pytest.approx(study / draws, abs=0.08)


def test_a_declaration_alone_changes_no_key_of_a_set_whose_queries_are_no_documents(
    tmp_path: Path, model: Path
) -> None:
    judged = {"q0": {"d0": 1, "d1": 2}}
    renamed = {name: f"other {name}" for name in DOCUMENTS}
    keys = {
        ignore: prepare(tmp_path, model, judged, ignore=ignore, texts=renamed).task_data
        for ignore in (None, True, False)
    }
    assert keys[None] == keys[False] != keys[True]
