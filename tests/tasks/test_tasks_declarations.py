"""Every declaration reads the columns of the data set that it names, and pins what it can.

The Hub cannot be reached from tests: its sets are tiny Parquet files of their columns and types, with invented rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest

from mlmclm.errors import UserError
from mlmclm.tasks.columns import TaskData
from mlmclm.tasks.declared_tasks import get_task, task_names
from mlmclm.tasks.families.retrieval import RetrievalSet
from mlmclm.tasks.load import load_task
from small_models import write_entities, write_table

ROWS = 60
ANSWERS = pa.struct([("text", pa.list_(pa.string())), ("answer_start", pa.list_(pa.int32()))])


def load(name: str, root: Path) -> TaskData:
    return load_task(get_task(name), store=Path("unused"), data_root=root)


def texts(*names: str) -> dict[str, Any]:
    return {name: [f"{name} {row} of café" for row in range(ROWS)] for name in names}


def labels(classes: int) -> dict[str, Any]:
    return {"label": pa.array([row % classes for row in range(ROWS)], pa.int64())}


def glue(classes: int, *names: str) -> dict[str, Any]:
    return {**texts(*names), **labels(classes), "idx": pa.array(range(ROWS), pa.int32())}


GLUE: dict[str, tuple[dict[str, Any], str]] = {
    "cola": (glue(2, "sentence"), "validation"),
    "mrpc": (glue(2, "sentence1", "sentence2"), "validation"),
    "qqp": (glue(2, "question1", "question2"), "validation"),
    "mnli": (glue(3, "premise", "hypothesis"), "validation_matched"),
    "mnli_mm": (glue(3, "premise", "hypothesis"), "validation_mismatched"),
    "qnli": (glue(2, "question", "sentence"), "validation"),
    "rte": (glue(2, "sentence1", "sentence2"), "validation"),
    "sst2": (glue(2, "sentence"), "validation"),
}


@pytest.mark.parametrize("name", GLUE)
def test_glue_is_read_with_its_columns_and_official_validation_is_the_test_split(name: str, tmp_path: Path) -> None:
    table, test = GLUE[name]
    task = get_task(name)
    assert task.folder is not None
    write_table(tmp_path / task.folder, "train", table)
    write_table(tmp_path / task.folder, test, {key: values[:10] for key, values in table.items()})
    data = load(name, tmp_path)
    assert (len(data.train), len(data.validation), len(data.test)) == (57, 3, 10)
    assert not set(data.train["text"].to_pylist()) & set(data.validation["text"].to_pylist())
    columns = [column for column in table if column not in ("label", "idx")]
    assert data.test["text"][0].as_py().startswith(columns[0])
    assert data.test["text_pair"][0].as_py() == (f"{columns[1]} 0 of café" if len(columns) == 2 else None)
    assert len(data.label_names) == len(set(table["label"].to_pylist()))
    assert bool(task.pair_template) == (len(columns) == 2)


def test_regression_labels_are_numbers(tmp_path: Path) -> None:
    table = {**texts("sentence1", "sentence2"), "label": pa.array([row % 11 / 2 for row in range(ROWS)], pa.float32())}
    write_table(tmp_path / "stsb", "train", table)
    write_table(tmp_path / "stsb", "validation", table)
    data = load("stsb", tmp_path)
    assert data.test["label"].to_pylist()[:3] == [0.0, 0.5, 1.0]
    assert data.label_names == ()
    changed = {**table, "label": pa.array([row % 11 / 2 + 0.25 for row in range(ROWS)], pa.float32())}
    write_table(tmp_path / "stsb", "validation", changed)
    assert load("stsb", tmp_path).fingerprint != data.fingerprint


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([-1.0] * ROWS, r"every label is -1; .*GLUE's test splits have none"),
        ([0.0, float("nan")] * (ROWS // 2), "row 1: the label is nan, not a finite number"),
        (["good"] * ROWS, "row 0: the column 'label' holds 'good', not a number"),
        ([None, 1.0] * (ROWS // 2), "row 0: label is null"),
    ],
)
def test_a_fault_in_regression_labels_is_named(tmp_path: Path, values: list[Any], message: str) -> None:
    write_table(tmp_path / "stsb", "train", {**texts("sentence1", "sentence2"), "label": values})
    with pytest.raises(UserError, match=f"task stsb, train .*{message}"):
        load("stsb", tmp_path)


def test_f1_of_one_class_needs_two(tmp_path: Path) -> None:
    task = get_task("mrpc").model_copy(update={"label_names": None})
    for split in ("train", "validation"):
        write_table(tmp_path / "mrpc", split, glue(3, "sentence1", "sentence2"))
    with pytest.raises(
        UserError, match=r"task mrpc: the metric f1 is that of the second of two classes.* 3 .*f1_macro"
    ):
        load_task(task, store=tmp_path, data_root=tmp_path)


@pytest.mark.parametrize(("name", "column"), [("ontonotes", "tags"), ("uner", "ner_tags")])
def test_entity_sets_are_read_with_their_columns(name: str, column: str, tmp_path: Path) -> None:
    names = get_task(name).label_names or ("O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC")
    tokens = [["Anna", "saw", "Oslo"]] * len(names)
    tags = [[tag, 0, 0] for tag in range(len(names))]
    features = datasets.Features(
        {
            "tokens": datasets.Sequence(datasets.Value("string")),
            column: datasets.Sequence(
                datasets.ClassLabel(names=list(names)) if name == "uner" else datasets.Value("int32")
            ),
        }
    )
    for split in ("train", "validation", "test"):
        (tmp_path / name).mkdir(exist_ok=True)
        data = datasets.Dataset.from_dict({"tokens": tokens, column: tags}, features=features)
        data.to_parquet(tmp_path / name / f"{split}.parquet")
    loaded = load(name, tmp_path)
    assert loaded.label_names == tuple(names)
    kinds = {"ontonotes": 18, "uner": 3}[name]
    assert len(names) == 2 * kinds + 1
    assert {f"I-{tag[2:]}" for tag in names if tag.startswith("B-")} == {tag for tag in names if tag.startswith("I-")}
    assert loaded.test["tags"].to_pylist() == tags


def squad(*, without: int = 0) -> dict[str, Any]:
    contexts = [f"Anna lives in Oslo {row // 3}" for row in range(ROWS)]
    answers = [
        {"text": [], "answer_start": []} if row < without else {"text": ["Oslo"], "answer_start": [14]}
        for row in range(ROWS)
    ]
    return {
        "id": [f"q{row}" for row in range(ROWS)],
        "title": ["Oslo"] * ROWS,
        "context": contexts,
        "question": ["Where does Anna live?"] * ROWS,
        "answers": pa.array(answers, ANSWERS),
    }


def test_squad_is_read_and_only_squad_v2_may_lack_answers(tmp_path: Path) -> None:
    for name in ("squad", "squad_v2"):
        for split in ("train", "validation"):
            write_table(tmp_path / name, split, squad(without=20))
    data = load("squad_v2", tmp_path)
    assert (len(data.train) + len(data.validation), len(data.test)) == (ROWS, ROWS)
    assert sum(not row["text"] for row in data.test["answers"].to_pylist()) == 20
    with pytest.raises(UserError, match=r"task squad, train .*row 0 \(id q0\): there is no answer.*unanswerable: true"):
        load("squad", tmp_path)
    for name in ("squad", "squad_v2"):
        for split in ("train", "validation"):
            write_table(tmp_path / name, split, squad())
    assert load("squad", tmp_path).fingerprint != load("squad_v2", tmp_path).fingerprint


def test_record_answers_are_texts_at_their_first_occurrence(tmp_path: Path) -> None:
    rows = {
        "passage": [f"Anna met Berta in Oslo. Berta left {row // 3}." for row in range(ROWS)],
        "query": ["@placeholder went away"] * ROWS,
        "entities": [["Anna", "Berta", "Oslo"]] * ROWS,
        "answers": [["Berta", "Anna"]] * ROWS,
        "idx": [{"passage": row // 3, "query": row} for row in range(ROWS)],
    }
    for split in ("train", "validation"):
        write_table(tmp_path / "record", split, rows)
    first = load("record", tmp_path).test.slice(7, 1).to_pylist()[0]
    assert (first["id"], first["question"]) == ("7", "@placeholder went away")
    assert first["answers"] == {"text": ["Berta", "Anna"], "answer_start": [9, 0]}
    write_table(tmp_path / "record", "validation", {**rows, "answers": [["Carl"]] * ROWS})
    with pytest.raises(UserError, match=r"task record, test .*'Carl' .*it isn't in the context at all"):
        load("record", tmp_path)


def beir(key: str, *, titles: bool = True) -> dict[str, dict[str, Any]]:
    """Queries, corpus and judgements of BEIR's layout; query n is judged by documents n and n + 1 (with 0)."""
    corpus = {key: [f"d{n}" for n in range(ROWS)], "text": [f"text {n}" for n in range(ROWS)]}
    query_ids = [f"q{n}" for n in range(ROWS - 1) for _ in range(2)]
    corpus_ids = [f"d{n + step}" for n in range(ROWS - 1) for step in range(2)]
    return {
        "queries": {key: [f"q{n}" for n in range(ROWS)], "text": [f"query {n}" for n in range(ROWS)]},
        "corpus": {**corpus, "title": [f"Title {n}" for n in range(ROWS)]} if titles else corpus,
        "qrels": {"query-id": query_ids, "corpus-id": corpus_ids, "score": [1, 0] * (ROWS - 1)},
    }


