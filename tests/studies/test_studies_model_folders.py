"""The models' folders of a study."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from mlmclm.models.folder import load_encoder, weights_hash
from mlmclm.models.stored_model import ExportedModel
from mlmclm.storage.place import Place
from mlmclm.studies.exports import export_models
from mlmclm.studies.prepare import prepare_study
from mlmclm.studies.study_file import load_study
from mlmclm.sweeps.find_model import find_model
from small_study import write_study


def test_a_study_s_models_are_whole_where_they_are_copied_to(tmp_path: Path) -> None:
    file = write_study(tmp_path, models=["1m-untrained"], baseline=None)
    place = Place(tmp_path / "store", tmp_path / "data")
    (exported,) = export_models(prepare_study(load_study(file), place))
    models = place.store / "studies" / "small" / "models"
    shutil.copytree(models.parent, tmp_path / "copied", symlinks=True)  # as `cp -r` does
    shutil.rmtree(place.store / "states")
    copied = tmp_path / "copied" / "models" / "1m-untrained"
    assert weights_hash(copied) == exported.weights
    assert load_encoder(copied) is not None


def test_studies_with_one_model_need_no_name_of_a_study(tmp_path: Path) -> None:
    place = Place(tmp_path / "store", tmp_path / "data")
    file = write_study(tmp_path, models=["1m-untrained"], baseline=None)
    study = load_study(file)
    prepared = prepare_study(study, place)
    (exported,) = export_models(prepared)
    export_models(prepare_study(study.model_copy(update={"name": "other"}), place))
    found = find_model("1m-untrained", place.store)
    assert found.weights == exported.weights
    # Also in a store whose copy has lost its hard links.
    shutil.copytree(place.store, tmp_path / "moved", symlinks=True)
    assert find_model("1m-untrained", tmp_path / "moved").weights == exported.weights


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "states" / "key" / "model"
    (folder / "decoder").mkdir(parents=True)
    for name in ("config.json", "README.md", "model.safetensors", "decoder/config.json"):
        (folder / name).write_text(name)
    return folder


def contents(folder: Path) -> dict[str, str]:
    return {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*") if file.is_file()}


def test_linked_files_take_no_room_and_follow_the_export(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "studies" / "model"
    ExportedModel(tmp_path, "key").link(target)
    assert contents(target) == contents(source)
    assert all((target / name).samefile(source / name) for name in contents(source))
    (source / "model.safetensors").unlink()
    (source / "model.safetensors").write_text("exported again")
    (target / "notes.txt").write_text("mine")
    (target / "README.md").unlink()
    (target / "README.md").write_text("my card")
    ExportedModel(tmp_path, "key").link(target)
    assert contents(target) == {**contents(source), "notes.txt": "mine", "README.md": "my card"}


def test_files_are_copied_once_where_they_cannot_be_linked(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError("Invalid cross-device link")

    monkeypatch.setattr(os, "link", refused)
    target = tmp_path / "elsewhere"
    ExportedModel(tmp_path, "key").link(target)
    assert contents(target) == contents(source)
    before = {file: file.stat().st_ino for file in target.rglob("*")}
    ExportedModel(tmp_path, "key").link(target)
    assert {file: file.stat().st_ino for file in target.rglob("*")} == before
