"""Classes are those that are declared or in the data, ids and labels are the characters in the file, and numbers are declared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import f1_score

from mlmclm.errors import UserError
from mlmclm.tasks.columns import TaskData
from mlmclm.tasks.declaration import Task
from mlmclm.tasks.families.retrieval import RetrievalSet
from mlmclm.tasks.families.sequence_classification import SequenceClassification
from mlmclm.tasks.load import load_task


def load(folder: Path, family: str = "sequence-classification", **changes: Any) -> TaskData:
    metric = {"sequence-classification": "f1_macro", "sequence-regression": "pearson", "retrieval": "ndcg@10"}
    declaration = {
        "name": "own", "family": family, "title": "Own", "source": "local", "folder": folder.name, "metric": metric.get(family, "accuracy"),
        "splits": {"train": "train", "validation_fraction": 0.25, "test": "test"}, "licence": "-", "citation": "-", **changes,
    }  # fmt: skip
    return load_task(Task.model_validate(declaration), store=Path("unused"), data_root=folder.parent)


def write(folder: Path, suffix: str, **columns: list[Any]) -> pandas.DataFrame:
    """Write the same rows as the training and the test split; return them."""
    folder.mkdir(exist_ok=True)
    frame = pandas.DataFrame({"text": [f"text {n}" for n in range(len(next(iter(columns.values()))))], **columns})
    for split in ("train", "test"):
        file = folder / f"{split}.{suffix}"
        if suffix in ("csv", "tsv"):
            frame.to_csv(file, index=False, sep="," if suffix == "csv" else "\t")
        elif suffix == "parquet":
            frame.to_parquet(file)
        else:
            frame.to_json(file, orient="records", lines=suffix == "jsonl")
    return frame


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize(
    ("labels", "names"),
    [
        ([1, 2, 3, 4], ["1", "2", "3", "4"]),
        ([4, 0], ["0", "4"]),
        ([-1, 1, 0], ["-1", "0", "1"]),
        (list(range(12)), [str(number) for number in range(12)]),
        ([True, False], ["False", "True"]),
        (["007", "7", "070"], ["007", "070", "7"]),
        (["NA", "nan", "null", "None", "yes"], ["NA", "None", "nan", "null", "yes"]),
        (["2020-01-02", "2021-01-02"], ["2020-01-02", "2021-01-02"]),
        (["9" * 23, "9" * 22 + "8"], ["9" * 22 + "8", "9" * 23]),
    ],
)
def test_the_classes_are_those_in_the_data_and_a_perfect_model_has_scikit_learn_s_f1(
    tmp_path: Path, suffix: str, labels: list[Any], names: list[str]
) -> None:
    frame = write(tmp_path / "own", suffix, label=labels * 4)
    data = load(tmp_path / "own")
    if suffix not in ("csv", "tsv") and isinstance(labels[0], bool):
        names = ["false", "true"]  # as JSON writes them
    assert list(data.label_names) == names
    gold = data.test["label"].to_numpy()
    assert [names[number].lower() for number in gold] == [str(label).lower() for label in frame["label"]]
    perfect = {"gold": gold, "prediction": gold, "correct": np.ones(len(gold), bool)}
    macro = SequenceClassification.scores(perfect, len(data.label_names))["f1_macro"]
    assert macro == 1.0 == f1_score(frame["label"].astype(str), frame["label"].astype(str), average="macro")
    wrong = np.roll(gold, 1)
    found = SequenceClassification.scores(perfect | {"prediction": wrong, "correct": gold == wrong}, len(names))
    assert found["f1_macro"] == pytest.approx(f1_score(gold, wrong, average="macro", zero_division=0))


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_declared_names_are_matched_by_their_characters_before_numbers_are_places(tmp_path: Path, suffix: str) -> None:
    frame = write(tmp_path / "own", suffix, label=[0, 1, 1] * 4)
    swapped = load(tmp_path / "own", label_names=["1", "0"])
    assert [swapped.label_names[number] for number in swapped.test["label"].to_pylist()] == frame["label"].astype(
        str
    ).tolist()
    placed = load(tmp_path / "own", label_names=["bad", "good"])
    assert placed.test["label"].to_pylist() == frame["label"].tolist()
    with pytest.raises(UserError, match=r"unknown label '0'.* Allowed: 1, 2, 3"):
        load(tmp_path / "own", label_names=["1", "2", "3"])
    with pytest.raises(UserError, match=r"label 1 is outside 0\.\.0"):
        load(tmp_path / "own", label_names=["bad"])


def test_each_file_s_own_schema_says_what_its_numbers_are_called(tmp_path: Path) -> None:
    """`DatasetDict.class_encode_column` numbers each split by itself, and so differently where a split lacks a label."""
    labels = {"train": ["cold", "mild", "warm"] * 8, "test": ["warm", "mild"] * 4}
    parts = {
        split: datasets.Dataset.from_dict({"text": [f"{split} {n}" for n in range(len(own))], "label": own})
        for split, own in labels.items()
    }
    encoded = datasets.DatasetDict(parts).class_encode_column("label")
    assert encoded["train"].features["label"].names != encoded["test"].features["label"].names
    (tmp_path / "own").mkdir()
    for split, own in encoded.items():
        own.to_parquet(tmp_path / "own" / f"{split}.parquet")
    data = load(tmp_path / "own")
    assert [data.label_names[number] for number in data.test["label"].to_pylist()] == labels["test"]
    # The parts of one split may differ, too.
    for number, split in enumerate(("train", "test")):
        encoded[split].to_parquet(tmp_path / "own" / f"train-0000{number}-of-00002.parquet")
    (tmp_path / "own" / "train.parquet").unlink()
    both = load(tmp_path / "own")
    assert both.label_names == ("cold", "mild", "warm")
    rows = sorted(zip(both.train["text"].to_pylist(), both.train["label"].to_pylist(), strict=True))
    known = {row["text"]: row["label"] for split, own in parts.items() for row in own}
    assert len(rows) == 24 and all(both.label_names[label] == known[text] for text, label in rows)
    encoded["train"].to_parquet(tmp_path / "own" / "train.parquet")
    with pytest.raises(UserError, match=r"unknown label 'mild'\..*Allowed: cold, warm\. The file's own names are"):
        load(tmp_path / "own", label_names=["cold", "warm"])


def test_a_list_of_one_label_is_that_label_and_several_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "own", "jsonl", label=[["a"], ["b"]] * 8)
    assert load(tmp_path / "own").label_names == ("a", "b")
    write(tmp_path / "own", "jsonl", label=[["a"], ["b", "a"]] * 8)
    with pytest.raises(UserError, match=r"row 1: it has 2 labels, \['b', 'a'\]; one label a row is expected"):
        load(tmp_path / "own")
    write(tmp_path / "own", "jsonl", label=["a", ["b"], {"c": 1}] * 8)
    with pytest.raises(UserError, match="are not numbers or names"):
        load(tmp_path / "own")


@pytest.mark.parametrize("suffix", ["tsv", "json"])
def test_only_a_declared_number_is_a_number(tmp_path: Path, suffix: str) -> None:
    write(tmp_path / "own", suffix, label=["0.5", "1e1", "+2", "007"] * 4)
    data = load(tmp_path / "own", "sequence-regression")
    assert data.test["label"].to_pylist() == [0.5, 10.0, 2.0, 7.0] * 4
    for wrong in ("NA", "1,5", "0x1F"):
        write(tmp_path / "own", suffix, label=["0.5", wrong] * 8)
        with pytest.raises(UserError, match=rf"row 1: the column 'label' holds '{wrong}', not a number"):
            load(tmp_path / "own", "sequence-regression")
    write(tmp_path / "own", suffix, label=["0.5", "nan"] * 8)
    with pytest.raises(UserError, match=r"row \d: the label is nan, not a finite number"):
        load(tmp_path / "own", "sequence-regression")


def test_spaces_around_labels_ids_and_numbers_of_a_csv_file_do_not_count(tmp_path: Path) -> None:
    write(tmp_path / "own", "csv", label=[" 0.5", "1 ", "2"] * 8)
    assert load(tmp_path / "own", "sequence-regression").test["label"].to_pylist() == [0.5, 1.0, 2.0] * 8
    assert load(tmp_path / "own").label_names == ("0.5", "1", "2")
    write(tmp_path / "own", "csv", label=["0.5", " ", "2"] * 8)
    with pytest.raises(UserError, match=r"row \d+: label is null"):
        load(tmp_path / "own", "sequence-regression")
    with pytest.raises(UserError, match="row 1: the label is empty"):
        load(tmp_path / "own")


@pytest.mark.parametrize(("tables", "judgements"), [("jsonl", "tsv"), ("csv", "jsonl"), ("parquet", "csv")])
def test_ids_are_the_characters_in_the_files(tmp_path: Path, tables: str, judgements: str) -> None:
    ids = ["1", "01", "001", "2020-01-02", "12:30", "9" * 23, "9" * 22 + "8", "1e5", "NA", "null", "true", "1.0", "d7"]
    folder = tmp_path / "own"
    folder.mkdir()
    texts = pandas.DataFrame({"_id": ids, "text": [f"text {name}" for name in ids]})
    qrels = pandas.DataFrame({"query-id": ids, "corpus-id": ids[::-1], "score": [1] * len(ids)})
    pairs = pandas.DataFrame({"query": ids * 2, "positive": [f"text {name}" for name in ids] * 2})
    for name, frame, suffix in (
        ("queries", texts, tables),
        ("corpus", texts, tables),
        ("qrels", qrels, judgements),
        ("train", pairs, "csv"),
    ):
        if suffix == "jsonl":
            frame.to_json(folder / f"{name}.jsonl", orient="records", lines=True)
        elif suffix == "parquet":
            frame.to_parquet(folder / f"{name}.parquet")
        else:
            frame.to_csv(folder / f"{name}.{suffix}", index=False, sep="," if suffix == "csv" else "\t")
    columns = {"id": "_id", "query_id": "query-id", "corpus_id": "corpus-id"}
    splits = {
        "train": "train",
        "validation_fraction": 0.2,
        "test": {"queries": "queries", "corpus": "corpus", "qrels": "qrels"},
    }
    data = load(folder, "retrieval", columns=columns, splits=splits)
    assert isinstance(data.test, RetrievalSet)
    assert data.test.corpus["id"].to_pylist() == ids
    assert data.test.qrels["query_id"].to_pylist() == ids and data.test.qrels["corpus_id"].to_pylist() == ids[::-1]
    assert set(data.train["query"].to_pylist()) <= set(ids)


def test_a_column_of_several_types_that_a_task_uses_is_refused_and_another_does_not_matter(tmp_path: Path) -> None:
    rows = [{"text": f"text {n}", "label": "ab"[n % 2], "more": [n, "x", [1], {"y": 1}][n % 4]} for n in range(16)]
    folder = tmp_path / "own"
    folder.mkdir()
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert load(folder).test["text"].to_pylist() == [row["text"] for row in rows]
    with pytest.raises(UserError, match="the column 'more' holds lists or objects among other values, not text"):
        load(folder, columns={"text": "more"})


def test_labels_of_floats_and_names_of_a_file_that_carries_none_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "own", "parquet", label=[0, 1] * 8)
    names = {
        b"huggingface": json.dumps(
            {"info": {"features": {"label": {"_type": "ClassLabel", "names": ["no", "yes"]}}}}
        ).encode()
    }
    table = pq.read_table(tmp_path / "own" / "train.parquet").replace_schema_metadata(names)
    pq.write_table(table, tmp_path / "own" / "train.parquet")
    with pytest.raises(UserError, match=r"own, test .*unknown label '0'\. Allowed: no, yes"):
        load(tmp_path / "own")
    assert load(tmp_path / "own", label_names=["no", "yes"]).test["label"].to_pylist() == [0, 1] * 8
    pq.write_table(pa.table({"text": ["a"] * 16, "label": [0.5, 1] * 8}), tmp_path / "own" / "train.parquet")
    with pytest.raises(UserError, match="labels of type double are not numbers or names"):
        load(tmp_path / "own")
