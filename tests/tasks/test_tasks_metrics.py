"""Metrics equal independent computations."""

from __future__ import annotations

import collections
import itertools
import math
import random
import re
import string

import numpy as np
import pytest
import seqeval.metrics
import torch
from sklearn.metrics import f1_score

from mlmclm.backends.packing import Packing
from mlmclm.tasks.answers import answer_f1, exact_match, graded_with_unanswerable, normalise_answer
from mlmclm.tasks.families.question_answering import passage_windows
from mlmclm.tasks.families.sequence_classification import SequenceClassification
from mlmclm.tasks.families.sequence_regression import SequenceRegression
from mlmclm.tasks.families.token_classification import TaggingTask, words_of_tokens
from mlmclm.tasks.ndcg import ndcg_at_10, rankings
from mlmclm.tasks.prepared_task import Lists, mean_of
from mlmclm.tasks.search import search
from mlmclm.tasks.settings import TaskSettings
from small_models import CITIES, FILL, NAMES


def official_normalise(text: str) -> str:
    """SQuAD's evaluate-v1.1 by its published definition: lower, remove punctuation, remove articles, fix white
    space."""

    def remove_articles(value: str) -> str:
        return re.sub(r"\b(a|an|the)\b", " ", value)

    def remove_punctuation(value: str) -> str:
        exclude = set(string.punctuation)
        return "".join(ch for ch in value if ch not in exclude)

    return " ".join(remove_articles(remove_punctuation(text.lower())).split())


def official_f1(prediction: str, truth: str) -> float:
    prediction_tokens = official_normalise(prediction).split()
    truth_tokens = official_normalise(truth).split()
    common = collections.Counter(prediction_tokens) & collections.Counter(truth_tokens)
    same = sum(common.values())
    if same == 0:
        return 0
    precision = 1.0 * same / len(prediction_tokens)
    recall = 1.0 * same / len(truth_tokens)
    return (2 * precision * recall) / (precision + recall)


def test_squad_scores_equal_the_official_definition_on_random_answers() -> None:
    chance = random.Random(0)
    words = [*NAMES, *CITIES, *FILL, "The", "an", "U.S.", "it's", "1,000", "A-B", "(so)"]
    for _ in range(500):
        prediction = " ".join(chance.choices(words, k=chance.randint(0, 5)))
        references = [" ".join(chance.choices(words, k=chance.randint(1, 5))) for _ in range(chance.randint(1, 4))]
        assert normalise_answer(prediction) == official_normalise(prediction)
        assert answer_f1(prediction, references) == max(official_f1(prediction, one) for one in references)
        exact = max(official_normalise(prediction) == official_normalise(one) for one in references)
        assert exact_match(prediction, references) == float(exact)


def official_v2(predictions: dict[str, str], golds: dict[str, list[str]]) -> dict[str, float]:
    """SQuAD's evaluate-v2.0 by its published definition, without its thresholds; shares in place of percentages."""

    def compute_exact(gold: str, found: str) -> int:
        return int(official_normalise(gold) == official_normalise(found))

    def compute_f1(gold: str, found: str) -> float:
        gold_tokens, found_tokens = official_normalise(gold).split(), official_normalise(found).split()
        common = collections.Counter(gold_tokens) & collections.Counter(found_tokens)
        same = sum(common.values())
        if len(gold_tokens) == 0 or len(found_tokens) == 0:
            return int(gold_tokens == found_tokens)
        if same == 0:
            return 0
        precision, recall = same / len(found_tokens), same / len(gold_tokens)
        return 2 * precision * recall / (precision + recall)

    exact_scores, f1_scores = {}, {}
    for name, answers in golds.items():
        gold_answers = [answer for answer in answers if official_normalise(answer)]
        if not gold_answers:
            gold_answers = [""]
        exact_scores[name] = max(compute_exact(answer, predictions[name]) for answer in gold_answers)
        f1_scores[name] = max(compute_f1(answer, predictions[name]) for answer in gold_answers)
    has_answer = [name for name, answers in golds.items() if answers]
    no_answer = [name for name, answers in golds.items() if not answers]
    scores = {}
    for prefix, names in (("", list(golds)), ("has_answer_", has_answer), ("no_answer_", no_answer)):
        if names:
            scores[f"{prefix}exact_match"] = sum(exact_scores[name] for name in names) / len(names)
            scores[f"{prefix}f1"] = sum(f1_scores[name] for name in names) / len(names)
    return scores


