"""A user's own tasks: from folders and from installed packages, run where nothing is installed but the cell itself."""

from __future__ import annotations

import dataclasses
import pickle
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlmclm.errors import UserError
from mlmclm.finetuning.cell import Cell, cell_key
from mlmclm.finetuning.protocol import Protocol
from mlmclm.finetuning.run import run_cell
from mlmclm.models.folder import weights_hash
from mlmclm.tasks import declared_tasks
from mlmclm.tasks.declared_tasks import FOLDER, broken_files, find_tasks, get_task, task_names
from mlmclm.tasks.load import load_task
from mlmclm.tasks.prepare_task import prepare_task
from small_models import save_small_model, write_sentiment

SHORT = Protocol(max_steps=3, max_length=32, stride=8, batch_size=4, max_evaluation_examples=10)


def declare(folder: Path, name: str = "own", metric: str = "matthews") -> Path:
    """A folder with sst2's declaration under another name and metric."""
    folder.mkdir(parents=True, exist_ok=True)
    text = (FOLDER / "sst2.yaml").read_text()
    text = text.replace("name: sst2", f"name: {name}").replace("metric: accuracy", f"metric: {metric}")
    (folder / f"{name}.yaml").write_text(text)
    return folder


def test_a_folders_tasks_stand_beside_the_packaged_ones(tmp_path: Path) -> None:
    first, second = declare(tmp_path / "a"), declare(tmp_path / "b", "another")
    assert set(find_tasks([first, second])) - set(task_names()) == {"own", "another"}
    assert get_task("own", [first]).metric == "matthews"
    with pytest.raises(UserError, match="unknown task 'own'"):
        get_task("own")
    with pytest.raises(UserError, match=r"unknown task 'ownn'. Did you mean 'own'"):
        get_task("ownn", [first])


def test_a_name_that_is_taken_is_an_error_with_both_files(tmp_path: Path) -> None:
    folder = declare(tmp_path / "a", "sst2")
    with pytest.raises(
        UserError, match=r"a/sst2\.yaml: the task 'sst2' is already declared by .*declarations/sst2\.yaml"
    ):
        get_task("sst2", [folder])
    folders = [declare(tmp_path / name) for name in ("b", "c")]
    with pytest.raises(UserError, match=r"c/own\.yaml: the task 'own' is already declared by .*b/own\.yaml"):
        get_task("own", folders)
    assert get_task("sst2", folders) == get_task("sst2")


def test_a_broken_file_takes_its_own_task_away_and_no_other(tmp_path: Path) -> None:
    """One malformed file in --task-dir blocked every task."""
    folder = declare(tmp_path / "a")
    (folder / "torn.yaml").write_text("name: torn\nsplits: {train: ")
    (folder / "second.yaml").write_text("name: wrong\nfamily: retrieving\n")
    assert get_task("own", [folder]).metric == "matthews"
    assert get_task("sst2", [folder]) == get_task("sst2")
    assert "own" in find_tasks([folder]) and not {"torn", "wrong"} & find_tasks([folder]).keys()
    assert sorted(each.file.name for each in broken_files([folder])) == ["second.yaml", "torn.yaml"]
    with pytest.raises(UserError, match=r"^[^\n]*torn\.yaml: not valid YAML"):
        get_task("torn", [folder])
    with pytest.raises(UserError, match=r"second\.yaml: family: .*'retrieving'"):
        get_task("wrong", [folder])
    with pytest.raises(
        UserError, match=r"unknown task 'ownn'.*Files that cannot be used \(.*second\.yaml, .*torn\.yaml"
    ):
        get_task("ownn", [folder])


@pytest.mark.parametrize(
    ("declared", "changed", "key", "value"),
    [
        ("folder: sst2", "folder: ../elsewhere", "folder", "../elsewhere"),
        ("folder: sst2", "folder: /etc", "folder", "/etc"),
        ("source: stanfordnlp/sst2", "source: ~/elsewhere", "source", "~/elsewhere"),
        ("folder: sst2", "data_dir: ../elsewhere", "data_dir", "../elsewhere"),
        ("test: validation", "test: in/../../elsewhere", "splits.test", "in/../../elsewhere"),
        ("test: validation", "test: {qrels: ../elsewhere}", "splits.test.qrels", "../elsewhere"),
        ("test: validation", "test: {split: validation, file: ../elsewhere}", "splits.test.file", "../elsewhere"),
        ("folder: sst2", "folder: sst2\nconfig_name: ../../secret", "config_name", "../../secret"),
        (
            "test: validation",
            "test: {split: validation, config_name: ../secret}",
            "splits.test.config_name",
            "../secret",
        ),
        ("test: validation", "test: {split: validation, revision: ../../x}", "splits.test.revision", "../../x"),
    ],
)
def test_a_declaration_cannot_name_a_place_outside_the_data_folder(
    tmp_path: Path, declared: str, changed: str, key: str, value: str
) -> None:
    folder = declare(tmp_path / "a")
    text = (folder / "own.yaml").read_text()
    assert declared in text
    (folder / "own.yaml").write_text(text.replace(declared, changed))
    with pytest.raises(UserError, match=re.escape(f"a/own.yaml: {key}: must not be")) as raised:
        get_task("own", [folder])
    assert "own" not in find_tasks([folder])
    assert f"(got {value!r})" in str(raised.value)
    assert "\n" not in str(raised.value), "one message for one mistake"


