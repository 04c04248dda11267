"""The four tasks made from documentation."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from mlmclm.errors import UserError
from mlmclm.pydocs import documentation
from mlmclm.pydocs import tasks as module
from mlmclm.pydocs.documented import first_sentences, normal, select, split_words
from mlmclm.pydocs.tasks import PYDOCS_TASKS, build
from small_words import WORDS

SHARED = """Reads {0} things from there.

    {0} is not said elsewhere.

    Args:
        path (str): The path of the file.
    """

NAMES = ["alpha", "beta", "gamma_ray", "delta"]

Tables = dict[str, dict[str, list[dict[str, Any]]]]


def docstring(generator: random.Random) -> str:
    """A docstring in Google's or numpydoc's form."""

    def sentence() -> str:
        return " ".join(generator.choice(WORDS) for _ in range(8)).capitalize() + "."

    names = generator.sample(NAMES, 3)
    if generator.random() < 0.5:
        fields = "\n".join(f"        {name} (str): {sentence()}" for name in names)
        return (
            f"{sentence()}\n\n    {sentence()}\n\n    Args:\n{fields}\n\n"
            f"    Returns:\n        bool: {sentence()}\n\n"
            f"    Raises:\n        KeyError: {sentence()}\n    "
        )
    fields = "\n".join(f"    {name} : list of int, optional\n        {sentence()}" for name in names)
    return (
        f"{sentence()}\n\n    {sentence()}\n\n    Parameters\n    ----------\n{fields}\n\n"
        f"    Returns\n    -------\n    dict\n"
        f"        {sentence()}\n\n    Notes\n    -----\n    {sentence()}\n    "
    )


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty packages; the last function of each is documented with the same words."""
    root = tmp_path_factory.mktemp("packages")
    for number in range(20):
        generator = random.Random(number)
        texts = [docstring(generator) for _ in range(12)]
        texts.append(SHARED.format(number))
        functions = [f'def read_{n}():\n    """{text}"""\n' for n, text in enumerate(texts)]
        (root / f"package{number:02d}.py").write_text("raise SystemExit('imported!')\n" + "\n".join(functions))
    return root


@pytest.fixture(scope="module", autouse=True)
def environment(packages: Path) -> Iterator[None]:
    """The packages in the place of the installed ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documentation, "installed_roots", lambda: [packages / "no standard library", packages])
        yield


@pytest.fixture(scope="module")
def store(environment: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store in which the tasks are made."""
    folder = tmp_path_factory.mktemp("store")
    build("pydocs-qa", folder)
    return folder


@pytest.fixture(scope="module")
def tables(store: Path) -> Tables:
    """task -> table -> rows."""
    result: Tables = {}
    for name in PYDOCS_TASKS:
        folder = build(name, store)
        result[name] = {file.stem: pq.read_table(file).to_pylist() for file in folder.glob("*.parquet")}
    return result


def texts_of(name: str, split: str, tables: Tables) -> list[str]:
    """What must not be in two splits."""
    rows = tables[name]
    if name == "pydocs-retrieval":
        if split == "train":
            return [row[key] for row in rows["train"] for key in ("query", "positive")]
        return [row["text"] for part in ("queries", "corpus") for row in rows[f"{split}_{part}"]]
    key = {"pydocs-kind": "text", "pydocs-fields": "tokens", "pydocs-qa": "context"}[name]
    return [row[key] if isinstance(row[key], str) else " ".join(row[key]) for row in rows[split]]


@pytest.mark.parametrize("name", PYDOCS_TASKS)
def test_no_evaluation_text_is_in_train(name: str, tables: Tables) -> None:
    train, validation, test = (
        {normal(text) for text in texts_of(name, s, tables)} for s in ("train", "validation", "test")
    )
    assert train
    assert validation
    assert test
    assert not train & validation
    assert not train & test
    assert not validation & test


def test_a_description_that_train_has_is_in_no_evaluation_example(tables: Tables) -> None:
    for name in ("pydocs-kind", "pydocs-fields", "pydocs-qa"):
        for split in ("validation", "test"):
            assert not [text for text in texts_of(name, split, tables) if "the path of the file" in text.lower()]
    assert any("path of the file" in text.lower() for text in texts_of("pydocs-kind", "train", tables))


def test_kinds_are_labelled_by_the_part_that_they_come_from(tables: Tables) -> None:
    labels = {row["label"] for row in tables["pydocs-kind"]["train"]}
    assert labels == {0, 1, 2, 3, 4}
    assert all(row["text_pair"] is None for row in tables["pydocs-kind"]["test"])
    path = [row for row in tables["pydocs-kind"]["train"] if row["text"] == "The path of the file."]
    assert [row["label"] for row in path] == [1]


