"""A study on a data file: what is inferred and written, and a run from end to end."""

from __future__ import annotations

import csv
import json
import random
import shlex
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import mlmclm
from mlmclm import progress
from mlmclm.cli.main import main
from mlmclm.errors import UserError
from mlmclm.storage.place import open_place
from mlmclm.studies import new_study
from mlmclm.studies.new_study import LADDER, count_weights, rates_for, settings_for, write_study
from mlmclm.tasks.data_file import read_task
from mlmclm.tasks.inference import Overrides
from small_models import BAD, FILL, GOOD, save_small_model

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two models, a data file in which one word decides."""
    folder, chance = tmp_path_factory.mktemp("tried"), random.Random(0)
    save_small_model(folder / "one")
    save_small_model(folder / "two", seed=1)
    with (folder / "reviews.csv").open("w", newline="") as file:
        made = csv.writer(file)
        made.writerow(["id", "text", "label"])
        for number in range(200):
            words = chance.choices(FILL, k=8)
            words.insert(chance.randrange(9), chance.choice(BAD if number % 2 else GOOD))
            made.writerow([number, f"{' '.join(words)} {number}", "bad" if number % 2 else "good"])
    return folder


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command in this process: exit code, output, errors."""
    monkeypatch.chdir(folder)

    def call(*words: str) -> tuple[int, str, str]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([*words, "--store", "store"])
        captured = capfd.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


def test_rates_follow_the_sizes_on_one_ladder() -> None:
    assert rates_for([1_000_000]) == [5e-4, 1e-3, 2e-3]
    assert rates_for([150_000_000]) == [2e-5, 5e-5, 1e-4]
    assert rates_for([150_000_000, 1_000_000]) == [rate for rate in LADDER if 2e-5 <= rate <= 2e-3]


def test_weights_are_counted_as_transformers_does(folder: Path) -> None:
    from transformers import AutoModelForMaskedLM

    model = AutoModelForMaskedLM.from_pretrained(folder / "one")
    assert count_weights(folder / "one") == sum(weight.numel() for weight in model.parameters())


def test_the_study_is_made_for_file_and_models_and_shown_before_it_is_written(
    folder: Path, tmp_path: Path, run: Run
) -> None:
    mine = tmp_path / "mine"
    words = ("init", str(mine), "--data", "reviews.csv", "--model", "a=one", "--model", "b=two")
    code, shown, errors = run(*words, "--dry-run")
    assert code == 0 and not mine.exists(), errors
    assert "# rows           140 train, 20 validation, 40 test" in shown and f"  a: {folder / 'one'}" in shown
    code, out, errors = run(*words, "--json")
    written = json.loads(out)
    assert code == 0 and written["data"]["kind of task"] == "sequence classification", errors
    assert set(written["files"]) == {str(mine / "study.yaml"), str(mine / "tasks" / "reviews.yaml")}
    for path, text in written["files"].items():
        assert Path(path).read_text() == text and text in shown
    study = mlmclm.study(mine / "study.yaml", store=tmp_path / "store", data=mine / "data", task_dirs=[mine / "tasks"])
    assert study.name == "mine" and list(study.file.find_space().learning_rates) == [5e-4, 1e-3, 2e-3]
    assert len(study.sweep(prepare=True).plan().cells) == 2 * 3 * 3
    code, _, errors = run(*words)
    assert code == 2 and "study.yaml: it exists and is not overwritten" in errors


def test_one_file_gives_one_division_whether_by_command_or_from_python(folder: Path, tmp_path: Path, run: Run) -> None:
    made = mlmclm.study_on_file(
        tmp_path / "mine", folder / "reviews.csv", str(folder / "one"), store=tmp_path / "store"
    )
    assert run("init", str(tmp_path / "other"), "--data", "reviews.csv", "--model", "one")[0] == 0
    for part in ("train", "validation", "test"):
        one, other = (tmp_path / name / "data" / "reviews" / f"{part}.parquet" for name in ("mine", "other"))
        assert pq.read_table(one) == pq.read_table(other)
    assert [str(each) for each in made.plan().as_dict()["models"]] == ["one"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--data", "reviews.csv", "--model", "one", "--label-column", "lable"), "Did you mean 'label'?"),
        (("--data", "reviews.csv", "--model", "three"), "three is no folder"),
        (("--data", "reviews.csv", "--model", "ome"), "unknown model 'ome'. Allowed: (none). Did you mean 'one'?"),
        (("--data", "review.csv", "--model", "one"), "review.csv: no such file. Did you mean 'reviews.csv'?"),
        (("--data", "reviews.csv"), "--model is missing"),
        (("--data", "reviews.csv", "--model", "one", "--model", "one"), "two models are called 'one'"),
        (("--model", "one"), "--model says more about a data file: give --data FILE too"),
    ],
)
def test_wrong_requests_name_the_option_and_write_nothing(
    words: tuple[str, ...], reason: str, tmp_path: Path, run: Run
) -> None:
    code, _, errors = run("init", str(tmp_path / "mine"), *words)
    assert code == 2 and reason in errors, errors
    assert not (tmp_path / "mine").exists()


