"""Cells of a small real model on real data, which several files measure."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlmclm.finetuning.cell import Cell
from mlmclm.finetuning.protocol import Protocol
from mlmclm.models.folder import weights_hash
from mlmclm.sweeps.cells import SweepModel, expand
from mlmclm.sweeps.space import Space
from mlmclm.sweeps.trainings import with_trainings
from mlmclm.tasks.prepare_task import prepare_task
from small_models import save_small_model, write_sentiment


@pytest.fixture
def real_cells(tmp_path: Path) -> list[Cell]:
    write_sentiment(tmp_path / "data", train=80, test=30)
    folder = save_small_model(tmp_path / "model")
    protocol = Protocol(max_steps=200, max_length=32, batch_size=4)
    space = Space(tasks=("sst2",), learning_rates=(1e-3,), seeds=(0, 1), protocol=protocol)
    task = prepare_task("sst2", folder, protocol, tmp_path, tmp_path / "data")
    cells = expand(space, [SweepModel("m", folder, weights_hash(folder))], {"sst2": task.task_data})
    return with_trainings(cells, {"sst2": task})
