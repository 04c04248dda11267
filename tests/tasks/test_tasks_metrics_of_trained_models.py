"""On the predictions of models trained for some steps, the standard metrics equal reference implementations, and the study's
equal a plain transcription of how they are described (arXiv 2507.00994, its released evaluation)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import pytrec_eval
import scipy.stats
import seqeval.metrics
import sklearn.metrics
from test_tasks_metrics import official_f1, official_normalise, official_v2

from mlmclm.finetuning.cell import Cell
from mlmclm.finetuning.protocol import Protocol
from mlmclm.finetuning.run import run_cell
from mlmclm.models.folder import load_tokenizer, weights_hash
from mlmclm.tasks.declared_tasks import get_task
from mlmclm.tasks.families.question_answering import QUESTION, passage_windows
from mlmclm.tasks.families.token_classification import TaggingTask
from mlmclm.tasks.ndcg import ndcg_at_10, rankings, study_ndcg_at_10
from mlmclm.tasks.prepare_task import prepare_task
from mlmclm.tasks.prepared_task import Examples, PreparedTask
from mlmclm.tasks.search import search
from small_models import write_place

STEPS = {"sst2": 20, "stsb": 60, "conll2003": 40, "squad_4k": 150, "squad_v2": 150, "reqa_squad": 30}
Row = np.ndarray[Any, Any]


@dataclass
class Trained:
    """A cell's result, its family, and what the family predicted for the test split and made of it for each example."""

    scores: dict[str, float]
    family: PreparedTask
    predictions: list[Row]
    examples: Examples
    votes: list[tuple[Row, Row, Row]]
    """Token classification: logits of a sentence's tokens, the word of each, the tags of its words; all splits."""
    place: Path
    protocol: Protocol


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Trains a small model on a task, once a task."""
    place, cache = tmp_path_factory.mktemp("metrics"), {}
    write_place(place)

    def train(task: str) -> Trained:
        if task in cache:
            return cache[task]
        protocol = Protocol(
            max_steps=STEPS[task], max_length=32, stride=8, batch_size=16, weight_decay=0.0, head_dropout=0.0
        )
        prepared = prepare_task(task, place / "model", protocol, place / "store", place / "data")
        cell = Cell("m", place / "model", weights_hash(place / "model"), task, prepared.task_data, protocol, 5e-3, 0)
        seen: dict[str, Any] = {}
        votes: list[tuple[Row, Row, Row]] = []
        kind = type(prepared)
        with pytest.MonkeyPatch.context() as patch:
            examples, vote = kind.examples, TaggingTask._vote

            def watched(self: PreparedTask, split: str, predictions: Any) -> Examples:
                seen[split] = (self, list(predictions), found := examples(self, split, predictions))
                return found

            def watched_vote(self: Any, logits: Row, words: Row, count: int) -> Row:
                votes.append((logits, words, found := vote(self, logits, words, count)))
                return found

            patch.setattr(kind, "examples", watched)
            patch.setattr(TaggingTask, "_vote", watched_vote)
            result = run_cell(cell, store=place / "store", data_root=place / "data")
        cache[task] = Trained(result["scores"]["test"], *seen["test"], votes, place, protocol)
        return cache[task]

    yield train


def raw(found: Trained, folder: str, split: str) -> list[dict[str, Any]]:
    return list(pq.read_table(found.place / "data" / folder / f"{split}.parquet").to_pylist())


def test_accuracy_f1_and_matthews_are_scikit_learns(trained: Any) -> None:
    found = trained("sst2")
    labels = [row["label"] for row in raw(found, "sst2", "validation")]
    predicted = [int(np.argmax(row)) for row in found.predictions]
    assert 0.5 < found.scores["accuracy"] == sklearn.metrics.accuracy_score(labels, predicted)
    assert found.scores["f1"] == pytest.approx(sklearn.metrics.f1_score(labels, predicted))
    assert found.scores["f1_macro"] == pytest.approx(sklearn.metrics.f1_score(labels, predicted, average="macro"))
    assert found.scores["matthews"] == pytest.approx(sklearn.metrics.matthews_corrcoef(labels, predicted))
    assert found.examples["gold"].tolist() == labels
    assert found.examples["prediction"].tolist() == predicted


def test_correlations_are_scipys(trained: Any) -> None:
    found = trained("stsb")
    labels = [row["label"] for row in raw(found, "stsb", "validation")]
    predicted = [float(row.item()) for row in found.predictions]
    assert found.scores["spearman"] == pytest.approx(scipy.stats.spearmanr(labels, predicted).statistic)
    assert found.scores["pearson"] == pytest.approx(np.corrcoef(labels, predicted)[0, 1])
    assert found.scores["spearman"] > 0.3
    assert found.examples["gold"].tolist() == labels
    assert found.examples["prediction"].tolist() == predicted


def entities(tags: list[str]) -> set[tuple[str, int, int]]:
    """(type, first word, last word) of a BIO sequence, as CoNLL's: an I of another type, or behind O, begins one too."""
    spans: list[list[Any]] = []
    for place, tag in enumerate(tags):
        kind = tag[2:]
        if tag == "O":
            continue
        goes_on = tag[0] == "I" and place > 0 and tags[place - 1] != "O" and tags[place - 1][2:] == kind
        if goes_on:
            spans[-1][2] = place
        else:
            spans.append([kind, place, place])
    return {(kind, first, last) for kind, first, last in spans}