def test_try_shows_what_is_in_the_file_and_its_dry_run_writes_nothing(folder: Path, run: Run) -> None:
    before = sorted(folder.rglob("*"))
    train = read_task(folder / "reviews.csv", Overrides()).tables["train"]["label"].to_pandas().value_counts()
    shares = ", ".join(f"{label} {count} ({count / 140:.0%})" for label, count in train.items())
    code, out, errors = run("try", "reviews.csv", "--model", "one", "--seeds", "2", "--dry-run")
    assert code == 0 and train.sum() == 140, errors
    assert f"2: {shares}" in out and "cells: 6 of 6 to compute" in out and "time: unknown" in out, out
    assert [path for path in sorted(folder.rglob("*")) if folder / "store" not in path.parents] == before
    code, _, errors = run("try", "reviews.csv", "--dry-run")
    assert code == 2 and "--model is missing" in errors
    words = ("try", "reviews.csv", "--model", "one", "--dry-run")
    code, _, errors = run("init", "reviews-study", "--data", "reviews.csv", "--model", "one")
    assert code == 0, errors
    assert run(*words)[0] == 0, "it is the study that is there"
    study = folder / "reviews-study" / "study.yaml"
    study.write_text(study.read_text() + "# edited\n")
    code, _, errors = run(*words)
    assert code == 2 and "study.yaml: it is not what this command writes. Run `mlmclm study" in errors
    shutil.rmtree(study.parent)


def test_try_says_what_it_does_while_models_are_read(folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    said = threading.Event()

    def read(*_: object, **__: object) -> str:
        assert said.wait(60), "nothing is said after the table"
        raise UserError("enough")

    def heard(text: str) -> None:
        if "reading the models" in text:
            said.set()

    monkeypatch.setattr(new_study, "settings_for", read)
    monkeypatch.setattr(progress, "SECONDS_OF_SILENCE", 0.0)
    monkeypatch.setattr(progress, "say", heard)
    assert run("try", "reviews.csv", "--model", "one", "--dry-run")[0] == 2


def test_a_study_is_resumed_if_its_files_are_as_they_were_written(folder: Path, tmp_path: Path) -> None:
    task, mine = read_task(folder / "reviews.csv", Overrides()), tmp_path / "mine"
    settings = settings_for(mine, task, str(folder / "one"), open_place(store=tmp_path / "store"))
    for _ in range(2):
        write_study(mine, task, settings, resume=True)
    with pytest.raises(UserError, match=r"study\.yaml: it exists"):
        write_study(mine, task, settings)
    for path in sorted(path for path in mine.rglob("*") if path.is_file()):
        before = path.read_bytes()
        path.write_bytes(before + b" ")
        with pytest.raises(
            UserError,
            match=f"{path.name}: it is not what this command writes. Run `mlmclm study .* --data {mine}/data`",
        ):
            write_study(mine, task, settings, resume=True)
        path.write_bytes(before)


@pytest.mark.slow
def test_a_data_file_ends_in_advice_and_a_second_run_computes_nothing(run: Run, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    code, out, errors = run("init", str(mine), "--data", "reviews.csv", "--model", "one", "--model", "two")
    assert code == 0, errors
    words = shlex.split(out.rpartition("compute: mlmclm ")[2])[:-1]
    code, out, errors = run(*words)
    assert code == 0 and "report.html" in out, errors
    code, out, errors = run(*words, "--dry-run")
    assert "cells: 0 of " in out, out
    code, out, errors = run("advise", "mine")
    assert code == 0 and "Based on: 2 models" in out, errors
