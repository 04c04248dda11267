"""Models tried on a data file, and a model adapted to a text: what is planned, kept and written; and both from end to end."""

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
from mlmclm.plans.names import parse
from mlmclm.pretraining.held_out import document_losses
from mlmclm.reports.basis import basis_of
from mlmclm.studies.adaptation import EPOCHS, MOST_STEPS, own_objective, schedule, short_name
from mlmclm.studies.prepare import find_prepared
from mlmclm.studies.small_grid import LADDER, count_weights, rates_for
from small_models import BAD, FILL, GOOD, save_small_decoder, save_small_model

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two models, a data file in which one word decides, and texts."""
    folder, chance = tmp_path_factory.mktemp("tried"), random.Random(0)
    save_small_model(folder / "one")
    save_small_model(folder / "two", seed=1)
    save_small_decoder(folder / "decoder")
    with (folder / "reviews.csv").open("w", newline="") as file:
        made = csv.writer(file)
        made.writerow(["id", "text", "label"])
        for number in range(200):
            words = chance.choices(FILL, k=8)
            words.insert(chance.randrange(9), chance.choice(BAD if number % 2 else GOOD))
            made.writerow([number, f"{' '.join(words)} {number}", "bad" if number % 2 else "good"])
    (folder / "texts").mkdir()
    for number in range(120):
        (folder / "texts" / f"{number}.md").write_text(" ".join(chance.choices(FILL + GOOD + BAD, k=80)))
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


def test_a_text_is_passed_over_a_few_times_in_bounded_steps() -> None:
    for tokens in (5_000, 30_000, 300_000, 3_000_000, 10**9):
        found = schedule(tokens, 512)
        assert 1 <= found.steps <= MOST_STEPS and found.epochs <= EPOCHS + 1e-9
        assert found.steps == MOST_STEPS or found.epochs > 0.85 * EPOCHS
        assert found.epochs == pytest.approx(found.steps * found.batch * found.block_length / tokens)
    assert schedule(10**6, 64).block_length == 64 and schedule(10**6, 512, steps=7).steps == 7


def test_a_decoder_goes_on_as_a_decoder_and_names_are_made_to_fit(folder: Path) -> None:
    assert own_objective(folder / "decoder") == "clm" and own_objective(folder / "one") == "mlm30"
    assert [short_name(name) for name in ("ModernBERT-base", "1m", "mlm30", "-")] == [
        "ModernBERT_base", "1m_given", "mlm30_given", "model",
    ]  # fmt: skip


def test_adaptation_is_an_ordinary_study_with_an_untouched_control(folder: Path, tmp_path: Path) -> None:
    made = mlmclm.adapt(
        folder / "one",
        folder / "texts",
        tasks=folder / "reviews.csv",
        learning_rate=1e-3,
        replicates=2,
        seeds=2,
        store=tmp_path / "store",
    )
    assert made.study.command.endswith("--lr 0.001 --replicates 2 --seeds 2")
    seeds = basis_of([], made.study.command)
    assert (seeds.setting, seeds.command) == ("--seeds", made.study.command.removesuffix(" --seeds 2"))
    file = made.study.file
    assert file.baseline == made.control == "one-untrained"
    assert len(made.trained) == 2 and made.trained[1] == f"{made.trained[0]}-r2"
    assert file.tasks == ("reviews",) and "2 pretraining runs" in made.facts["training"]
    (written,) = made.write(tmp_path / "files")
    again = mlmclm.study(
        written, store=tmp_path / "store", task_dirs=[tmp_path / "files" / "tasks"], data=tmp_path / "files" / "data"
    )
    assert again.file.models == file.models and again.file.find_space() == file.find_space()


def test_wrong_requests_name_the_option_and_what_is_allowed(folder: Path, run: Run) -> None:
    for words, reason in (
        (("try", "reviews.csv", "--model", "one", "--label-column", "lable"), "Did you mean 'label'?"),
        (("try", "reviews.csv", "--model", "three"), "three is no folder"),
        (("adapt", "one", "--text", "text"), "text"),
        (("adapt", "one", "--text", "texts", "--objective", "mlm"), "--objective: unknown objective 'mlm'"),
        (("adapt", "one", "--text", "texts", "--seeds", "3"), "--seeds are of fine-tuning"),
        (("adapt", "one", "--text", "texts", "--lr", "2"), "--lr 2: allowed are rates between 0 and 1"),
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


@pytest.mark.slow
def test_an_adaptation_from_end_to_end_says_what_the_validation_says(run: Run, folder: Path) -> None:
    code, out, errors = run("adapt", "one", "--text", "texts", "--task", "reviews.csv", "--seeds", "1", "--steps", "40")
    assert code == 0, errors
    assert "On the text, the training helped" in out and "On reviews" in out and "one pretraining run" in out
    made = mlmclm.adapt("one", "texts", tasks="reviews.csv", seeds=1, steps=40, store="store")
    prepared = find_prepared(made.study.file, made.study.place)
    assert prepared is not None
    name = parse(made.trained[0], made.study.file.sizes)
    recorded = prepared.curve(name)[-1]["validation_loss"]
    (blocks,) = (source.validation for source in prepared.corpus.sources.values())
    losses = document_losses(
        prepared.model_folder(name),
        blocks,
        made.study.file.recipe,
        name.phases[-1].objective,
        prepared.corpus.tokenizer,
    )
    assert losses.loss == pytest.approx(recorded, rel=1e-4)
