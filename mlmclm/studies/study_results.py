"""The results of a study so far, in its store, and its report."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from mlmclm.errors import MlmclmError, UserError, unknown
from mlmclm.progress import say
from mlmclm.studies.study_answers import StudyAnswers
from mlmclm.studies.study_sweep import StudySweep, analyse_sweep
from mlmclm.sweeps.cells import added_rates
from mlmclm.sweeps.ledger import Ledger

if TYPE_CHECKING:
    from mlmclm.analysis.analyse import Analysis
    from mlmclm.finetuning.cell import Cell
    from mlmclm.reports.advice import Advice
    from mlmclm.reports.basis import Basis
    from mlmclm.reports.study_facts import StudyFacts
    from mlmclm.studies.study_tracking import StudyTracking


@dataclass(eq=False, repr=False)
class StudyResults(StudyAnswers):
    """The results of a study, at least one, and what follows from them.

    Attributes:
        sweep: the study's models, tasks and search space.
        command: the command that computes the study again, which the report shows.
        shown_at: address of the MLflow server that has the runs; None if the store's own database has them.
    """

    sweep: StudySweep
    rows: list[dict[str, Any]]
    command: str
    failure: MlmclmError | None = None
    report: Path | None = None
    shown_at: str | None = None

    def __repr__(self) -> str:
        return f"<results of {self.sweep.file.kind} {self.sweep.file.name!r}: {len(self.rows):,} cells>"

    @property
    def name(self) -> str:
        """The study's name."""
        return self.sweep.file.name

    @property
    def runs(self) -> str:
        """The address of the MLflow server that has the runs, or the command that starts one."""
        return self.shown_at or f"mlmclm tracking ui --store {self.sweep.place.store}"

    @property
    def kept(self) -> Ledger:
        """The store's results, which have the outcome of each test example."""
        return Ledger(self.sweep.place.store)

    def model_of(self, name: str, *, where: str) -> str:
        """Return a model's name as the study spells it. If there is no such model, the `UserError` starts with `where`."""
        return self.sweep.file.model_of(name, where=where)

    def remedy(self, where: str) -> str:
        """Say what computes missing cells, in a sentence."""
        return f"`mlmclm {self.sweep.file.kind} {where}` computes what is missing."

    @cached_property
    def advice(self) -> Advice:
        """Advice from the results: the answer, how sure it is, what it rests on, and what would settle the rest."""
        from mlmclm.reports.advice import advise

        return advise(self.analysis, self.basis)

    @cached_property
    def basis(self) -> Basis:
        """The costs of the results, their foundations, and the way to ask for more."""
        from mlmclm.studies.report_facts import study_basis

        return study_basis(self.sweep, self.rows, self.command)

    @cached_property
    def analysis(self) -> Analysis:
        """All tables, as the report shows them."""
        file, space, cells = self.sweep.file, self.sweep.space, self.sweep.plan().cells
        return analyse_sweep(
            tuple(file.models),
            file.baseline,
            space,
            self.rows,
            tasks=self.sweep.tasks,
            store=self.sweep.place.store,
            added=added_rates(cells, space.learning_rates),
            replicate_of=self.sweep.replicate_of,
        )

    @cached_property
    def facts(self) -> StudyFacts:
        """The facts that the report shows beside the results."""
        from mlmclm.studies.report_facts import study_facts

        return study_facts(self.sweep, self.rows, self.command, self.basis)

    def best_cell(self, model: str, task: str) -> Cell:
        """Return the cell of a model and task with the best validation score among the seeds of the best learning rate.

        Raises:
            UserError: the study has no such model or task, or none of its cells has a score.
        """
        from mlmclm.analysis.results import place_of, records
        from mlmclm.finetuning.cell import cell_key

        file, space = self.sweep.file, self.sweep.space
        model = file.model_of(model, where=file.name)
        if task not in space.tasks:
            raise unknown("task", task, space.tasks, where=file.name)
        chosen = [row for row in records(self.analysis.chosen) if (row["model"], row["task"]) == (model, task)]
        if not chosen:
            raise UserError(
                f"{file.name}: no cell of {model} on {task} has a score; `mlmclm {file.kind}` computes them."
            )
        best = place_of(max(chosen, key=lambda row: row["validation"]))
        key = next(row["key"] for row in records(self.cells) if place_of(row) == best)
        return next(cell for cell in self.sweep.plan().cells if cell_key(cell) == key and cell.model == model)

    def export_best(self, model: str, task: str, to: Path) -> dict[str, dict[str, float]]:
        """Train the `best_cell` again and write its encoder as a folder for sentence-transformers; return its scores.

        Raises:
            UserError: as `best_cell`; or the task is not retrieval, or the folder is not empty.
        """
        from mlmclm.finetuning.cell import cell_key
        from mlmclm.finetuning.sentence_encoder import check_target, export_sentence_encoder
        from mlmclm.studies.one_cell import keep_start, make_ready, steps_bar
        from mlmclm.sweeps.cells import cell_name

        cell, place = self.best_cell(model, task), self.sweep.place
        check_target(cell, to)
        if cell.start is not None:
            keep_start(next(each for each in self.sweep.plan().cells if cell_key(each) == cell.start.key), place)
        make_ready(cell)
        with steps_bar(f"{cell_name(cell)}, trained again") as on_step:
            result = export_sentence_encoder(cell, to, store=place.store, data_root=place.data_root, on_step=on_step)
        kept = next(each["scores"] for each in self.rows if each["key"] == cell_key(cell))
        if kept != result["scores"]:
            say(
                f"{cell_name(cell)}: trained again, it does not score exactly as before; another machine or version computed "
                f"the {self.sweep.file.kind}. Before: {kept}"
            )
        return dict(result["scores"])

    def write(self, folder: Path | None, tracking: StudyTracking | None = None) -> Self:
        """Write the tables and the report to a folder and log them to MLflow; without a folder, MLflow gets no files."""
        from mlmclm.reports.write_report import write_report
        from mlmclm.studies.other_pages import other_pages
        from mlmclm.studies.recorded_runs import recorded_runs

        paths, pages = {}, other_pages(self.sweep.file, self.sweep.place.store, self.rows)
        if folder is not None:
            tasks = dict.fromkeys((*self.sweep.space.tasks, *(each.task for each in self.facts.zero_shot)))
            recorded = recorded_runs(self.sweep.file, self.sweep.place.store, tuple(tasks))
            paths = write_report(self.analysis, replace(self.facts, recorded=recorded, pages=pages), folder)
        self.report = paths.get("report")
        if tracking is not None:
            answer, provenance = self.advice.lines(), self.facts.provenance
            tracking.reported(self.sweep.space, self.analysis, self.rows, paths.values(), answer, provenance, pages)
            self.shown_at = tracking.elsewhere
        return self
