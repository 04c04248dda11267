"""A flipped byte or a lost half of any file of a store is never believed: what was there comes out again, or a message says what to do."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from mlmclm.errors import MlmclmError
from mlmclm.finetuning.cell import Cell, cell_key
from mlmclm.finetuning.kept import kept_folder, load_kept, set_aside_damaged
from mlmclm.finetuning.run import keep_encoder, run_cell
from mlmclm.models.folder import load_encoder
from mlmclm.models.given import read_written
from mlmclm.pretraining import checkpoints, states
from mlmclm.study.model_folders import export_models, restore_exports
from mlmclm.study.place import Place
from mlmclm.study.prepare import prepare
from mlmclm.study.prepared_study import PreparedStudy
from mlmclm.study.study_file import load_study
from mlmclm.study.study_sweep import plan_sweep, prepare_tasks, study_space
from mlmclm.sweeps.ledger import Ledger
from mlmclm.sweeps.starts import KeptWeights
from small_models import save_small_decoder
from small_study import write_study

SPACE = {
    "tasks": ["sst2"],
    "learning_rates": [1e-3],
    "seeds": [0],
    "protocol": {"max_steps": 2, "max_length": 32, "stride": 8, "batch_size": 8},
}

KINDS = [
    "corpora/*/index.json",
    "corpora/*/train-00000.bin",
    "corpora/*/validation-00000.bin",
    "corpora/hashes.json",
    "tokenizers/*/tokenizer.json",
    "tokenizers/*/tokenizer_config.json",
    "initial/sources/*.json",
    "initial/sources/*/config.json",
    "initial/sources/*/tokenizer.json",
    "initial/sources/*/tokenizer_config.json",
    "initial/*/config.json",
    "initial/*/initial.json",
    "initial/*/model.safetensors",
    "states/*/state.safetensors",
    "states/*/step.json",
    "states/*/state.json",
    "states/*/metrics.jsonl",
    "states/*/model/config.json",
    "states/*/model/model.safetensors",
    "states/*/model/tokenizer.json",
    "states/*/model/tokenizer_config.json",
    "states/*/model/mlmclm.json",
    "states/*/model.weights.json",
    "prepared/*/train.arrow",
    "prepared/*/test.arrow",
    "prepared/*/validation.arrow",
    "prepared/*/meta.json",
    "cells/*/*.json",
    "cells/*/*.parquet",
    "tuned/*/*/encoder.safetensors",
    "tuned/*/*/result.json",
    "*/checksums.json",
]
UNREAD = ["states/*/model/README.md", "studies/*", "*.lock"]
"""Written for people, or empty."""


class Study:
    """A study of one small model to continue from, with a state that a stage could have left, and one cell a model."""

    def __init__(self, folder: Path, store: Path) -> None:
        self.loaded = load_study(folder / "study.yaml")
        self.place = Place(store, folder / "data")

    def make(self) -> None:
        """Fills the store."""
        prepared = prepare(self.loaded, self.place)
        initial = prepared.initial["tiny"]
        weights = dict(read_written(initial.folder)[1])
        parts = ({name: value + more for name, value in weights.items()} for more in (0.01, 0.02, 0.03))
        state = checkpoints.TrainingState(12, *parts)
        target = prepared.target(prepared.plan.models[1])
        rows = [{"step": step, "loss": 5.0 - step / 10} for step in range(1, 13)]
        description = {"parent": None, "size": "tiny", "initial": initial.key}
        checkpoints.deposit(self.place.store, target.key(prepared.fingerprint), state, description, rows)
        for cell in self.cells(prepared):
            Ledger(self.place.store).complete(cell, self.compute)
        self.keep(self.cells(prepared)[0])

    def cells(self, prepared: PreparedStudy) -> list[Cell]:
        models = export_models(prepared)
        restore_exports(prepared, self.loaded.models)
        space = study_space(self.loaded)
        return plan_sweep(space, models, prepare_tasks(prepared, space), self.place).cells

    def compute(self, cell: Cell) -> dict[str, Any]:
        ledger = Ledger(self.place.store)
        places = {"store": self.place.store, "data_root": self.place.data_root}
        return run_cell(cell, **places, on_examples=ledger.write_examples)

    def keep(self, cell: Cell) -> None:
        """As a sweep does before cells start from this one."""
        set_aside_damaged(kept_folder(self.place.store, cell_key(cell)))
        if KeptWeights(self.place.store).missing([cell]):
            keep_encoder(cell, store=self.place.store, data_root=self.place.data_root)

    def all_that_is_read(self) -> dict[str, Any]:
        """Everything that a command makes of the store's files."""
        store = self.place.store
        prepared = prepare(self.loaded, self.place)
        trained = prepared.plan.models[1]
        cells, ledger = self.cells(prepared), Ledger(store)
        results = ledger.results(cells)
        self.keep(cells[0])
        encoder = load_encoder(cells[0].model_folder)
        load_kept(encoder, store, cell_key(cells[0]))
        prepared.initial["tiny"].check()
        key = prepared.target(trained).key(prepared.fingerprint)
        tasks = prepare_tasks(prepared, study_space(self.loaded)).values()
        corpus = [blocks.take(np.arange(len(blocks))) for blocks in (prepared.corpus.train, prepared.corpus.validation)]
        return {
            "keys": [cell_key(cell) for cell in cells],
            "results": [{**result, "cost": None} for result in results],
            "examples": [
                {name: column.tolist() for name, column in ledger.examples(result).columns.items()}
                for result in results
            ],
            "tables": [task.table(name).to_pylist() for task in tasks for name in ("train", "validation", "test")],
            "curve": prepared.curve(trained),
            "corpus": [hashlib.sha256(part.tobytes()).hexdigest() for part in corpus],
            "facts": asdict(prepared.initial["tiny"].size),
            "config": (prepared.initial["tiny"].folder / "config.json").read_text(),
            "kept": digest(encoder.state_dict()),
            "state": digest(checkpoints.read_weights(states.state_folder(store, key))),
        }


