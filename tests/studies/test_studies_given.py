"""Studies of given models: in a file, by options and from Python; their cells, results, and records in the store."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from safetensors.torch import load_file as load_tensors
from safetensors.torch import save_file

import mlmclm
from mlmclm.cli.main import main
from mlmclm.errors import UserError
from mlmclm.finetuning.cell import cell_key
from mlmclm.finetuning.run import run_cell
from mlmclm.models.sources import named_models
from mlmclm.storage.files import read_json, write_json
from mlmclm.studies.study import Study
from mlmclm.studies.study_file import StudyFile, SweepFile, load_file, read_file
from mlmclm.studies.study_record import as_yaml
from mlmclm.sweeps.cells import expand
from mlmclm.sweeps.results_store import ResultsStore
from small_models import FEELINGS, save_small_decoder, save_small_model, write_entities, write_sentiment

Run = Callable[..., tuple[int, str, str]]
SPACE: dict[str, Any] = {
    "tasks": ["sst2", "conll2003"],
    "learning_rates": [1e-3],
    "seeds": [0, 1],
    "protocol": {"base": "standard", "batch_size": 8, "max_steps": 3, "max_length": 48},
}
SHARES = {**SPACE, "learning_rates": [1e-3, 1e-2], "protocol": {"base": "standard", "batch_size": 8, "max_steps": 4, "length_share": 0.5}}  # fmt: skip
FILE = "name: mine\nmodels: {euro: euro, tiny: llama}\nspace: space.yaml\nbaseline: euro\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data/, two models of different kinds, tokenizers and contexts, two spaces and a sweep file."""
    folder = tmp_path_factory.mktemp("given")
    write_sentiment(folder / "data", train=60, test=20)
    write_entities(folder / "data", train=60, test=20)
    save_small_model(folder / "euro", length=128)
    save_small_decoder(folder / "llama", length=64, vocabulary=300)
    (folder / "space.yaml").write_text(json.dumps(SPACE))
    (folder / "shares.yaml").write_text(json.dumps(SHARES))
    (folder / "sweep.yaml").write_text(FILE)
    return folder


def given(folder: Path, text: str, **more: Any) -> Study:
    """The study of a sweep file with this text."""
    (folder / "tried.yaml").write_text(text)
    return mlmclm.study(folder / "tried.yaml", **{"store": folder / "store", "data": folder / "data", **more})


def compute(study: Study) -> list[dict[str, Any]]:
    """Compute all cells of a study one by one, without Ray."""
    place, results_store = study.place, ResultsStore(study.place.store)

    def one(cell: Any) -> dict[str, Any]:
        return run_cell(cell, store=place.store, data_root=place.data_root, on_examples=results_store.write_examples)

    return [
        results_store.ensure(cell_key(cell), partial(one, cell))[0] for cell in study.sweep(prepare=True).plan().cells
    ]


@pytest.fixture(scope="module")
def computed(folder: Path) -> list[dict[str, Any]]:
    return compute(given(folder, FILE))


@pytest.fixture(scope="module")
def finished(folder: Path, computed: list[dict[str, Any]]) -> Study:
    """The study by arguments, run: all cells are there already."""
    models = {"euro": str(folder / "euro"), "tiny": str(folder / "llama")}
    places = {"store": folder / "store", "data": folder / "data"}
    study = mlmclm.sweep(models, None, SPACE, name="mine", baseline="euro", **places)
    study.run()
    return study


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command in this process: exit code, output, errors."""
    monkeypatch.chdir(folder)

    def call(*words: str, data: bool = True) -> tuple[int, str, str]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([*words, "--store", "store", *(("--data", "data") if data else ())])
        captured = capfd.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


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


def test_a_folder_that_is_there_comes_before_a_name_and_before_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning, Hydra and Ray Tune write such folders."""
    expected = {
        "lr=1e-4": "lr-1e-4",
        "lr=1e-4/ckpt": "ckpt",
        "runs/epoch=3-step=100": "epoch-3-step-100",
        "outputs/2026-11-27/seed=1,lr=0.1": "seed-1-lr-0.1",
        "1e-4/ckpt2": "ckpt2",
        "a@b/last 100%?#é": "last-100-",
        "trial/_hidden": "hidden",
    }
    for folder in expected:
        (tmp_path / "there" / folder).mkdir(parents=True, exist_ok=True)
    assert named_models(list(expected), tmp_path / "there") == {name: path for path, name in expected.items()}
    monkeypatch.chdir(tmp_path / "there")
    assert named_models(list(expected)) == {name: path for path, name in expected.items()}
    assert named_models(["mine=lr=1e-4/ckpt"]) == {"mine": "lr=1e-4/ckpt"}
    monkeypatch.chdir(tmp_path)
    assert named_models(["lr=1e-4/ckpt"]) == {"lr": "1e-4/ckpt"}
    assert named_models(["runs/lr=1e-4/ckpt"]) == {"ckpt": "runs/lr=1e-4/ckpt"}, "a name has no slash"


