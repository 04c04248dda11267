"""The cells of a sweep: how they are listed from a space, models and tasks, rebuilt from filed results, and named."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlmclm.errors import UserError
from mlmclm.finetuning.cell import Cell, Start, cell_key
from mlmclm.finetuning.protocol import Protocol
from mlmclm.numbers import rate_text
from mlmclm.results.metrics import metric_parts
from mlmclm.seeds import Seed, Seeds, read_seed
from mlmclm.sweeps.space import Space
from mlmclm.tasks.declaration import Task
from mlmclm.tasks.declared_tasks import get_task


@dataclass(frozen=True)
class SweepModel:
    """A model to fine-tune: its name in reports, its Hugging Face folder, and the hash of its weights and tokenizer.

    `earlier` has this hash as earlier versions defined it (`models.folder.weights_hashes`).
    """

    name: str
    folder: Path
    weights: str
    earlier: tuple[str, ...] = ()

    @property
    def hashes(self) -> tuple[str, ...]:
        """All hashes of the model; a result with any of them is a result of this model."""
        return self.weights, *self.earlier


@dataclass(frozen=True)
class ListedCell:
    """A cell of a sweep by its names and key, as a manifest lists it. To compute it, a `Cell` is needed."""

    key: str
    model: str
    task: str
    setting: str
    learning_rate: float
    seed: Seed
    metric: str
    """The task's main metric in this sweep."""
    start: str | None
    """Key of the cell whose encoder it starts from, if any."""

    @property
    def name(self) -> str:
        """The cell's name, as in logs."""
        return cell_name(self)


def expand(
    space: Space,
    models: Sequence[SweepModel],
    task_data: Mapping[str, str],
    declarations: Mapping[str, Task] | None = None,
    starts: Mapping[tuple[str, str], Start] | None = None,
    recut: Collection[str] = (),
) -> list[Cell]:
    """Return all cells of a sweep, each once: by model, then by task, grid point, learning rate and seed.

    Args:
        task_data: task name -> fingerprint of its data, for every task of the space.
        declarations: task name -> declaration, for tasks that workers may not have installed.
        starts: (model, task that others start from) -> start; cells whose start is not among these are left out.
        recut: the tasks whose prepared data have `recut` set (`PreparedTask.recut`).
    """
    # Model and task vary slowest, because a worker drops its cached weights and data when the model changes.
    cells = [
        Cell(
            model=model.name,
            model_folder=model.folder,
            weights=model.weights,
            earlier=model.earlier,
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


def added_rates(
    cells: Iterable[Cell | ListedCell], listed: Collection[float]
) -> dict[tuple[str, str, str], tuple[float, ...]]:
    """Return the cells' learning rates that are not in `listed`, by (model, task, setting), in the order of the cells."""
    added: dict[tuple[str, str, str], dict[float, None]] = {}
    for cell in cells:
        if cell.learning_rate not in listed:
            added.setdefault((cell.model, cell.task, cell.setting), {})[cell.learning_rate] = None
    return {group: tuple(rates) for group, rates in added.items()}


def recorded_cell(result: Mapping[str, Any], model: SweepModel, task_dirs: Sequence[Path], *, where: str) -> Cell:
    """Return the cell of a filed result, rebuilt from the result's entries.

    Args:
        result: as the results store returns it.
        model: the cell's model. If its weights differ from the result's, the cell has another key than the result. If only the
            definition of the hash differs (`earlier`), the cell gets the result's hash.
        where: beginning of messages.

    Raises:
        UserError: the task is not declared, or another engine computed the result.
    """
    cell = result_cell(result, model, task_dirs)
    # A key hashes everything that can change a result, so a different one means that other code computed it.
    if cell_key(replace(cell, weights=result["weights"])) != result["key"]:
        raise UserError(
            f"{where}: another version of mlmclm computed it (engine {result.get('engine')}), or other code of your own."
        )
    return cell


def result_cell(result: Mapping[str, Any], model: SweepModel, task_dirs: Sequence[Path]) -> Cell:
    """Return the cell that a result's entries describe, without a check of its key; raise a `UserError` if its task or a setting is unknown."""
    declaration = get_task(result["task"], task_dirs)
    start = result.get("start")
    return Cell(
        model=model.name,
        model_folder=model.folder,
        weights=result["weights"] if result["weights"] in model.earlier else model.weights,
        task=result["task"],
        task_data=result["task_data"],
        protocol=Protocol.of_result(result["protocol"]),
        learning_rate=result["learning_rate"],
        seed=read_seed(result["seed"]),
        declaration=declaration.model_copy(update={"metric": result["metric"]}),  # a space may choose another metric
        start=Start(start["cell"], start["task"]) if start else None,
        recut="pair_truncation" in result["protocol"],  # recorded only where it changed the examples
    )


def named_result(result: dict[str, Any], cell: Cell | ListedCell) -> dict[str, Any]:
    """Return a result under the cell's names of model and setting, and with its task's main metric.

    A key ignores these three, so the result may have been filed by another study, or by this one before it changed its
    choice of metrics.

    Raises:
        UserError: the result lacks the metric.
    """
    renamed = {**result, "model": cell.model, **({"setting": cell.setting} if cell.setting else {})}
    if isinstance(cell, ListedCell):
        metric = cell.metric
    elif cell.declaration is None:
        return renamed
    else:
        metric = cell.declaration.metric
    for scores in (result["scores"] or {}).values():
        absent = [name for name in metric_parts(metric) if name not in scores]
        if absent:
            raise UserError(
                f"result {result['key']} (model {cell.model}, task {cell.task}) has no {', '.join(absent)}, which "
                f"was not computed then. Choose other metrics (the space's `metrics`), or delete the results of task "
                f"{cell.task}, each a file cells/<first two digits>/<key>.json of the store, and run the same command again."
            )
    return {**renamed, "metric": metric}


def cell_name(cell: Cell | ListedCell) -> str:
    """Return the cell's name in logs, in Ray and in MLflow, such as `2m-clm-600/pydocs-qa/lr1e-3/s0`.

    It ends in `/h0-o1-d0` if the streams have seeds of their own. A grid adds the point: `.../lr1e-3/epochs2/s0`.
    """
    point = f"/{cell.setting.replace(', ', '-').replace(' ', '')}" if cell.setting else ""
    return f"{cell.model}/{cell.task}/lr{rate_text(cell.learning_rate)}{point}/{seed_label(cell.seed)}"


def seed_label(seed: Seed) -> str:
    """Return the part of a cell's name for its seed."""
    simplest = Seeds.of(seed).simplest()
    return f"s{simplest}" if isinstance(simplest, int) else str(simplest)
