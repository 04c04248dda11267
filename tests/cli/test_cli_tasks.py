"""`mlmclm tasks` lists what there is, and `tasks check` shows what a model would be given of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from mlmclm.tasks.declared_tasks import FOLDER, task_names
from small_models import small_tokenizer, write_place

Run = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data/ and model/."""
    folder = tmp_path_factory.mktemp("tasks")
    write_place(folder)
    return folder


def check(run: Run, place: Path, name: str, *words: str) -> dict[str, Any]:
    code, printed = run("tasks", "check", name, "--model", place / "model", "--data", place / "data", "--json", *words)
    assert code == 0, printed
    found: dict[str, Any] = json.loads(printed)
    return found


def test_the_list_has_every_task_with_family_metric_source_and_licence(run: Run, tmp_path: Path) -> None:
    code, printed = run("tasks", "--json")
    found = {task["name"]: task for task in json.loads(printed)["tasks"]}
    assert (code, sorted(found)) == (0, task_names())
    assert found["mnli"]["source"] == "nyu-mll/glue/mnli"
    assert found["stsb"]["metric"] == "spearman"
    assert all(task["licence"] and task["family"] for task in found.values())
    (tmp_path / "own.yaml").write_text((FOLDER / "sst2.yaml").read_text().replace("name: sst2", "name: own"))
    code, printed = run("tasks", "--json", "--task-dir", tmp_path)
    assert {task["name"] for task in json.loads(printed)["tasks"]} - set(found) == {"own"}
    code, printed = run("tasks")
    assert (code, "conll2003" in printed) == (0, True)
    (tmp_path / "torn.yaml").write_text("name: torn\nname: twice\n")
    code, printed = run("tasks", "--task-dir", tmp_path)
    words = " ".join(printed.split())
    assert code == 0 and "conll2003" in words
    assert f"left out: {tmp_path / 'torn.yaml'}: key 'name' is there twice, in lines 1 and 2" in words
    code, printed = run("tasks", "--json", "--task-dir", tmp_path)
    (broken,) = json.loads(printed)["broken"]
    assert (code, broken["file"], "twice" in broken["reason"]) == (0, str(tmp_path / "torn.yaml"), True)


def test_a_classification_task_is_shown_with_counts_and_lengths(run: Run, place: Path) -> None:
    found = check(run, place, "sst2", "--max-length", "12")
    assert found["rows"] == {"train": 380, "validation": 20, "test": 60}
    rows = pq.read_table(place / "data" / "sst2" / "validation.parquet").to_pydict()
    assert found["labels"]["test"] == {"negative": rows["label"].count(0), "positive": rows["label"].count(1)}
    tokenizer = small_tokenizer()
    counts = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) + 1 for text in rows["sentence"]]
    lengths = found["lengths"]["test"]
    assert lengths["sequences"] == 60
    assert lengths["quantiles"]["max"] == max(counts)
    assert lengths["quantiles"]["median"] == sorted(counts)[29]
    assert lengths["truncated"] == pytest.approx(np.mean([count > 12 for count in counts]))
    assert 0 < lengths["truncated"] < 1
    assert len(found["examples"]) == 3
    train = pq.read_table(place / "data" / "sst2" / "train.parquet").to_pydict()
    known = dict(zip(train["sentence"], train["label"], strict=True))
    for example in found["examples"]:
        assert example["text"].endswith("<eos>")
        text = example["text"].removesuffix("<eos>")
        label = known.get(text, next(label for sentence, label in known.items() if sentence.startswith(text)))
        assert example["label"] == ("negative", "positive")[label]


def test_every_family_is_shown(run: Run, place: Path) -> None:
    pairs = check(run, place, "stsb", "--examples", "1")
    assert pairs["examples"][0]["text"].startswith("Sentence 1: ")
    assert pairs["labels"]["train"]["min"] == 0.0 < pairs["labels"]["train"]["mean"] < pairs["labels"]["train"]["max"]
    assert pairs["lengths"]["train"]["lost"] == {"longest_first": 0.0, "joined": 0.0}
    lost = check(run, place, "stsb", "--max-length", "26")["lengths"]["train"]["lost"]
    assert lost["longest_first"] == 0.0 < lost["joined"]
    entities = check(run, place, "conll2003")
    tags = {tag for example in entities["examples"] for _, tag in example["tags"]}
    assert tags <= {"O", "B-PER", "B-LOC", "I-LOC"}
    assert entities["labels"]["test"]["B-MISC"] == 0 < entities["labels"]["test"]["B-LOC"]
    assert entities["labels"]["test"]["B-LOC"] == entities["labels"]["test"]["I-LOC"]
    retrieval = check(run, place, "reqa_squad")
    assert retrieval["examples"][0]["query"].startswith("Query: ")
    assert retrieval["examples"][0]["positive"].startswith("Document: ")
    assert retrieval["rows"]["test documents"] == 40
    questions = check(run, place, "squad_v2", "--examples", "20")
    assert questions["labels"]["test"] == {"answered": 26, "unanswerable": 14}
    assert {example["answer"] is None for example in questions["examples"]} == {True, False}
    assert all(example["answer"] is None or example["answer"] in example["text"] for example in questions["examples"])
    assert questions["lengths"]["test"]["truncated"] == 0.0
    tight = check(run, place, "squad_v2", "--max-length", "24")
    assert 0 < tight["lengths"]["test"]["truncated"] < 1
    assert tight["lengths"]["test"]["quantiles"] == questions["lengths"]["test"]["quantiles"]


def test_a_model_that_lacks_ids_of_its_tokenizer_is_refused_as_fine_tuning_does(
    run: Run, place: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(place / "model", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    texts = pq.read_table(place / "data" / "sst2" / "train.parquet")["sentence"].to_pylist()
    ids = [max(small_tokenizer()(text)["input_ids"]) for text in texts]
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": max(ids)}))
    code, printed = run("tasks", "check", "sst2", "--model", folder, "--data", place / "data")
    assert code == 2 and f"gives the id {max(ids)}, and the model's vocabulary has {max(ids)}" in printed


def test_nothing_is_written(run: Run, place: Path, tmp_path: Path) -> None:
    words = ("tasks", "check", "sst2", "--tokenizer", place / "model", "--data", place / "data")
    code, printed = run(*words, "--store", tmp_path / "store")
    assert (code, "test: negative " in printed) == (0, True), printed
    assert not (tmp_path / "store").exists()


def test_mistakes_are_named(run: Run, place: Path, tmp_path: Path) -> None:
    data = ("--data", place / "data")
    model = ("--model", place / "model")
    for words, message in (
        (("sst3", *model, *data), "unknown task 'sst3'. Did you mean 'sst2'"),
        (("sst2", *data), "either by --tokenizer FOLDER or by --model FOLDER"),
        (("sst2", *model, "--tokenizer", place / "model", *data), "either by --tokenizer FOLDER or by --model FOLDER"),
        (("sst2", "--model", tmp_path / "none", *data), "no such model folder"),
        (("sst2", "--tokenizer", tmp_path, *data), "the tokenizer is missing"),
        (("sst2", *model, *data, "--max-length", "4096"), "made for 128 positions"),
        (("rte", *model, "--data", tmp_path / "none"), "no such folder"),
        (("qqp_20k", *model, *data), "there is no folder"),
    ):
        code, printed = run("tasks", "check", *words)
        assert code == 2, printed
        assert message in " ".join(printed.split())
        assert "Traceback" not in printed
    code, printed = run("tasks", "--task-dir", FOLDER, "check", "sst2", *model, *data)
    assert (code, "give --task-dir after `check`" in printed) == (2, True), printed
