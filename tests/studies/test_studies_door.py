"""`import mlmclm`: studies from Python, with the same pipeline, plan and errors as the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

import mlmclm
from mlmclm.finetuning.run import run_cell
from mlmclm.studies.given_study import GivenStudy
from mlmclm.studies.new_study import new_study
from mlmclm.studies.study import Study
from mlmclm.sweeps.ledger import Ledger
from small_models import save_small_decoder, save_small_model, write_sentiment
from small_study import write_study

SPACE = """
tasks: [sst2]
learning_rates: [1.0e-3, 1.0e-2]
seeds: [0, 1]
protocol: {base: standard, batch_size: 8, max_steps: 3, max_length: 48}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("door")
    write_sentiment(folder / "data", train=60, test=20)
    save_small_model(folder / "euro")
    save_small_decoder(folder / "llama", vocabulary=300)
    (folder / "space.yaml").write_text(SPACE)
    return folder


def given(folder: Path, **more: Any) -> Study:
    models = {"euro": str(folder / "euro"), "tiny": str(folder / "llama")}
    places = {"store": folder / "store", "data": folder / "data"}
    return mlmclm.sweep(models, None, folder / "space.yaml", name="mine", baseline="euro", **places | more)


@pytest.fixture(scope="module")
def finished(folder: Path) -> Study:
    """A study of given models, all of whose cells are computed one by one without Ray."""
    study = given(folder)
    assert isinstance(study, GivenStudy)
    ledger, place = Ledger(study.place.store), study.place
    for cell in study.sweep(prepare=True).plan().cells:
        ledger.write(run_cell(cell, store=place.store, data_root=place.data_root, on_examples=ledger.write_examples))
    study.run()
    return study


def test_importing_the_package_loads_nothing_and_names_everything() -> None:
    code = "import sys, mlmclm; print(*sorted({'torch', 'ray', 'numpy', 'pandas', 'rich', 'pydantic'} & sys.modules.keys())); print(*dir(mlmclm))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded, names = done.stdout.splitlines()
    assert loaded == "" and set(mlmclm.__all__) <= set(names.split())
    assert all(callable(getattr(mlmclm, name)) for name in mlmclm.__all__ if name != "tune") and callable(
        mlmclm.tune.Finetune
    )
    with pytest.raises(AttributeError, match="no attribute 'stduy'"):
        mlmclm.stduy  # noqa: B018


def test_a_room_that_is_imported_does_not_hide_the_function_study() -> None:
    import mlmclm.studies.study

    assert callable(mlmclm.study)


def test_results_are_the_tables_of_the_report(finished: Study) -> None:
    results = finished.results
    for name in ("best", "comparisons", "stability"):
        written = pd.read_csv(finished.folder / f"{name}.csv")
        assert list(getattr(results, name).columns) == list(written.columns) and len(written)
    assert len(results.cells) == 8
    assert set(results.predictions().columns) >= {"model", "task", "seed", "row", "gold", "prediction"}
    assert len(results.predictions()) == 20 * 2 * 2
    compared = results.compare("euro", "tiny")
    assert [row["task"] for row in compared.rows] == ["sst2"] and not compared.left_out


def test_a_figure_shows_in_a_notebook(finished: Study) -> None:
    shown = finished.results.figure("overall")._repr_html_()
    assert "<svg" in shown and "tiny" in shown and "<style>" in shown and "<script" not in shown
    with pytest.raises(mlmclm.UserError, match=r"mine: unknown figure 'overal'\. Did you mean 'overall'\?"):
        finished.results.figure("overal")