def test_one_model_and_one_task_need_no_list() -> None:
    one = mlmclm.sweep("euro/base", "sst2", "glue").file
    assert list(one.models) == ["base"] and one.tasks == ("sst2",)
    assert one == mlmclm.sweep(["euro/base"], ["sst2"], "glue").file


def test_the_keys_of_a_file_say_whether_its_models_are_given(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text("models: [euro]\nspace: glue\n")
    assert isinstance(load_file(tmp_path / "sweep.yaml"), SweepFile)
    assert isinstance(load_file(Path("quickstart")), StudyFile)
    with pytest.raises(UserError, match="study: unknown key 'corpsu'"):
        read_file({"corpsu": {}, "recipe": {}}, where="study")


def test_cells_are_those_of_each_model_by_itself_at_its_own_context(folder: Path) -> None:
    made = given(folder, "models: {first: euro, second: llama}\nspace: shares.yaml\n").sweep(prepare=True)
    cells = made.plan().cells
    assert [cell.model for cell in cells] == ["first"] * 8 + ["second"] * 8
    assert {(cell.model, cell.protocol.max_length) for cell in cells} == {("first", 64), ("second", 32)}
    for each in made.models:
        data = {name: task.task_data for name, task in each.tasks.items()}
        alone = expand(each.space, [each.model], data, {cell.task: cell.declared for cell in cells})
        assert [cell for cell in cells if cell.model == each.model.name] == alone
    keys = {each.model.name: {task.key for task in each.tasks.values()} for each in made.models}
    assert not keys["first"] & keys["second"], "tokenised by different tokenizers"


def test_written_down_it_is_the_same_sweep_from_anywhere_with_each_model_s_own_settings(
    folder: Path, tmp_path: Path
) -> None:
    text = "models: {first: euro, second: llama}\nspace: shares.yaml\nper_model: {second: {batch_size: 4, max_length: 24}}\n"
    made = given(folder, text).sweep(prepare=True)
    found = {(cell.model, cell.protocol.batch_size, cell.protocol.max_length) for cell in made.plan().cells}
    assert found == {("first", 8, 64), ("second", 4, 24)}
    again = given(tmp_path, as_yaml(made), store=folder / "store", data=folder / "data").sweep(prepare=False)
    assert again.plan().cells == made.plan().cells
    with pytest.raises(UserError, match=r"per_model: unknown model 'secnd'. Did you mean 'second'\?"):
        given(folder, text.replace("{second: {", "{secnd: {")).sweep(prepare=True)


def test_all_models_of_a_study_are_named_at_once(folder: Path, tmp_path: Path) -> None:
    for name in ("1m-clm-10", "1m-mlm40-10"):
        link = tmp_path / "studies" / "mine" / "models" / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(folder / "euro", target_is_directory=True)
    found = mlmclm.sweep(["mine/*"], None, "glue", store=tmp_path).file.models
    assert found == {"1m-clm-10": "mine/1m-clm-10", "1m-mlm40-10": "mine/1m-mlm40-10"}
    with pytest.raises(UserError, match=r"unknown study with models 'min'. Did you mean 'mine'\?"):
        mlmclm.sweep(["min/*"], None, "glue", store=tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: [euro]\n", "tried.yaml: key 'space' is missing"),
        ("models: []\nspace: glue\n", "models"),
        ("models: {a b: euro}\nspace: glue\n", "'a b': a model's name is letters"),
        ("models: [mine=study/*]\nspace: glue\n", "the models of a study keep their own names"),
        ("models: {mine: study/*}\nspace: glue\n", "the models of a study (study/*) keep their own names"),
        ("models: [mine=]\nspace: glue\n", "a model's folder or name is missing"),
        ("models: [euro]\nspace: glue\nmodel: x\n", "unknown key 'model'. Did you mean 'models'?"),
        ("models: [euro, nowhere]\nspace: space.yaml\n", "unknown model 'nowhere'"),
        ("models: [euro]\nspace: space.yaml\nbaseline: eur\n", "baseline: unknown model 'eur'. Did you mean 'euro'?"),
        ("models: [euro]\nspace: space.yaml\ntasks: [sst3]\n", "unknown task 'sst3'. Did you mean 'sst2'?"),
    ],
)
def test_a_wrong_file_is_refused_with_the_key_before_anything_is_prepared(
    folder: Path, text: str, message: str
) -> None:
    with pytest.raises(UserError) as caught:
        given(folder, text).sweep(prepare=True)
    assert message in str(caught.value)


