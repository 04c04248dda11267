"""The plan of a study: what the store has of it, what would be computed now, and what that would take."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.filesize import decimal

from mlmclm.errors import EnvironmentFault, UserError
from mlmclm.numbers import rate_text, time_text
from mlmclm.progress import say
from mlmclm.seeds import Seed, seed_labels, seed_value
from mlmclm.studies.last_grid import since_last
from mlmclm.studies.study_sweep import StudySweep
from mlmclm.studies.zero_shot import evaluations_there, zero_shot_tasks
from mlmclm.sweeps.ledger import Ledger

if TYPE_CHECKING:
    from mlmclm.sweeps.estimate import Range


@dataclass(frozen=True)
class PlannedStage:
    """A stage of pretraining, and how much of it is still to be trained."""

    title: str
    models: tuple[str, ...]
    steps: int
    steps_to_train: int


@dataclass(frozen=True)
class ExpectedWork:
    """Estimate of the time and cost of the cells without a result.

    Attributes:
        cells_estimated: number of cells that are covered.
        cells_not_estimated: number of cells that are not, because their models or data do not exist yet.
        trainings: number of trainings; several cells can share one.
        workers: number of cells computed at once.
        hours: of all of it; with `cost`, in the currency of the given price.
        mlflow_runs: number of runs that MLflow will get.
    """

    cells_estimated: int
    cells_not_estimated: int
    trainings: int
    workers: int
    device: str
    hours: Range
    cost: Range | None
    disk_bytes: Range
    mlflow_runs: int


@dataclass(frozen=True)
class PlannedSweep:
    """The grid of a study, and how many of its cells are to be computed.

    Attributes:
        added: what the grid has gained since the last run under this name.
        lost: what it has lost or changed since then.
        cells_waiting: number of cells whose starting weights are not chosen yet.
        start_from: task -> task whose best cell its cells start from.
        expected: None if there is nothing to compute, or no estimate is possible.
        evaluations: number of zero-shot evaluations, if there are any.
    """

    tasks: tuple[str, ...]
    learning_rates: tuple[float, ...]
    seeds: tuple[Seed, ...]
    added: tuple[str, ...]
    lost: tuple[str, ...]
    cells: int
    cells_to_compute: int
    cells_waiting: int = 0
    start_from: Mapping[str, str] = field(default_factory=dict)
    expected: ExpectedWork | None = None
    evaluations: int | None = None
    evaluations_to_compute: int = 0


@dataclass(frozen=True)
class StudyPlan:
    """Work that a run of a study would do now; nothing was computed. `str(plan)` says it in words.

    Attributes:
        kind: `study` if its models are trained, `sweep` if they are given.
        corpus_source: where the text comes from; empty where models are given, as `corpus` is.
        corpus: `prepared` or `to be prepared`.
        initial: size -> the model that models of this size continue from.
        models: given models -> where they come from.
        sweep: None if the study has no search space, or only its pretraining was asked about.
        fault: why the command could not run now, such as a corpus that cannot be looked up without a network.
    """

    kind: str
    name: str
    store: Path
    corpus_source: str = ""
    corpus: str = ""
    initial: Mapping[str, str] = field(default_factory=dict)
    stages: tuple[PlannedStage, ...] = ()
    models: Mapping[str, str] = field(default_factory=dict)
    sweep: PlannedSweep | None = None
    fault: EnvironmentFault | None = None

    @property
    def steps_to_train(self) -> int:
        """The number of optimiser steps that are still to be trained."""
        return sum(stage.steps_to_train for stage in self.stages)

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain values, as `--dry-run --json` prints it."""
        plain: dict[str, Any] = {self.kind: self.name, "store": str(self.store)}
        if self.kind == "sweep":
            plain["models"] = dict(self.models)
        else:
            plain |= {
                "corpus": self.corpus,
                **({"initial": dict(self.initial)} if self.initial else {}),
                "stages": [asdict(stage) for stage in self.stages],
                "steps_to_train": self.steps_to_train,
            }
        return plain | (_plain(self.sweep) if self.sweep is not None else {})

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        return f"<pre>{html.escape(str(self))}</pre>"

    def _lines(self) -> Iterator[str]:
        yield f"{self.kind} {self.name}: nothing is computed now (--dry-run)"
        if self.corpus:
            yield f"corpus {self.corpus_source}: {self.corpus}"
        for size, source in self.initial.items():
            yield f"models {size}: continue from {source}"
        for stage in self.stages:
            left = f"{stage.steps_to_train:,} of {stage.steps:,} steps to train"
            yield f"stage {stage.title}: {left if stage.steps_to_train else 'done'}"
        for name, source in self.models.items():
            yield f"model {name}: {source}"
        if self.sweep is not None:
            yield from _sweep_lines(self.sweep)


