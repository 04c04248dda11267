"""A sweep of given models: named in a file or by options, each with its own tokenizer and context."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlmclm.configuration import parse
from mlmclm.errors import UserError
from mlmclm.studies.given_sweep import expand_studies, open_sweep
from mlmclm.studies.place import Place
from mlmclm.studies.sweep_file import SweepFile, is_sweep_file, load_sweep, named_models
from mlmclm.sweeps.cells import expand
from small_models import save_small_decoder, save_small_model, write_entities, write_sentiment

SPACE = """
tasks: [sst2, conll2003]
learning_rates: [1.0e-3, 1.0e-2]
seeds: [0, 1]
protocol: {base: standard, batch_size: 8, max_steps: 4, length_share: 0.5}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("given")
    write_sentiment(folder / "data", train=40, test=20)
    write_entities(folder / "data", train=40, test=20)
    save_small_model(folder / "euro", length=128)
    save_small_decoder(folder / "llama", length=64, vocabulary=300)
    (folder / "space.yaml").write_text(SPACE)
    return folder


def place(folder: Path) -> Place:
    return Place(folder / "store", folder / "data")


def sweep_of(folder: Path, text: str) -> SweepFile:
    (folder / "sweep.yaml").write_text(text)
    return load_sweep(folder / "sweep.yaml")


def test_a_model_is_called_by_the_last_part_of_its_source_or_as_it_is_said() -> None:
    found = named_models(["./my/euro", "answerdotai/ModernBERT-base@main", "mine=./my/other", "quickstart/1m-clm-1k"])
    assert found == {
        "euro": "./my/euro",
        "ModernBERT-base": "answerdotai/ModernBERT-base@main",
        "mine": "./my/other",
        "1m-clm-1k": "quickstart/1m-clm-1k",
    }
    with pytest.raises(ValueError, match=r"two models are called 'euro' \(a/euro and b/euro\)"):
        named_models(["a/euro", "b/euro"])


def test_cells_are_those_of_each_model_by_itself_at_its_own_context(folder: Path) -> None:
    file = sweep_of(folder, "models: {first: euro, second: llama}\nspace: space.yaml\nbaseline: second\n")
    made = open_sweep(file, place(folder), prepare=True)
    cells = made.plan().cells
    assert [cell.model for cell in cells] == ["first"] * 8 + ["second"] * 8
    assert {(cell.model, cell.protocol.max_length) for cell in cells} == {("first", 64), ("second", 32)}
    for each in made.models:
        data = {name: task.task_data for name, task in each.tasks.items()}
        alone = expand(each.space, [each.model], data, {cell.task: cell.declared for cell in cells})
        assert [cell for cell in cells if cell.model == each.model.name] == alone
    keys = {each.model.name: {task.key for task in each.tasks.values()} for each in made.models}
    assert not keys["first"] & keys["second"], "tokenised by different tokenizers"


def test_one_model_s_settings_are_its_own(folder: Path) -> None:
    text = "models: {first: euro, second: llama}\nspace: space.yaml\nper_model: {second: {batch_size: 4, max_length: 24}}\n"
    made = open_sweep(sweep_of(folder, text), place(folder), prepare=True)
    found = {(cell.model, cell.protocol.batch_size, cell.protocol.max_length) for cell in made.plan().cells}
    assert found == {("first", 8, 64), ("second", 4, 24)}
    (folder / "again.yaml").write_text(made.as_file())
    assert open_sweep(load_sweep(folder / "again.yaml"), place(folder), prepare=False).plan().cells == made.plan().cells
    with pytest.raises(UserError, match=r"per_model: unknown model 'secnd'. Did you mean 'second'\?"):
        open_sweep(sweep_of(folder, text.replace("{second: {", "{secnd: {")), place(folder), prepare=True)