def test_a_model_that_cannot_be_fine_tuned_is_refused_before_any_cell(folder: Path, tmp_path: Path) -> None:
    broken = save_small_model(tmp_path / "broken", seed=5)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    with pytest.raises(UserError, match=r"model\.safetensors: cannot be read"):
        given(folder, f"models: [euro, {broken}]\nspace: space.yaml\n").sweep(prepare=True)
    # Also if another model of its tokenizer has prepared the task.
    short = save_small_model(tmp_path / "short", length=32)
    with pytest.raises(UserError, match=r"max_length is 48, but the model in .*short was made for 32 positions"):
        given(folder, f"models: [euro, {short}]\nspace: space.yaml\n").sweep(prepare=True)


def test_given_models_are_not_pretrained(folder: Path) -> None:
    values = {"models": [str(folder / "euro")], "space": str(folder / "space.yaml")}
    with pytest.raises(UserError, match="its models are given; there is nothing to pretrain"):
        mlmclm.pretrain(values, store=folder / "store")


def test_results_are_the_tables_of_the_report(finished: Study) -> None:
    results = finished.results
    for name in ("best", "comparisons", "stability", "components"):
        written = pd.read_csv(finished.folder / f"{name}.csv")
        assert list(getattr(results, name).columns) == list(written.columns) and len(written)
    assert len(results.cells) == 8
    shown = results.figure("overall")._repr_html_()
    assert "<svg" in shown and "tiny" in shown and "<style>" in shown and "<script" not in shown
    with pytest.raises(UserError, match=r"mine: unknown figure 'overal'\. Did you mean 'overall'\?"):
        results.figure("overal")


def test_figures_for_papers_are_written_by_the_verb_and_from_python(finished: Study, run: Run, tmp_path: Path) -> None:
    status, shown, _ = run("report", "mine", "--figures", str(tmp_path / "paper"), "--json")
    files = [Path(file) for file in json.loads(shown)["figures"]]
    assert status == 0 and {file.suffix for file in files} == {".svg", ".pdf", ".csv", ".tex"}
    again = finished.results.write_figures(tmp_path / "again")
    assert [file.read_bytes() for file in files] == [file.read_bytes() for file in again]


def test_the_plan_is_typed_and_says_what_a_dry_run_prints(finished: Study, run: Run) -> None:
    plan = finished.plan()
    assert plan.sweep is not None and (plan.sweep.cells, plan.sweep.cells_to_compute) == (8, 0)
    assert "time:" not in str(plan)
    assert plan.models == {"euro": "the folder euro", "tiny": "the folder llama"}
    words = ("--model", "euro=euro", "--model", "tiny=llama", "--space", "space.yaml", "--name", "mine")
    for form, printed in (("--json", json.dumps(plan.as_dict(), indent=1)), ("--dry-run", str(plan))):
        assert run("sweep", *words, "--dry-run", form)[:2] == (0, f"{printed}\n")


def test_a_store_lists_its_studies_and_opens_their_results(finished: Study, folder: Path) -> None:
    store = mlmclm.open(folder / "store")
    row = next(row for row in store.studies().to_dict("records") if row["name"] == "mine")
    assert (row["kind"], row["done"]) == ("sweep", 8)
    pd.testing.assert_frame_equal(store.study("mine").results.best, finished.results.best)
    with pytest.raises(UserError, match=r"unknown study or sweep 'mien'\. Did you mean 'mine'\?"):
        store.study("mien")
    assert list(store.models().columns) == ["study", "name", "folder"]
    assert store.model(str(folder / "euro")).folder == folder / "euro"


def test_predictions_join_with_the_cells_that_made_them(finished: Study) -> None:
    results = finished.results
    joined = results.predictions().merge(results.cells, on=["key", "model", "task", "seed"])
    assert len(joined) == len(results.predictions()) > 0
    for _, own in joined[joined["task"] == "sst2"].groupby("key"):
        right = (own["prediction"] == own["gold"]).mean()
        assert right == pytest.approx(own["test"].iloc[0])


