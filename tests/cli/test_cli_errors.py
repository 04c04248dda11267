"""Every mistake is one clear message without a traceback: exit code 2, or 1 where the environment is at fault; nothing is lost."""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml

from mlmclm.tasks.declared_tasks import FOLDER
from small_models import write_table
from small_study import write_study

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(run: Run) -> Run:
    """The same with every gap between words one space, wherever lines were broken."""

    def call(*words: str | Path) -> tuple[int, str]:
        code, text = run(*words)
        return code, " ".join(text.split())

    return call


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_study(tmp_path_factory.mktemp("errors"))


def changed(template: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> list[str | Path]:
    """The words of `mlmclm data` on a changed copy of the study."""
    content = yaml.safe_load(template.read_text())
    change(content)
    path = tmp_path / "changed.yaml"
    path.write_text(yaml.safe_dump(content))
    return ["data", path, "--store", tmp_path / "store", "--data", template.parent / "data"]


def put(*keys: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """A change: the nested key gets this value; other models need no baseline."""

    def change(content: dict[str, Any]) -> None:
        if keys == ("models",):
            content.pop("baseline")
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (put("recipe", "batchs", value=1), ["unknown key 'recipe.batchs'", "Did you mean 'recipe.batch'"]),
        (put("recipe", "batch", value="many"), ["recipe.batch", "many"]),
        (put("recipe", "zero_stage", value=4), ["recipe.zero_stage", "4"]),
        (put("recipe", "corruption", value={"random": 0.1}), ["recipe.corruption: mask + random + keep must be 1, but is 1.1"]),
        (put("recipe", "workers", value=3), ["does not divide", "1, 2, 4, 8"]),
        (put("models", value=["1m-clmm-30"]), ["unknown objective 'clmm'", "Did you mean 'clm'"]),
        (put("models", value=["1m-clm-30", "1m-clm-30"]), ["listed twice: 1m-clm-30"]),
        (put("baseline", value="2m-untrained"), ["not one of the models"]),
        (put("tasks", value=["sst3"]), ["unknown task 'sst3'", "Did you mean 'sst2'"]),
        (put("space", value="quickstat"), ["unknown search space 'quickstat'", "Did you mean 'quickstart'"]),
        (put("space", value="missing/space.yaml"), ["missing/space.yaml: no such file"]),
        (put("corpus", "source", value="./nowhere"), ["nowhere"]),
        (put("corpus", "max_documents", value=0), ["corpus.max_documents"]),
        (put("tokenizer", value={"path": "nowhere.json"}), ["nowhere.json"]),
        (put("tokenizer", value={"path": "a", "name": "b"}), ["exactly one of name, path and train_vocab_size"]),
        (put("tracking", value="ftp://somewhere"), ["unknown MLflow address"]),
    ],
)  # fmt: skip
def test_a_mistake_in_the_study_file_is_named_with_what_is_allowed(
    template: Path, tmp_path: Path, run: Run, change: Callable[[dict[str, Any]], None], parts: list[str]
) -> None:
    words = changed(template, tmp_path, change)
    if "tracking" in yaml.safe_load((tmp_path / "changed.yaml").read_text()):
        words[0] = "study"
    code, printed = run(*words)
    assert code == 2, printed
    assert "Traceback" not in printed
    for part in parts:
        assert part in printed


def test_a_study_takes_tasks_from_the_users_folder(template: Path, tmp_path: Path, run: Run) -> None:
    words = ["study", *changed(template, tmp_path, put("tasks", value=["sst2", "own"]))[1:], "--dry-run"]
    code, printed = run(*words)
    assert (code, "unknown task 'own'" in printed) == (2, True), printed
    code, printed = run(*words, "--task-dir", tmp_path / "none")
    assert (code, "--task-dir" in printed, "no such folder" in printed) == (2, True, True)
    folder = tmp_path / "tasks"
    folder.mkdir()
    text = (FOLDER / "sst2.yaml").read_text()
    (folder / "own.yaml").write_text(text.replace("name: sst2", "name: own"))
    for verb in ("study", "sweep", "pretrain"):
        code, printed = run(verb, *words[1:], "--task-dir", folder)
        assert code == 0, printed
    (folder / "own.yaml").write_text(text)
    code, printed = run(*words, "--task-dir", folder)
    assert (code, "own.yaml: the task 'sst2' is already declared by" in printed) == (2, True), printed


