"""The results of a study so far: its tables, figures, predictions and report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from mlmclm.errors import MlmclmError, UserError, for_each, unknown
from mlmclm.progress import Bar, say
from mlmclm.studies.study_sweep import StudySweep, analyse_sweep
from mlmclm.sweeps.cells import added_rates, seeds_by_task
from mlmclm.sweeps.ledger import Ledger

if TYPE_CHECKING:
    import pandas as pd

    from mlmclm.analysis.analyse import Analysis
    from mlmclm.finetuning.cell import Cell
    from mlmclm.reports.advice import Advice
    from mlmclm.reports.drawing import Figure
    from mlmclm.reports.study_facts import StudyFacts
    from mlmclm.seeds import Seeds
    from mlmclm.studies.comparison_of_models import ComparisonOfModels
    from mlmclm.studies.study_tracking import StudyTracking


@dataclass(eq=False, repr=False)
class StudyResults:
    """The results of a study, at least one, and what follows from them.

    The tables are DataFrames, the same as the CSV files beside the report (docs/report.md); scores in them are
    fractions of 1. Cells without a result count as missing.

    Attributes:
        sweep: the study's models, tasks and search space.
        rows: the results, one a cell, as the store keeps them.
        command: the command that computes the study again, which the report shows.
        failure: the error of zero-shot evaluations that failed.
        report: the report's page, once it is written.
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
    def verdict(self) -> str:
        """Which model is best, and how sure that is, in words."""
        answer = self.advice.answer
        return f"{answer.verdict}\n{answer.detail}"

    @cached_property
    def advice(self) -> Advice:
        """Advice from the results: the answer, how sure it is, what it rests on, and what would settle the rest."""
        from mlmclm.reports.advice import advise
        from mlmclm.studies.report_facts import study_basis

        return advise(self.analysis, study_basis(self.sweep, self.rows, self.command))

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
            allotted=None if space.seeds.power is None else seeds_by_task(cells),
            replicate_of=self.sweep.replicate_of,
        )

    @cached_property
    def facts(self) -> StudyFacts:
        """The facts that the report shows beside the results."""
        from mlmclm.studies.report_facts import study_facts

        return study_facts(self.sweep, self.rows, self.command)

    @property
    def cells(self) -> pd.DataFrame:
        """Every cell with a result: its model, task, learning rate, seed, status, scores and costs."""
        return self.analysis.cells

    @property
    def best(self) -> pd.DataFrame:
        """The best learning rate of each model on each task, and the test score there with its interval."""
        return self.analysis.best

    @property
    def comparisons(self) -> pd.DataFrame:
        """Differences between models, by task and over all tasks, with intervals and p-values."""
        return self.analysis.comparisons

    @property
    def stability(self) -> pd.DataFrame:
        """The spread of scores over seeds and learning rates, and the share of diverged runs, by model and task."""
        return self.analysis.stability

    @property
    def components(self) -> pd.DataFrame:
        """How much each source adds to the variance of scores, by model and task: rate, seed, test examples."""
        return self.analysis.components

    def claims(self, *files: str | Path) -> pd.DataFrame:
        """Test claims, one row each: verdict, reason, what would settle it, the difference and its p values (docs/claims.md).

        Args:
            files: names of packaged files of claims, or paths; by default those of the study.
        """
        from mlmclm.reports.tested_claims import claim_frame, verdicts_on
        from mlmclm.studies.claim_files import read_claims

        wanted = read_claims(files) if files else self.facts.claims
        return claim_frame(verdicts_on(wanted, self.analysis, self.facts))

    @cached_property
    def figures(self) -> dict[str, Figure]:
        """The report's figures by name; a notebook shows one that ends a cell."""
        from mlmclm.reports.view import figures_by_name

        return figures_by_name(self.analysis, self.facts)

    def figure(self, name: str) -> Figure:
        """Return a figure of the report, an SVG that a notebook shows; a `UserError` lists the names."""
        if name not in self.figures:
            raise unknown("figure", name, self.figures, where=self.sweep.file.name)
        return self.figures[name]

    def write_figures(self, folder: str | Path) -> list[Path]:
        """Write the figures as SVG, PDF and CSV, and the tables in the layout of papers as LaTeX and CSV; return the files."""
        from mlmclm.reports.figure_files import write_figure_files

        return write_figure_files(self.analysis, self.facts, Path(folder))

    def predictions(self) -> pd.DataFrame:
        """Return what the models predicted for the test examples at their best learning rates, one row an example.

        Columns: model, task, seed, and what the task's family keeps (docs/fine-tuning.md); it is NaN for other families.

        Raises:
            UserError: some cells have no predictions; the message names all of them.
        """
        import pandas as pd

        from mlmclm.tasks.predictions import predicted

        ledger = Ledger(self.sweep.place.store)

        def rows(model: str, task: str, seed: str, result: Mapping[str, Any]) -> list[dict[str, Any]]:
            return [{"model": model, "task": task, "seed": seed, **row} for row in predicted(ledger.examples(result))]

        parts = for_each(self._at_best_rates(), lambda each: rows(*each))
        return pd.DataFrame([row for part in parts for row in part])

    def write_predictions(self, folder: Path) -> None:
        """Write what `predictions` returns as JSON lines, to `FOLDER/MODEL/TASK/sSEED.jsonl`; it raises the same."""
        from mlmclm.tasks.predictions import write_predictions

        ledger, cells = Ledger(self.sweep.place.store), list(self._at_best_rates())
        with Bar("predictions", len(cells), unit="cells") as bar:

            def write(cell: tuple[str, str, str, Mapping[str, Any]]) -> None:
                model, task, seed, result = cell
                write_predictions(ledger.examples(result), folder / model / task / f"{seed}.jsonl")
                bar.update(bar.done + 1)

            for_each(cells, write)

    def _at_best_rates(self) -> Iterator[tuple[str, str, str, Mapping[str, Any]]]:
        """Yield model, task, seed and result of the cells at the best learning rates."""
        for (model, task), by_seed in self.chosen().items():
            for seeds, result in by_seed.items():
                simplest = seeds.simplest()  # `s0`, or `h0-o1-d0` where the streams have seeds of their own
                yield model, task, f"s{simplest}" if isinstance(simplest, int) else str(simplest), result

    def chosen(self) -> dict[tuple[str, str], dict[Seeds, Mapping[str, Any]]]:
        """Return the results at the best learning rates, by (model, task) and seed."""
        from mlmclm.analysis.summary import chosen_results

        return chosen_results(self.analysis, self.rows)

    def compare(
        self,
        first: str,
        second: str,
        *,
        tasks: Sequence[str] | None = None,
        metric: str | None = None,
        where: str | None = None,
    ) -> ComparisonOfModels:
        """Compare two models at their best learning rates, as the report does: seeds and test examples in one interval.

        Args:
            tasks: some of the study's tasks; by default all.
            metric: a score in place of the tasks' main one.
            where: what messages call the study; by default its name.

        Raises:
            UserError: a model or task is unknown, or no task has cells to compare.
        """
        from mlmclm.studies.comparison_of_models import compare_models

        file, space, where = self.sweep.file, self.sweep.space, where or self.sweep.file.name
        first, second = (file.model_of(name, where=where) for name in (first, second))
        for task in tasks or ():
            if task not in space.tasks:
                raise unknown("task", task, space.tasks, where=where)
        return compare_models(
            (first, second),
            self.analysis,
            self.chosen(),
            Ledger(self.sweep.place.store),
            tasks or space.tasks,
            whole=not tasks,
            metric=metric,
            remedy=f"`mlmclm {file.kind} {where}` computes what is missing.",
        )

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
        from mlmclm.studies.recorded_runs import recorded_runs

        paths = {}
        if folder is not None:
            tasks = dict.fromkeys((*self.sweep.space.tasks, *(each.task for each in self.facts.zero_shot)))
            recorded = recorded_runs(self.sweep.file, self.sweep.place.store, tuple(tasks))
            paths = write_report(self.analysis, replace(self.facts, recorded=recorded), folder)
        self.report = paths.get("report")
        if tracking is not None:
            provenance = self.facts.provenance
            tracking.reported(self.sweep.space, self.analysis, self.rows, paths.values(), provenance)
            self.shown_at = tracking.elsewhere
        return self
