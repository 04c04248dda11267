"""Every fault of a task's data is one message that names the task, the place and what to do, before anything is
trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from mlmclm.errors import EnvironmentFault, UserError
from mlmclm.finetuning.protocol import Protocol
from mlmclm.tasks.declared_tasks import FOLDER, broken_files, get_task, task_names
from mlmclm.tasks.families.retrieval import RetrievalSet
from mlmclm.tasks.load import load_task
from mlmclm.tasks.prepare_task import prepare_task
from small_models import save_small_model, write_all, write_entities, write_questions, write_retrieval, write_table


def load(name: str, root: Path | None) -> Any:
    return load_task(get_task(name), store=Path("unused"), data_root=root)


def rows(split: int = 20, **columns: Any) -> dict[str, Any]:
    return {"sentence": ["good film"] * split, "label": [0, 1] * (split // 2), **columns}


def sst2(root: Path, train: dict[str, Any] | None = None, test: dict[str, Any] | None = None) -> Path:
    write_table(root / "sst2", "train", train or rows())
    write_table(root / "sst2", "validation", test or rows())
    return root


def test_every_declaration_is_readable_and_named_as_its_file() -> None:
    assert {"sst2", "conll2003", "squad_4k", "reqa_squad", "pydocs-kind", "pydocs-retrieval"} <= set(task_names())
    for file in FOLDER.glob("*.yaml"):
        assert get_task(file.stem).citation


def test_questions_on_one_passage_stay_on_one_side(tmp_path: Path) -> None:
    write_questions(tmp_path, train=200)
    folder = tmp_path / "squad_4k"
    table = pa.parquet.read_table(folder / "train.parquet").to_pydict()
    write_table(folder, "train", {name: values * 3 for name, values in table.items()})
    data = load("squad_4k", tmp_path)
    assert 20 <= len(data.validation) <= 30
    assert not set(data.train["context"].to_pylist()) & set(data.validation["context"].to_pylist())


def test_held_out_pairs_become_a_retrieval_evaluation(tmp_path: Path) -> None:
    write_retrieval(tmp_path)
    data = load("reqa_squad", tmp_path)
    assert isinstance(data.validation, RetrievalSet)
    held = set(data.validation.corpus["text"].to_pylist())
    assert len(held) == len(data.validation.corpus)
    assert not held & set(data.train["positive"].to_pylist())
    assert set(data.validation.qrels["query_id"].to_pylist()) == set(data.validation.queries["id"].to_pylist())


def test_the_fingerprint_is_of_the_content_and_not_of_the_place_or_form(tmp_path: Path) -> None:
    first = load("sst2", sst2(tmp_path / "a")).fingerprint
    assert load("sst2", sst2(tmp_path / "b")).fingerprint == first
    other = sst2(tmp_path / "c", rows(extra=[1] * 20))
    (other / "sst2" / "validation.parquet").unlink()
    lines = [f'{{"sentence": "good film", "label": {label}}}' for label in [0, 1] * 10]
    (other / "sst2" / "validation.jsonl").write_text("\n".join(lines))
    assert load("sst2", other).fingerprint == first
    changed = sst2(tmp_path / "d", test=rows(sentence=["good film"] * 19 + ["bad film"]))
    assert load("sst2", changed).fingerprint != first


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (
            {"sentences": ["a"] * 20, "label": [0, 1] * 10},
            r"column 'sentence' is missing\. Did you mean 'sentences'\? There are",
        ),
        ({"sentence": pa.array([], pa.string()), "label": pa.array([], pa.int64())}, "train .* the split is empty"),
        (rows(label=[0, 1] * 9 + [0, 2]), "row 19: label 2 is outside 0..1; the labels are negative, positive"),
        (rows(label=[-1] * 20), "label -1 is outside .* -1 marks rows without public labels"),
        (rows(sentence=["a"] * 19 + [None]), "row 19: text is null"),
        (rows(sentence=[1] * 20), "column 'sentence' holds int64, not text"),
        (rows(label=["positive", "negativ"] * 10), "unknown label 'negativ'. Did you mean 'negative'"),
        (rows(label=[0.5] * 20), "labels of type double are not numbers or names"),
        (rows(label=[1] * 20), "test has the label 'negative', which train never shows"),
    ],
)
def test_a_fault_in_a_classification_split_is_named(tmp_path: Path, train: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"task sst2.*{message}"):
        load("sst2", sst2(tmp_path, train))


@pytest.mark.parametrize(
    ("tokens", "tags", "message"),
    [
        ([["a", "b"]], [[0, 0, 0]], "row 0: 3 tags for 2 tokens"),
        ([["a"], []], [[0], []], "row 1: there are no tokens"),
        ([["a"], ["b"]], [[0], [9]], "row 1: tag 9 is outside 0..8"),
        ([["a", None]], [[0, 0]], "a token or tag is null"),
    ],
)
def test_a_fault_in_a_tagging_split_is_named(tmp_path: Path, tokens: Any, tags: Any, message: str) -> None:
    write_entities(tmp_path)
    kinds = pa.list_(pa.string()), pa.list_(pa.int64())
    write_table(
        tmp_path / "conll2003", "train", {"tokens": pa.array(tokens, kinds[0]), "ner_tags": pa.array(tags, kinds[1])}
    )
    with pytest.raises(UserError, match=f"task conll2003, train .*{message}"):
        load("conll2003", tmp_path)


@pytest.mark.parametrize(
    ("part", "table", "message"),
    [
        (
            "qrels",
            {"query-id": ["q0"], "corpus-id": ["nowhere"], "score": [1]},
            "no corpus_id .* is in corpus, such as 'nowhere'",
        ),
        (
            "qrels",
            {"query-id": ["Q0"], "corpus-id": ["d0"], "score": [1]},
            "no query_id .* is in queries, such as 'Q0'",
        ),
        ("qrels", {"query-id": ["q0"], "corpus-id": ["d0"], "score": [0]}, "no document is judged relevant"),
        ("qrels", {"query-id": ["q0"], "corpus-id": ["d0"], "score": [0.5]}, "scores must be whole numbers"),
        (
            "qrels",
            {"query-id": ["q0", "q0"], "corpus-id": ["d0", "d0"], "score": [1, 0]},
            "the document 'd0' has several scores for the query 'q0'",
        ),
        (
            "queries",
            {"_id": ["q0", "q0"], "text": ["a", "b"]},
            "queries: the id 'q0' occurs twice, with different texts",
        ),
        ("corpus", {"id": ["d0"], "text": ["a"]}, r"test corpus .* column '_id' is missing\. Did you mean 'id'\?"),
    ],
)
def test_a_fault_in_a_retrieval_evaluation_is_named(tmp_path: Path, part: str, table: Any, message: str) -> None:
    write_retrieval(tmp_path)
    write_table(tmp_path / "reqa_squad", part, table)
    with pytest.raises(UserError, match=f"task reqa_squad, .*{message}"):
        load("reqa_squad", tmp_path)


def test_a_missing_split_says_which_there_are(tmp_path: Path) -> None:
    (sst2(tmp_path) / "sst2" / "validation.parquet").unlink()
    with pytest.raises(UserError, match=r"has no split 'validation' .*there are: train\.parquet"):
        load("sst2", tmp_path)


def test_parts_may_have_their_columns_in_another_order(tmp_path: Path) -> None:
    sst2(tmp_path)
    (tmp_path / "sst2" / "train.parquet").unlink()
    for part in range(2):
        items = [{"sentence": f"film {part} {n}", "label": n % 2} for n in range(20)]
        rows = [dict(reversed(item.items())) if part else item for item in items]
        file = tmp_path / "sst2" / f"train-0000{part}-of-00002.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert len(load("sst2", tmp_path).train) == 38


def test_a_folder_may_be_beir_s(tmp_path: Path) -> None:
    folder = tmp_path / "msmarco"
    (folder / "qrels").mkdir(parents=True)
    texts = {part: [f"{part} {n}" for n in range(30)] for part in ("queries", "corpus")}
    for part, own in texts.items():
        lines = [json.dumps({"_id": f"{part[0]}{n}", "text": text, "metadata": {}}) for n, text in enumerate(own)]
        (folder / f"{part}.jsonl").write_text("\n".join(lines) + "\n")
    for split, numbers in (("train", range(20)), ("dev", range(20, 25)), ("test", range(25, 30))):
        lines = [f"q{n}\tc{n}\t1\n" for n in numbers]
        (folder / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(lines))
    found = load("msmarco", tmp_path)
    assert isinstance(found.test, RetrievalSet)
    assert found.test.qrels["query_id"].to_pylist() == [f"q{n}" for n in range(25, 30)]
    assert found.validation.qrels["query_id"].to_pylist() == [f"q{n}" for n in range(20, 25)]
    assert found.train["query"].to_pylist() == texts["queries"][:20]


def test_without_a_folder_the_hub_is_asked_and_a_local_task_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"task reqa_squad: there is no folder .*give --data the folder that holds reqa_squad/"
    ):
        load("reqa_squad", tmp_path)
    with pytest.raises((UserError, EnvironmentFault), match=r"task sst2: .*stanfordnlp/sst2"):
        load("sst2", tmp_path)


def test_faults_of_the_tokenizer_and_of_lengths_come_before_training(tmp_path: Path) -> None:
    root = write_all(tmp_path / "data")
    folder = save_small_model(tmp_path / "model", length=64)
    with pytest.raises(UserError, match=r"max_length is 512, but the model .* was made for 64 positions"):
        prepare_task("sst2", folder, Protocol(), tmp_path / "store", root)
    protocol = Protocol(max_length=32, stride=8)
    (tmp_path / "bare").mkdir()
    with pytest.raises(UserError, match="the tokenizer is missing"):
        prepare_task("sst2", tmp_path / "bare", protocol, tmp_path / "store", root)
    config = folder / "tokenizer_config.json"
    config.write_text(config.read_text().replace('"eos_token": "<eos>"', '"eos_token": null'))
    with pytest.raises(UserError, match="no end-of-sequence token"):
        prepare_task("sst2", folder, protocol, tmp_path / "store", root)


def test_the_four_real_local_sets_load(shared_data: Path) -> None:
    sizes = {}
    for name in ("sst2", "conll2003", "squad_4k"):
        data = load(name, shared_data)
        sizes[name] = (len(data.train), len(data.validation), len(data.test))
    assert sizes["sst2"] == (63982, 3367, 872)
    assert sizes["conll2003"] == (14041, 3250, 3453)
    assert sum(sizes["squad_4k"][:2]) == 4000
    retrieval = load("reqa_squad", shared_data)
    assert isinstance(retrieval.test, RetrievalSet)
    assert (len(retrieval.test.queries), len(retrieval.test.corpus)) == (10539, 10246)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("metric: ndcg@10", "metric 'ndcg@10' is not computed for sequence-classification; allowed: accuracy"),
        ("familly: retrieval", "unknown key 'familly'. Did you mean 'family'"),
        ("columns: {txt: a}", "unknown canonical column 'txt'. Did you mean 'text'"),
        ("pair_template: '{text} {text_pair} {text}'", "pair_template must contain {text} and {text_pair}, each once"),
        ("unanswerable: true", "only question answering has 'unanswerable' questions"),
        ("header: [text, label, text]", "header names 'text' twice"),
        ("ignore_identical_ids: true", "only retrieval has 'ignore_identical_ids'"),
        ("negatives: {bm25: 2}", "only retrieval has 'negatives'"),
        ("splits: {train: train, test: validation}", "give either 'validation' or 'validation_fraction'"),
        ("splits: {train: t, validation: v, test: {queries: q}}", "splits.test of a retrieval task, and only of one"),
        ("splits: {train: {queries: q}, validation: v, test: t}", "of a retrieval task only"),
    ],
)
def test_a_declaration_that_cannot_be_meant_is_refused(tmp_path: Path, change: str, message: str) -> None:
    key = change.split(":")[0]
    lines = [line for line in (FOLDER / "sst2.yaml").read_text().splitlines() if not line.startswith(f"{key}:")]
    (tmp_path / "x.yaml").write_text("\n".join([*lines, change]))
    (broken,) = broken_files([tmp_path])
    assert message in broken.reason


KIND = pa.struct([("text", pa.list_(pa.string())), ("answer_start", pa.list_(pa.int64()))])


@pytest.mark.parametrize(
    ("answers", "context", "message"),
    [
        ({"text": ["Oslo"], "answer_start": [3]}, "Anna in Oslo", "at character 3 of the context; it is at 8"),
        ({"text": ["Rome"], "answer_start": [8]}, "Anna in Oslo", "at character 8 .*; it isn't in the context at all"),
        (
            {"text": [], "answer_start": []},
            "Anna in Oslo",
            "there is no answer. A task with unanswerable questions says",
        ),
        ({"text": ["Oslo"], "answer_start": [8, 9]}, "Anna in Oslo", "1 answer texts for 2 positions"),
        ({"text": ["Oslo"], "answer_start": [0]}, " ", "the context is empty"),
        ("Oslo", "Anna in Oslo", r"the column 'answers' must hold \{text, answer_start\}, it holds string"),
    ],
)
def test_a_fault_in_an_answer_is_named(tmp_path: Path, answers: Any, context: str, message: str) -> None:
    write_questions(tmp_path)
    row = {"id": ["x1"], "context": [context], "question": ["where?"]}
    column = pa.array([answers], KIND if isinstance(answers, dict) else pa.string())
    write_table(tmp_path / "squad_4k", "validation", {**row, "answers": column})
    place = r"row 0 \(id x1\): .*" if isinstance(answers, dict) else ""
    with pytest.raises(UserError, match=rf"task squad_4k, test .*{place}{message}"):
        load("squad_4k", tmp_path)


@pytest.mark.parametrize(
    ("suffix", "line"),
    [
        ("jsonl", '{{"sentence": "good film", "label": {}}}'),
        ("json", '{{"sentence": "good film", "label": {}}}'),
        ("csv", '"a good, film",{}'),
        ("csv", '{},"a good, film"'),
    ],
)
@pytest.mark.parametrize("left", [0.0, 0.5, 0.95])
def test_a_file_of_lines_that_ends_in_the_middle_of_one_is_named(
    tmp_path: Path, suffix: str, line: str, left: float
) -> None:
    (sst2(tmp_path) / "sst2" / "train.parquet").unlink()
    file = tmp_path / "sst2" / f"train.{suffix}"
    head = [] if suffix != "csv" else ["label,sentence" if line.startswith("{}") else "sentence,label"]
    text = "\n".join([*head, *(line.format(n % 2) for n in range(40))]) + "\n"
    file.write_text(text)
    assert len(load("sst2", tmp_path).train) == 38
    cut = int(len(text) * left)
    while text[cut - 1 : cut] == "\n" or text[cut : cut + 1] == "\n":
        cut -= 4
    file.write_text(text[:cut])
    with pytest.raises(UserError, match=rf"task sst2: .*train\.{suffix} cannot be read; is it cut short\?"):
        load("sst2", tmp_path)


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    file = sst2(tmp_path) / "sst2" / "train.parquet"
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(UserError, match=r"train\.parquet cannot be read; is it cut short\?"):
        load("sst2", tmp_path)