def tags_of(found: Trained) -> tuple[list[list[str]], list[list[str]]]:
    names = get_task("conll2003").label_names or ()
    true = [[names[tag] for tag in row["ner_tags"]] for row in raw(found, "conll2003", "test")]
    return true, [[names[int(tag)] for tag in row] for row in found.predictions]


def test_entity_f1_is_seqevals_and_counts_whole_entities(trained: Any) -> None:
    found = trained("conll2003")
    true, predicted = tags_of(found)
    assert found.scores["f1"] == pytest.approx(seqeval.metrics.f1_score(true, predicted))
    wanted, called = (
        {(row, *entity) for row, tags in enumerate(side) for entity in entities(tags)} for side in (true, predicted)
    )
    assert found.scores["precision"] == pytest.approx(len(wanted & called) / len(called))
    assert found.scores["recall"] == pytest.approx(len(wanted & called) / len(wanted))
    assert 0.05 < found.scores["f1"] < 1
    for name, kept in (("gold", wanted), ("predicted", called), ("correct", wanted & called)):
        rows = Counter(row for row, *_ in kept)
        assert found.examples[f"entities_{name}"].tolist() == [rows[row] for row in range(len(true))]
    right = [sum(map(str.__eq__, *pair)) for pair in zip(true, predicted, strict=True)]
    assert found.examples["words_correct"].tolist() == right
    assert found.scores["accuracy"] == seqeval.metrics.accuracy_score(true, predicted)


def test_the_study_s_f1_of_words_is_macro_averaged_over_the_tags_of_each_sentence(trained: Any) -> None:
    found = trained("conll2003")
    true, predicted = tags_of(found)
    sentences = []
    for gold, given in zip(true, predicted, strict=True):
        per_tag = []
        for tag in {*gold, *given}:  # O included
            right = sum(a == b == tag for a, b in zip(gold, given, strict=True))
            precision = right / given.count(tag) if tag in given else 0.0
            recall = right / gold.count(tag) if tag in gold else 0.0
            per_tag.append(2 * precision * recall / (precision + recall) if right else 0.0)
        sentences.append(sum(per_tag) / len(per_tag))
        assert sentences[-1] == pytest.approx(sklearn.metrics.f1_score(gold, given, average="macro", zero_division=0.0))
    assert found.examples["study.f1"] == pytest.approx(sentences)
    assert found.scores["study.f1"] == pytest.approx(sum(sentences) / len(sentences))
    assert abs(found.scores["study.f1"] - found.scores["f1"]) > 1e-3
    assert len({len(set(gold)) for gold in true}) > 1


def test_a_word_has_the_tag_that_most_of_its_sub_tokens_have(trained: Any) -> None:
    found = trained("conll2003")
    contested = 0
    for logits, words, voted in found.votes:
        for word, tag in enumerate(voted):
            own = Counter(int(np.argmax(row)) for row, owner in zip(logits, words, strict=True) if owner == word)
            contested += len(own) > 1
            assert not own or own[int(tag)] == max(own.values())
    assert contested, "in no word did the sub-tokens disagree: train less"


