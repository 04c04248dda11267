"""Tokenised data are made once, say what the text says, and are the same for whoever makes them."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mlmclm.analysis.effects import fold_scores
from mlmclm.errors import UserError
from mlmclm.finetuning.cell import Cell
from mlmclm.finetuning.protocol import Protocol
from mlmclm.finetuning.run import run_cell
from mlmclm.models.folder import weights_hash
from mlmclm.results.examples import from_parquet
from mlmclm.results.measures import WeightedMean
from mlmclm.tasks import prepare_task as prepare
from mlmclm.tasks.declared_tasks import get_task
from mlmclm.tasks.family import subset
from mlmclm.tasks.prepare_task import find_or_prepare, prepare_task
from small_models import save_small_model, small_tokenizer, write_sentiment, write_table

PROTOCOL = Protocol(max_length=64, stride=8)


def prepared(place: Path, name: str, protocol: Protocol = PROTOCOL) -> prepare.Prepared:
    return prepare_task(name, place / "model", protocol, place / "store", place / "data")


def test_what_is_there_is_not_made_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepared(place, "sst2")
    monkeypatch.setattr(prepare, "load_tokenizer", lambda folder: pytest.fail("tokenised again"))
    assert prepared(place, "sst2") == first
    monkeypatch.setattr(prepare, "load_task", lambda *_, **__: pytest.fail("read again"))
    again = find_or_prepare("sst2", first.task_data, place / "model", PROTOCOL, place / "store", place / "data")
    assert again == first


def test_training_settings_share_prepared_data_and_lengths_do_not(place: Path) -> None:
    first = prepared(place, "sst2")
    assert prepared(place, "sst2", Protocol(max_length=64, stride=8, batch_size=8, pooling="last")) == first
    assert prepared(place, "sst2", Protocol(max_length=32, stride=8)).key != first.key


def test_data_that_changed_since_the_plan_are_refused(place: Path) -> None:
    with pytest.raises(UserError, match="the data have changed since this sweep was planned"):
        find_or_prepare("sst2", "0" * 64, place / "model", PROTOCOL, place / "store", place / "data")


def test_a_tokenizer_that_changes_after_it_was_hashed_is_named_and_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_sentiment(tmp_path / "data", train=20, test=10)
    file, load = save_small_model(tmp_path / "model") / "tokenizer.json", prepare.load_tokenizer
    content = json.loads(file.read_text())

    def edited(*given: Any, **more: Any) -> Any:
        replaced = {"type": "Replace", "pattern": {"String": "a"}, "content": "e"}
        file.write_text(json.dumps({**content, "normalizer": replaced}))
        return load(*given, **more)

    monkeypatch.setattr(prepare, "load_tokenizer", edited)
    with pytest.raises(UserError, match=rf"{file}: it has changed since it was hashed"):
        prepare_task("sst2", tmp_path / "model", PROTOCOL, tmp_path / "store", tmp_path / "data")
    assert [*(tmp_path / "store" / "prepared").glob("*")] == []


def test_every_sequence_ends_with_the_closing_token_and_fits(place: Path) -> None:
    short = Protocol(max_length=12, stride=4)
    for name in ("sst2", "conll2003", "squad_4k", "reqa_squad"):
        made = prepared(place, name, short)
        for split in ("validation", "test"):
            sequences = made.columns[split]["input_ids"]
            assert all(ids[-1] == 2 for ids in sequences)
            assert sequences.lengths.max() <= 12


def test_subsets_are_fixed_and_of_the_size_asked(place: Path) -> None:
    few = Protocol(
        max_length=64, stride=8, max_train_examples=50, max_evaluation_examples=10, max_evaluation_documents=15
    )
    for name, rows in {"sst2": (50, 10), "conll2003": (50, 10), "squad_4k": (50, 10), "reqa_squad": (50, 25)}.items():
        made = prepared(place, name, few)
        assert (made.rows["train"], made.rows["test"]) == rows
    other = prepare_task("sst2", place / "model", few, place / "elsewhere", place / "data")
    assert other.table("train").equals(prepared(place, "sst2", few).table("train"))


def test_only_judged_documents_are_searched_and_the_study_s_score_stays(place: Path) -> None:
    few = {**PROTOCOL.model_dump(), "max_evaluation_examples": 5}  # so that some documents are judged for no query
    full, judged = (Protocol.model_validate(few | {"max_evaluation_documents": limit}) for limit in (None, "judged"))
    scores = {}
    for settings in (full, judged):
        made = prepared(place, "reqa_squad", settings)
        table = made.table("test").to_pydict()
        # Any embedding of a text will do, as long as both searches see the same one.
        vectors = [np.random.default_rng(sum(ids)).normal(size=8).astype(np.float32) for ids in table["input_ids"]]
        scores[settings.max_evaluation_documents] = made.scores(made.examples("test", vectors))
        documents = {name for name, query in zip(table["id"], table["is_query"], strict=True) if not query}
        wanted = set(made.table("test_qrels")["corpus_id"].to_pylist())
        assert documents == wanted if settings is judged else documents > wanted
    assert scores["judged"]["study.ndcg@10"] == scores[None]["study.ndcg@10"]
    assert scores["judged"]["ndcg@10"] >= scores[None]["ndcg@10"]


def test_the_true_spans_give_a_perfect_score(place: Path) -> None:
    """Predictions made of the targets: exact match 1, so that positions, offsets and windows agree with the text."""
    for protocol in (PROTOCOL, Protocol(max_length=24, stride=10)):
        made = prepared(place, "squad_4k", protocol)
        table = made.table("test").to_pydict()
        predictions = []
        for row, ids in enumerate(table["input_ids"]):
            none = table["start"][row] == len(ids) - 1
            first, last = table["start"][row] - table["passage"][row], table["end"][row] - table["passage"][row]
            predictions.append(np.array([0.0, 0, 0] if none else [1.0, first, last]))
        assert made.scores(made.examples("test", predictions)) == {"f1": 1.0, "exact_match": 1.0, "study.f1": 1.0}


def test_a_question_without_an_answer_points_at_the_closing_token_of_every_window(place: Path) -> None:
    tight = Protocol(max_length=24, stride=10)
    made = prepared(place, "squad_v2", tight)
    assert made.unanswerable
    assert not prepared(place, "squad_4k", tight).unanswerable
    table, examples = made.table("test").to_pydict(), made.table("test_examples").to_pydict()
    empty = {number for number, answers in enumerate(examples["answers"]) if not answers}
    assert len(empty) == 14
    closing = [
        start == end == len(ids) - 1
        for ids, start, end in zip(table["input_ids"], table["start"], table["end"], strict=True)
    ]
    answered = {example for example, none in zip(table["example"], closing, strict=True) if not none}
    assert answered == set(range(40)) - empty


@pytest.mark.parametrize("damage", ["a bit", "missing"])
def test_prepared_data_that_are_damaged_are_made_again_before_training(
    place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], damage: str
) -> None:
    def again() -> dict[str, bytes]:
        folder = prepare_task("conll2003", place / "model", PROTOCOL, tmp_path, place / "data").folder
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    whole = again()
    (folder,) = tmp_path.glob("prepared/*")
    file = folder / "validation.arrow"
    flipped = bytearray(whole[file.name])
    flipped[len(flipped) // 2] ^= 1
    file.write_bytes(bytes(flipped))
    if damage == "missing":
        file.unlink()
    capfd.readouterr()
    assert again() == whole
    assert f"{folder} is not used: {file.name}" in " ".join(capfd.readouterr().err.split())
    assert folder.with_name(f"{folder.name}.damaged").is_dir()


def test_a_tokenizer_with_more_ids_than_the_model_knows_is_refused_where_the_data_have_them(
    place: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(place / "model", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    for name in ("sst2", "reqa_squad"):
        largest = max(
            max(values) for values in prepared(place, name).table("train").column(0).to_pylist()
        )  # of input_ids, or query
        for known, refused in ((largest + 300, False), (largest, True)):
            (folder / "config.json").write_text(json.dumps(config | {"vocab_size": known}))
            for _ in range(2):  # while it is made, and when it is there
                if not refused:
                    prepare_task(name, folder, PROTOCOL, tmp_path / name, place / "data")
                    continue
                with pytest.raises(UserError, match=rf"gives the id \d+, and the model's vocabulary has {known}"):
                    prepare_task(name, folder, PROTOCOL, tmp_path / name, place / "data")


@pytest.mark.parametrize(
    ("name", "column", "split", "wanted"),
    [
        ("sst2", "label", "validation", "label"),
        ("squad_4k", "context", "validation", "context"),
        ("conll2003", "words", "test", "words"),
        ("reqa_squad", "text", "queries", "text"),
    ],
)
def test_groups_that_a_task_declares_are_those_of_its_test_examples(
    place: Path, tmp_path: Path, name: str, column: str, split: str, wanted: str
) -> None:
    data = shutil.copytree(place / "data" / name, tmp_path / "data" / name)
    file = data / f"{split}.parquet"
    rows = pq.read_table(file)
    if name == "conll2003":
        rows = rows.append_column("words", pa.array([len(tokens) for tokens in rows["tokens"].to_pylist()]))
        pq.write_table(rows, file)
    grouped = get_task(name).model_copy(update={"group": column})
    for limit in (None, 12):
        settings = PROTOCOL.model_copy(update={"max_evaluation_examples": limit})
        plain, made = (
            prepare_task(task, place / "model", settings, tmp_path / "store", tmp_path / "data")
            for task in (get_task(name), grouped)
        )
        assert plain.groups == {} and plain.task_data != made.task_data
        assert made.table("test")["input_ids"].equals(plain.table("test")["input_ids"])
        kept = subset(rows.num_rows, limit)
        values = np.asarray(rows[wanted].to_pylist())[slice(None) if kept is None else kept]
        assert _numbered(made.groups["group"]) == _numbered(values)
    with pytest.raises(UserError, match=rf"task {name}, test .*: the column 'passag' is missing"):
        prepare_task(
            grouped.model_copy(update={"group": "passag"}), place / "model", PROTOCOL, tmp_path, tmp_path / "data"
        )


def _numbered(values: np.ndarray) -> list[int]:
    """Numbers of equal values, in the order in which the values first occur."""
    first = {value: number for number, value in enumerate(dict.fromkeys(values.tolist()))}
    return [first[value] for value in values.tolist()]


def test_a_cell_s_examples_have_their_groups_and_folds_keep_them_together(place: Path, tmp_path: Path) -> None:
    task = get_task("squad_4k").model_copy(update={"group": "context"})
    made = prepare_task(task, place / "model", PROTOCOL, tmp_path, place / "data")
    protocol = PROTOCOL.model_copy(update={"max_steps": 2})
    cell = Cell("m", place / "model", weights_hash(place / "model"), task.name, made.task_data, protocol, 1e-3, 0)
    files: list[bytes] = []
    result = run_cell(
        dataclasses.replace(cell, declaration=task), store=tmp_path, data_root=place / "data",
        on_examples=lambda _, content: files.append(content),
    )  # fmt: skip
    assert "group" not in result["scores"]["test"]
    (tmp_path / "examples.parquet").write_bytes(files[0])
    kept = from_parquet(tmp_path / "examples.parquet", result)
    contexts = pq.read_table(place / "data" / "squad_4k" / "validation.parquet")["context"].to_pylist()
    assert len(set(contexts)) == kept.rows and kept.groups is None, "each passage has one question"
    kept.columns["group"] = np.arange(kept.rows) // 4
    groups = kept.groups
    assert groups is not None
    own = fold_scores(WeightedMean(kept.columns["f1"]), kept.rows, groups)
    f1 = kept.columns["f1"]
    assert sorted(own) == pytest.approx(sorted(f1[groups != number].mean() for number in range(groups.max() + 1)))


def test_pairs_are_joined_by_their_template(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = get_task("sst2").model_copy(
        update={
            "folder": "pairs",
            "columns": {"text": "one", "text_pair": "two"},
            "pair_template": "Question: {text}\nContext: {text_pair}",
        }
    )
    monkeypatch.setattr(prepare, "get_task", lambda name: task)
    rows = {"one": ["Anna {text_pair}"] * 20, "two": ["Oslo"] * 20, "label": [0, 1] * 10}
    for split in ("train", "validation"):
        write_table(place / "data" / "pairs", split, rows)
    made = prepared(place, "sst2", Protocol(max_length=100, stride=8))
    ids = made.table("test")["input_ids"][0].as_py()
    assert small_tokenizer().decode(ids[:-1]) == "Question: Anna Oslo\nContext: Oslo"
