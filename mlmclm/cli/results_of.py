"""The results so far of a study file or a sweep file, for commands that compute nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlmclm.cli import options
from mlmclm.errors import UserError, unknown

if TYPE_CHECKING:
    from mlmclm.analysis.analyse import Analysis
    from mlmclm.finetuning.cell import Cell
    from mlmclm.reports.study_facts import StudyFacts
    from mlmclm.study.place import Place
    from mlmclm.study.prepared_study import PreparedStudy
    from mlmclm.study.study_file import StudyFile
    from mlmclm.study.sweep_file import SweepFile
    from mlmclm.sweeps.space import Space
    from mlmclm.tasks.prepared_task import PreparedTask


@dataclass(frozen=True)
class Results:
    """The results so far, at least one, and what is needed to analyse them."""

    file: StudyFile | SweepFile
    prepared: PreparedStudy | None  # None for a sweep of given models
    space: Space
    results: list[dict[str, Any]]
    verb: str  # the command that computes the file
    facts: Callable[[str], StudyFacts]  # the report's, given the command that computes the file as a user would type it
    cells: list[Cell]
    tasks: Mapping[str, PreparedTask]
    store: Path

    def analyse(self) -> Analysis:
        """Return all tables; cells without a result count as missing."""
        from mlmclm.study.study_sweep import analyse_sweep

        models, baseline = tuple(self.file.models), self.file.baseline
        return analyse_sweep(models, baseline, self.space, self.results, tasks=self.tasks, store=self.store)

    def best_cell(self, model: str, task: str) -> Cell:
        """Return the cell of a model and task with the best validation score among the seeds of the best learning rate.

        Raises:
            UserError: the model or task is not in the file, or none of its cells has a score.
        """
        from mlmclm.analysis.results import place_of, records
        from mlmclm.finetuning.cell import cell_key

        model = self.file.model_of(model, where=self.file.name)
        if task not in self.space.tasks:
            raise unknown("task", task, self.space.tasks, where=self.file.name)
        analysis = self.analyse()
        chosen = [row for row in records(analysis.chosen) if (row["model"], row["task"]) == (model, task)]
        if not chosen:
            raise UserError(
                f"{self.file.name}: no cell of {model} on {task} has a score; `mlmclm {self.verb}` computes them."
            )
        best = place_of(max(chosen, key=lambda row: row["validation"]))
        key = next(row["key"] for row in records(analysis.cells) if place_of(row) == best)
        return next(cell for cell in self.cells if cell_key(cell) == key and cell.model == model)


def results_of(file: Path, place: Place, rule: str | None) -> Results:
    """Find the results of a study or sweep; `rule` is as `--rule` gives it.

    Raises:
        UserError: something is not prepared yet, or there are no results; the message says what to run.
    """
    from mlmclm.study.sweep_file import is_sweep_file

    return (_of_sweep if is_sweep_file(file) else _of_study)(file, place, rule)


def _of_study(file: Path, place: Place, rule: str | None) -> Results:
    from mlmclm.study.facts import study_facts
    from mlmclm.study.opened import open_study
    from mlmclm.study.study_file import load_study
    from mlmclm.study.study_sweep import study_space

    study = load_study(file)
    space = options.by_rule(study_space(study, place.task_dirs), rule)
    prepared, tasks, cells, results = open_study(study, place, space, file)
    facts = partial(study_facts, prepared, space, tasks, results)
    return Results(study, prepared, space, results, "study", facts, cells, tasks, place.store)


def _of_sweep(file: Path, place: Place, rule: str | None) -> Results:
    from mlmclm.study.given_sweep import expand_studies, given_facts, open_sweep
    from mlmclm.study.sweep_file import load_sweep
    from mlmclm.sweeps.ledger import Ledger

    sweep = expand_studies(load_sweep(file), place.store)
    made = open_sweep(sweep, place, prepare=False)
    made = replace(made, space=options.by_rule(made.space, rule))
    made.check_prepared()
    cells = made.plan().cells
    results = Ledger(place.store).results(cells)
    if not results:
        raise UserError(f"sweep {sweep.name!r} has no results yet: run `mlmclm sweep {file}` first.")
    facts = partial(given_facts, made, results)
    return Results(sweep, None, made.space, results, "sweep", facts, cells, made.models[0].tasks, place.store)
