"""The results so far of a study or sweep, for commands that compute nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from mlmclm.cli import options
from mlmclm.errors import UserError, unknown

if TYPE_CHECKING:
    from mlmclm.analysis.analyse import Analysis
    from mlmclm.finetuning.cell import Cell
    from mlmclm.reports.study_facts import StudyFacts
    from mlmclm.studies.last_run import LastRun
    from mlmclm.studies.place import Place
    from mlmclm.studies.prepared_study import PreparedStudy
    from mlmclm.studies.study_file import StudyFile
    from mlmclm.studies.sweep_file import SweepFile
    from mlmclm.sweeps.space import Space
    from mlmclm.tasks.prepared_task import PreparedTask


@dataclass(frozen=True)
class Results:
    """The results so far, at least one, and what is needed to analyse them."""

    file: StudyFile | SweepFile
    place: Place
    command: str | None  # of the last run, if that was needed to find them
    prepared: PreparedStudy | None  # None for a sweep of given models
    space: Space
    results: list[dict[str, Any]]
    verb: str  # the command that computes the file
    facts: Callable[[str], StudyFacts]  # the report's, given the command that computes the file as a user would type it
    cells: list[Cell]
    tasks: Mapping[str, PreparedTask]

    def analyse(self) -> Analysis:
        """Return all tables; cells without a result count as missing."""
        from mlmclm.studies.study_sweep import analyse_sweep

        models, baseline = tuple(self.file.models), self.file.baseline
        return analyse_sweep(models, baseline, self.space, self.results, tasks=self.tasks, store=self.place.store)

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


def results_of(which: str, place: Place, rule: str | None) -> Results:
    """Find the results of a study or sweep.

    Args:
        which: its file, or its name in the store.
        rule: as `--rule` gives it.

    Raises:
        UserError: there is no such study or sweep, something is not prepared yet, or there are no results; the message
            says what to run.
    """
    from mlmclm.studies.last_run import find_run
    from mlmclm.studies.sweep_file import SweepFile

    run = find_run(which, place)
    return _of_sweep(run, run.file, rule) if isinstance(run.file, SweepFile) else _of_study(run, run.file, rule)


def _of_study(run: LastRun, study: StudyFile, rule: str | None) -> Results:
    from mlmclm.studies.facts import study_facts
    from mlmclm.studies.opened import open_study
    from mlmclm.studies.study_sweep import study_space

    space = options.by_rule(study_space(study, run.place.task_dirs), rule)
    prepared, tasks, cells, results = open_study(study, run.place, space, run.source)
    facts = partial(study_facts, prepared, space, tasks, results)
    return Results(study, run.place, run.command, prepared, space, results, "study", facts, cells, tasks)


def _of_sweep(run: LastRun, file: SweepFile, rule: str | None) -> Results:
    from mlmclm.studies.given_sweep import expand_studies, given_facts, open_sweep
    from mlmclm.sweeps.ledger import Ledger

    sweep = expand_studies(file, run.place.store)
    made = open_sweep(sweep, run.place, prepare=False)
    made = replace(made, space=options.by_rule(made.space, rule))
    made.check_prepared()
    cells = made.plan().cells
    results = Ledger(run.place.store).results(cells)
    if not results:
        raise UserError(f"sweep {sweep.name!r} has no results yet: run `mlmclm sweep {run.source}` first.")
    facts = partial(given_facts, made, results)
    return Results(
        sweep, run.place, run.command, None, made.space, results, "sweep", facts, cells, made.models[0].tasks
    )