def test_what_is_wrong_with_any_task_is_said_of_all_at_once_before_anything_is_trained(
    template: Path, tmp_path: Path, run: Run
) -> None:
    good = {"sentence": ["good film", "bad film"] * 20, "label": [0, 1] * 20}
    bad = {
        "beyond-head": {**good, "label": [0, 2] * 20},
        "empty": {"sentence": pa.array([], pa.string()), "label": pa.array([], pa.int64())},
        "test-only": {**good, "label": [1] * 40},
        "cut": good,
        "other-column": {"text": good["sentence"], "label": good["label"]},
        "fine": good,
    }
    data = shutil.copytree(template.parent / "data", tmp_path / "data")
    declared = tmp_path / "tasks"
    declared.mkdir()
    text = (FOLDER / "sst2.yaml").read_text()
    for name, train in bad.items():
        write_table(data / name, "train", train)
        write_table(data / name, "validation", good)
        own = text.replace("name: sst2", f"name: {name}").replace("folder: sst2", f"folder: {name}")
        (declared / f"{name}.yaml").write_text(own)
    file = data / "cut" / "train.parquet"
    file.write_bytes(file.read_bytes()[:-30])
    words = changed(template, tmp_path, put("tasks", value=[*bad, "sst2"]))
    words = ["study", *words[1:-1], data, "--task-dir", declared]
    for more in (["--dry-run"], []):
        code, printed = run(*words, *more)
        assert code == 2, printed
        for part in (
            "task beyond-head, train", "label 2 is outside 0..1; the labels are negative, positive",
            "task empty, train", "the split is empty",
            "task test-only: test has the label 'negative', which train never shows",
            "task cut:", "is it cut short?",
            "task other-column, train", "the column 'sentence' is missing. There are: text, label.",
        ):  # fmt: skip
            assert part in printed
        assert "task fine" not in printed and "task sst2" not in printed
    assert not (tmp_path / "store" / "states").exists() and not (tmp_path / "store" / "runs").exists()
    for name, change in {"cut": ("metric: accuracy", "metric: acuracy"), "empty": ("family: ", "familly: ")}.items():
        (declared / f"{name}.yaml").write_text((declared / f"{name}.yaml").read_text().replace(*change))
    code, printed = run(*words)
    assert code == 2, printed
    assert "cut.yaml: metric 'acuracy' is not computed for sequence-classification; allowed: accuracy" in printed
    assert "empty.yaml: unknown key 'familly'. Did you mean 'family'?" in printed


def test_lengths_and_names_are_said_of_all_tasks_at_once(template: Path, tmp_path: Path, run: Run) -> None:
    own = yaml.safe_load((template.parent / "space.yaml").read_text())
    own["protocol"]["max_length"], own["tasks"] = 64, ["sst2", "conll2003", "rte"]
    own["per_task"] = {"rte": {"max_length": 16}}
    (tmp_path / "space.yaml").write_text(yaml.safe_dump(own))
    code, printed = run(*changed(template, tmp_path, put("space", value=str(tmp_path / "space.yaml"))))
    assert code == 2, printed
    for task in ("sst2", "conll2003"):
        assert f"task '{task}': max_length 64 is longer than the models' sequences (recipe.block_length 32)" in printed
    assert "'rte'" not in printed


def test_a_data_set_without_the_column_names_those_there_are(template: Path, tmp_path: Path, run: Run) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_text('{"txt": "some words"}\n')
    code, printed = run(*changed(template, tmp_path, put("corpus", "source", value=str(tmp_path / "rows"))))
    assert code == 2, printed
    assert "'text'" in printed
    assert "txt" in printed


def test_a_corpus_of_fewer_tokens_than_one_step_is_refused_with_both_numbers(
    template: Path, tmp_path: Path, run: Run
) -> None:
    def change(content: dict[str, Any]) -> None:
        content["recipe"] |= {"batch": 4096}

    code, printed = run(*changed(template, tmp_path, change))
    assert code == 2, printed
    assert re.search(r"has [\d,]+ tokens, fewer than the 131,072 of one step", printed)
    code, second = run("pretrain", *changed(template, tmp_path, change)[1:])
    assert (code, "fewer than the 131,072 of one step" in second, "Ray" in second) == (2, True, False)