def test_written_down_it_is_the_same_sweep_from_anywhere(folder: Path, tmp_path: Path) -> None:
    file = sweep_of(folder, "models: [euro, llama]\nspace: space.yaml\n")
    made = open_sweep(file, place(folder), prepare=True)
    (tmp_path / "again.yaml").write_text(made.as_file())
    again = open_sweep(load_sweep(tmp_path / "again.yaml"), place(folder), prepare=False)
    again.check_prepared()
    assert [cell.model_folder.resolve() for cell in again.plan().cells] == [
        cell.model_folder.resolve() for cell in made.plan().cells
    ]


def test_all_models_of_a_study_are_named_at_once(folder: Path, tmp_path: Path) -> None:
    for name in ("1m-clm-10", "1m-mlm40-10"):
        link = tmp_path / "studies" / "mine" / "models" / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(folder / "euro", target_is_directory=True)
    named = parse(SweepFile, {"models": ["mine/*"], "space": "glue"}, where="options")
    assert expand_studies(named, tmp_path).models == {
        "1m-clm-10": "mine/1m-clm-10",
        "1m-mlm40-10": "mine/1m-mlm40-10",
    }
    with pytest.raises(UserError, match=r"unknown study with models 'min'. Did you mean 'mine'\?"):
        expand_studies(parse(SweepFile, {"models": ["min/*"], "space": "glue"}, where="options"), tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: [euro]\n", "sweep.yaml: key 'space' is missing"),
        ("models: []\nspace: glue\n", "models"),
        ("models: [a/euro, b/euro]\nspace: glue\n", "two models are called 'euro'"),
        ("models: {a b: euro}\nspace: glue\n", "'a b': a model's name is letters"),
        ("models: [mine=study/*]\nspace: glue\n", "the models of a study keep their own names"),
        ("models: {mine: study/*}\nspace: glue\n", "the models of a study (study/*) keep their own names"),
        ("models: [mine=]\nspace: glue\n", "a model's folder or name is missing"),
        ("models: [euro]\nspace: glue\nmodel: x\n", "unknown key 'model'. Did you mean 'models'?"),
    ],
)
def test_a_wrong_sweep_file_is_refused_with_the_key(folder: Path, text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        sweep_of(folder, text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: [euro, nowhere]\nspace: space.yaml\n", "unknown model 'nowhere'"),
        ("models: [euro]\nspace: space.yaml\nbaseline: eur\n", "baseline: unknown model 'eur'. Did you mean 'euro'?"),
        ("models: [euro]\nspace: space.yaml\ntasks: [sst3]\n", "unknown task 'sst3'. Did you mean 'sst2'?"),
    ],
)
def test_unknown_names_are_refused_before_anything_is_prepared(folder: Path, text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        open_sweep(sweep_of(folder, text), place(folder), prepare=True)
    assert message in str(caught.value)


def test_a_model_that_cannot_be_fine_tuned_is_refused_before_any_cell(folder: Path, tmp_path: Path) -> None:
    broken = save_small_model(tmp_path / "broken", seed=5)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    file = sweep_of(folder, f"models: [euro, {broken}]\nspace: space.yaml\n")
    with pytest.raises(UserError, match=r"model\.safetensors: cannot be read"):
        open_sweep(file, place(folder), prepare=True)


def test_a_model_is_checked_even_if_another_of_its_tokenizer_prepared_the_task(folder: Path, tmp_path: Path) -> None:
    short = save_small_model(tmp_path / "short", length=32)
    (folder / "long.yaml").write_text(SPACE.replace("length_share: 0.5", "max_length: 48, stride: 8"))
    file = sweep_of(folder, f"models: [euro, {short}]\nspace: long.yaml\n")
    with pytest.raises(UserError, match=r"max_length is 48, but the model in .*short was made for 32 positions"):
        open_sweep(file, place(folder), prepare=True)


def test_a_study_file_is_no_sweep_file(folder: Path, tmp_path: Path) -> None:
    sweep_of(folder, "models: [euro]\nspace: glue\n")
    (tmp_path / "study.yaml").write_text("models: [1m-clm-10]\ncorpus: {source: text}\nrecipe: {}\n")
    assert is_sweep_file(folder / "sweep.yaml") and not is_sweep_file(tmp_path / "study.yaml")