def check_retrieval_set(name: str, data: TaskData) -> None:
    assert isinstance(data.test, RetrievalSet)
    assert isinstance(data.validation, RetrievalSet)
    pairs = data.train.to_pylist()
    assert len(pairs) == ROWS - 1  # pairs judged 0 are none
    if name == "nq":  # half of the test queries each
        asked = [set(part.queries["id"].to_pylist()) for part in (data.validation, data.test)]
        assert len(asked[0]) == ROWS // 2 and asked[0].isdisjoint(asked[1]) and len(asked[0] | asked[1]) == ROWS
        for part, ids in zip((data.validation, data.test), asked, strict=True):
            assert set(part.qrels["query_id"].to_pylist()) == ids - {f"q{ROWS - 1}"}  # which nobody judged
    assert all(pair["query"].split()[-1] == pair["positive"].split()[-1] for pair in pairs)
    assert len(data.test.corpus) == len(data.validation.corpus) == ROWS
    assert data.test.corpus["text"][3].as_py() == ("Title 3 text 3" if name == "nq" else "text 3")


@pytest.mark.parametrize("name", ["msmarco", "nq", "mldr"])
def test_each_table_is_asked_of_the_right_data_set_of_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub is a function here, which knows what each data set's configurations and splits are called."""
    known = {
        ("mteb/msmarco", "queries", "queries"): ("_id", "queries"),
        ("mteb/msmarco", "corpus", "corpus"): ("_id", "corpus"),
        ("mteb/msmarco", None, "train"): ("_id", "qrels"),
        ("mteb/msmarco", None, "dev"): ("_id", "qrels"),
        ("mteb/msmarco", None, "test"): ("_id", "qrels"),
        ("mteb/nq", "queries", "queries"): ("_id", "queries"),
        ("mteb/nq", "corpus", "corpus"): ("_id", "corpus"),
        ("mteb/nq", None, "test"): ("_id", "qrels"),
        **{
            ("mteb/MultiLongDocRetrieval", f"en-{part}", split): ("id", part)
            for part in ("queries", "corpus", "qrels")
            for split in ("dev", "test")
        },
    }
    asked: dict[str, set[str]] = {}

    def hub(source: str, config: str | None, *, split: str, revision: str, data_dir: str | None) -> datasets.Dataset:
        key, part = known[source, config, split]
        asked.setdefault(source, set()).add(revision)
        assert data_dir is None
        return datasets.Dataset.from_dict(beir(key)[part])

    monkeypatch.setattr(datasets, "load_dataset", hub)
    check_retrieval_set(name, load_task(get_task(name), store=Path("unused"), data_root=None))
    assert "mteb/msmarco" in asked
    assert all(len(revisions) == 1 and re.fullmatch("[0-9a-f]{40}", *revisions) for revisions in asked.values())