def test_the_plan_is_typed_and_says_what_a_dry_run_prints(
    finished: Study, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlmclm.cli.main import main

    plan = finished.plan()
    assert plan.sweep is not None and (plan.sweep.cells, plan.sweep.cells_to_compute) == (8, 0)
    words = ["--space", "space.yaml", "--name", "mine", "--baseline", "euro", "--store", "store", "--data", "data"]
    monkeypatch.chdir(folder)
    for form, expected in ((["--json"], plan.as_dict()), ([], str(plan))):
        with pytest.raises(SystemExit) as ended:
            main(["sweep", "--model", "euro=euro", "--model", "tiny=llama", "--dry-run", *words, *form])
        printed = capsys.readouterr().out
        assert not ended.value.code
        if form:
            assert json.loads(printed) == json.loads(json.dumps(expected))
        else:
            assert printed == f"{expected}\n"


def test_a_store_lists_its_studies_and_opens_their_results(finished: Study, folder: Path) -> None:
    store = mlmclm.open(folder / "store")
    (row,) = store.studies().to_dict("records")
    assert (row["name"], row["kind"], row["done"]) == ("mine", "sweep", 8)
    pd.testing.assert_frame_equal(store.study("mine").results.best, finished.results.best)
    with pytest.raises(mlmclm.UserError, match=r"unknown study or sweep 'mien'\. Did you mean 'mine'\?"):
        store.study("mien")
    assert list(store.models().columns) == ["study", "name", "folder"]
    assert store.model(str(folder / "euro")).folder == folder / "euro"


def test_a_single_cell_is_found_that_a_sweep_computed(finished: Study, folder: Path) -> None:
    found = mlmclm.finetune(
        str(folder / "euro"), "sst2", 1e-3, seed=1, space=str(folder / "space.yaml"), store=folder / "store", data=folder / "data",
    )  # fmt: skip
    row = finished.results.cells.query("model == 'euro' and learning_rate == 1e-3 and seed == 1").iloc[0]
    assert not found.computed and found.result["key"] == row["key"]
    assert found.scores["test"]["accuracy"] == row["test"] and len(found.predictions()) == 20
    with pytest.raises(mlmclm.UserError, match="a learning rate is between 0 and 1"):
        mlmclm.finetune(str(folder / "euro"), "sst2", 2.0, store=folder / "store", data=folder / "data")


def test_a_dict_is_a_study_as_its_file_is(tmp_path: Path) -> None:
    path = write_study(tmp_path)
    values = yaml.safe_load(path.read_text())
    plans = [mlmclm.study(each, store=tmp_path / "store", data=tmp_path / "data").plan() for each in (values, path)]
    assert plans[0] == plans[1] and plans[0].steps_to_train == 50
    with pytest.raises(mlmclm.UserError, match=r"study: unknown key 'modles'\. Did you mean 'models'\?"):
        mlmclm.study({**values, "modles": []})
    with pytest.raises(mlmclm.UserError, match="Packaged studies: continue, local-data, paper, quickstart"):
        mlmclm.study("quickstrat")
    assert mlmclm.study("quickstart", store=tmp_path / "store").name == "quickstart"


def test_folders_come_from_the_environment_as_for_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_study(tmp_path)
    monkeypatch.setenv("MLMCLM_STORE", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("MLMCLM_DATA", str(tmp_path / "data"))
    place = mlmclm.study(path).place
    assert (place.store, place.data_root) == (tmp_path / "elsewhere", tmp_path / "data")
    with pytest.raises(mlmclm.UserError, match="no such folder"):
        mlmclm.study(path, data=tmp_path / "nowhere")


def test_only_trained_models_are_pretrained(folder: Path) -> None:
    values = {"models": [str(folder / "euro")], "space": str(folder / "space.yaml")}
    with pytest.raises(mlmclm.UserError, match="its models are given; there is nothing to pretrain"):
        mlmclm.pretrain(values, store=folder / "store")


def test_a_new_study_can_be_read_and_overwrites_nothing(tmp_path: Path) -> None:
    study, space = new_study(tmp_path / "my study")
    made = mlmclm.study(study, store=tmp_path / "store")
    assert made.name == "my-study" and made.file.find_space().tasks
    assert study.read_text().startswith("# A study:") and space.read_text().startswith("# A search space:")
    study.write_text("mine")
    with pytest.raises(mlmclm.UserError, match=r"study\.yaml: it exists and is not overwritten"):
        new_study(tmp_path / "my study")
    assert study.read_text() == "mine"
