"""Models tried on a data file: what is planned, kept and written, and a run from end to end."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

import mlmclm
from mlmclm.cli.main import main
from mlmclm.errors import UserError
from mlmclm.studies.small_grid import LADDER, count_weights, rates_for
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


def test_the_grid_is_made_for_file_and_models_and_its_files_say_the_same(folder: Path, tmp_path: Path) -> None:
    sources = {"a": str(folder / "one"), "b": str(folder / "two")}
    made = mlmclm.try_models(folder / "reviews.csv", sources, baseline="a", seeds=2, store=tmp_path / "store")
    assert list(made.file.find_space().learning_rates) == [5e-4, 1e-3, 2e-3]
    assert len(made.sweep(prepare=True).plan().cells) == 2 * 3 * 2
    sweep, space, task = made.write(tmp_path / "files")
    again = mlmclm.study(
        sweep, store=tmp_path / "store", data=tmp_path / "files" / "data", task_dirs=[tmp_path / "files" / "tasks"]
    )
    assert again.file.find_space() == made.file.find_space() and space.exists() and task.exists()
    keys = [[cell.task_data for cell in each.sweep(prepare=True).plan().cells] for each in (made, again)]
    assert keys[0] == keys[1], "the written files hold other rows"
    with pytest.raises(UserError, match="exists and is not overwritten"):
        made.write(tmp_path / "files")
    with pytest.raises(UserError, match="unknown model 'c'"):
        mlmclm.try_models(folder / "reviews.csv", sources, baseline="c", store=tmp_path / "store").plan()


def test_wrong_requests_name_the_option_and_what_is_allowed(folder: Path, run: Run) -> None:
    for words, reason in (
        (("try", "reviews.csv", "--model", "one", "--label-column", "lable"), "Did you mean 'label'?"),
        (("try", "reviews.csv", "--model", "three"), "three is no folder"),
    ):
        code, _, errors = run(*words)
        assert code == 2 and reason in errors, errors


@pytest.mark.slow
def test_models_tried_from_end_to_end_end_in_advice_and_a_second_call_computes_nothing(run: Run) -> None:
    words = ("try", "reviews.csv", "--model", "one", "--model", "two", "--seeds", "2")
    code, out, errors = run(*words)
    assert code == 0, errors
    assert "sequence classification" in out and "Rests on: 2 models" in out and "report.html" in out
    code, out, errors = run(*words, "--json")
    found = json.loads(out)
    assert (
        code == 0
        and found["data"]["rows"] == "140 train, 20 validation, 40 test"
        and found["advice"]["answer"]["verdict"]
    )
    assert run("advise", "try-reviews")[0] == 0
