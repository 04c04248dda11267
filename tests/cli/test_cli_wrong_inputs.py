"""Kinds of wrong input over verbs and files: each is one message that names the file, without a traceback; 2 is the user's mistake, 1 the machine's."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from mlmclm.tasks.declared_tasks import FOLDER
from small_models import save_small_model
from small_study import write_study

Run = Callable[..., tuple[int, str]]
Spoil = Callable[[Path], None]


def missing(file: Path) -> None:
    file.unlink()


def folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def empty(file: Path) -> None:
    file.write_bytes(b"")


def binary(file: Path) -> None:
    file.write_bytes(bytes(range(256)) * 8)


def wrong_encoding(file: Path) -> None:
    file.write_bytes(file.read_bytes() + "# Größe\n".encode("latin-1"))


def duplicate_key(file: Path) -> None:
    first = next(line for line in file.read_text().splitlines() if line and line[0].isalpha())
    file.write_text(f"{file.read_text()}\n{first if not first.endswith(':') else first + ' 1'}\n")


def a_list(file: Path) -> None:
    file.write_text("- one\n- two\n")


def no_yaml(file: Path) -> None:
    file.write_text("name: [unclosed\nmore: {")


def typo(file: Path) -> None:
    content = yaml.safe_load(file.read_text())
    key = next(iter(content))
    file.write_text(yaml.safe_dump({f"{key}s": content.pop(key), **content}))


SPOILS: tuple[Spoil, ...] = (
    missing, folder, empty, binary, wrong_encoding, duplicate_key, a_list, no_yaml, typo,
)  # fmt: skip


class Inputs(NamedTuple):
    """A copy of every file that a person writes."""

    folder: Path
    study: Path
    space: Path
    data: Path


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("wrong")
    write_study(root)
    (root / "tasks").mkdir()
    (root / "tasks" / "own.yaml").write_text((FOLDER / "sst2.yaml").read_text().replace("name: sst2", "name: own"))
    study = yaml.safe_load((root / "study.yaml").read_text())
    (root / "study.yaml").write_text(yaml.safe_dump({**study, "space": "space.yaml"}))
    suite = {"description": "two", "models": ["1m-clm-30"]}
    (root / "suite.yaml").write_text(yaml.safe_dump(suite))
    (root / "sweep.yaml").write_text("name: own\nmodels: {model: model}\nspace: space.yaml\n")
    save_small_model(root / "model")
    return root


@pytest.fixture
def inputs(template: Path, tmp_path: Path) -> Inputs:
    root = shutil.copytree(template, tmp_path / "inputs")
    return Inputs(root, root / "study.yaml", root / "space.yaml", root / "data")


def places(inputs: Inputs, tmp_path: Path) -> tuple[str | Path, ...]:
    return "--store", tmp_path / "store", "--data", inputs.data


def words_of(words: Sequence[str], inputs: Inputs, tmp_path: Path) -> list[str | Path]:
    """Return the words with files in place of the names in capitals."""
    stands_for = {
        "STUDY": inputs.study, "SWEEP": inputs.folder / "sweep.yaml", "SPACE": inputs.space, "SUITE": inputs.folder / "suite.yaml",
        "TASKS": inputs.folder / "tasks", "MODEL": inputs.folder / "model", "FILE": tmp_path / "FILE",
        "NOWHERE": tmp_path / "NOWHERE", "TO": tmp_path / "to",
    }  # fmt: skip
    return [stands_for.get(word, word) for word in words]


def assert_one_clear_message(code: int, printed: str, name: str, *, expected: int = 2) -> None:
    assert code == expected, printed
    assert name in printed, printed
    for never in ("Traceback", "unexpected error", "MarkupError", "pydantic", "errors.pydantic.dev"):
        assert never not in printed, printed
    assert len(printed.splitlines()) <= 12, printed


READ_BY = {
    "study.yaml": (
        "data STUDY", "data order STUDY --steps 0:1", "plan --study STUDY", "pretrain STUDY", "sweep STUDY", "study STUDY",
        "study STUDY --dry-run", "report STUDY", "compare a b --study STUDY", "export STUDY 1m-clm-30 --to TO",
    ),
    "sweep.yaml": ("sweep SWEEP", "sweep SWEEP --dry-run", "report SWEEP", "compare a b --study SWEEP"),
    "space.yaml": (
        "data STUDY", "study STUDY", "study STUDY --dry-run", "pretrain STUDY --dry-run", "sweep STUDY", "report STUDY",
        "finetune MODEL sst2 --lr 1e-3 --space SPACE",
    ),
    "suite.yaml": ("plan --suite SUITE", "pretrain STUDY --suite SUITE"),
    "tasks/own.yaml": ("tasks check own --model MODEL --task-dir TASKS",),
}  # fmt: skip
"""Files, and the command lines that read them; the first is tried with every mistake, the others with one."""


@pytest.mark.parametrize(
    ("file", "line", "spoil"),
    [
        (file, line, spoil)
        for file, lines in READ_BY.items()
        for number, line in enumerate(lines)
        for spoil in (SPOILS if number == 0 else [typo])
    ],
    ids=lambda part: getattr(part, "__name__", part),
)
def test_a_wrong_file(file: str, line: str, spoil: Spoil, inputs: Inputs, tmp_path: Path, run: Run) -> None:
    spoil(inputs.folder / file)
    name = "no declaration of a task" if (file, spoil) == ("tasks/own.yaml", missing) else Path(file).name
    where = () if line.startswith("plan") else places(inputs, tmp_path)
    assert_one_clear_message(*run(*words_of(line.split(), inputs, tmp_path), *where), name)
    assert not (tmp_path / "store" / "corpora").exists()


@pytest.mark.parametrize("spoil", [missing, folder, empty, binary], ids=lambda spoil: spoil.__name__)
@pytest.mark.parametrize("verb", ["tasks check", "finetune", "data"])
def test_a_wrong_file_of_task_data(verb: str, spoil: Spoil, inputs: Inputs, tmp_path: Path, run: Run) -> None:
    spoil(inputs.data / "sst2" / "train.parquet")
    words = {
        "tasks check": ("tasks", "check", "sst2", "--model", inputs.folder / "model"),
        "finetune": ("finetune", inputs.folder / "model", "sst2", "--lr", "1e-3", "--space", inputs.space),
        "data": ("data", inputs.study),
    }[verb]
    name = "has no split 'train'" if spoil in (missing, folder) else "train.parquet"
    assert_one_clear_message(*run(*words, *places(inputs, tmp_path)), name)


@pytest.mark.parametrize("spoil", [missing, folder, empty, binary], ids=lambda spoil: spoil.__name__)
@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_wrong_file_of_a_model(file: str, spoil: Spoil, inputs: Inputs, tmp_path: Path, run: Run) -> None:
    spoil(inputs.folder / "model" / file)
    words = ("finetune", inputs.folder / "model", "sst2", "--lr", "1e-3", "--space", inputs.space)
    assert_one_clear_message(*run(*words, *places(inputs, tmp_path)), "model")


@pytest.mark.parametrize(("content", "name"), [
    (b"", "no text"), (b"\x00\xff" * 500, "train.txt"), ("Größe\n".encode("latin-1") * 50, "train.txt"),
], ids=["empty", "binary", "wrong encoding"])  # fmt: skip
def test_a_wrong_corpus(content: bytes, name: str, inputs: Inputs, tmp_path: Path, run: Run) -> None:
    (inputs.data / "prose" / "train.txt").write_bytes(content)
    assert_one_clear_message(*run("data", inputs.study, *places(inputs, tmp_path)), name)


@pytest.mark.parametrize(("words", "name"), [
    (("data", "STUDY", "--store", "FILE"), "FILE"),
    (("report", "STUDY", "--store", "FILE"), "FILE"),
    (("tracking", "ui", "--store", "FILE"), "FILE"),
    (("tracking", "ui", "--store", "NOWHERE"), "NOWHERE"),
    (("tracking", "ui", "--port", "70000"), "--port"),
    (("data", "STUDY", "--data", "NOWHERE"), "NOWHERE"),
    (("tasks", "--task-dir", "NOWHERE"), "NOWHERE"),
    (("tasks", "--task-dir", "FILE"), "FILE"),
    (("data", "order", "STUDY", "--steps", "-3:1"), "--steps"),
    (("data", "order", "STUDY", "--steps", "3:1"), "--steps"),
    (("plan", "1m-clm--30"), "1m-clm--30"),
    (("plan", "1m-clm-42k", "--vocabulary", "-1"), "--vocabulary"),
    (("finetune", "MODEL", "sst2", "--lr", "-1"), "--lr"),
    (("finetune", "MODEL", "sst2", "--lr", "fast"), "--lr"),
    (("finetune", "MODEL", "sst2", "--lr", "1e-3", "--seed", "-1"), "--seed"),
    (("finetune", "modle", "sst2", "--lr", "1e-3"), "modle"),
    (("finetune", "MODEL", "sst2", "--lr", "1e-3", "--set", "epochs=-1"), "epochs"),
    (("export", "STUDY", "1m-clm-30", "--to", "TO", "--step", "-1"), "--step"),
    (("tasks", "check", "sst2", "--model", "MODEL", "--max-length", "-5"), "--max-length"),
    (("tasks", "check", "sst2", "--model", "MODEL", "--examples", "-5"), "--examples"),
    (("study", "STUDY", "--ray", "127.0.0.1:99999"), "99999"),
    (("studdy", "STUDY"), "studdy"),
    (("study", "STUDY", "--stor", "x"), "--stor"),
], ids=lambda part: " ".join(part) if isinstance(part, tuple) else "")  # fmt: skip
def test_a_wrong_option(
    words: tuple[str, ...], name: str, inputs: Inputs, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where the store is by default
    (tmp_path / "FILE").write_text("a file")
    code, printed = run(*words_of(words, inputs, tmp_path))
    # A file in the store's place and a cluster that isn't there are faults of the surroundings.
    surroundings = words[-2:] == ("--store", "FILE") or "--ray" in words
    assert_one_clear_message(code, printed, name, expected=1 if surroundings and code == 1 else 2)


def test_a_port_that_is_taken(finished_study: Any, run: Run) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert_one_clear_message(
            *run("tracking", "ui", "--store", finished_study.store, "--port", str(port)), str(port)
        )


@pytest.fixture(scope="module")
def namespaces() -> None:
    """Mounts of one process alone, which end with it."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("this system gives no mounts of one's own (unshare -rm)")


