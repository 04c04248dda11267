"""Dry runs: show which parts of a study would be computed now."""

from __future__ import annotations

from typing import Any

from mlmclm.cli.output import print_json, show
from mlmclm.plans.plan import Plan, make_plan
from mlmclm.study.place import Place
from mlmclm.study.prepare import check_models_to_continue, find_prepared
from mlmclm.study.prepared_study import PreparedStudy
from mlmclm.study.study_file import StudyFile
from mlmclm.study.sweep import study_space
from mlmclm.study.sweep_file import SweepFile


def show_dry_run(study: StudyFile, place: Place, *, as_json: bool, sweep: bool = True) -> None:
    """Print which parts of a study exist and which would be computed.

    Model names, the search space and the tasks are checked on the way.
    """
    space = study_space(study, place.task_dirs)
    plan = make_plan(study.parsed, study.recipe)
    prepared = find_prepared(study, place)
    if prepared is None:
        check_models_to_continue(study, place, plan)
    else:
        plan = prepared.plan
    stages = [_stage(plan, index, prepared) for index in range(len(plan.stages))]
    found: dict[str, Any] = {
        "study": study.name,
        "store": str(place.store),
        "corpus": "prepared" if prepared is not None else "to be prepared",
        **({"initial": study.initial} if study.initial else {}),
        "stages": stages,
        "steps_to_train": sum(stage["steps_to_train"] for stage in stages),
    }
    if sweep:
        found["cells"] = len(study.models) * space.cells_a_model
        there, named = _cells_there(prepared)
        found["cells_to_compute"] = found["cells"] - there
        if space.start_from:
            # A cell has no key until its start is chosen, so these cannot be looked up in the ledger.
            unnamed = len(study.models) * sum(map(space.cells_of, space.start_from))
            found["cells_waiting"] = unnamed - named
            found["start_from"] = space.start_from
    if as_json:
        print_json(found)
        return
    show(f"study {study.name}: nothing is computed now (--dry-run)")
    show(f"corpus {study.corpus.source}: {found['corpus']}")
    for size, source in study.initial.items():
        show(f"models {size}: continue from {source}")
    for stage in stages:
        left = (
            f"{stage['steps_to_train']:,} of {stage['steps']:,} steps to train" if stage["steps_to_train"] else "done"
        )
        show(f"stage {stage['title']}: {left}")
    if sweep:
        show(f"cells: {found['cells_to_compute']:,} of {found['cells']:,} to compute")
        if found.get("cells_waiting"):
            starts = ", ".join(f"{task} from {source}" for task, source in space.start_from.items())
            show(
                f"{found['cells_waiting']:,} of them wait for the cell with the best validation score to start from ({starts})"
            )


def show_dry_sweep(file: SweepFile, place: Place, *, as_json: bool) -> None:
    """Print which cells of a sweep of given models exist and which would be computed."""
    from mlmclm.study.given_sweep import open_sweep
    from mlmclm.sweeps.ledger import Ledger

    made = open_sweep(file, place, prepare=False)
    planned = made.plan()
    total = len(made.models) * made.space.cells_a_model
    there = len(planned.cells) - len(Ledger(place.store).missing(planned.cells))
    found = {
        "sweep": file.name,
        "store": str(place.store),
        "models": {each.model.name: each.source for each in made.models},
        "cells": total,
        "cells_to_compute": total - there,
    }
    if as_json:
        print_json(found)
        return
    show(f"sweep {file.name}: nothing is computed now (--dry-run)")
    for each in made.models:
        show(f"model {each.model.name}: {each.source}")
    show(f"cells: {total - there:,} of {total:,} to compute")


def _stage(plan: Plan, index: int, prepared: PreparedStudy | None) -> dict[str, Any]:
    stage = plan.stages[index]
    left = stage.steps
    if prepared is not None:
        start, wanted = prepared.missing(stage)
        left = wanted[-1].step - start.step if wanted else 0
    return {"title": stage.title, "models": list(stage.models), "steps": stage.steps, "steps_to_train": left}


def _cells_there(prepared: PreparedStudy | None) -> tuple[int, int]:
    """Count the cells that have a result, and the cells whose start is settled.

    The second count is of cells that start from another cell. Their start is settled once it is chosen, or once every
    candidate has diverged. Both counts are 0 until all models are exported and all tasks prepared.
    """
    if prepared is None:
        return 0, 0
    from mlmclm.study.opened import find_models, find_tasks
    from mlmclm.study.sweep import plan_sweep
    from mlmclm.sweeps.ledger import Ledger

    space = study_space(prepared.study, prepared.place.task_dirs)
    # A cell's key contains hashes of its model and data, so nothing can be looked up before all of them exist.
    models = [model for model in find_models(prepared).values() if model is not None]
    if len(models) < len(prepared.plan.models):
        return 0, 0
    tasks = {name: task for name, task in find_tasks(prepared, space).items() if task is not None}
    if len(tasks) < len(space.tasks):
        return 0, 0
    planned = plan_sweep(space, models, tasks, prepared.place)
    there = len(planned.cells) - len(Ledger(prepared.place.store).missing(planned.cells))
    known = sum(cell.start is not None for cell in planned.cells)
    return there, known + sum(planned.stranded.values())
