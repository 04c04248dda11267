"""Dry runs: show which parts of a study would be computed now."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.filesize import decimal

from mlmclm.cli.options import Assumed
from mlmclm.cli.output import print_json, show
from mlmclm.cli.plan import time_text
from mlmclm.errors import EnvironmentFault, UserError
from mlmclm.numbers import rate_text
from mlmclm.plans.stages import Stage, make_plan
from mlmclm.progress import say
from mlmclm.seeds import seed_labels, seed_value
from mlmclm.studies.last_grid import since_last
from mlmclm.studies.opened import find_models, find_tasks
from mlmclm.studies.place import Place
from mlmclm.studies.prepare import check_models_to_continue, check_sources, find_prepared
from mlmclm.studies.prepared_study import PreparedStudy
from mlmclm.studies.study_file import StudyFile
from mlmclm.studies.study_sweep import plan_sweep, study_grid, study_space, together
from mlmclm.studies.sweep_file import SweepFile
from mlmclm.studies.zero_shot import evaluations_there, zero_shot_tasks
from mlmclm.sweeps.ledger import Ledger

if TYPE_CHECKING:
    from mlmclm.finetuning.cell import Cell
    from mlmclm.sweeps.cells import SweepModel
    from mlmclm.sweeps.space import Space
    from mlmclm.sweeps.starts import Planned


def show_dry_run(study: StudyFile, place: Place, assumed: Assumed | None, *, as_json: bool) -> None:
    """Print which parts of a study exist, which would be computed, and what its sweep would take.

    Model names, the corpora, the search space and the tasks are checked on the way. The sweep is estimated once its
    models are exported.

    Args:
        assumed: None leaves the sweep out.

    Raises:
        EnvironmentFault: a corpus could not be looked up on the Hub. The plan has been shown.
    """
    # A study that is only pretrained needs no search space.
    space = None if assumed is None and study.space is None else study_space(study, place.task_dirs)
    plan, fault = make_plan(study.parsed, study.recipe), None
    prepared = find_prepared(study, place)
    if prepared is None:
        check_models_to_continue(study, place, plan)
        try:
            check_sources(study, place)
        except EnvironmentFault as error:
            fault = error  # the plan can be shown without the network, but the command could not run now
    else:
        plan = prepared.plan
    stages = [_stage(stage, prepared) for stage in plan.stages]
    found: dict[str, Any] = {
        "study": study.name,
        "store": str(place.store),
        "corpus": "prepared" if prepared is not None else "to be prepared",
        **({"initial": study.initial} if study.initial else {}),
        "stages": stages,
        "steps_to_train": sum(stage["steps_to_train"] for stage in stages),
    }
    if assumed is not None and space is not None:
        models = (
            [model for model in find_models(prepared).values() if model is not None] if prepared is not None else []
        )
        planned, grid = _planned(prepared, space, models), study_grid(study, space)
        waiting = {}
        if space.start_from:
            # A cell has no key until its start is settled: chosen, or impossible because every candidate diverged.
            unnamed = len(study.models) * sum(map(space.cells_of, space.start_from))
            settled = sum(cell.start is not None for cell in planned.cells) + sum(planned.stranded.values())
            waiting = {"cells_waiting": unnamed - settled, "start_from": space.start_from}
        found |= _sweep(study, place, space, grid, planned, models, assumed, **waiting)
    if as_json:
        print_json(found)
    else:
        _show_study(study, found, space if assumed is not None else None)
    if fault is not None:
        raise fault


def _show_study(study: StudyFile, found: Mapping[str, Any], space: Space | None) -> None:
    show(f"study {study.name}: nothing is computed now (--dry-run)")
    show(f"corpus {study.source}: {found['corpus']}")
    for size, source in study.initial.items():
        show(f"models {size}: continue from {source}")
    for stage in found["stages"]:
        left = f"{stage['steps_to_train']:,} of {stage['steps']:,} steps to train"
        show(f"stage {stage['title']}: {left if stage['steps_to_train'] else 'done'}")
    if space is not None:
        _show_sweep(found, space)


def show_dry_sweep(file: SweepFile, place: Place, assumed: Assumed, *, as_json: bool) -> None:
    """Print which cells of a sweep of given models exist, which would be computed, and what that would take."""
    from mlmclm.studies.given_sweep import open_sweep

    made = open_sweep(file, place, prepare=False)
    sources = {each.model.name: each.source for each in made.models}
    models = [each.model for each in made.models]
    found = {
        "sweep": file.name,
        "store": str(place.store),
        "models": sources,
        **_sweep(file, place, made.space, made.grid(), made.plan(), models, assumed),
    }
    if as_json:
        print_json(found)
        return
    show(f"sweep {file.name}: nothing is computed now (--dry-run)")
    for name, source in sources.items():
        show(f"model {name}: {source}")
    _show_sweep(found, made.space)


def _stage(stage: Stage, prepared: PreparedStudy | None) -> dict[str, Any]:
    left = stage.steps
    if prepared is not None:
        start, wanted = prepared.missing(stage)
        left = wanted[-1].step - start.step if wanted else 0
    return {"title": stage.title, "models": list(stage.models), "steps": stage.steps, "steps_to_train": left}


def _planned(prepared: PreparedStudy | None, space: Space, models: Sequence[SweepModel]) -> Planned:
    """Return all cells of a study, or none before all of its models are exported and its tasks prepared.

    A cell's key contains hashes of its model and data, so nothing can be looked up before.
    """
    if prepared is not None:
        tasks = {name: task for name, task in find_tasks(prepared, space).items() if task is not None}
        if len(models) == len(prepared.plan.models) and len(tasks) == len(space.tasks):
            return plan_sweep(space, models, tasks, prepared.place)
    return together([])


def _sweep(
    file: StudyFile | SweepFile,
    place: Place,
    space: Space,
    grid: Mapping[str, Any],
    planned: Planned,
    models: Sequence[SweepModel],
    assumed: Assumed,
    **waiting: Any,
) -> dict[str, Any]:
    """Return the grid, the number of its cells without a result, and what they would take, as plain values.

    Args:
        planned: the cells whose models and data exist.
        models: the models that exist.
        waiting: what is known of cells that wait for others.
    """
    changed = since_last(place.study_folder(file), grid)
    missing = Ledger(place.store).missing(planned.cells)
    every = len(file.models) * space.cells_a_model
    to_compute = every - len(planned.cells) + len(missing)
    found = {
        "tasks": space.tasks,
        "learning_rates": space.learning_rates,
        "seeds": [seed_value(seed) for seed in space.seeds],
        "added_since_last_run": changed.added,
        "changed_since_last_run": changed.lost,
        "cells": every,
        "cells_to_compute": to_compute,
        **waiting,
        **_estimate(planned.cells, missing, to_compute, space, place, assumed),
    }
    evaluations = zero_shot_tasks(file, place)
    if evaluations is not None:
        asked = len(file.models) * len(evaluations.tasks)
        there = evaluations_there(evaluations, place, models)
        found |= {"evaluations": asked, "evaluations_to_compute": asked - there}
    return found


def _estimate(
    cells: Sequence[Cell], missing: Sequence[Cell], to_compute: int, space: Space, place: Place, assumed: Assumed
) -> dict[str, Any]:
    """Return what the cells without a result will take, as plain values; an empty mapping if no estimate is possible.

    Args:
        cells: the cells whose models and data exist.
        missing: those of them without a result.
        to_compute: number of all cells without a result.
    """
    if not missing:
        return {}
    from mlmclm.sweeps.estimate import estimate, places_here

    try:
        workers = assumed.workers or places_here(space)
        made = estimate(cells, missing, store=place.store, data_root=place.data_root, workers=workers)
    except UserError as error:
        say(f"no estimate of the time: {error}")
        return {}
    hours = made.seconds.times(1 / 3600)
    return {
        "cells_estimated": len(missing),
        "cells_not_estimated": to_compute - len(missing),
        "trainings": made.trainings,
        "workers": made.workers,
        "device": made.device,
        "hours": asdict(hours),
        **({"cost": asdict(hours.times(assumed.price))} if assumed.price is not None else {}),
        "disk_bytes": asdict(made.disk_bytes),
        "mlflow_runs": made.runs,
    }


def _show_sweep(found: Mapping[str, Any], space: Space) -> None:
    show(f"tasks: {', '.join(space.tasks)}")
    show(f"learning rates: {', '.join(map(rate_text, space.learning_rates))}")
    show(f"seeds: {', '.join(seed_labels(space.seeds))}")
    for line in found["added_since_last_run"]:
        show(f"since the last run under this name: {line}")
    for line in found["changed_since_last_run"]:
        show(f"since the last run under this name: {line}; needs another name, or --replace")
    show(f"cells: {found['cells_to_compute']:,} of {found['cells']:,} to compute")
    if found.get("cells_waiting"):
        starts = ", ".join(f"{task} from {source}" for task, source in space.start_from.items())
        show(
            f"{found['cells_waiting']:,} of them wait for the cell with the best validation score to start from ({starts})"
        )
    if "trainings" in found:
        _show_estimate(found)
    if "evaluations" in found:
        show(f"zero-shot evaluations: {found['evaluations_to_compute']:,} of {found['evaluations']:,} to compute")


def _show_estimate(found: Mapping[str, Any]) -> None:
    def between(name: str, text: Callable[[float], str]) -> str:
        value, low, high = (text(found[name][each]) for each in ("value", "low", "high"))
        return f"{value} ({low} to {high})"

    if found["trainings"] < found["cells_estimated"]:
        shared = found["cells_estimated"] - found["trainings"]
        show(f"trainings: {found['trainings']:,}; {shared:,} cells share that of another cell")
    show(f"time: {between('hours', time_text)} at {found['workers']} cells at once on {found['device']}")
    if found["cells_not_estimated"]:
        show(f"not in the time: {found['cells_not_estimated']:,} cells whose models or data do not exist yet")
    if "cost" in found:
        show(f"cost: {between('cost', '{:,.2f}'.format)}")
    show(f"disk: {between('disk_bytes', lambda size: decimal(round(size)))}")
    show(f"MLflow runs: {found['mlflow_runs']:,}")
