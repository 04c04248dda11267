"""What each example got lies beside a cell's result: it gives the result's scores, and is whole or absent."""

from __future__ import annotations

import dataclasses
import json
import resource
import signal
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import pytrec_eval
import scipy.stats
import seqeval.metrics
import sklearn.metrics

from mlmclm.errors import EnvironmentFault, UserError
from mlmclm.finetuning.cell import Cell, cell_key
from mlmclm.finetuning.protocol import Protocol
from mlmclm.finetuning.run import run_cell
from mlmclm.models.folder import weights_hash
from mlmclm.results.examples import KeptExamples, to_parquet
from mlmclm.sweeps.results_store import ResultsStore
from mlmclm.tasks.declaration import FAMILIES
from mlmclm.tasks.predictions import write_predictions
from mlmclm.tasks.prepare_task import prepare_task
from mlmclm.tasks.prepared_task import objects
from small_models import write_place

STEPS = {"sst2": 20, "stsb": 60, "conll2003": 40, "squad_4k": 100, "squad_v2": 100, "reqa_squad": 30}
Column = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class Kept:
    """A cell as it lies in a store."""

    cell: Cell
    place: Path
    result: dict[str, Any]

    @property
    def results_store(self) -> ResultsStore:
        return ResultsStore(self.place / "store")

    @property
    def examples(self) -> KeptExamples:
        return self.results_store.examples(self.result)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Kept]:
    """Trains a small model on a task and files it as a sweep's worker does, once a task."""
    place, cache = tmp_path_factory.mktemp("examples"), {}
    write_place(place)

    def file(task: str) -> Kept:
        if task not in cache:
            protocol = Protocol(
                max_steps=STEPS[task], max_length=32, stride=8, batch_size=16, weight_decay=0.0, head_dropout=0.0
            )
            prepared = prepare_task(task, place / "model", protocol, place / "store", place / "data")
            cell = Cell(
                "m", place / "model", weights_hash(place / "model"), task, prepared.task_data, protocol, 5e-3, 0
            )
            results_store = ResultsStore(place / "store")
            result, _ = results_store.ensure(cell_key(cell), lambda: compute(cell, place, results_store))
            cache[task] = Kept(cell, place, result)
        return cache[task]

    return file


def compute(cell: Cell, place: Path, results_store: ResultsStore) -> dict[str, Any]:
    return run_cell(cell, store=results_store.store, data_root=place / "data", on_examples=results_store.write_examples)


def of_classes(table: pd.DataFrame) -> dict[str, float]:
    sides = table.gold, table.prediction
    assert (table.correct == (sides[0] == sides[1])).all()
    return {
        "accuracy": table.correct.mean(),
        "f1_macro": sklearn.metrics.f1_score(*sides, average="macro"),
        "f1": sklearn.metrics.f1_score(*sides),
        "matthews": sklearn.metrics.matthews_corrcoef(*sides),
    }


def of_numbers(table: pd.DataFrame) -> dict[str, float]:
    return {
        "spearman": scipy.stats.spearmanr(table.gold, table.prediction).statistic,
        "pearson": np.corrcoef(table.gold, table.prediction)[0, 1],
    }


def of_tags(table: pd.DataFrame) -> dict[str, float]:
    total = table.sum()
    return {
        "f1": 2 * total.entities_correct / (total.entities_gold + total.entities_predicted),
        "precision": total.entities_correct / total.entities_predicted,
        "recall": total.entities_correct / total.entities_gold,
        "accuracy": total.words_correct / total.words,
        "study.f1": table["study.f1"].mean(),
    }


def of_means(table: pd.DataFrame) -> dict[str, float]:
    return dict(table.mean())  # over the rows that have a value


@pytest.mark.parametrize(("task", "scores_of", "rows"), [
    ("sst2", of_classes, 60), ("stsb", of_numbers, 60), ("conll2003", of_tags, 50),
    ("squad_4k", of_means, 40), ("squad_v2", of_means, 40), ("reqa_squad", of_means, 40),
])  # fmt: skip
def test_the_rows_give_every_score_of_the_result(kept: Any, task: str, scores_of: Any, rows: int) -> None:
    found = kept(task)
    table = pd.read_parquet(found.results_store.examples_path(found.result["key"])).select_dtypes(["number", "bool"])
    assert len(table) == rows
    assert found.result["scores"]["test"] == pytest.approx(scores_of(table), abs=1e-12)
    assert 0.05 < found.result["scores"]["test"][found.result["metric"]] < 1, "all right or all wrong tests little"


