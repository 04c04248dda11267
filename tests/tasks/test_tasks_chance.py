"""Chance levels equal what other implementations give to constant and random predictions; constant ones are recognised."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytrec_eval
from scipy.stats import hypergeom
from seqeval.metrics import f1_score as entity_f1
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from mlmclm.finetuning.protocol import Protocol
from mlmclm.results.examples import KeptExamples
from mlmclm.tasks.answers import answer_f1, constant_answers, exact_match, normalise_answer
from mlmclm.tasks.ndcg import constant_order, expected_ndcg, expected_study_ndcg, study_ndcg_at_10
from mlmclm.tasks.predictions import predicts_the_same
from mlmclm.tasks.prepare_task import prepare_task
from mlmclm.tasks.prepared_task import PreparedTask, objects
from mlmclm.tasks.search import BestDocuments

PROTOCOL = Protocol(max_length=32, stride=8)
Prepare = Callable[[str], PreparedTask]


@pytest.fixture(scope="module")
def prepare(place: Path) -> Prepare:
    return lambda task: prepare_task(task, place / "model", PROTOCOL, place / "store", place / "data")


def level(prepared: PreparedTask, metric: str) -> float:
    found = prepared.chance(metric)
    assert found is not None
    return found.score


def test_of_classes_it_is_the_best_constant_prediction_by_scikit_learn(prepare: Prepare) -> None:
    made = prepare("sst2")
    gold = made.table("test")["label"].to_numpy()
    constants = [np.full(len(gold), number) for number in (0, 1)]
    every = [
        {
            "accuracy": accuracy_score(gold, same),
            "f1_macro": f1_score(gold, same, average="macro", zero_division=0.0),
            "f1": f1_score(gold, same, zero_division=0.0),
            "matthews": matthews_corrcoef(gold, same),
        }
        for same in constants
    ]
    for metric in ("accuracy", "f1_macro", "f1", "matthews", "accuracy+f1"):
        parts = metric.split("+")
        assert level(made, metric) == pytest.approx(max(np.mean([own[part] for part in parts]) for own in every))
    found = made.chance("accuracy")
    assert found is not None and found.how == f"always {made.label_names[np.bincount(gold).argmax()]}"


def test_of_numbers_it_is_0_and_said_to_be_undefined(prepare: Prepare) -> None:
    found = prepare("stsb").chance("pearson+spearman")
    assert found is not None and found.score == 0.0 and "correlation is undefined" in found.how


def test_of_tags_it_is_the_best_constant_tag_by_seqeval(prepare: Prepare) -> None:
    made = prepare("conll2003")
    gold = [[made.label_names[tag] for tag in row] for row in made.table("test")["tags"].to_pylist()]
    constant = [[[name] * len(row) for row in gold] for name in made.label_names]
    assert level(made, "f1") == pytest.approx(max(entity_f1(gold, same, zero_division=0) for same in constant))
    words = list(itertools.chain.from_iterable(gold))
    assert level(made, "accuracy") == pytest.approx(max(words.count(name) for name in made.label_names) / len(words))


def test_of_answers_it_is_the_best_of_random_words_the_passage_s_beginning_and_no_answer(prepare: Prepare) -> None:
    made = prepare("squad_4k")
    (begun, passages), *constant, (_, guesses) = made.blind()
    expected, copied = [], []
    for row in made.table("test_examples").to_pylist():
        words = row["context"].split()
        spans = [" ".join(words[start : start + length]) for start in range(len(words)) for length in (1, 2, 3, 4)]
        expected.append(np.mean([answer_f1(span, row["answers"]) for span in spans]))
        copied.append((row["context"], row["answers"]))
    assert guesses["f1"].mean() == pytest.approx(np.mean(expected), abs=0.03)
    assert begun == "the start of the passage"
    for (context, answers), answer, score in zip(copied, passages["answer"], passages["f1"], strict=True):
        assert answer and context.strip().startswith(answer) and score == pytest.approx(answer_f1(answer, answers))
    assert any(answer == context.strip() for (context, _), answer in zip(copied, passages["answer"], strict=True))
    blind = [passages, *(examples for _, examples in constant), guesses]
    assert level(made, "f1") == pytest.approx(max(examples["f1"].mean() for examples in blind))
    assert level(made, "f1") > 0.05
    with_none = prepare("squad_v2")
    unanswered = np.mean([not row["answers"] for row in with_none.table("test_examples").to_pylist()])
    (how, never), (_, passages), *constant, (_, words) = with_none.blind()
    assert how == "never an answer" and never["f1"].mean() == pytest.approx(unanswered)
    assert (never["answer"] == "").all()
    assert np.nanmean(words["no_answer_f1"]) < 0.2, "only an article alone is as good as no answer"
    blind = [never, passages, *(examples for _, examples in constant), words]
    assert level(with_none, "f1") == pytest.approx(max(examples["f1"].mean() for examples in blind))


@pytest.mark.parametrize("task", ["squad_4k", "squad_v2"])
def test_of_answers_it_is_no_less_than_that_of_any_answer_or_word_given_to_every_question(
    prepare: Prepare, task: str
) -> None:
    made = prepare(task)
    asked = [row["answers"] for row in made.table("test_examples").to_pylist()]
    texts = sorted({normalise_answer(answer) for answers in asked for answer in answers})
    words = sorted({word for text in texts for word in text.split()})
    exact = {text: np.mean([exact_match(text, answers or [""]) for answers in asked]) for text in texts}
    f1 = {word: np.mean([answer_f1(word, answers or [""]) for answers in asked]) for word in words}
    commonest, best, *_ = [*constant_answers(asked)] * 2
    assert exact[commonest] == max(exact.values()) and f1[best] == pytest.approx(max(f1.values()))
    assert level(made, "exact_match") >= max(exact.values()) and level(made, "f1") >= max(f1.values()) - 1e-12
    said = dict(made.blind())
    assert said[f"always {commonest!r}"]["exact_match"].mean() == pytest.approx(exact[commonest])
    assert said[f"always {best!r}"]["f1"].mean() == pytest.approx(f1[best])


def test_the_commonest_answer_is_normalised_and_counts_once_a_question() -> None:
    asked = [["The Nile", "nile"], ["the  Nile!"], ["Lake Victoria"], ["Victoria Falls", "Victoria"], []]
    assert constant_answers(asked) == ["nile", "victoria"] or constant_answers(asked) == ["nile"]
    f1 = {word: sum(answer_f1(word, answers) for answers in asked if answers) for word in ("nile", "victoria")}
    assert constant_answers(asked)[-1] == max(f1, key=lambda word: f1[word])
    assert constant_answers([[], []]) == []


def test_of_a_ranking_it_is_the_better_of_any_order_and_one_for_every_query(prepare: Prepare) -> None:
    made = prepare("reqa_squad")
    sequences, asked = made.table("test"), made.table("test_qrels").to_pylist()
    documents = int((~sequences["is_query"].to_numpy()).sum())
    counts = [
        sum(row["query_id"] == query for row in asked) for query in dict.fromkeys(row["query_id"] for row in asked)
    ]
    (how, every), (alike, same) = made.blind()
    assert (how, alike) == ("any order", "the same order for every query")
    assert every["ndcg@10"].mean() == pytest.approx(expected_ndcg([[1] * count for count in counts], documents).mean())
    assert len(set(map(tuple, same["documents"]))) == 1
    for metric in ("ndcg@10", "study.ndcg@10"):
        assert level(made, metric) == pytest.approx(max(every[metric].mean(), same[metric].mean()))


def test_of_a_ranking_it_is_that_of_the_best_order_for_all_queries_by_enumeration() -> None:
    documents = [f"d{number}" for number in range(6)]
    draw = np.random.default_rng(3)
    for _ in range(5):
        qrels = {
            f"q{query}": {document: int(draw.integers(0, 3)) for document in documents if draw.random() < 0.6}
            for query in range(4)
        }
        qrels = {query: own for query, own in qrels.items() if any(own.values())}
        judge = pytrec_eval.RelevanceEvaluator(qrels, {"ndcg_cut.10"})

        def score(order: Any, qrels: Any = qrels, judge: Any = judge) -> float:
            run = {documents[number]: float(-place) for place, number in enumerate(order)}
            each = judge.evaluate(dict.fromkeys(qrels, run))
            return float(np.mean([each[query]["ndcg_cut_10"] for query in qrels]))

        best = max(map(score, itertools.permutations(range(6))))
        assert score(constant_order(list(qrels), documents, qrels)) == pytest.approx(best)


def test_of_the_study_s_ranking_it_is_the_mean_over_random_orders_of_the_judged(prepare: Prepare) -> None:
    draw, judged = np.random.default_rng(2), 25
    grades = {"a": [1], "b": [2, 1, 0, 1], "c": [1] * 14}
    names = [f"d{number}" for number in range(judged)]
    qrels = {query: dict(zip(names, own, strict=False)) for query, own in grades.items()}
    values = []
    for _ in range(4000):
        orders = np.stack([draw.permutation(judged)[:10] for _ in grades])
        values.append(study_ndcg_at_10(list(grades), names, BestDocuments(orders, np.zeros((3, 10))), qrels))
    found = expected_study_ndcg(list(grades.values()), judged)
    assert found == pytest.approx(np.mean(values, axis=0), abs=0.02)
    # With a single relevant document: found among the ten with chance 10 / 25, at any of ten ranks.
    single = hypergeom(judged, 1, 10).pmf(1) * np.mean(1 / np.log2(np.arange(10) + 2))
    assert found[0] == pytest.approx(single, abs=0.02)
    assert 0 < level(prepare("reqa_squad"), "study.ndcg@10") < 1


def kept(family: str, name: str, values: Any) -> KeptExamples:
    values = values if isinstance(values, np.ndarray) else objects(values)
    numbers = {} if values.dtype == object else {name: values}
    return KeptExamples({"family": family, "key": "k", "task": "t"}, numbers, (), {} if numbers else {name: values})


@pytest.mark.parametrize(
    ("family", "name", "same", "other"),
    [
        ("sequence-classification", "prediction", np.zeros(9, np.uint8), np.arange(9) % 2),
        ("sequence-regression", "prediction", np.full(5, 2.5) + 1e-7 * np.arange(5), np.linspace(2.4, 2.5, 5)),
        ("token-classification", "predicted_tags", [[0, 0], [0], [0, 0, 0]], [[0, 0], [1]]),
        ("question-answering", "answer", ["", "", ""], ["", "Paris"]),
        ("retrieval", "documents", [["d2", "d1"]] * 3, [["d2", "d1"], ["d1", "d2"]]),
    ],
)
def test_the_same_prediction_for_every_example_is_recognised(family: str, name: str, same: Any, other: Any) -> None:
    assert predicts_the_same(kept(family, name, same))
    assert not predicts_the_same(kept(family, name, other))
    assert not predicts_the_same(kept(family, "f1", np.zeros(3))), "predictions were not kept"
