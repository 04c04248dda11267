"""The cell of a filed result, made again from what the result says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlmclm.errors import UserError
from mlmclm.finetuning.cell import Cell, Start, cell_key
from mlmclm.finetuning.protocol import Protocol
from mlmclm.seeds import read_seed
from mlmclm.sweeps.cells import SweepModel
from mlmclm.tasks.declared_tasks import get_task


def recorded_cell(result: Mapping[str, Any], model: SweepModel, task_dirs: Sequence[Path], *, where: str) -> Cell:
    """Return the cell that a result is of.

    Args:
        result: as the ledger has it.
        model: the model with the result's weights.
        where: beginning of messages.

    Raises:
        UserError: the task is not declared, or another engine computed the result.
    """
    declaration = get_task(result["task"], task_dirs)
    start = result.get("start")
    cell = Cell(
        model=model.name,
        model_folder=model.folder,
        weights=model.weights,
        task=result["task"],
        task_data=result["task_data"],
        protocol=Protocol.of_result(result["protocol"]),
        learning_rate=result["learning_rate"],
        seed=read_seed(result["seed"]),
        declaration=declaration.model_copy(update={"metric": result["metric"]}),  # a space may choose another one
        start=Start(start["cell"], start["task"]) if start else None,
        recut="pair_truncation" in result["protocol"],  # recorded only where it changed the examples
    )
    # A key hashes everything that can change a result, so a different one means that another engine computed it.
    if cell_key(cell) != result["key"]:
        raise UserError(f"{where}: another version of mlmclm computed it (engine {result.get('engine')}).")
    return cell
