"""`mlmclm sweep` of models that no study made: named by options or a file, swept, reported, compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mlmclm.cli.main import main
from mlmclm.finetuning.cell import cell_key
from mlmclm.finetuning.run import run_cell
from mlmclm.studies.given_study import GivenStudy
from mlmclm.studies.place import Place
from mlmclm.studies.sweep_file import load_sweep
from mlmclm.sweeps.ledger import Ledger
from small_models import FEELINGS, save_small_decoder, save_small_model, write_entities, write_sentiment

Run = Callable[..., tuple[int, str, str]]
SPACE = """
tasks: [sst2, conll2003]
learning_rates: [1.0e-3]
seeds: [0, 1]
protocol: {base: standard, batch_size: 8, max_steps: 3, max_length: 48}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data/, two models of different kinds and tokenizers, a space and a sweep file."""
    folder = tmp_path_factory.mktemp("given")
    write_sentiment(folder / "data", train=60, test=20)
    write_entities(folder / "data", train=60, test=20)
    save_small_model(folder / "euro")
    save_small_decoder(folder / "llama", vocabulary=300)
    (folder / "space.yaml").write_text(SPACE)
    (folder / "sweep.yaml").write_text(
        "name: mine\nmodels: {euro: euro, tiny: llama}\nspace: space.yaml\nbaseline: euro\n"
    )
    return folder


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], place: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command in this process: exit code, output, errors."""
    monkeypatch.chdir(place)

    def call(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([*words, "--store", "store", "--data", "data"])
        captured = capfd.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture(scope="module")
def computed(place: Path) -> list[dict[str, Any]]:
    """The results of all cells, computed one by one without Ray."""
    where = Place((place / "store").resolve(), place / "data")
    made = GivenStudy(load_sweep(place / "sweep.yaml"), where).sweep(prepare=True)
    ledger = Ledger(where.store)

    def compute(cell: Any) -> dict[str, Any]:
        return run_cell(cell, store=where.store, data_root=where.data_root, on_examples=ledger.write_examples)

    return [ledger.ensure(cell_key(cell), partial(compute, cell))[0] for cell in made.plan().cells]


def test_a_dry_run_counts_cells_and_says_where_models_come_from(run: Run, place: Path) -> None:
    words = ("--model", "euro", "--model", "tiny=llama", "--space", "space.yaml", "--task", "sst2")
    code, out, _ = run("sweep", *words, "--dry-run", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["models"] == {"euro": "the folder euro", "tiny": "the folder llama"}
    assert (found["cells"], found["sweep"]) == (4, "sweep")


def test_cells_that_are_there_are_reported_without_ray(
    run: Run, place: Path, computed: list[dict[str, Any]], capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, said = run("sweep", "sweep.yaml")
    assert code == 0, said
    assert "Ray:" not in said
    assert "euro" in out and "tiny" in out
    report = (place / "store/studies/mine/report.html").read_text()
    assert "Is the folder llama." in report and "Which of these models suits these tasks best" in report
    assert "Pretraining recipe" not in report
    with pytest.raises(SystemExit):
        main(["sweep", "status", "sweep.yaml", "--store", "store", "--json"])
    found = json.loads(capfd.readouterr().out)
    assert (found["sweep"], found["done"], found["complete"]) == ("mine", len(computed), True)
    # A sweep by options is the same cells under another name.
    words = ("--model", "euro", "--model", "tiny=llama", "--space", "space.yaml", "--baseline", "euro", "--json")
    code, out, said = run("sweep", *words, "--name", "other")
    assert code == 0, said
    assert "Ray:" not in said
    found = json.loads(out)
    assert found["report"].endswith("studies/other/report.html")
    again, _, _ = run("report", "store/studies/other/sweep.yaml")
    assert again == 0


def test_models_of_a_sweep_are_compared(run: Run, computed: list[dict[str, Any]]) -> None:
    code, out, _ = run("compare", "euro", "tiny", "--study", "sweep.yaml", "--json")
    assert code == 0
    scores = {result["scores"]["test"]["accuracy"] for result in computed if result["task"] == "sst2"}
    assert scores, out
    code, _, said = run("compare", "euro", "tin", "--study", "sweep.yaml")
    assert code == 2 and "unknown model 'tin'. Did you mean 'tiny'?" in said


def test_a_finished_sweep_is_known_by_name_and_needs_neither_data_nor_task_folders(
    place: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    (place / "tasks").mkdir()
    (place / "tasks" / "feelings.yaml").write_text(FEELINGS)
    sweep = "name: own\nmodels: {euro: euro, tiny: llama}\nspace: space.yaml\nbaseline: euro\ntasks: [feelings]\n"
    (place / "own.yaml").write_text(sweep)
    where = Place((place / "store").resolve(), place / "data", (place / "tasks",))
    ledger = Ledger(where.store)
    cells = GivenStudy(load_sweep(place / "own.yaml"), where).sweep(prepare=True).plan().cells
    for cell in cells:
        ledger.write(run_cell(cell, store=where.store, data_root=where.data_root, on_examples=ledger.write_examples))

    def call(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([*words, "--store", "store"])
        captured = capfd.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    code, _, said = call("sweep", "own.yaml", "--data", "data", "--task-dir", "tasks")
    assert code == 0 and "Ray:" not in said, said
    page = (place / "store/studies/own/report.html").read_bytes()
    (place / "tasks").rename(place / "elsewhere")
    for which in ("own", "own.yaml"):
        code, out, said = call("compare", "euro", "tiny", "--study", which, "--json")
        assert code == 0, said
        assert [found["task"] for found in json.loads(out)["tasks"]] == ["feelings"]
        code, out, said = call("report", which)
        assert code == 0 and "euro" in out, said
        assert (place / "store/studies/own/report.html").read_bytes() == page
    code, out, said = call("studies", "--json")
    (known,) = [each for each in json.loads(out) if each["name"] == "own"]
    assert code == 0 and known.pop("run"), said
    assert known == {"name": "own", "kind": "sweep", "models": 2, "tasks": 1, "cells": len(cells), "done": len(cells)}
    code, out, _ = call("studies")
    assert code == 0 and "4 of 4" in out
    for words in (("report", "ownn"), ("compare", "euro", "tiny", "--study", "ownn")):
        code, _, said = call(*words)
        assert code == 2 and "unknown study or sweep 'ownn'. Did you mean 'own'?" in " ".join(said.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give a study file, a sweep file, or models with --model."),
        (("--model", "euro"), "--space is missing"),
        (("sweep.yaml", "--model", "euro"), "--model: sweep.yaml sets this already; give a file or options."),
        (("--model", "eurro", "--space", "space.yaml"), "unknown model 'eurro'"),
        (("--model", "euro", "--model", "x/euro", "--space", "space.yaml"), "two models are called 'euro'"),
        (("--model", "nostudy/*", "--space", "space.yaml"), "unknown study with models 'nostudy'"),
        (("--model", "euro", "--space", "spac.yaml"), "spac.yaml: no such file"),
        (("nothing.yaml",), "nothing.yaml"),
    ],
)
def test_wrong_words_are_said_in_one_line(run: Run, words: tuple[str, ...], message: str) -> None:
    code, out, said = run("sweep", *words)
    assert code == 2
    assert out == "" and message in said and "Traceback" not in said


@pytest.mark.slow
def test_a_sweep_on_ray_computes_what_single_cells_do(
    run: Run, place: Path, computed: list[dict[str, Any]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["sweep", "sweep.yaml", "--store", str(tmp_path / "fresh"), "--data", "data"])
    assert not ended.value.code, capfd.readouterr().err
    for wanted in computed:
        found = Ledger(tmp_path / "fresh").find(wanted["key"])
        assert found is not None and {**found, "cost": None, "model": None} == {**wanted, "cost": None, "model": None}


def test_another_grid_under_an_old_name_asks_for_a_decision(
    run: Run, place: Path, computed: list[dict[str, Any]]
) -> None:
    words = ("--model", "euro", "--space", "space.yaml", "--name", "twice")
    assert run("sweep", *words)[0] == 0
    folder = place / "store/studies/twice"
    report, cells = (folder / "report.html").read_text(), sorted((place / "store/cells").glob("*/*"))
    code, out, said = run("sweep", *words, "--task", "sst2")
    assert (code, out) == (2, "")
    assert "task left out: conll2003" in said and "--name" in said and "--replace" in said and "Traceback" not in said
    assert (folder / "report.html").read_text() == report
    shown = run("sweep", *words, "--task", "sst2", "--dry-run")[1]
    assert "task left out: conll2003; needs another name, or --replace" in shown
    code, _, said = run("sweep", *words, "--task", "sst2", "--replace")
    assert code == 0, said
    assert "conll2003" not in (folder / "report.html").read_text()
    # All that a grid gains is said in one line.
    code, _, said = run("sweep", *words, "--model", "tiny=llama")
    assert code == 0 and "the grid has grown: model added: tiny; task added: conll2003" in said
    assert sorted((place / "store/cells").glob("*/*")) == cells


def test_a_dry_run_shows_the_rates_that_were_drawn_and_a_wrong_model_s_override(run: Run, place: Path) -> None:
    drawn = SPACE.replace("[1.0e-3]", "{choice: [2.0e-3, 1.0e-3], samples: 2}")
    (place / "drawn.yaml").write_text(f"{drawn}per_model: {{euro: {{batch_size: 4}}}}\n")
    code, out, said = run("sweep", "--model", "euro", "--space", "drawn.yaml", "--dry-run")
    assert code == 0 and "learning rates: 1e-3, 2e-3" in out and "cells: 8 of 8 to compute" in out, said
    code, _, said = run("sweep", "--model", "eur=euro", "--space", "drawn.yaml", "--dry-run")
    assert code == 2 and "per_model: unknown model 'euro'. Did you mean 'eur'?" in said
