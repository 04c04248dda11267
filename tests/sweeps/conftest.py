"""Cells of a small real model on real data, and a Ray cluster of several nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster as Raylets

import sweep_cells
from mlmclm.finetuning.cell import Cell
from mlmclm.finetuning.protocol import Protocol
from mlmclm.models.folder import weights_hash
from mlmclm.sweeps.cells import SweepModel, expand
from mlmclm.sweeps.space import Space
from mlmclm.sweeps.trial import with_trainings
from mlmclm.tasks.prepare_task import prepare_task
from ray_nodes import head_with_nodes
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


@pytest.fixture(scope="module")
def raylets(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Raylets]:
    """A session on a head with this number of CPUs, to which nodes can be added."""
    ray.cloudpickle.register_pickle_by_value(sweep_cells)
    with head_with_nodes(tmp_path_factory.mktemp("ray"), num_cpus=request.param) as raylets:
        yield raylets
    ray.cloudpickle.unregister_pickle_by_value(sweep_cells)