def test_tags_mark_names_types_and_exceptions(tables: Tables) -> None:
    seen = set()
    for row in tables["pydocs-fields"]["train"]:
        assert len(row["tokens"]) == len(row["tags"])
        for token, tag in zip(row["tokens"], row["tags"], strict=True):
            seen.add(tag)
            assert (tag == 1) == (token in NAMES) or token == "path"
            assert (tag == 4) == (token == "KeyError")
            assert token != "optional"
        typed = " ".join(t for t, tag in zip(row["tokens"], row["tags"], strict=True) if tag in (2, 3))
        assert set(typed.split()) <= {"str", "bool", "dict", "list", "of", "int"}
    assert seen == {0, 1, 2, 3, 4}


def test_the_layout_does_not_give_tags_away(tables: Tables) -> None:
    rows = tables["pydocs-fields"]["train"]
    assert not {":", "(", ")", "."} & {token for row in rows for token in row["tokens"]}
    after_name = {row["tags"][n + 1] for row in rows for n, tag in enumerate(row["tags"][:-1]) if tag == 1}
    assert {0, 2} <= after_name


def test_answers_are_spans_of_their_contexts(tables: Tables) -> None:
    for split in ("train", "validation", "test"):
        for row in tables["pydocs-qa"][split]:
            answer, start = row["answers"]["text"][0], row["answers"]["answer_start"][0]
            assert row["context"][start : start + len(answer)] == answer
            assert answer


def test_a_question_about_a_parameter_is_answered_by_its_own_entry(tables: Tables) -> None:
    asked = 0
    for row in tables["pydocs-qa"]["train"]:
        match = re.search(r"(alpha|beta|gamma_ray|delta)", row["question"])
        if match:
            asked += 1
            before = row["context"][: row["answers"]["answer_start"][0]]
            assert re.findall(r"\b(alpha|beta|gamma_ray|delta)\b", before)[-1] == match[1]
    assert asked > 50


def test_the_rest_of_a_docstring_holds_neither_summary_nor_name(tables: Tables) -> None:
    for row in tables["pydocs-retrieval"]["train"]:
        assert normal(row["query"]) not in normal(row["positive"])
        assert not re.search(r"\bread_\d+\b", row["positive"])


def test_the_facts_fit_the_files_and_content_decides_the_fingerprint(
    store: Path, tables: Tables, tmp_path: Path
) -> None:
    for name in PYDOCS_TASKS:
        facts = json.loads((build(name, store) / "meta.json").read_text())
        assert facts["rows"] == {table: len(rows) for table, rows in tables[name].items()}
        assert facts["name"] == name
        again = build(name, tmp_path)
        assert json.loads((again / "meta.json").read_text()) == facts
    assert json.loads((build("pydocs-kind", store) / "meta.json").read_text())["label_names"] == [
        "summary",
        "parameter",
        "return",
        "exception",
        "note",
    ]


def test_a_task_with_another_bit_is_made_again_and_a_line_says_so(
    store: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = "test.parquet"
    shutil.copytree(store, tmp_path / "store")
    folder = build("pydocs-qa", tmp_path / "store")
    whole = (folder / file).read_bytes()
    (folder / file).write_bytes(whole[:300] + bytes([whole[300] ^ 1]) + whole[301:])
    capfd.readouterr()
    assert build("pydocs-qa", tmp_path / "store") == folder
    assert (folder / file).read_bytes() == whole
    assert f"{folder} is not used: {file} is not what was written" in " ".join(capfd.readouterr().err.split())


def test_too_little_documentation_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documentation, "installed_roots", lambda: [tmp_path / "no standard library", tmp_path])
    for number in range(3):
        (tmp_path / f"module{number}.py").write_text(f'"""A module about nothing, number {number}."""\n')
    with pytest.raises(UserError, match="too little documentation"):
        build("pydocs-qa", tmp_path / "store")


def test_shortening_keeps_whole_sentences_or_cuts_the_first() -> None:
    assert first_sentences("One two three. Four five six.", 6) == "One two three."
    assert first_sentences("One two three. Four five six.", 8) == "One two three. Four five six."
    assert first_sentences("One two three four five", 3) == "One two three"
    assert first_sentences("a.b (c) d", 3) == "a.b"
    assert all(
        len(split_words(first_sentences("x, (y) z. And so on, for long.", limit))) <= limit for limit in range(1, 14)
    )


def test_selection_is_fixed_and_takes_few_of_each_package() -> None:
    items = [f"{package}-{number}" for package in "abcdefghij" for number in range(100)]

    def chosen(given: list[str]) -> list[str]:
        return select(given, 100, key=lambda item: item, package=lambda item: item[0], salt="x")

    picked = chosen(items)
    assert picked == chosen(items[::-1])
    assert len(picked) == 100
    assert max(sum(item[0] == package for item in picked) for package in "abcdefghij") <= 15


def test_what_is_made_is_not_made_again(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "prepare_pydocs", None)
    for name in PYDOCS_TASKS:
        assert build(name, store).is_dir()
