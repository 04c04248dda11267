"""`mlmclm finetune` of a study's model is the cell of the study's sweep."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from mlmclm.finetuning.cell import cell_key
from mlmclm.storage.place import Place
from mlmclm.studies.exports import export_models
from mlmclm.studies.prepare import prepare_study
from mlmclm.studies.study_file import load_study
from mlmclm.studies.study_sweep import SweptModel, plan_sweep, prepare_tasks, study_space
from small_models import save_small_decoder
from small_study import write_study

Run = Callable[..., tuple[int, str]]
SPACE = {
    "tasks": ["sst2", "conll2003"],
    "learning_rates": [1e-3],
    "seeds": [0],
    "protocol": {"max_steps": 4, "length_share": 0.75, "batch_size": 8},
    "per_task": {"conll2003": {"length_share": 0.5}},
}
MODELS = ["1m-untrained", "tiny-untrained"]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of blocks of 32 tokens: a model of its own, and one to continue from that has 64 positions."""
    folder = tmp_path_factory.mktemp("study")
    initial = {"tiny": str(save_small_decoder(folder / "decoder"))}
    path = write_study(folder, initial=initial, models=MODELS, baseline=None)
    content = yaml.safe_load(path.read_text())
    del content["tokenizer"]
    path.write_text(yaml.safe_dump(content))
    (folder / "space.yaml").write_text(yaml.safe_dump(SPACE))
    return path


def keys_of(study: Path) -> dict[tuple[str, str], str]:
    """Of all of the study's cells, by model and task; its models are exported."""
    loaded, place = load_study(study), Place(study.parent / "store", study.parent / "data")
    prepared, space = prepare_study(loaded, place), study_space(loaded)
    tasks = prepare_tasks(prepared, space)
    planned = plan_sweep([SweptModel(model, space, tasks) for model in export_models(prepared)], place)
    return {(cell.model, cell.task): cell_key(cell) for cell in planned.cells}


@pytest.mark.parametrize("model", MODELS)
def test_the_key_is_that_of_the_study_s_cell_where_lengths_are_a_share_of_the_context(
    study: Path, run: Run, model: str, tmp_path: Path
) -> None:
    keys = keys_of(study)
    places = [
        "--store",
        study.parent / "store",
        "--data",
        study.parent / "data",
        "--space",
        study.parent / "space.yaml",
    ]

    def plan(named: str | Path, task: str) -> dict[str, Any]:
        code, output = run("finetune", named, task, "--lr", "1e-3", *places, "--dry-run", "--json")
        assert code == 0, output
        return dict(json.JSONDecoder().raw_decode(output)[0])  # progress comes behind it

    folder = (study.parent / "store" / "studies" / "small" / "models" / model).resolve()
    elsewhere = shutil.copytree(folder, tmp_path / "elsewhere")
    for task, length in (("sst2", 24), ("conll2003", 16)):
        for named in (model, folder, elsewhere):
            found = plan(named, task)
            assert found["protocol"]["max_length"] == length
            assert found["key"] == keys[model, task]
