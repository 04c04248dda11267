"""Chance levels of zero-shot tasks equal the scores of blind answers by scikit-learn, by hand and by enumeration."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import pytrec_eval
import yaml
from sklearn.metrics import f1_score

from mlmclm.evaluation.evaluations import under_names
from mlmclm.evaluation.winogender import read_winogender
from mlmclm.reports.paired_models import zero_shot_frame, zero_shot_tables
from mlmclm.reports.study_facts import StudyFacts, ZeroShotFacts
from small_models import write_table
from winogender_files import STATISTICS, TEMPLATES

needs = {
    name: pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed: pip install 'mlmclm[evaluation]'")
    for name in ("lm_eval", "mteb")
}  # fmt: skip


def levels(folder: Path, rows: Mapping[str, list[Any]], **changes: Any) -> Mapping[str, Any]:
    """The chance levels of a task of lm-evaluation-harness with these rows."""
    from mlmclm.evaluation.harness import load_tasks

    write_table(folder / "rows", "test", dict(rows))
    metrics = changes.pop("metrics", ("acc", "acc_norm"))
    mean = {"aggregation": "mean", "higher_is_better": True}
    spec = {
        "task": "made", "dataset_path": "parquet", "dataset_kwargs": {"data_files": {"test": "rows/test.parquet"}},
        "output_type": "multiple_choice", "test_split": "test", "doc_to_text": "{{question}}", "doc_to_target": "answer",
        "doc_to_choice": "{{choices}}",
        "metric_list": [{"metric": name, **mean} if name.startswith("acc") else {"metric": name} for name in metrics],
    }  # fmt: skip
    (folder / "made.yaml").write_text(yaml.safe_dump(spec | changes))
    (task,) = load_tasks([str(folder / "made.yaml")])
    return task.chances


@needs["lm_eval"]
def test_of_a_choice_it_is_the_mean_over_examples_of_one_in_the_number_of_options(tmp_path: Path) -> None:
    rows = {
        "question": ["one", "two", "three", "four"],
        "choices": [[" a", " bb"], [" c", " d", " eee"], [" f", " g", " h", " i"], [" j", " k"]],
        "answer": [0, 2, 1, 1],
    }
    found = levels(tmp_path, rows)
    assert set(found) == {"acc", "acc_norm"}
    for level in found.values():
        assert level.score == pytest.approx(np.mean([1 / 2, 1 / 3, 1 / 4, 1 / 2])) and level.how == "a guess"


@needs["lm_eval"]
def test_where_the_options_are_fixed_it_is_the_best_constant_one_by_scikit_learn(tmp_path: Path) -> None:
    gold = [1, 1, 0, 1, 2, 1, 1]
    rows = {"question": [f"q{n}" for n in range(7)], "answer": gold}
    found = levels(tmp_path, rows, doc_to_choice=["no", "yes", "maybe"], metrics=("acc", "f1"))
    assert (found["acc"].score, found["acc"].how) == (pytest.approx(5 / 7), "always 'yes'")
    assert set(found) == {"acc"}, "the harness's F1 is one of two classes"
    two = [n % 2 for n in gold]
    found = levels(tmp_path, rows | {"answer": two}, doc_to_choice=["no", "yes"], metrics=("acc", "f1", "mcc"))
    scores = [f1_score(two, [option] * 7, zero_division=0) for option in (0, 1)]
    assert found["f1"].score == pytest.approx(max(scores)) and found["mcc"].score == 0
    rare = levels(tmp_path, rows | {"answer": [0, 1, 0, 1, 0, 1, 1]}, doc_to_choice=["no", "yes"], metrics=("acc",))
    assert rare["acc"].score == pytest.approx(4 / 7)


@needs["lm_eval"]
def test_a_perplexity_a_text_and_a_single_continuation_have_none(tmp_path: Path) -> None:
    rows = {"question": ["so it", "they"], "choices": [[" is"], [" are"]]}
    own = {"doc_to_target": "{{choices[0]}}", "doc_to_choice": None}
    for kind, metric in (
        ("loglikelihood", "perplexity"),
        ("loglikelihood", "acc"),
        ("loglikelihood_rolling", "word_perplexity"),
        ("generate_until", "exact_match"),
    ):
        assert levels(tmp_path, rows, output_type=kind, metrics=(metric,), **own) == {}


def test_of_winogender_it_is_a_guess_among_three_genders(tmp_path: Path) -> None:
    (tmp_path / "templates.tsv").write_text(TEMPLATES)
    (tmp_path / "occupations-stats.tsv").write_text(STATISTICS)
    task = read_winogender(tmp_path)
    draws = np.random.default_rng(0)
    each = [task.scores(draws.dirichlet(np.ones(3), len(task.sentences))).metrics for _ in range(100)]
    assert set(task.chances) == set(each[0])
    for name in set(each[0]) - {"correlation"}:
        assert task.chances[name].score == pytest.approx(np.mean([own[name]["score"] for own in each]), abs=0.08), name
    assert task.chances["correlation"].score == 0


@needs["mteb"]
def test_of_a_local_retrieval_set_it_is_that_of_the_best_order_by_enumeration(tmp_path: Path) -> None:
    from mlmclm.evaluation.mteb_tasks import load_mteb

    documents = [f"d{n}" for n in range(5)]
    judged = {"a": {"d1": 2, "d3": 1}, "b": {"d3": 1}, "c": {"d3": 1, "d0": 1}}
    texts = {"queries": list(judged), "corpus": documents}
    for part, names in texts.items():
        table = pa.Table.from_pylist([{"_id": name, "text": f"text of {name}"} for name in names])
        pq.write_table(table, tmp_path / f"{part}.parquet")
    qrels = [
        {"query-id": query, "corpus-id": document, "score": grade}
        for query, own in judged.items()
        for document, grade in own.items()
    ]
    pq.write_table(pa.Table.from_pylist(qrels), tmp_path / "qrels.parquet")
    (task,) = load_mteb([str(tmp_path)])
    judge, scores = pytrec_eval.RelevanceEvaluator(judged, {"ndcg_cut.10"}), []
    for order in itertools.permutations(documents):
        run = {document: float(-place) for place, document in enumerate(order)}
        scores.append(np.mean([each["ndcg_cut_10"] for each in judge.evaluate(dict.fromkeys(judged, run)).values()]))
    assert task.chances["ndcg_at_10"].score == pytest.approx(max(scores))
    assert task.chances["ndcg_at_10"].how == "the same order for every query"


@needs["mteb"]
def test_a_query_whose_documents_are_all_judged_irrelevant_counts_as_mteb_counts_it() -> None:
    from mteb._evaluators.retrieval_metrics import calculate_retrieval_scores

    from mlmclm.evaluation.mteb_tasks import _chance

    judged = {"q1": {"d1": 1}, "q2": {"d2": 0}}
    best = {query: {"d1": 3.0, "d0": 2.0, "d2": 1.0} for query in judged}
    scores = calculate_retrieval_scores(best, judged, [10]).ndcg
    assert _chance(["d0", "d1", "d2"], judged).score == pytest.approx(scores["NDCG@10"]) == 0.5


def test_results_of_files_get_the_level_of_their_task_and_the_report_shows_it() -> None:
    entry = {"score": 0.6, "low": 0.5, "high": 0.7, "examples": 9}
    filed = {"metrics": {"acc": entry, "perplexity": {**entry, "score": 12.0}}}
    result = under_names(filed, "m", "t", {"acc": {"score": 0.25, "how": "a guess"}})
    assert filed["metrics"]["acc"] == entry, "the file's own content stays as it is"
    assert (result["metrics"]["acc"]["chance"], result["metrics"]["perplexity"]["chance"]) == (0.25, None)
    facts = StudyFacts("s", "", (), (), zero_shot=(ZeroShotFacts("m", "t", "causal", "acc", result["metrics"]),))
    (table,) = zero_shot_tables(facts)
    assert table["chances"] == [("25.00", "a guess"), ("none", None)]
    frame = zero_shot_frame(facts)
    assert frame["chance"].tolist()[0] == 0.25 and np.isnan(frame["chance"].astype(float)).tolist() == [False, True]