COMMANDS = """
import contextlib, io, json, sys
from mlmclm.cli.main import main
from mlmclm.progress import console
for words in json.loads(sys.argv[1]):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            main(words)
        except SystemExit as ended:
            code = ended.code or 0
    print(json.dumps([code, printed.getvalue()]))
"""


@pytest.fixture
def mounted(namespaces: None) -> Callable[..., list[tuple[int, str]]]:
    """Runs command lines, all in one process, behind a shell's mounts: exit code and what it printed of each."""

    def call(mounts: str, *lines: tuple[str | Path, ...], home: Path) -> list[tuple[int, str]]:
        given = json.dumps([[str(word) for word in words] for words in lines])
        line = ["unshare", "-rm", "bash", "-c", f'{mounts} && exec "$@"', "bash", sys.executable, "-c", COMMANDS, given]
        environment = {**os.environ, "HOME": str(home), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=1500)
        assert done.returncode == 0, done.stderr
        return [(code, printed) for code, printed in map(json.loads, done.stdout.splitlines())]

    return call


def test_a_store_that_may_only_be_read(
    finished_study: Any, mounted: Callable[..., list[tuple[int, str]]], tmp_path: Path
) -> None:
    """`report` and `compare` show what is there; what has to write says that it can't."""
    store, study = finished_study.store, finished_study.study
    where = ("--store", store, "--data", study.parent / "data")
    shown, elsewhere, compared, finetuned = mounted(
        f"mount --bind {store} {store} && mount -o remount,ro,bind {store}",
        ("report", study, *where),
        ("report", study, *where, "--to", tmp_path / "to"),
        ("compare", "1m-clm-30", "1m-untrained", "--study", study, *where),
        ("finetune", "1m-clm-30", "sst2", "--lr", "2e-3", "--set", "max_length=32", *where),
        home=finished_study.home,
    )
    code, printed = shown
    assert code == 0, printed
    assert "is not written: " in printed and "--to" in printed and "Traceback" not in printed
    assert elsewhere[0] == 0, elsewhere[1]
    for name in ("report.html", "results.csv"):
        assert (tmp_path / "to" / name).read_bytes() == (store / "studies" / "small" / name).read_bytes()
    assert compared[0] == 0, compared[1]
    assert_one_clear_message(*finetuned, "Read-only file system", expected=1)


def test_a_disk_that_is_full(template: Path, tmp_path: Path, mounted: Callable[..., list[tuple[int, str]]]) -> None:
    store = tmp_path / "store"
    store.mkdir()
    where = ("--store", store, "--data", template / "data")
    for found in mounted(
        f"mount -t tmpfs -o size=16k none {store}",
        ("finetune", template / "model", "sst2", "--lr", "1e-3", "--space", template / "space.yaml", *where),
        ("data", template / "study.yaml", *where),
        home=tmp_path,
    ):
        assert_one_clear_message(*found, "the disk is full", expected=1)
