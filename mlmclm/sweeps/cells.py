"""From a space, models and tasks to the list of cells, in the order in which workers' caches are hit most."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlmclm.finetuning.cell import Cell, Start, cell_key
from mlmclm.seeds import Seeds
from mlmclm.sweeps.space import Space
from mlmclm.tasks.declaration import Task


@dataclass(frozen=True)
class SweepModel:
    """A model to fine-tune: its name in reports, its Hugging Face folder, and the hash of its weights and tokenizer."""

    name: str
    folder: Path
    weights: str


def expand(
    space: Space,
    models: Sequence[SweepModel],
    task_data: Mapping[str, str],
    declarations: Mapping[str, Task] | None = None,
    starts: Mapping[tuple[str, str], Start] | None = None,
    recut: Collection[str] = (),
) -> list[Cell]:
    """All cells of a sweep: model by model, task by task, then the grid's points, learning rates and seeds; no cell twice.

    Args:
        space: the axes and protocols.
        models: the models, in the order of the report.
        task_data: task name -> fingerprint of its data, for every task of the space.
        declarations: of tasks that are not installed.
        starts: by the names of a model and of the task that others start from; cells whose start isn't here are left out.
        recut: tasks with `Prepared.recut`.
    """
    cells = [
        Cell(
            model=model.name,
            model_folder=model.folder,
            weights=model.weights,
            task=task,
            task_data=task_data[task],
            protocol=protocol,
            learning_rate=learning_rate,
            seed=seed,
            declaration=(declarations or {}).get(task),
            setting=setting,
            start=start,
            recut=task in recut,
        )
        for model in models
        for task in space.tasks
        for start in [(starts or {}).get((model.name, space.start_from.get(task, "")))]
        if start is not None or task not in space.start_from
        for setting, protocol in space.settings_for(task).items()
        for learning_rate in space.learning_rates
        for seed in space.seeds
    ]
    return list({(cell.model, cell_key(cell)): cell for cell in cells}.values())


def unique_by_key(cells: Iterable[Cell]) -> dict[str, Cell]:
    """Key -> the first cell with it, in order: two names of the same weights are computed once."""
    unique: dict[str, Cell] = {}
    for cell in cells:
        unique.setdefault(cell_key(cell), cell)
    return unique


def learning_rate_label(learning_rate: float) -> str:
    """Shortest exact scientific form, exponent of two digits: `1e-03`, `3.5e-04`."""
    mantissa, exponent = f"{learning_rate:.6e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{exponent}"


def cell_name(cell: Cell) -> str:
    """Return the cell's name in logs, in Ray and in MLflow: `2m-clm-600/pydocs-qa/lr1e-03/s0`, or `.../h0-o1-d0`
    where the streams have seeds of their own; in a grid with its point, `.../lr1e-03/epochs2/s0`."""
    seed = Seeds.of(cell.seed).simplest()
    label = f"s{seed}" if isinstance(seed, int) else str(seed)
    point = f"/{cell.setting.replace(', ', '-').replace(' ', '')}" if cell.setting else ""
    return f"{cell.model}/{cell.task}/lr{learning_rate_label(cell.learning_rate)}{point}/{label}"