def passages(
    found: Trained, task: str
) -> Iterator[tuple[dict[str, Any], list[tuple[int, int]], list[tuple[Row, int]]]]:
    """Of each question the row, the characters of its passage's tokens, and of each window (prediction, first token)."""
    tokenizer = load_tokenizer(found.place / "model")
    left = iter(found.predictions)
    for row in raw(found, task, "validation"):
        question = tokenizer(QUESTION.format(question=row["question"]), add_special_tokens=False)["input_ids"]
        encoded = tokenizer(" " + row["context"], add_special_tokens=False, return_offsets_mapping=True)
        characters = [(start - 1, end - 1) for start, end in encoded["offset_mapping"]]  # the space before it
        room = found.protocol.max_length - len(question[: found.protocol.max_length // 2]) - 1
        cut = passage_windows(len(characters), room, found.protocol.stride)
        yield row, characters, [(next(left), begin) for begin, _ in cut]
    assert next(left, None) is None


def best_span(parts: list[tuple[Row, int]], *, unanswerable: bool) -> set[int]:
    """Tokens of the passage that are answered."""
    row, begin = max(parts, key=lambda part: part[0][0])  # of equal ones the first
    if unanswerable and min(other[3] for other, _ in parts) > row[0]:
        return set()
    return set(range(begin + int(row[1]), begin + int(row[2]) + 1))


@pytest.mark.parametrize("task", ["squad_4k", "squad_v2"])
def test_squad_scores_are_the_official_scripts_and_the_study_s_are_over_token_positions(
    trained: Any, task: str
) -> None:
    found = trained(task)
    texts, references, study, most_windows = {}, {}, [], 0
    for number, (row, characters, parts) in enumerate(passages(found, task)):
        most_windows = max(most_windows, len(parts))
        given = best_span(parts, unanswerable=task == "squad_v2")
        gold: set[int] = set()
        if row["answers"]["text"]:  # the first answer only
            start = row["answers"]["answer_start"][0]
            end = start + len(row["answers"]["text"][0])
            gold = {token for token, (a, b) in enumerate(characters) if a < end and b > start}
        common = len(gold & given)
        precision, recall = common / max(1, len(given)), common / max(1, len(gold))
        both_empty = float(not gold and not given)
        study.append(2 * precision * recall / (precision + recall) if common else both_empty)
        name = str(number)
        spans = [characters[token] for token in sorted(given)]
        texts[name] = row["context"][max(0, spans[0][0]) : spans[-1][1]].strip() if spans else ""
        references[name] = list(row["answers"]["text"])
    assert most_windows > 1
    assert found.examples["study.f1"] == pytest.approx(study)
    assert found.scores["study.f1"] == pytest.approx(sum(study) / len(study))
    if task == "squad_v2":
        expected = official_v2(texts, references)
        assert {name: found.scores[name] for name in expected} == pytest.approx(expected)
        for number, name in enumerate(texts):
            alone = official_v2({name: texts[name]}, {name: references[name]})
            kept = {score: found.examples[score][number] for score in expected}
            assert {score: value for score, value in kept.items() if not np.isnan(value)} == pytest.approx(alone)
    else:
        f1 = [max(official_f1(texts[name], one) for one in references[name]) for name in texts]
        exact = [
            max(official_normalise(texts[name]) == official_normalise(one) for one in references[name])
            for name in texts
        ]
        assert found.examples["f1"] == pytest.approx(f1)
        assert found.examples["exact_match"].tolist() == exact
        assert found.scores["f1"] == pytest.approx(sum(f1) / len(f1))
        assert found.scores["exact_match"] == pytest.approx(sum(exact) / len(exact))
    assert 0.05 < found.scores["study.f1"] < 1


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


def test_ndcg_is_pytrec_evals_and_the_study_s_ideal_is_of_what_was_retrieved(trained: Any) -> None:
    found = trained("reqa_squad")
    queries = [row["_id"] for row in raw(found, "reqa_squad", "queries")]
    documents = [row["_id"] for row in raw(found, "reqa_squad", "corpus")]
    qrels: dict[str, dict[str, int]] = {query: {} for query in queries}
    for row in raw(found, "reqa_squad", "qrels"):
        qrels[row["query-id"]][row["corpus-id"]] = row["score"]
    # float32, as the engine searches: documents of equal texts must tie here too
    vectors = np.stack(found.predictions)
    scores = vectors[: len(queries)] @ vectors[len(queries) :].T

    def standard(qrels: dict[str, dict[str, int]]) -> list[float]:
        run = {
            query: {name: float(score) for name, score in zip(documents, row, strict=True)}
            for query, row in zip(queries, scores, strict=True)
        }
        each = pytrec_eval.RelevanceEvaluator(qrels, {"ndcg_cut.10"}).evaluate(run)
        return [each[query]["ndcg_cut_10"] for query in queries]

    study = study_ndcg(scores, documents, list(qrels.values()))
    assert found.examples["ndcg@10"] == pytest.approx(standard(qrels), abs=1e-6)
    assert found.examples["study.ndcg@10"] == pytest.approx(study, abs=1e-6)
    assert 0.1 < found.scores["ndcg@10"] == pytest.approx(np.mean(standard(qrels)), abs=1e-6)
    assert found.scores["study.ndcg@10"] == pytest.approx(np.mean(study), abs=1e-6)
    # The same predictions judged with grades, several documents a query, and documents that nobody judged.
    generator = np.random.default_rng(0)
    graded = {
        query: {documents[place]: int(generator.integers(0, 3)) for place in generator.choice(25, 14, replace=False)}
        for query in queries
    }
    for grades in graded.values():
        grades[documents[0]] = 1
    asked, searched = found.predictions[: len(queries)], found.predictions[len(queries) :]
    every, judged = search(asked, searched, rankings(queries, documents, graded), 10)
    assert ndcg_at_10(queries, documents, every, graded) == pytest.approx(standard(graded), abs=1e-6)
    overstated = study_ndcg_at_10(queries, documents, judged, graded)
    assert overstated == pytest.approx(study_ndcg(scores, documents, list(graded.values())), abs=1e-6)
    assert np.mean(overstated) > np.mean(standard(graded)) + 0.01