def digest(weights: dict[str, torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(weights[name].numpy().tobytes() for name in sorted(weights))).hexdigest()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study, its `store`, and away from where it was, the model that it continues from."""
    folder = tmp_path_factory.mktemp("study")
    initial = {"tiny": str(save_small_decoder(folder / "decoder"))}
    names = ["tiny-untrained", "tiny-mlm40-12"]
    path = write_study(folder, initial=initial, models=names, baseline=None)
    content = yaml.safe_load(path.read_text())
    del content["tokenizer"]
    path.write_text(yaml.safe_dump(content))
    (folder / "space.yaml").write_text(yaml.safe_dump(SPACE))
    Study(folder, folder / "store").make()
    (folder / "decoder").rename(folder / "away")
    return folder


@pytest.fixture(scope="module")
def whole(folder: Path) -> dict[str, Any]:
    """All that is read of the store as it was written."""
    return Study(folder, folder / "store").all_that_is_read()


def files_of(store: Path) -> list[str]:
    return sorted(path.relative_to(store).as_posix() for path in store.rglob("*") if path.is_file())


def matches(file: str, kind: str) -> bool:
    if kind.startswith("*"):
        return fnmatch(file, kind)
    return len(file.split("/")) == len(kind.split("/")) and fnmatch(file, kind)


def test_every_file_of_the_store_is_of_a_kind_that_is_tried_here(folder: Path, whole: dict[str, Any]) -> None:
    files = files_of(folder / "store")
    assert [name for name in whole if Study(folder, folder / "store").all_that_is_read()[name] != whole[name]] == []
    assert [file for file in files if not any(matches(file, kind) for kind in [*KINDS, *UNREAD])] == []
    assert [kind for kind in KINDS if not any(matches(file, kind) for file in files)] == []


def damaged(content: bytes, how: str, *, text: bool) -> bytes:
    """The content with another digit (of a text) or bit in its middle, or its first half."""
    if how == "cut":
        return content[: len(content) // 2]
    places = [found.start() for found in re.finditer(rb"\d", content)] if text else []
    place = places[len(places) // 2] if places else len(content) // 2
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


@pytest.mark.parametrize("how", ["flip", "cut"])
@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_mended_or_named_with_a_remedy_and_never_believed(
    folder: Path, whole: dict[str, Any], tmp_path: Path, kind: str, how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    shutil.copytree(folder / "store", store, symlinks=True, copy_function=os.link)
    for file in (store / name for name in files_of(store) if matches(name, kind)):
        content = file.read_bytes()
        file.unlink()  # the copies are links
        file.write_bytes(damaged(content, how, text=file.suffix in (".json", ".jsonl")))
    capfd.readouterr()
    remedies = "made again|exported again|hashed again|making .* again|rebuilt from"
    try:
        found = Study(folder, store).all_that_is_read()
    except MlmclmError as error:
        print(error)
        remedies = "Delete|[Pp]ut back|Run|run "
    else:
        assert [name for name in whole if found[name] != whole[name]] == []
    said = " ".join("".join(capfd.readouterr()).split())
    assert re.search(remedies, said), said
    assert str(store) in said or f"making {file.name} again" in said, said
    if kind.endswith(".bin"):
        assert Study(folder, store).all_that_is_read() == whole
    if kind != "*/checksums.json":  # the file that it belongs to is what is named
        assert kind.rpartition("/")[2].lstrip("*").rpartition(".")[0] in said, said