def test_a_single_cell_is_found_that_a_sweep_computed(finished: Study, folder: Path) -> None:
    places = {"store": folder / "store", "data": folder / "data"}
    found = mlmclm.finetune(str(folder / "euro"), "sst2", 1e-3, seed=1, space=str(folder / "space.yaml"), **places)
    row = finished.results.cells.query("model == 'euro' and task == 'sst2' and seed == 1").iloc[0]
    assert not found.computed and found.result["key"] == row["key"]
    assert found.scores["test"]["accuracy"] == row["test"] and len(found.predictions()) == 20
    with pytest.raises(UserError, match="a learning rate is between 0 and 1"):
        mlmclm.finetune(str(folder / "euro"), "sst2", 2.0, **places)


def test_a_task_s_data_are_checked_as_a_model_would_be_given_them(folder: Path) -> None:
    checked = mlmclm.check_task("sst2", model=folder / "llama", store=folder / "store", data=folder / "data")
    assert (checked.task.name, checked.max_length, checked.rows["train"]) == ("sst2", 64, 57)
    assert len(checked.examples) == 3
    with pytest.raises(UserError, match=r"give the tokens either by --tokenizer FOLDER or by --model FOLDER"):
        mlmclm.check_task("sst2", data=folder / "data")


def test_cells_that_are_there_are_reported_without_ray(run: Run, folder: Path, finished: Study) -> None:
    code, out, said = run("sweep", "sweep.yaml")
    assert code == 0 and "Ray:" not in said, said
    assert "euro" in out and "tiny" in out
    report = (folder / "store/studies/mine/report.html").read_text()
    assert "Is the folder llama." in report and "Which of these models suits these tasks best" in report
    assert "Pretraining recipe" not in report
    found = json.loads(run("sweep", "status", "sweep.yaml", "--json", data=False)[1])
    assert (found["sweep"], found["done"], found["complete"]) == ("mine", 8, True)
    # A sweep by options is the same cells under another name.
    words = ("--model", "euro", "--model", "tiny=llama", "--space", "space.yaml", "--baseline", "euro", "--json")
    code, out, said = run("sweep", *words, "--name", "other")
    assert code == 0 and "Ray:" not in said, said
    assert json.loads(out)["report"].endswith("studies/other/report.html")
    assert run("report", "store/studies/other/sweep.yaml")[0] == 0


def test_a_finished_sweep_is_known_by_name_and_needs_neither_data_nor_task_folders(
    run: Run, folder: Path, tmp_path: Path
) -> None:
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "feelings.yaml").write_text(FEELINGS)
    (folder / "own.yaml").write_text(f"{FILE.replace('mine', 'own')}tasks: [feelings]\n")
    own = mlmclm.study(folder / "own.yaml", store=folder / "store", data=folder / "data", task_dirs=[tasks])
    assert len(compute(own)) == 4
    code, _, said = run("sweep", "own.yaml", "--task-dir", str(tasks))
    assert code == 0 and "Ray:" not in said, said
    page = (folder / "store/studies/own/report.html").read_bytes()
    tasks.rename(tmp_path / "elsewhere")
    for which in ("own", "own.yaml"):
        code, out, said = run("compare", "euro", "tiny", "--study", which, "--json", data=False)
        assert code == 0, said
        assert [found["task"] for found in json.loads(out)["tasks"]] == ["feelings"]
        code, out, said = run("report", which, data=False)
        assert code == 0 and "euro" in out, said
        assert (folder / "store/studies/own/report.html").read_bytes() == page
    (known,) = [each for each in json.loads(run("store", "studies", "--json", data=False)[1]) if each["name"] == "own"]
    assert known.pop("run") and known == {"name": "own", "kind": "sweep", "models": 2, "tasks": 1, "cells": 4, "done": 4}  # fmt: skip
    assert "4 of 4" in run("store", "studies", data=False)[1]
    for words in (("report", "ownn"), ("compare", "euro", "tiny", "--study", "ownn")):
        code, _, said = run(*words, data=False)
        assert code == 2 and "unknown study or sweep 'ownn'. Did you mean 'own'?" in " ".join(said.split())
    code, _, said = run("compare", "euro", "tin", "--study", "own", data=False)
    assert code == 2 and "unknown model 'tin'. Did you mean 'tiny'?" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give a study file, a sweep file, or models with --model."),
        (("--model", "euro"), "--space is missing"),
        (("sweep.yaml", "--model", "euro"), "--model: sweep.yaml sets this already; give a file or options."),
        (
            ("--model", "euro", "--space", "spac.yaml"),
            "spac.yaml: no such file; looked for spac.yaml. Did you mean 'space.yaml'?",
        ),
        (("nothing.yaml",), "nothing.yaml"),
    ],
)
def test_wrong_words_are_said_in_one_line(run: Run, words: tuple[str, ...], message: str) -> None:
    code, out, said = run("sweep", *words)
    assert code == 2
    assert out == "" and message in said and "Traceback" not in said