def test_a_folder_of_a_converted_data_set_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def hub(*words: Any, **options: Any) -> datasets.Dataset:
        raise ValueError(f"{words} {options}")

    monkeypatch.setattr(datasets, "load_dataset", hub)
    with pytest.raises(UserError, match=r"universal_ner', None\).*'refs/convert/parquet', 'data_dir': 'en_ewt'"):
        load_task(get_task("uner"), store=Path("unused"), data_root=None)


def test_data_of_a_branch_are_held_to_what_the_store_first_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = {"tokens": [["Anna", "sings"], ["in", "Oslo"]] * 20, "ner_tags": [[1, 0], [0, 5]] * 20}
    monkeypatch.setattr(datasets, "load_dataset", lambda *words, **options: datasets.Dataset.from_dict(rows))

    def load(store: str, name: str = "conll2003", **changes: Any) -> str:
        task = get_task(name).model_copy(update=changes)
        return load_task(task, store=tmp_path / store, data_root=None).fingerprint

    first = load("store")
    assert load("store") == first
    rows["tokens"][0] = ["Berta", "sings"]
    with pytest.raises(
        UserError, match=r"eriktks/conll2003 \(revision refs/convert/parquet.*have changed since"
    ) as caught:
        load("store")
    assert first[:12] in str(caught.value)
    # Another store and another declaration have read nothing yet; what a commit names cannot change.
    second = load("other")
    assert load("store", revision="refs/pr/1") == second != first
    assert load("pinned", revision="0" * 40) == second
    assert not (tmp_path / "pinned").exists()
    pin = str(caught.value).partition("delete ")[2].partition(":")[0]
    Path(pin).unlink()
    assert load("store") == second
    write_entities(tmp_path / "data")
    assert load_task(get_task("conll2003"), store=tmp_path / "store", data_root=tmp_path / "data").fingerprint != second