@pytest.mark.parametrize("source", ["secret", "text", "csv", "owner/name"])
def test_a_source_is_a_name_on_the_hub_and_never_a_local_folder(
    tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`datasets` would read a folder of this name below the working directory."""
    monkeypatch.chdir(tmp_path)
    for place in (Path(), Path("secret"), Path("owner/name")):
        place.mkdir(parents=True, exist_ok=True)
        (place / "train.csv").write_text("text,label\nhidden,1\n")
    folder = declare(tmp_path / "a")
    text = (folder / "own.yaml").read_text().replace("source: stanfordnlp/sst2", f"source: {source}")
    (folder / "own.yaml").write_text(text)
    with pytest.raises(UserError, match=rf"task own: source: '{source}' (would be read from|stands for local files)"):
        load_task(get_task("own", [folder]), store=tmp_path, data_root=None)


def test_an_unknown_key_of_a_split_names_the_nearest(tmp_path: Path) -> None:
    folder = declare(tmp_path / "a")
    text = (folder / "own.yaml").read_text()
    for wrong, near in (("{split: validation, fille: x}", "file"), ("{qrels: {split: x, sourc: y}}", "qrels.source")):
        (folder / "own.yaml").write_text(text.replace("test: validation", f"test: {wrong}"))
        with pytest.raises(UserError, match=rf"unknown key 'splits.test.*Did you mean 'splits.test.{near}'") as raised:
            get_task("own", [folder])
        assert "\n" not in str(raised.value), "one message for one mistake"


def test_links_in_the_users_own_data_folder_are_followed(tmp_path: Path) -> None:
    write_sentiment(tmp_path / "elsewhere", train=40, test=10)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "sst2").symlink_to(tmp_path / "elsewhere" / "sst2", target_is_directory=True)
    assert len(load_task(get_task("sst2"), store=tmp_path, data_root=tmp_path / "data").test) == 10


def test_a_folder_without_declarations_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--task-dir .*nowhere: no such folder"):
        find_tasks([tmp_path / "nowhere"])
    with pytest.raises(UserError, match=r"there is no declaration of a task \(\*\.yaml\) in it"):
        find_tasks([tmp_path])


@pytest.fixture
def fresh() -> Iterator[None]:
    """What is installed is read anew, before and after."""
    declared_tasks._installed.cache_clear()
    yield
    declared_tasks._installed.cache_clear()


def install(place: Path, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution of a package `own_package` with an entry point, as an installer leaves it."""
    declare(place / "own_package" / "tasks", "of_package")
    (place / "own_package" / "__init__.py").touch()
    information = place / "own_package-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: own-package\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[mlmclm.tasks]\nmine = {value}\n")
    monkeypatch.delitem(sys.modules, "own_package", raising=False)
    monkeypatch.syspath_prepend(place)


def test_an_installed_packages_tasks_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    install(tmp_path, "own_package.tasks", monkeypatch)
    assert get_task("of_package").metric == "matthews"
    with pytest.raises(
        UserError, match=r"of_package\.yaml: the task 'of_package' is already declared by .*own_package"
    ):
        get_task("of_package", [declare(tmp_path / "a", "of_package")])


def test_an_entry_point_that_names_no_package_is_left_out_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path, "own_package.elsewhere", monkeypatch)
    assert "sst2" in task_names()
    said = capsys.readouterr().err
    assert re.search(
        r"left out: entry point 'mine' .* own-package 1\.0: 'own_package.elsewhere' is not a package", said
    )


def test_a_cell_brings_its_declaration_to_a_worker_that_has_none(tmp_path: Path) -> None:
    write_sentiment(tmp_path / "data", train=60, test=20)
    folder = save_small_model(tmp_path / "model")
    task = get_task("own", [declare(tmp_path / "tasks")])
    made = prepare_task(task, folder, SHORT, tmp_path / "store", tmp_path / "data")
    bare = Cell("m", folder, weights_hash(folder), "own", made.task_data, SHORT, 1e-3, 0)
    cell = dataclasses.replace(bare, declaration=task)
    assert cell_key(cell) == cell_key(bare)
    sent = pickle.loads(pickle.dumps(cell))
    result = run_cell(sent, store=tmp_path / "another", data_root=tmp_path / "data")
    assert (result["task"], result["metric"], result["status"]) == ("own", "matthews", "ok")
    assert set(result["scores"]["test"]) == {"accuracy", "f1_macro", "f1", "matthews"}
    with pytest.raises(UserError, match="unknown task 'own'"):
        run_cell(bare, store=tmp_path / "another", data_root=tmp_path / "data")


def test_the_data_of_a_task_are_the_same_under_whatever_name(tmp_path: Path) -> None:
    write_sentiment(tmp_path / "data", train=60, test=20)
    folder = save_small_model(tmp_path / "model")
    own = get_task("own", [declare(tmp_path / "tasks")])
    found = {
        prepare_task(task, folder, SHORT, tmp_path / "store", tmp_path / "data").task_data for task in (own, "sst2")
    }
    assert len(found) == 1