@pytest.mark.slow
def test_a_sweep_on_ray_computes_what_single_cells_do(
    folder: Path, computed: list[dict[str, Any]], tmp_path: Path
) -> None:
    given(folder, FILE, store=tmp_path).run()
    for wanted in computed:
        found = ResultsStore(tmp_path).find(wanted["key"])
        assert found is not None and {**found, "cost": None, "model": None} == {**wanted, "cost": None, "model": None}


def test_another_grid_under_an_old_name_asks_for_a_decision(run: Run, folder: Path, finished: Study) -> None:
    words = ("--model", "euro", "--space", "space.yaml", "--name", "twice")
    assert run("sweep", *words)[0] == 0
    written = folder / "store/studies/twice"
    report, cells = (written / "report.html").read_text(), sorted((folder / "store/cells").glob("*/*"))
    code, out, said = run("sweep", *words, "--task", "sst2")
    assert (code, out) == (2, "")
    assert "task left out: conll2003" in said and "--name" in said and "--replace" in said and "Traceback" not in said
    assert (written / "report.html").read_text() == report
    shown = run("sweep", *words, "--task", "sst2", "--dry-run")[1]
    assert "task left out: conll2003; needs another name, or --replace" in shown
    code, _, said = run("sweep", *words, "--task", "sst2", "--replace")
    assert code == 0, said
    assert "conll2003" not in (written / "report.html").read_text()
    # All that a grid gains is said in one line.
    code, _, said = run("sweep", *words, "--model", "tiny=llama")
    assert code == 0 and "the grid has grown: model added: tiny; task added: conll2003" in said
    assert sorted((folder / "store/cells").glob("*/*")) == cells


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("a layer", r"the weights lack layers\.1"),
        ("a shape", r"layers\.1\.mlp\.up_proj\.weight have the shape 63 x 32; config\.json says 64 x 32"),
        ("an end", "no end-of-sequence token"),
        ("a row", "gives the id 399, and the model's vocabulary has 300"),
    ],
)
@pytest.mark.parametrize("verb", ["sweep", "finetune"])
def test_a_dry_run_refuses_a_model_that_the_run_would(
    run: Run, folder: Path, tmp_path: Path, verb: str, fault: str, message: str
) -> None:
    wrong = save_small_model(tmp_path / "wrong")
    weights, file = load_tensors(wrong / "model.safetensors"), wrong / "model.safetensors"
    name = "model.layers.1.mlp.up_proj.weight"
    if fault == "a layer":
        save_file({name: each for name, each in weights.items() if "layers.1" not in name}, file, {"format": "pt"})
    elif fault == "a shape":
        save_file({**weights, name: weights[name][1:].clone()}, file, {"format": "pt"})
    elif fault == "an end":
        write_json(wrong / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    else:
        write_json(wrong / "config.json", {**read_json(wrong / "config.json"), "vocab_size": 300})
        table = "model.embed_tokens.weight"
        cut = {each: weights[each][:300].clone() for each in (table, "lm_head.weight") if each in weights}
        save_file({**weights, **cut}, file, {"format": "pt"})
    words = {
        "sweep": ("sweep", "--model", str(wrong), "--task", "sst2", "--space", "space.yaml"),
        "finetune": ("finetune", str(wrong), "sst2", "--lr", "1e-3", "--space", "space.yaml"),
    }
    code, _, said = run(*words[verb], "--dry-run")
    assert code == 2 and re.search(message, " ".join(said.split())), said


def test_a_dry_run_shows_the_rates_and_the_cells(run: Run, folder: Path) -> None:
    (folder / "rates.yaml").write_text(json.dumps({**SPACE, "learning_rates": [1e-3, 2e-3]}))
    code, out, said = run("sweep", "--model", "euro", "--space", "rates.yaml", "--dry-run")
    assert code == 0 and "learning rates: 1e-3, 2e-3" in out and "of 8 to compute" in out, said