def test_squad_v2_scores_equal_the_official_definition_on_random_answers() -> None:
    chance = random.Random(0)
    words = [*NAMES[:3], *FILL[:4], "The", "an", "a", "U.S.", "(so)", "..."]
    for questions in (1, 2, 50, 200):
        texts = [" ".join(chance.choices(words, k=chance.randint(0, 3))) for _ in range(questions)]
        golds = [
            [" ".join(chance.choices(words, k=chance.randint(1, 3))) for _ in range(chance.choice((0, 0, 1, 3)))]
            for _ in range(questions)
        ]
        names = [f"q{number}" for number in range(questions)]
        expected = official_v2(dict(zip(names, texts, strict=True)), dict(zip(names, golds, strict=True)))
        scores = {name: mean_of(column) for name, column in graded_with_unanswerable(texts, golds).items()}
        assert scores == pytest.approx(expected)
    assert {"no_answer_f1", "has_answer_exact_match"} <= set(expected)


def test_squad_scores_take_the_best_reference() -> None:
    assert exact_match("the Eiffel tower!", ["Paris", "Eiffel Tower"]) == 1.0
    assert answer_f1("tall Eiffel tower", ["Paris", "an Eiffel Tower"]) == pytest.approx(0.8)


def test_ndcg_equals_its_formula_and_counts_what_was_not_retrieved() -> None:
    generator = np.random.default_rng(0)
    queries, documents = [f"q{n}" for n in range(30)], [f"d{n}" for n in range(400)]
    scores = generator.normal(size=(30, 400)).astype(np.float32)
    qrels = {
        query: {documents[d]: int(generator.integers(0, 3)) for d in generator.choice(400, 25)} for query in queries
    }
    qrels["q0"] = {"d5": 0}
    expected = np.full(30, np.nan)
    for row, query in enumerate(queries):
        grades = qrels[query]
        ideal = sorted(grades.values(), reverse=True)[:10]
        best = sum(grade / math.log2(rank + 2) for rank, grade in enumerate(ideal))
        if best == 0:
            continue
        ranking = np.argsort(-scores[row])[:10]
        gain = sum(grades.get(documents[d], 0) / math.log2(rank + 2) for rank, d in enumerate(ranking))
        expected[row] = gain / best
    assert np.isnan(expected).tolist() == [True] + [False] * 29
    # Documents that are the axes: a product is one of the scores.
    every, _ = search(list(scores), list(np.eye(400, dtype=np.float32)), rankings(queries, documents, qrels), 10)
    assert ndcg_at_10(queries, documents, every, qrels) == pytest.approx(expected, abs=1e-6, nan_ok=True)


def test_macro_f1_counts_classes_that_are_never_predicted() -> None:
    assert f1_score([0, 1, 2], [0, 0, 0], labels=[0, 1, 2], average="macro", zero_division=0.0) == pytest.approx(1 / 6)


def test_entities_are_scored_whole(tagger: TaggingTask) -> None:
    """Three true entities; one found, one cut short, one of the wrong kind: precision 1/3, recall 1/3."""
    true = np.array([1, 0, 5, 6, 0, 3])  # B-PER O B-LOC I-LOC O B-ORG
    found = np.array([1, 0, 5, 0, 0, 7])  # the place's second word is missing; MISC instead of ORG
    scores = tagger.score_of([true], [found])
    assert scores["f1"] == pytest.approx(1 / 3)
    assert scores["precision"] == pytest.approx(1 / 3)
    assert scores["accuracy"] == pytest.approx(4 / 6)