def plan_of_sweep(
    sweep: StudySweep, grid: Mapping[str, Any], *, workers: int | None, price: float | None
) -> PlannedSweep:
    """Return the plan of a study's sweep.

    Args:
        sweep: the study's sweep with the models and tasks that exist.
        grid: as `last_grid` records it.
        workers: cells that are computed at once; None for as many as this machine can.
        price: of an hour of all workers, in any currency.
    """
    file, place, space, planned = sweep.file, sweep.place, sweep.space, sweep.plan()
    changed = since_last(place.study_folder(file), grid)
    missing = Ledger(place.store).missing(planned.cells)
    every = len(file.models) * space.cells_a_model
    to_compute = every - len(planned.cells) + len(missing)
    waiting = 0
    if space.start_from:
        # A cell has no key until its start is settled: chosen, or impossible because every candidate diverged.
        unnamed = len(file.models) * sum(map(space.cells_of, space.start_from))
        waiting = unnamed - sum(cell.start is not None for cell in planned.cells) - sum(planned.stranded.values())
    expected = None
    if missing:
        from mlmclm.sweeps.estimate import estimate, places_here

        store, data = place.store, place.data_root
        try:
            workers = workers or places_here(space)
            made = estimate(planned.cells, missing, store=store, data_root=data, workers=workers)
        except UserError as error:
            say(f"no estimate of the time: {error}")
        else:
            hours = made.seconds.times(1 / 3600)
            expected = ExpectedWork(
                cells_estimated=len(missing),
                cells_not_estimated=to_compute - len(missing),
                trainings=made.trainings,
                workers=made.workers,
                device=made.device,
                hours=hours,
                cost=None if price is None else hours.times(price),
                disk_bytes=made.disk_bytes,
                mlflow_runs=made.runs,
            )
    evaluations = zero_shot_tasks(file, place)
    asked = None if evaluations is None else len(file.models) * len(evaluations.tasks)
    there = 0 if evaluations is None else evaluations_there(evaluations, place, [each.model for each in sweep.models])
    return PlannedSweep(
        tasks=space.tasks,
        learning_rates=space.learning_rates,
        seeds=space.seeds,
        added=changed.added,
        lost=changed.lost,
        cells=every,
        cells_to_compute=to_compute,
        cells_waiting=waiting,
        start_from=space.start_from,
        expected=expected,
        evaluations=asked,
        evaluations_to_compute=(asked or 0) - there,
    )


def _plain(sweep: PlannedSweep) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "tasks": sweep.tasks,
        "learning_rates": sweep.learning_rates,
        "seeds": [seed_value(seed) for seed in sweep.seeds],
        "added_since_last_run": sweep.added,
        "changed_since_last_run": sweep.lost,
        "cells": sweep.cells,
        "cells_to_compute": sweep.cells_to_compute,
    }
    if sweep.start_from:
        plain |= {"cells_waiting": sweep.cells_waiting, "start_from": sweep.start_from}
    if sweep.expected is not None:
        plain |= {name: value for name, value in asdict(sweep.expected).items() if value is not None}
    if sweep.evaluations is not None:
        plain |= {"evaluations": sweep.evaluations, "evaluations_to_compute": sweep.evaluations_to_compute}
    return plain


def _sweep_lines(sweep: PlannedSweep) -> Iterator[str]:
    yield f"tasks: {', '.join(sweep.tasks)}"
    yield f"learning rates: {', '.join(map(rate_text, sweep.learning_rates))}"
    yield f"seeds: {', '.join(seed_labels(sweep.seeds))}"
    for line in sweep.added:
        yield f"since the last run under this name: {line}"
    for line in sweep.lost:
        yield f"since the last run under this name: {line}; needs another name, or --replace"
    yield f"cells: {sweep.cells_to_compute:,} of {sweep.cells:,} to compute"
    if sweep.cells_waiting:
        starts = ", ".join(f"{task} from {source}" for task, source in sweep.start_from.items())
        yield f"{sweep.cells_waiting:,} of them wait for the cell with the best validation score to start from ({starts})"
    if sweep.expected is not None:
        yield from _expected_lines(sweep.expected)
    if sweep.evaluations is not None:
        yield f"zero-shot evaluations: {sweep.evaluations_to_compute:,} of {sweep.evaluations:,} to compute"


def _expected_lines(work: ExpectedWork) -> Iterator[str]:
    def between(found: Range, text: Callable[[float], str]) -> str:
        return f"{text(found.value)} ({text(found.low)} to {text(found.high)})"

    if work.trainings < work.cells_estimated:
        shared = work.cells_estimated - work.trainings
        yield f"trainings: {work.trainings:,}; {shared:,} cells share that of another cell"
    yield f"time: {between(work.hours, time_text)} at {work.workers} cells at once on {work.device}"
    if work.cells_not_estimated:
        yield f"not in the time: {work.cells_not_estimated:,} cells whose models or data do not exist yet"
    if work.cost is not None:
        yield f"cost: {between(work.cost, '{:,.2f}'.format)}"
    yield f"disk: {between(work.disk_bytes, lambda size: decimal(round(size)))}"
    yield f"MLflow runs: {work.mlflow_runs:,}"