def test_every_set_of_the_hub_is_pinned_to_a_commit_or_to_the_hubs_conversion() -> None:
    for name in task_names():
        task = get_task(name)
        if task.source not in ("local", "pydocs"):
            assert task.folder, name
            assert re.fullmatch("[0-9a-f]{40}|refs/convert/parquet", task.revision or ""), name


SIZES: dict[str, Callable[[TaskData], bool]] = {
    "rte": lambda data: len(data.train) + len(data.validation) == 2490 and len(data.test) == 277,
    "qqp_20k": lambda data: (len(data.train), len(data.validation), len(data.test)) == (19000, 1000, 3496),
    "sick": lambda data: (len(data.train), len(data.validation), len(data.test)) == (4500, 500, 4927),
    "sick_relatedness": lambda data: (len(data.train), len(data.validation), len(data.test)) == (4500, 500, 4927),
}


@pytest.mark.parametrize("name", SIZES)
def test_local_sets_load(name: str, shared_data: Path) -> None:
    data = load(name, shared_data)
    assert SIZES[name](data)
    assert data.test["text_pair"].null_count == 0
    if name == "sick_relatedness":
        assert 1 <= min(data.train["label"].to_pylist()) < max(data.train["label"].to_pylist()) <= 5


def test_the_official_squad_v2_questions_load(shared_data: Path, tmp_path: Path) -> None:
    """Only the development split is there, so it stands in for train too."""
    (tmp_path / "squad_v2").mkdir()
    for split in ("train", "validation"):
        (tmp_path / "squad_v2" / f"{split}.parquet").symlink_to(shared_data / "squad_v2" / "validation.parquet")
    data = load("squad_v2", tmp_path)
    assert len(data.test) == 11873
    assert sum(not row["text"] for row in data.test["answers"].to_pylist()) == 5945


ONTONOTES = {
    "O": 0, "B-CARDINAL": 1, "B-DATE": 2, "I-DATE": 3, "B-PERSON": 4, "I-PERSON": 5, "B-NORP": 6, "B-GPE": 7, "I-GPE": 8,
    "B-LAW": 9, "I-LAW": 10, "B-ORG": 11, "I-ORG": 12, "B-PERCENT": 13, "I-PERCENT": 14, "B-ORDINAL": 15, "B-MONEY": 16,
    "I-MONEY": 17, "B-WORK_OF_ART": 18, "I-WORK_OF_ART": 19, "B-FAC": 20, "B-TIME": 21, "I-CARDINAL": 22, "B-LOC": 23,
    "B-QUANTITY": 24, "I-QUANTITY": 25, "I-NORP": 26, "I-LOC": 27, "B-PRODUCT": 28, "I-TIME": 29, "B-EVENT": 30,
    "I-EVENT": 31, "I-FAC": 32, "B-LANGUAGE": 33, "I-PRODUCT": 34, "I-ORDINAL": 35, "I-LANGUAGE": 36,
}  # fmt: skip
"""`label2id` of the data set's card and `dataset/label.json` (tner/ontonotes5), whose files hold numbers only."""
PUBLISHED_LABELS = {
    "ontonotes": ONTONOTES,
    # eriktks/conll2003, the card's ner_tags.
    "conll2003": {
        "O": 0, "B-PER": 1, "I-PER": 2, "B-ORG": 3, "I-ORG": 4, "B-LOC": 5, "I-LOC": 6, "B-MISC": 7, "I-MISC": 8,
    },
    # nyu-mll/glue and stanfordnlp/sst2, the cards' class labels.
    "sst2": {"negative": 0, "positive": 1},
    "cola": {"unacceptable": 0, "acceptable": 1},
    "mrpc": {"not_equivalent": 0, "equivalent": 1},
    "qqp": {"not_duplicate": 0, "duplicate": 1},
    "mnli": {"entailment": 0, "neutral": 1, "contradiction": 2},
    "mnli_mm": {"entailment": 0, "neutral": 1, "contradiction": 2},
    "qnli": {"entailment": 0, "not_entailment": 1},
    "rte": {"entailment": 0, "not_entailment": 1},
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED_LABELS)
def test_labels_have_the_numbers_of_the_published_data(name: str) -> None:
    names = get_task(name).label_names
    assert names is not None
    assert {label: number for number, label in enumerate(names)} == PUBLISHED_LABELS[name]