def test_a_mask_token_that_is_the_eos_token_is_refused_for_a_masked_model_and_fine_for_a_causal_one(
    template: Path, tmp_path: Path, run: Run
) -> None:
    from mlmclm.corpora.corpus_config import TokenizerConfig
    from mlmclm.corpora.tokenizer import prepare_tokenizer

    text = (template.parent / "data" / "prose" / "train.txt").read_text()
    made = prepare_tokenizer(TokenizerConfig(train_vocab_size=400), store=tmp_path, texts=[text])
    settings = json.loads((made / "tokenizer_config.json").read_text())
    (made / "tokenizer_config.json").write_text(json.dumps(settings | {"mask_token": settings["eos_token"]}))
    for model, expected in (("1m-mlm40-30", 2), ("1m-clm-30", 0)):

        def change(content: dict[str, Any], model: str = model) -> None:
            content["tokenizer"] = {"path": str(made)}
            content["models"], content["tasks"] = [model], ["sst2"]
            content.pop("baseline")

        code, printed = run(*changed(template, tmp_path, change))
        assert code == expected, printed
        assert ("the mask token is also the eos token" in printed) == (expected == 2)


def test_an_mlflow_server_that_does_not_answer_is_the_environment_s_fault_and_found_first(
    template: Path, tmp_path: Path, run: Run
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = changed(template, tmp_path, put("tracking", value=f"http://127.0.0.1:{port}"))
    code, printed = run("study", *words[1:])
    assert code == 1, printed
    assert f"The MLflow server at http://127.0.0.1:{port} doesn't answer" in printed
    assert not (tmp_path / "store" / "corpora").exists()


@pytest.mark.parametrize("verb", ["study", "pretrain", "sweep", "data"])
def test_a_ray_cluster_that_does_not_answer_is_found_before_anything_is_prepared(
    template: Path, tmp_path: Path, run: Run, verb: str
) -> None:
    words = (verb, template, "--store", tmp_path / "store", "--data", template.parent / "data")
    code, printed = run(*words, "--ray", "127.0.0.1:1")
    assert code == 1, printed
    assert "The Ray cluster at 127.0.0.1:1 doesn't answer" in printed
    code, printed = run(*words, "--ray", "http://127.0.0.1:8265")
    assert code == 2, printed
    assert "An http:// address belongs to its dashboard" in printed
    assert not (tmp_path / "store" / "corpora").exists()


def test_a_sweep_of_models_that_are_not_trained_says_what_to_run(template: Path, tmp_path: Path, run: Run) -> None:
    code, printed = run("sweep", template, "--store", tmp_path / "store", "--data", template.parent / "data")
    assert code == 2, printed
    assert "not trained yet" in printed
    assert "mlmclm pretrain" in printed


def test_report_and_compare_prepare_and_export_nothing_and_say_what_to_run(
    template: Path, tmp_path: Path, run: Run
) -> None:
    places = ("--store", tmp_path / "store", "--data", template.parent / "data")

    def files() -> set[Path]:
        found = {path for path in (tmp_path / "store").rglob("*") if path.is_file()}
        return found - {tmp_path / "store" / "corpora" / "hashes.json"}

    verbs = (("report", template), ("compare", "1m-untrained", "1m-clm-30", "--study", template))
    for words in verbs:
        code, printed = run(*words, *places)
        assert code == 2, printed
        assert f"study 'small' has no results yet: run `mlmclm study {template}` first" in printed
        assert not files()


def test_a_second_run_on_the_same_study_is_refused_while_the_first_is_alive(
    template: Path, tmp_path: Path, run: Run
) -> None:
    from mlmclm.storage.files import only_one

    lock = tmp_path / "store" / "studies" / "small" / ".lock"
    with only_one(lock, "it"):
        code, printed = run("study", template, "--store", tmp_path / "store", "--data", template.parent / "data")
    assert code == 2, printed
    assert "already being worked on by process" in printed


def test_debug_shows_the_traceback_and_the_exit_code_stays(tmp_path: Path, run: Run) -> None:
    code, printed = run("plan", "2m-cml-3", "--debug")
    assert code == 2
    assert "Traceback" in printed


def test_there_are_few_verbs_and_a_word_that_is_none_is_said_to_be_elsewhere(run: Run) -> None:
    from mlmclm.cli.main import PANELS

    assert list(PANELS) == ["Study", "Look", "Store", "Service"] and sum(map(len, PANELS.values())) <= 25
    for word, place in {
        "stduy": "study",
        "why": "store why",
        "ui": "tracking ui",
        "figures": "report --figures",
        "schema": "init --schema",
    }.items():
        code, printed = run(word)
        assert code == 2 and f"No such command '{word}'. Did you mean '{place}'?" in printed, printed
