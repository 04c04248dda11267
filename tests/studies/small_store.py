"""A small store with a file of almost every kind, made in seconds and without Ray."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from mlmclm.finetuning.cell import Cell, cell_key
from mlmclm.finetuning.kept import KeptEncoder, load_kept
from mlmclm.finetuning.run import keep_encoder, run_cell
from mlmclm.models.folder import load_encoder
from mlmclm.pretraining import checkpoints, states
from mlmclm.storage.place import Place
from mlmclm.studies.exports import export_models, restore_exports
from mlmclm.studies.prepare import PreparedStudy, prepare_study
from mlmclm.studies.study_file import load_study
from mlmclm.studies.study_sweep import StudySweep, SweptModel, prepare_tasks, study_space
from mlmclm.sweeps.results_store import ResultsStore
from small_models import save_small_decoder
from small_study import write_study

SPACE = {
    "tasks": ["sst2"],
    "learning_rates": [1e-3],
    "seeds": [0],
    "protocol": {"max_steps": 2, "max_length": 32, "stride": 8, "batch_size": 8},
}


class Study:
    """A study of one small model to continue from, with a state that a stage could have left, and one cell a model."""

    def __init__(self, folder: Path, store: Path) -> None:
        self.loaded = load_study(folder / "study.yaml")
        self.place = Place(store, folder / "data")

    def make(self) -> None:
        """Fill the store."""
        prepared = prepare_study(self.loaded, self.place)
        initial = prepared.initial["tiny"]
        weights = dict(initial.weights())
        parts = ({name: value + more for name, value in weights.items()} for more in (0.01, 0.02, 0.03))
        state = checkpoints.TrainingState(12, *parts)
        target = prepared.target(prepared.plan.models[1])
        rows = [
            {"step": step, "loss": 5.0 - step / 10, "time": 1e9 + step, "step_seconds": 1.0} for step in range(1, 13)
        ]
        description = {
            "parent": None,
            "size": "tiny",
            "initial": initial.key,
            "legs": [segment.identity() for segment in target.segments],
            "fingerprint": prepared.fingerprint,
            "corpus": prepared.corpus.key,
            "recipe": self.loaded.recipe.model_dump(mode="json"),
            "system": {"device": "cpu"},
        }
        checkpoints.deposit(self.place.store, target.key(prepared.fingerprint), state, description, rows)
        for cell in self.cells(prepared):
            results_store = ResultsStore(self.place.store)
            results_store.ensure(cell_key(cell), partial(self.compute, cell, results_store))
        self.keep(self.cells(prepared)[0])

    def cells(self, prepared: PreparedStudy) -> list[Cell]:
        return self.sweep(prepared).plan().cells

    def sweep(self, prepared: PreparedStudy) -> StudySweep:
        models = export_models(prepared)
        restore_exports(prepared, self.loaded.models)
        space = study_space(self.loaded)
        tasks = prepare_tasks(prepared, space)
        swept = tuple(SweptModel(model, space, tasks) for model in models)
        return StudySweep(self.loaded, self.place, space, swept, prepared)

    def compute(self, cell: Cell, results_store: ResultsStore) -> dict[str, Any]:
        places = {"store": self.place.store, "data_root": self.place.data_root}
        return run_cell(cell, **places, on_examples=results_store.write_examples)

    def keep(self, cell: Cell) -> None:
        """Keep the cell's encoder, as a sweep does before other cells start from it."""
        places = {"store": self.place.store, "data_root": self.place.data_root}
        KeptEncoder(self.place.store, cell_key(cell)).ensure(partial(keep_encoder, cell, **places))

    def all_that_is_read(self) -> dict[str, Any]:
        """Return everything that commands read from the store's files."""
        store = self.place.store
        prepared = prepare_study(self.loaded, self.place)
        trained = prepared.plan.models[1]
        cells, results_store = self.cells(prepared), ResultsStore(store)
        results = results_store.results(cells)
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
                {name: column.tolist() for name, column in results_store.examples(result).columns.items()}
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


def make_store(folder: Path) -> Path:
    """A study and its `store`; the folder of the model from which it continues has been moved."""
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
