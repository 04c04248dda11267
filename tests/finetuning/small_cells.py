"""Short cells of a small model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from mlmclm.finetuning.cell import Cell
from mlmclm.finetuning.protocol import Protocol
from mlmclm.finetuning.run import run_cell
from mlmclm.models.folder import weights_hash
from mlmclm.tasks.prepare_task import prepare_task

SHORT = Protocol(max_steps=8, max_length=48, stride=8, batch_size=8, max_evaluation_examples=20)


def make(place: Path, task: str, protocol: Protocol = SHORT, **changes: Any) -> Cell:
    prepared = prepare_task(task, place / "model", protocol, place / "store", place / "data")
    folder = place / "model"
    cell = Cell("m", folder, weights_hash(folder), task, prepared.task_data, protocol, 1e-3, 0)
    return dataclasses.replace(cell, **changes)


def run(place: Path, cell: Cell, cache: dict[Any, Any] | None = None) -> dict[str, Any]:
    return run_cell(cell, store=place / "store", data_root=place / "data", cache=cache)
