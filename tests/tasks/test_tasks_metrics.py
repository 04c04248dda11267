"""Metrics equal scikit-learn's, seqeval's and the official scripts', and the study's a plain transcription of how they are
described (arXiv 2507.00994, its released evaluation)."""

from __future__ import annotations

import collections
import itertools
import math
import random
import re
import string
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import pytrec_eval
import seqeval.metrics
import sklearn.metrics
import torch

from mlmclm.backends.packing import Packing
from mlmclm.models.folder import load_tokenizer
from mlmclm.tasks.answers import graded, graded_with_unanswerable
from mlmclm.tasks.declared_tasks import get_task
from mlmclm.tasks.families.question_answering import QUESTION, passage_windows
from mlmclm.tasks.families.sequence_classification import SequenceClassification
from mlmclm.tasks.families.sequence_regression import SequenceRegression
from mlmclm.tasks.families.token_classification import TaggingTask, words_of_tokens
from mlmclm.tasks.ndcg import ndcg_at_10, rankings, study_ndcg_at_10
from mlmclm.tasks.prepare_task import prepare_task
from mlmclm.tasks.prepared_task import Lists, mean_of
from mlmclm.tasks.search import search
from mlmclm.tasks.settings import TaskSettings
from small_models import FILL, NAMES

Row = np.ndarray[Any, Any]