@pytest.fixture
def tagger() -> TaggingTask:
    """A tagger without data, whose `score_of` scores given tags."""
    from pathlib import Path

    from mlmclm.tasks.declared_tasks import get_task

    names = get_task("conll2003").label_names
    assert names is not None
    task = TaggingTask("", Path(), "token-classification", "", names, TaskSettings())

    def score_of(true: list[np.ndarray], found: list[np.ndarray]) -> dict[str, float]:
        offsets = np.cumsum([0, *(len(row) for row in true)])
        tags = Lists(np.concatenate(true), offsets)
        task.columns = {"test": {"tags": tags}}
        return task.scores(task.examples("test", [row.astype(np.float32) for row in found]))

    task.score_of = score_of  # type: ignore[attr-defined]
    return task


def test_a_words_tag_is_the_majority_of_its_sub_tokens_and_ties_go_to_the_likelier(tagger: TaggingTask) -> None:
    def votes(*tags: int, strength: float = 1.0) -> np.ndarray:
        logits = np.zeros((len(tags), 9), dtype=np.float32)
        logits[np.arange(len(tags)), tags] = strength
        return logits

    words = np.array([0, 0, 0, 1, 1, -1], dtype=np.int32)
    logits = np.concatenate(
        (votes(1, 1, strength=0.1), votes(3, strength=9.0), votes(5), votes(7, strength=4.0), votes(2))
    )
    assert tagger._vote(logits, words, 3).tolist() == [1, 7, 0]  # the third word was cut off: O


@pytest.mark.parametrize("labelled", ["all", "first"])
def test_a_batchs_tags_are_those_of_each_sentence_by_itself(tagger: TaggingTask, labelled: str) -> None:
    chance = np.random.default_rng(0)
    vars(tagger)["settings"] = TaskSettings(label_sub_tokens=labelled)
    words, tags = [], []
    for _ in range(40):  # words of 1 to 3 tokens, a bare space here and there, some words cut off, a closing token
        pieces = chance.integers(1, 4, chance.integers(1, 8))
        own = np.repeat(np.arange(len(pieces)), pieces)[: max(1, int(pieces.sum()) - 2)]
        words.append(np.append(np.where(chance.random(len(own)) < 0.1, -1, own), -1))
        tags.append(np.zeros(len(pieces), int))

    def lists(rows: list[np.ndarray]) -> Lists:
        return Lists(np.concatenate(rows), np.cumsum([0, *(len(row) for row in rows)]))

    vars(tagger)["columns"] = {"test": {"words": lists(words), "tags": lists(tags)}}
    logits = torch.from_numpy(chance.normal(size=(sum(map(len, words)), 9)))

    def predict(rows: np.ndarray) -> list[np.ndarray]:
        own = torch.cat([logits.split([len(row) for row in words])[row] for row in rows])
        packing = Packing.of([len(words[row]) for row in rows])
        return tagger.predict(torch.nn.Identity(), own, packing, "test", rows)

    together = predict(np.arange(40)[::-1].copy())
    for row, found in zip(range(39, -1, -1), together, strict=True):
        assert found.tolist() == predict(np.array([row]))[0].tolist()
        assert len(found) == len(tags[row])
    assert len({tag for found in together for tag in found.tolist()}) == 9


def test_entity_scores_are_seqevals(tagger: TaggingTask) -> None:
    chance = np.random.default_rng(1)
    true = [chance.integers(0, 9, chance.integers(1, 12)) for _ in range(200)]
    found = [np.where(chance.random(len(row)) < 0.3, chance.integers(0, 9, len(row)), row) for row in true]
    names = tagger.label_names
    pair = [[[names[tag] for tag in row] for row in rows] for rows in (true, found)]
    scores = tagger.score_of(true, found)
    assert scores["f1"] == seqeval.metrics.f1_score(*pair)
    assert scores["precision"] == seqeval.metrics.precision_score(*pair)
    assert scores["recall"] == seqeval.metrics.recall_score(*pair)


