"""A study as found in the store, for commands that compute nothing: `report`, `compare` and dry runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mlmclm.errors import UserError, for_each
from mlmclm.study.model_folders import exported_model
from mlmclm.study.place import Place
from mlmclm.study.prepare import find_prepared
from mlmclm.study.prepared_study import PreparedStudy
from mlmclm.study.study_file import StudyFile
from mlmclm.study.sweep import plan_sweep

if TYPE_CHECKING:
    from mlmclm.finetuning.cell import Cell
    from mlmclm.sweeps.cells import SweepModel
    from mlmclm.sweeps.space import Space
    from mlmclm.tasks.prepared_task import PreparedTask

Item = TypeVar("Item")


@dataclass(frozen=True)
class Stored:
    """The parts of a study that the analysis of its results needs."""

    prepared: PreparedStudy
    tasks: dict[str, PreparedTask]
    results: list[dict[str, Any]]
    """Results of the cells that have one; never empty."""
    cells: list[Cell]


def open_study(study: StudyFile, place: Place, space: Space, file: Path) -> Stored:
    """Return a study whose corpus, models and tasks, and at least one result, are in the store.

    Args:
        file: the study file, which errors name in the command to run.

    Raises:
        UserError: something is missing; the message says what to run.
    """
    from mlmclm.sweeps.ledger import Ledger

    command = f"`mlmclm study {file}`"
    prepared = find_prepared(study, place, damaged=True)
    if prepared is None:
        raise UserError(f"study {study.name!r} is not prepared in {place.store}: run {command} first.")
    models = _all_there(find_models(prepared), f"is not trained and exported yet: run {command} first.", "model")
    tasks = _all_there(find_tasks(prepared, space), f"is not prepared yet: run {command} first.", "task")
    cells = plan_sweep(space, list(models.values()), tasks, place).cells
    results = Ledger(place.store).results(cells)
    if not results:
        raise UserError(f"study {study.name!r} has no results yet: run {command} first.")
    return Stored(prepared, tasks, results, cells)


def find_models(prepared: PreparedStudy) -> dict[str, SweepModel | None]:
    """Return the models that are exported already, by name; None for each of the others."""
    return {
        str(name): exported_model(prepared, name) if (prepared.model_folder(name) / "config.json").is_file() else None
        for name in prepared.plan.models
    }


def find_tasks(prepared: PreparedStudy, space: Space) -> dict[str, PreparedTask | None]:
    """Return the tasks that are prepared already, by name; None for each of the others."""
    from mlmclm.tasks.prepared_task import find_task
    from mlmclm.tasks.registry import get_task

    place, tokenizer = prepared.place, prepared.corpus.tokenizer

    def one(name: str) -> PreparedTask | None:
        task = get_task(name, place.task_dirs)
        return find_task(task, tokenizer, space.protocol_for(name), place.store, place.data_root)

    return dict(zip(space.tasks, for_each(space.tasks, one), strict=True))


def _all_there(found: Mapping[str, Item | None], what: str, kind: str) -> dict[str, Item]:
    """Return all items.

    Raises:
        UserError: some are missing; the message names each of them.
    """
    missing = [name for name, item in found.items() if item is None]
    if missing:
        raise UserError("\n".join(f"{kind} {name!r} {what}" for name in missing))
    return {name: item for name, item in found.items() if item is not None}