def official_normalise(text: str) -> str:
    """SQuAD's evaluate-v1.1 by its published definition: lower, remove punctuation, remove articles, fix white space."""
    text = "".join(character for character in text.lower() if character not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def official_f1(gold: str, found: str, *, version: int) -> float:
    gold_tokens, found_tokens = official_normalise(gold).split(), official_normalise(found).split()
    if version == 2 and (len(gold_tokens) == 0 or len(found_tokens) == 0):
        return int(gold_tokens == found_tokens)
    same = sum((collections.Counter(gold_tokens) & collections.Counter(found_tokens)).values())
    if same == 0:
        return 0
    precision, recall = same / len(found_tokens), same / len(gold_tokens)
    return 2 * precision * recall / (precision + recall)


def official_v1(predictions: list[str], golds: list[list[str]]) -> dict[str, list[float]]:
    """F1 and exact match of each question."""
    return {
        "f1": [max(official_f1(one, text, version=1) for one in gold) for text, gold in zip(predictions, golds, strict=True)],
        "exact_match": [
            max(float(official_normalise(text) == official_normalise(one)) for one in gold)
            for text, gold in zip(predictions, golds, strict=True)
        ],
    }  # fmt: skip


def official_v2(predictions: list[str], golds: list[list[str]]) -> dict[str, float]:
    """SQuAD's evaluate-v2.0 by its published definition, without its thresholds; shares in place of percentages."""
    exact, f1 = [], []
    for text, answers in zip(predictions, golds, strict=True):
        accepted = [answer for answer in answers if official_normalise(answer)] or [""]
        exact.append(max(float(official_normalise(answer) == official_normalise(text)) for answer in accepted))
        f1.append(max(official_f1(answer, text, version=2) for answer in accepted))
    has = np.array([bool(answers) for answers in golds])
    scores = {}
    for prefix, part in (("", has | ~has), ("has_answer_", has), ("no_answer_", ~has)):
        if part.any():
            scores[f"{prefix}exact_match"] = float(np.array(exact)[part].mean())
            scores[f"{prefix}f1"] = float(np.array(f1)[part].mean())
    return scores


def test_squad_scores_equal_the_official_definitions_on_random_answers() -> None:
    chance = random.Random(0)
    words = [*NAMES[:3], *FILL[:4], "The", "an", "a", "U.S.", "it's", "1,000", "A-B", "(so)", "..."]
    for questions in (1, 2, 50, 200):
        texts = [" ".join(chance.choices(words, k=chance.randint(0, 3))) for _ in range(questions)]
        golds = [
            [" ".join(chance.choices(words, k=chance.randint(1, 3))) for _ in range(chance.choice((0, 0, 1, 3)))]
            for _ in range(questions)
        ]
        expected = official_v2(texts, golds)
        assert {name: mean_of(column) for name, column in graded_with_unanswerable(texts, golds).items()} == (
            pytest.approx(expected)
        )
        answered = [gold or ["one"] for gold in golds]
        assert {name: column.tolist() for name, column in graded(texts, answered).items()} == official_v1(
            texts, answered
        )
    assert {"no_answer_f1", "has_answer_exact_match"} <= set(expected)


@pytest.mark.parametrize("task", ["squad_4k", "squad_v2"])
def test_answers_over_windows_are_scored_as_the_official_scripts_and_the_study_do(place: Path, task: str) -> None:
    """Predictions are random spans of each window."""
    unanswerable, draw = task == "squad_v2", np.random.default_rng(0)
    settings, tokenizer = TaskSettings(max_length=32, stride=8), load_tokenizer(place / "model")
    made = prepare_task(task, place / "model", settings, place / "store", place / "data")
    predictions: list[Row] = []
    texts, references, study = [], [], []
    for row in pq.read_table(place / "data" / task / "validation.parquet").to_pylist():
        question = tokenizer(QUESTION.format(question=row["question"]), add_special_tokens=False)["input_ids"]
        encoded = tokenizer(" " + row["context"], add_special_tokens=False, return_offsets_mapping=True)
        characters = [(start - 1, end - 1) for start, end in encoded["offset_mapping"]]  # the space before it
        parts = []
        for begin, end in passage_windows(len(characters), 32 - len(question[:16]) - 1, 8):
            first = int(draw.integers(end - begin))
            last = min(first + int(draw.integers(3)), end - begin - 1)
            predictions.append(np.array([draw.normal(), first, last, *([draw.normal() - 1] if unanswerable else [])]))
            parts.append((predictions[-1], begin))
        best, begin = max(parts, key=lambda part: part[0][0])
        given = set(range(begin + int(best[1]), begin + int(best[2]) + 1))
        if unanswerable and min(other[3] for other, _ in parts) > best[0]:
            given = set()
        gold: set[int] = set()
        if row["answers"]["text"]:  # the first answer only
            start = row["answers"]["answer_start"][0]
            end = start + len(row["answers"]["text"][0])
            gold = {token for token, (a, b) in enumerate(characters) if a < end and b > start}
        common = len(gold & given)
        precision, recall = common / max(1, len(given)), common / max(1, len(gold))
        both_empty = float(not gold and not given)
        study.append(2 * precision * recall / (precision + recall) if common else both_empty)
        spans = [characters[token] for token in sorted(given)]
        texts.append(row["context"][max(0, spans[0][0]) : spans[-1][1]].strip() if spans else "")
        references.append(list(row["answers"]["text"]))
    assert len(predictions) > len(texts) and sum(study) > 0
    found = made.examples("test", predictions)
    assert found["study.f1"] == pytest.approx(study)
    scores = made.scores(found)
    assert scores["study.f1"] == pytest.approx(np.mean(study))
    if unanswerable:
        expected = official_v2(texts, references)
        assert {name: scores[name] for name in expected} == pytest.approx(expected)
        for number, pair in enumerate(zip(texts, references, strict=True)):
            kept = {name: found[name][number] for name in expected if not np.isnan(found[name][number])}
            assert kept == pytest.approx(official_v2(*([part] for part in pair)))
    else:
        for name, values in official_v1(texts, references).items():
            assert found[name] == pytest.approx(values) and scores[name] == pytest.approx(np.mean(values))


@pytest.fixture
def tagger() -> TaggingTask:
    """A tagger without data."""
    names = get_task("conll2003").label_names
    assert names is not None
    return TaggingTask("", Path(), "token-classification", "", names, TaskSettings())


def lists(rows: list[Row]) -> Lists:
    return Lists(np.concatenate(rows), np.cumsum([0, *(len(row) for row in rows)]))


def entities(tags: list[str]) -> set[tuple[str, int, int]]:
    """(type, first word, last word) of a BIO sequence, as CoNLL's: an I of another type, or behind O, begins one too."""
    spans: list[list[Any]] = []
    for place, tag in enumerate(tags):
        if tag[0] == "I" and place > 0 and tags[place - 1] != "O" and tags[place - 1][2:] == tag[2:]:
            spans[-1][2] = place
        elif tag != "O":
            spans.append([tag[2:], place, place])
    return {(kind, first, last) for kind, first, last in spans}


def test_tags_are_scored_as_seqeval_does_and_the_study_s_f1_is_macro_averaged_over_each_sentence_s_tags(
    tagger: TaggingTask,
) -> None:
    chance, names = np.random.default_rng(1), tagger.label_names
    true = [chance.integers(0, 9, chance.integers(1, 12)) for _ in range(200)]
    found = [np.where(chance.random(len(row)) < 0.3, chance.integers(0, 9, len(row)), row) for row in true]
    vars(tagger)["columns"] = {"test": {"tags": lists(true)}}
    examples = tagger.examples("test", [row.astype(np.float32) for row in found])
    scores = tagger.scores(examples)
    gold, given = ([[names[tag] for tag in row] for row in rows] for rows in (true, found))
    for name in ("f1", "precision", "recall", "accuracy"):
        assert scores[name] == getattr(seqeval.metrics, f"{name}_score")(gold, given)
    wanted, called = ([entities(tags) for tags in side] for side in (gold, given))
    both = [first & second for first, second in zip(wanted, called, strict=True)]
    for name, kept in (("gold", wanted), ("predicted", called), ("correct", both)):
        assert examples[f"entities_{name}"].tolist() == list(map(len, kept))
    study = [
        sklearn.metrics.f1_score(*pair, average="macro", zero_division=0.0) for pair in zip(gold, given, strict=True)
    ]
    assert examples["study.f1"] == pytest.approx(study) and scores["study.f1"] == pytest.approx(np.mean(study))


def test_a_words_tag_is_the_majority_of_its_sub_tokens_and_ties_go_to_the_likelier(tagger: TaggingTask) -> None:
    def votes(*tags: int, strength: float = 1.0) -> Row:
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
    vars(tagger)["columns"] = {"test": {"words": lists(words), "tags": lists(tags)}}
    logits = torch.from_numpy(chance.normal(size=(sum(map(len, words)), 9)))

    def predict(rows: Row) -> list[Row]:
        own = torch.cat([logits.split([len(row) for row in words])[row] for row in rows])
        packing = Packing.of([len(words[row]) for row in rows])
        return tagger.predict(torch.nn.Identity(), own, packing, "test", rows)

    together = predict(np.arange(40)[::-1].copy())
    for row, found in zip(range(39, -1, -1), together, strict=True):
        assert found.tolist() == predict(np.array([row]))[0].tolist()
        assert len(found) == len(tags[row])
    assert len({tag for found in together for tag in found.tolist()}) == 9


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
    assert (found[0][0], found[-1][1]) == (0, tokens)
    assert all(stop - start <= room for start, stop in found)
    for (_, stop), (start, _) in itertools.pairwise(found):
        assert stop - start >= min(stride, room - 1)
    assert all(stop < tokens for _, stop in found[:-1])


def classification_scores(labels: Row, predicted: Row, classes: int) -> dict[str, float]:
    examples = {"gold": labels, "prediction": predicted, "correct": labels == predicted}
    return SequenceClassification.scores(examples, classes)


@pytest.mark.parametrize("classes", [2, 3])
def test_classification_scores_are_scikit_learn_s(classes: int) -> None:
    generator = np.random.default_rng(classes)
    for rows in (4, 60):  # of few rows, some classes are never predicted
        for _ in range(20):
            labels, predicted = (np.append(np.arange(classes), generator.integers(0, classes, rows)) for _ in range(2))
            predicted[:classes] = predicted[-1]
            expected = {
                "accuracy": sklearn.metrics.accuracy_score(labels, predicted),
                "f1_macro": sklearn.metrics.f1_score(labels, predicted, average="macro", zero_division=0.0),
                "matthews": sklearn.metrics.matthews_corrcoef(labels, predicted),
            }
            if classes == 2:
                expected["f1"] = sklearn.metrics.f1_score(labels, predicted, zero_division=0.0)
            assert classification_scores(labels, predicted, classes) == pytest.approx(expected)


def correlations(labels: Row, predicted: Row) -> dict[str, float]:
    return SequenceRegression.scores({"gold": labels, "prediction": predicted}, 0)


def test_a_constant_prediction_has_no_correlation_and_an_opposite_one_has_minus_one() -> None:
    labels = np.array([0, 1, 1, 0, 1])
    assert classification_scores(labels, np.ones(5, dtype=int), 2)["matthews"] == 0.0
    assert classification_scores(labels, 1 - labels, 2)["matthews"] == pytest.approx(-1)
    assert correlations(labels.astype(float), np.full(5, 2.5)) == {"spearman": 0.0, "pearson": 0.0}
    assert correlations(labels.astype(float), -labels.astype(float))["pearson"] == pytest.approx(-1)


def test_correlations_equal_their_definitions_with_ties() -> None:
    def pearson(a: Row, b: Row) -> float:
        a, b = a - a.mean(), b - b.mean()
        return float(a @ b / math.sqrt((a @ a) * (b @ b)))

    def ranks(values: Row) -> Row:
        return np.array([(values < value).sum() + ((values == value).sum() + 1) / 2 for value in values])

    generator = np.random.default_rng(0)
    for _ in range(20):
        labels = generator.integers(0, 11, 80) / 2  # many ties, as STS-B's labels have
        predicted = (labels + generator.normal(size=80) * 2).round(1).astype(np.float32)
        scores = correlations(labels, predicted)
        assert scores["pearson"] == pytest.approx(pearson(labels, predicted.astype(np.float64)))
        assert scores["spearman"] == pytest.approx(pearson(ranks(labels), ranks(predicted)))


def study_ndcg(scores: Row, documents: list[str], qrels: list[dict[str, int]]) -> list[float]:
    """One query a row: the judged documents in order of score, and the ideal of the ten that were retrieved."""
    judged = [place for place, name in enumerate(documents) if any(name in grades for grades in qrels)]
    values = []
    for row, grades in zip(scores, qrels, strict=True):
        found = sorted(judged, key=lambda place: (-row[place], place))[:10]
        gains = [grades.get(documents[place], 0) for place in found]
        ideal = sum(gain / math.log2(rank + 2) for rank, gain in enumerate(sorted(gains, reverse=True)))
        gained = sum(gain / math.log2(rank + 2) for rank, gain in enumerate(gains))
        values.append(gained / ideal if ideal else 0.0)
    return values


def test_ndcg_is_pytrec_eval_s_and_the_study_s_ideal_is_of_what_was_retrieved() -> None:
    """Judgements with grades, with several documents a query, and with documents that nobody judged."""
    draw = np.random.default_rng(0)
    queries, documents = [f"q{n}" for n in range(30)], [f"d{n}" for n in range(60)]
    scores = draw.normal(size=(30, 60)).astype(np.float32)
    qrels = {
        name: {documents[d]: int(draw.integers(0, 3)) for d in draw.choice(25, 14, replace=False)} for name in queries
    }
    for grades in qrels.values():
        grades["d0"] = 1
    run = {
        query: {name: float(score) for name, score in zip(documents, row, strict=True)}
        for query, row in zip(queries, scores, strict=True)
    }
    each = pytrec_eval.RelevanceEvaluator(qrels, {"ndcg_cut.10"}).evaluate(run)
    standard = [each[query]["ndcg_cut_10"] for query in queries]
    # Documents that are the axes: a product is one of the scores.
    axes = list(np.eye(60, dtype=np.float32))
    every, judged = search(list(scores), axes, rankings(queries, documents, qrels), 10)
    assert ndcg_at_10(queries, documents, every, qrels) == pytest.approx(standard, abs=1e-6)
    overstated = study_ndcg_at_10(queries, documents, judged, qrels)
    assert overstated == pytest.approx(study_ndcg(scores, documents, list(qrels.values())), abs=1e-6)
    assert np.mean(overstated) > np.mean(standard) + 0.01