def test_tokens_find_their_words_whatever_the_tokenizer_does_with_spaces() -> None:
    words = ["New", "York", "x"]
    with_space_before = [(0, 3), (3, 6), (6, 8), (8, 10)]
    without = [(0, 3), (4, 6), (6, 8), (9, 10)]
    bare_space = [(0, 3), (3, 4), (4, 8), (8, 9), (9, 10)]
    assert words_of_tokens(words, with_space_before).tolist() == [0, 1, 1, 2]
    assert words_of_tokens(words, without).tolist() == [0, 1, 1, 2]
    assert words_of_tokens(words, bare_space).tolist() == [0, -1, 1, -1, 2]


@pytest.mark.parametrize(
    ("tokens", "room", "stride"), [(10, 10, 3), (11, 10, 3), (100, 30, 10), (50, 20, 19), (50, 10, 40)]
)
def test_windows_cover_the_passage_and_share_the_stride(tokens: int, room: int, stride: int) -> None:
    found = passage_windows(tokens, room, stride)
    assert found[0][0] == 0
    assert found[-1][1] == tokens
    assert all(stop - start <= room for start, stop in found)
    for (_, stop), (start, _) in itertools.pairwise(found):
        assert stop - start >= min(stride, room - 1)
    assert all(stop < tokens for _, stop in found[:-1])


def classification_scores(labels: np.ndarray, predicted: np.ndarray, classes: int) -> dict[str, float]:
    examples = {"gold": labels, "prediction": predicted, "correct": labels == predicted}
    return SequenceClassification.scores(examples, classes)


def correlations(labels: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    return SequenceRegression.scores({"gold": labels, "prediction": predicted}, 0)


@pytest.mark.parametrize("classes", [2, 3])
def test_classification_scores_equal_their_definitions_on_random_predictions(classes: int) -> None:
    generator = np.random.default_rng(classes)
    for _ in range(20):
        labels, predicted = generator.integers(0, classes, (2, 60))
        table = np.zeros((classes, classes))
        np.add.at(table, (labels, predicted), 1)
        true, called, right = table.sum(axis=1), table.sum(axis=0), np.diag(table)
        # Gorodkin's R_K, which is Matthews' correlation for two classes.
        covariance = right.sum() * 60 - true @ called
        matthews = covariance / math.sqrt((60**2 - called @ called) * (60**2 - true @ true))
        f1 = 2 * right / (true + called)
        scores = classification_scores(labels, predicted, classes)
        assert scores["accuracy"] == pytest.approx(right.sum() / 60)
        assert scores["f1_macro"] == pytest.approx(f1.mean())
        assert scores["matthews"] == pytest.approx(matthews)
        assert ("f1" in scores) == (classes == 2)
        if classes == 2:
            assert scores["f1"] == pytest.approx(f1[1])


def test_a_constant_prediction_has_no_correlation_and_an_opposite_one_has_minus_one() -> None:
    labels = np.array([0, 1, 1, 0, 1])
    assert classification_scores(labels, np.ones(5, dtype=int), 2)["matthews"] == 0.0
    assert classification_scores(labels, 1 - labels, 2)["matthews"] == pytest.approx(-1)
    assert correlations(labels.astype(float), np.full(5, 2.5)) == {"spearman": 0.0, "pearson": 0.0}
    assert correlations(labels.astype(float), -labels.astype(float))["pearson"] == pytest.approx(-1)


def test_correlations_equal_their_definitions_with_ties() -> None:
    def pearson(a: np.ndarray, b: np.ndarray) -> float:
        a, b = a - a.mean(), b - b.mean()
        return float(a @ b / math.sqrt((a @ a) * (b @ b)))

    def ranks(values: np.ndarray) -> np.ndarray:
        return np.array([(values < value).sum() + ((values == value).sum() + 1) / 2 for value in values])

    generator = np.random.default_rng(0)
    for _ in range(20):
        labels = generator.integers(0, 11, 80) / 2  # many ties, as STS-B's labels have
        predicted = (labels + generator.normal(size=80) * 2).round(1).astype(np.float32)
        scores = correlations(labels, predicted)
        assert scores["pearson"] == pytest.approx(pearson(labels, predicted.astype(np.float64)))
        assert scores["spearman"] == pytest.approx(pearson(ranks(labels), ranks(predicted)))
