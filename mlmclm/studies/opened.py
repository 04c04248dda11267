"""A study as found in the store, for commands that compute nothing: `report`, `compare` and dry runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from mlmclm.errors import UserError, for_each
from mlmclm.finetuning.cell import Cell
from mlmclm.studies.model_folders import exported_model
from mlmclm.studies.place import Place
from mlmclm.studies.prepare import find_prepared
from mlmclm.studies.prepared_study import PreparedStudy
from mlmclm.studies.study_file import StudyFile
from mlmclm.studies.study_sweep import plan_sweep
from mlmclm.sweeps.cells import SweepModel
from mlmclm.sweeps.ledger import Ledger
from mlmclm.sweeps.space import Space
from mlmclm.tasks.declared_tasks import get_task
from mlmclm.tasks.prepared_task import PreparedTask, find_task

Item = TypeVar("Item")


def open_study(
    study: StudyFile, place: Place, space: Space, file: str
) -> tuple[PreparedStudy, dict[str, PreparedTask], list[Cell], list[dict[str, Any]]]:
    """Return a study whose corpus, models and tasks are in the store, with its tasks, its cells, and at least one result.

    Args:
        file: the study file or its name, which errors give in the command to run.

    Raises:
        UserError: something is missing; the message says what to run.
    """
    remedy = f"run `mlmclm study {file}` first."
    prepared = find_prepared(study, place, damaged=True)
    if prepared is None:
        raise UserError(f"study {study.name!r} is not prepared in {place.store}: {remedy}")
    models = _all_there(find_models(prepared), f"is not trained and exported yet: {remedy}", "model")
    tasks = _all_there(find_tasks(prepared, space), f"is not prepared yet: {remedy}", "task")
    cells = plan_sweep(space, list(models.values()), tasks, place).cells
    results = Ledger(place.store).results(cells)
    if not results:
        raise UserError(f"study {study.name!r} has no results yet: {remedy}")
    return prepared, tasks, cells, results


def find_models(prepared: PreparedStudy) -> dict[str, SweepModel | None]:
    """Return the models that are exported already, by name; None for each of the others."""
    return {
        str(name): exported_model(prepared, name) if (prepared.model_folder(name) / "config.json").is_file() else None
        for name in prepared.plan.models
    }


def find_tasks(prepared: PreparedStudy, space: Space) -> dict[str, PreparedTask | None]:
    """Return the tasks that are prepared already, by name; None for each of the others."""
    place, tokenizer = prepared.place, prepared.corpus.tokenizer

    def one(name: str) -> PreparedTask | None:
        task = get_task(name, place.task_dirs)
        return find_task(task, tokenizer, space.protocol_for(name), place.store, place.data_root)

    return dict(zip(space.tasks, for_each(space.tasks, one), strict=True))


def _all_there(found: Mapping[str, Item | None], what: str, kind: str) -> dict[str, Item]:
    """Return all items; raise a `UserError` that names each of them that is None."""
    missing = [name for name, item in found.items() if item is None]
    if missing:
        raise UserError("\n".join(f"{kind} {name!r} {what}" for name in missing))
    return {name: item for name, item in found.items() if item is not None}