def predictions(kept: Kept, folder: Path) -> list[dict[str, Any]]:
    write_predictions(kept.examples, folder / "predictions.jsonl")
    return [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]


def raw(kept: Kept, file: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(kept.place / "data" / f"{file}.parquet").to_pylist()
    return rows


def test_other_evaluators_give_the_scores_of_the_exported_predictions(kept: Any, tmp_path: Path) -> None:
    """Each on the data set's own file, by row or id."""
    scores = {task: kept(task).result["scores"]["test"] for task in STEPS}

    rows = predictions(kept("sst2"), tmp_path)
    gold = [("negative", "positive")[row["label"]] for row in raw(kept("sst2"), "sst2/validation")]
    assert [row["gold"] for row in rows] == gold
    found = [row["prediction"] for row in rows]
    assert sklearn.metrics.accuracy_score(gold, found) == pytest.approx(scores["sst2"]["accuracy"])

    rows, gold = predictions(kept("stsb"), tmp_path), [row["label"] for row in raw(kept("stsb"), "stsb/validation")]
    spearman = scipy.stats.spearmanr(gold, [row["prediction"] for row in rows]).statistic
    assert spearman == pytest.approx(scores["stsb"]["spearman"])

    rows, names = predictions(kept("conll2003"), tmp_path), kept("conll2003").examples.label_names
    gold = [[names[tag] for tag in row["ner_tags"]] for row in raw(kept("conll2003"), "conll2003/test")]
    assert seqeval.metrics.f1_score(gold, [row["prediction"] for row in rows]) == pytest.approx(
        scores["conll2003"]["f1"]
    )

    for task, file in (("squad_4k", "squad_4k/validation"), ("squad_v2", "squad_v2/validation")):
        answers = {row["id"]: row["answers"]["text"] for row in raw(kept(task), file)}
        found = {row["id"]: row["prediction"] for row in predictions(kept(task), tmp_path)}
        assert found.keys() == answers.keys()
        exact = [squad_words(found[key]) in map(squad_words, answers[key] or [""]) for key in answers]
        assert np.mean(exact) == pytest.approx(scores[task]["exact_match"])

    rows = predictions(kept("reqa_squad"), tmp_path)
    run = {row["id"]: dict(zip(row["documents"], row["scores"], strict=True)) for row in rows}
    qrels: dict[str, dict[str, int]] = {}
    for row in raw(kept("reqa_squad"), "reqa_squad/qrels"):
        qrels.setdefault(row["query-id"], {})[row["corpus-id"]] = int(row["score"])
    each = pytrec_eval.RelevanceEvaluator(qrels, {"ndcg_cut.10"}).evaluate(run)
    assert np.mean([value["ndcg_cut_10"] for value in each.values()]) == pytest.approx(scores["reqa_squad"]["ndcg@10"])


def squad_words(text: str) -> list[str]:
    """SQuAD's normalisation, written anew."""
    kept = "".join(
        " " if character.isspace() else character for character in text.lower() if character not in string.punctuation
    )
    return [word for word in kept.split() if word not in ("a", "an", "the")]


@pytest.mark.parametrize("task", STEPS)
def test_scores_of_weighted_rows_are_those_of_rows_that_are_there_so_often(kept: Any, task: str) -> None:
    """The vectorised scores of resampling against the families' own, by scikit-learn and scipy."""
    found = kept(task)
    examples = found.examples
    prepared = prepare_task(
        task, found.place / "model", found.cell.protocol, found.place / "store", found.place / "data"
    )
    chance = np.random.default_rng(0)
    weights = np.stack([np.ones(examples.rows, int), *chance.integers(0, 4, (20, examples.rows))])
    known = prepared.kind.measures(examples.columns, len(examples.label_names))
    values = {name: value(weights.astype(float)) for name, value in known.items()}
    for number, own in enumerate(weights):
        repeated = {name: np.repeat(column, own) for name, column in examples.columns.items()}
        assert {name: value[number] for name, value in values.items()} == pytest.approx(prepared.scores(repeated))
    assert {name: value[0] for name, value in values.items()} == pytest.approx(found.result["scores"]["test"])


def test_the_same_cell_keeps_the_same_bytes_and_its_key_and_result_are_those_of_a_cell_without_examples(
    kept: Any, tmp_path: Path
) -> None:
    found = kept("conll2003")
    contents: list[bytes] = []
    again = run_cell(
        found.cell,
        store=found.place / "store",
        data_root=found.place / "data",
        on_examples=lambda result, content: contents.append(content),
    )
    assert contents == [found.results_store.examples_path(found.result["key"]).read_bytes()]
    plain = run_cell(found.cell, store=found.place / "store", data_root=found.place / "data")
    assert {**again, "cost": None} == {**plain, "cost": None} == {**found.result, "cost": None}


def test_a_result_whose_examples_are_missing_stays_and_says_what_to_do(kept: Any, tmp_path: Path) -> None:
    found = kept("sst2")
    results_store = ResultsStore(tmp_path)
    results_store.write(found.result)
    with pytest.raises(UserError, match=r"has no examples beside it: .*parquet is missing") as caught:
        results_store.examples(found.result)
    assert f"Delete {results_store.path(found.result['key'])} and run the command that made it again" in str(
        caught.value
    )
    assert results_store.ensure(found.result["key"], lambda: pytest.fail("computed again")) == (found.result, False)
    assert not results_store.examples_path(found.result["key"]).exists()


@pytest.mark.parametrize("damage", ["cut short", "no Parquet", "another table"])
def test_a_damaged_file_is_named_with_what_to_do(kept: Any, tmp_path: Path, damage: str) -> None:
    found, other = kept("sst2"), kept("conll2003")
    results_store = ResultsStore(tmp_path)
    whole = found.results_store.examples_path(found.result["key"]).read_bytes()
    plain = tmp_path / "plain.parquet"
    pd.DataFrame({"correct": [True]}).to_parquet(plain)
    path = results_store.examples_path(found.result["key"])
    path.parent.mkdir(parents=True)
    damaged = {"cut short": whole[:-20], "no Parquet": b"\xff\x00" * 100, "another table": plain.read_bytes()}
    path.write_bytes(damaged[damage])
    with pytest.raises(UserError, match="damaged file of examples") as caught:
        results_store.examples(found.result)
    assert str(results_store.examples_path(found.result["key"])) in str(caught.value)
    assert f"Delete {results_store.path(found.result['key'])}" in str(caught.value)
    path.write_bytes(other.results_store.examples_path(other.result["key"]).read_bytes())
    with pytest.raises(UserError, match="those of another result"):
        results_store.examples(found.result)


def test_a_bit_anywhere_in_the_examples_is_seen(kept: Any, tmp_path: Path) -> None:
    found, results_store = kept("sst2"), ResultsStore(tmp_path)
    path = results_store.examples_path(found.result["key"])
    whole = found.results_store.examples_path(found.result["key"]).read_bytes()
    results_store.write_examples(found.result, whole)
    results_store.write(found.result)
    for place in range(0, len(whole), 97):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(UserError, match="damaged file of examples"):
            results_store.examples(found.result)


def test_examples_of_other_scores_than_the_result_s_are_refused(kept: Any, tmp_path: Path) -> None:
    """Two machines that compute the same cell at once and don't agree."""
    found, results_store = kept("sst2"), ResultsStore(tmp_path)
    scores = {**found.result["scores"], "test": {**found.result["scores"]["test"], "accuracy": 0.123}}
    results_store.write_examples(found.result, found.results_store.examples_path(found.result["key"]).read_bytes())
    results_store.write({**found.result, "scores": scores})
    with pytest.raises(UserError, match="those of another result"):
        results_store.examples({**found.result, "scores": scores})
    results_store.write_examples(found.result, b"a later worker's")
    results_store.write(found.result)
    assert results_store.examples(found.result).rows == 60, "what lies beside a result stays"


def test_a_diverged_cell_keeps_no_examples(kept: Any, tmp_path: Path) -> None:
    found, results_store = kept("sst2"), ResultsStore(tmp_path)
    protocol = found.cell.protocol.model_copy(update={"clip_norm": None})
    cell = dataclasses.replace(found.cell, protocol=protocol, learning_rate=1e38)
    result, _ = results_store.ensure(cell_key(cell), lambda: compute(cell, found.place, results_store))
    assert result["status"] == "diverged"
    assert not results_store.examples_path(cell_key(cell)).exists()
    with pytest.raises(UserError, match="diverged: it has no predictions"):
        results_store.examples(result)


@pytest.mark.parametrize("when", ["at the examples", "behind the examples"])
def test_a_crash_leaves_no_result_without_examples_and_the_next_run_makes_both(
    kept: Any, tmp_path: Path, when: str
) -> None:
    found, results_store = kept("sst2"), ResultsStore(tmp_path)
    key = found.result["key"]
    if when == "at the examples":
        # A file size limit fails the write the way a full disk does, half way through.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        content = found.results_store.examples_path(key).read_bytes()
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        try:
            results_store.write_examples(found.result, content)
            with pytest.raises(EnvironmentFault):
                results_store.write(found.result)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    else:
        results_store.path(key).parent.mkdir(parents=True)
        results_store.examples_path(key).write_bytes(b"of a run that was not filed")
    assert results_store.missing([found.cell]) == [found.cell]
    result, computed = results_store.ensure(key, lambda: compute(found.cell, found.place, results_store))
    assert computed
    assert results_store.examples(result).rows == 60


LARGEST = {"sequence-classification": 5, "sequence-regression": 60, "token-classification": 300,
           "question-answering": 300, "retrieval": 1100}  # fmt: skip
"""KiB of 10,000 examples."""


def ten_thousand(family: str) -> dict[str, Column]:
    """Columns of a family's examples as large as real ones."""
    chance = np.random.default_rng(0)
    n = 10_000
    shares = np.unique([a / b for b in range(1, 40) for a in range(b + 1)])  # F1 and NDCG take few values
    gold = chance.integers(0, 2, n)
    right = chance.random(n) < 0.9
    match family:
        case "sequence-classification":
            return {"gold": gold, "prediction": gold ^ ~right, "correct": right}
        case "sequence-regression":
            return {
                "gold": chance.integers(0, 26, n) / 5, "prediction": chance.normal(2.5, 1, n).astype(np.float32),
            }  # fmt: skip
        case "token-classification":
            rates = [0.84, *[0.02] * 8]
            return {
                **{name: chance.integers(0, 30, n) for name in ("words", "words_correct")},
                **{f"entities_{name}": chance.integers(0, 4, n) for name in ("gold", "predicted", "correct")},
                "study.f1": chance.choice(shares, n),
                **{f"{side}_tags": objects(list(chance.choice(9, (n, 20), p=rates).astype(np.uint8)))
                   for side in ("gold", "predicted")},
            }  # fmt: skip
        case "question-answering":
            words = [[f"word{number}" for number in row] for row in chance.integers(0, 2000, (n, 4))]
            lengths = chance.integers(1, 5, n)
            return {
                "f1": np.where(right, 1.0, chance.choice(shares, n)), "exact_match": right.astype(float),
                "study.f1": np.where(right, 1.0, chance.choice(shares, n)),
                "id": objects([f"{number:08x}" for number in chance.integers(0, 2**32, n)]),
                "answer": objects([" ".join(row[:length]) for row, length in zip(words, lengths, strict=True)]),
            }  # fmt: skip
        case "retrieval":
            return {
                **{name: chance.choice(shares, n) for name in ("ndcg@10", "study.ndcg@10")},
                "id": objects([str(number) for number in range(n)]),
                "documents": objects([list(map(str, row)) for row in chance.integers(0, 100_000, (n, 10))]),
                "document_scores": objects(list(chance.random((n, 10)).astype(np.float32))),
            }  # fmt: skip
    raise AssertionError(f"no columns of {family}")


@pytest.mark.parametrize("family", [*FAMILIES])
def test_ten_thousand_examples_are_no_larger_than_documented(family: str) -> None:
    result = {"key": "0" * 64, "scores": {"test": {}}}
    assert len(to_parquet(result, ten_thousand(family), ())) < LARGEST[family] * 1024
