"""The results of a study, from a store, a published folder or another tool, and the analysis, advice, figures and comparisons that follow from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlmclm.answers.record import UNKNOWN_STATES, StudyRecord
from mlmclm.errors import MlmclmError, UserError, for_each, unknown
from mlmclm.progress import Bar
from mlmclm.reports.text import in_notebook

if TYPE_CHECKING:
    import pandas as pd

    from mlmclm.analysis.analyse import Analysis
    from mlmclm.answers.comparison_of_models import Comparison
    from mlmclm.reports.advice import Advice
    from mlmclm.reports.drawing import Figure
    from mlmclm.reports.provenance import Basis
    from mlmclm.reports.study_facts import RecordedRuns, StudyFacts
    from mlmclm.results.examples import ExampleSource
    from mlmclm.seeds import Seeds


@dataclass(eq=False, repr=False)
class Results:
    """At least one result of a study, with the analysis, advice, figures and comparisons that follow from it.

    The tables are DataFrames, the same as the CSV files beside the report (docs/report.md); scores in them are
    fractions of 1. Cells without a result count as missing.

    Attributes:
        record: the results themselves, and what their report needs besides.
        runs: the MLflow address of the runs behind the results, or the command that shows them; empty without either.
        failure: the error of zero-shot evaluations that failed.
        files: the files of the report by name, once it is written.
        grids: Ray Tune's ResultGrid of each experiment of this run, with one trial per training; results from the store are in none.
    """

    record: StudyRecord
    runs: str = ""
    failure: MlmclmError | None = None
    files: Mapping[str, Path] = field(default_factory=dict)
    grids: Sequence[Any] = ()

    def __repr__(self) -> str:
        about = f"<results of {' '.join(filter(None, (self.record.kind, repr(self.name))))}: {len(self.rows):,} cells>"
        return f"{about}\n{self.verdict}"

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        from mlmclm.analysis.results import records

        columns = ("model", "task", "learning_rates", "score", "score_low", "score_high", "chance")
        return in_notebook(repr(self), records(self.best), columns)

    def by_rule(self, rule: str | None) -> Results:
        """Return the results with the best learning rates chosen by a rule.

        Args:
            rule: `mean`, `per_seed` or `on_test`; None for the rule of the study.

        Raises:
            UserError: there is no such rule.
        """
        from mlmclm.analysis.selection import check_rule

        if rule is None:
            return self
        setting = replace(self.record.setting, rule=check_rule(rule))
        return replace(self, record=replace(self.record, setting=setting), files={})

    @property
    def name(self) -> str:
        """The study's name."""
        return self.record.name

    @property
    def rows(self) -> Sequence[dict[str, Any]]:
        """The results, one a cell, as the store keeps them."""
        return self.record.rows

    @property
    def kept(self) -> ExampleSource:
        """The source of the outcomes of each cell's test examples."""
        return self.record.kept

    @property
    def report(self) -> Path | None:
        """The page of the report: that of the last run if it wrote one, or the page of these results after `write`; else None."""
        return self.files.get("report")

    @cached_property
    def analysis(self) -> Analysis:
        """All tables, as the report shows them."""
        return self.record.setting.analyse(self.rows, self.kept)

    @cached_property
    def basis(self) -> Basis:
        """The costs of the results, their basis, and how to ask for more."""
        examples = dict[str, int]()
        for row in self.rows:
            if row["task"] not in examples and row["status"] == "ok":
                try:
                    examples[row["task"]] = self.kept.examples(row).rows
                except UserError:  # damaged or not kept; another cell of the task may have them
                    continue
        states, further = self.record.states, self.record.setting.replicate_of
        # The stages of first replicates.
        first = [stage.work for stage in states.stages if not further.keys() >= {*stage.models}]
        return self.record.facts.basis.with_costs(self.rows, test_examples=examples, pretraining=first)

    @cached_property
    def facts(self) -> StudyFacts:
        """The facts that the report shows beside the results."""
        from mlmclm.reports.provenance import cell_work, provenance_facts

        facts, states = self.record.facts, self.record.states
        protocol = {**facts.protocol, "rule": self.record.setting.rule}
        facts = replace(facts, protocol=protocol, basis=self.basis, claims=self.record.claims())
        if states is UNKNOWN_STATES:
            return facts
        # By key, because two names of the same weights share their cells and the work counts once.
        cells = [cell_work(row) for row in {row["key"]: row for row in self.rows}.values()]
        stages = [stage.work for stage in states.stages]
        return replace(facts, provenance=provenance_facts(stages, cells, corpus=states.corpus, tasks=states.task_data))

    @cached_property
    def advice(self) -> Advice:
        """Advice from the results: the answer, how sure it is, what it is based on, and what would settle the rest."""
        from mlmclm.reports.advice import advise

        return advise(self.analysis, self.basis)

    def model_of(self, name: str, *, where: str) -> str:
        """Return a model's name as the study spells it. If there is no such model, the `UserError` starts with `where`."""
        spelled, models = self.record.spelled(name), self.record.setting.grid.models
        if spelled not in models:
            raise unknown("model", spelled, models, where=where)
        return spelled

    @property
    def verdict(self) -> str:
        """Which model is best, and how sure that is, in words."""
        answer = self.advice.answer
        return f"{answer.verdict}\n{answer.detail}"

    @property
    def cells(self) -> pd.DataFrame:
        """Every cell with a result: its model, task, learning rate, seed, status, scores and costs."""
        return self.analysis.cells

    @property
    def best(self) -> pd.DataFrame:
        """The best learning rate of each model on each task, the test score at it, and the expected score of a fresh run, with intervals."""
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
        from mlmclm.answers.claim_files import read_claims
        from mlmclm.reports.tested_claims import claim_frame, verdicts_on

        wanted = read_claims(files) if files else self.facts.claims
        return claim_frame(verdicts_on(wanted, self.analysis, self.facts))

    @cached_property
    def figures(self) -> dict[str, Figure]:
        """The report's figures by name; a notebook displays a figure that is the last value of a cell."""
        from mlmclm.reports.view import figures_by_name

        return figures_by_name(self.analysis, self.facts)

    def figure(self, name: str) -> Figure:
        """Return a figure of the report, an SVG that a notebook shows; a `UserError` lists the names."""
        if name not in self.figures:
            raise unknown("figure", name, self.figures, where=self.name)
        return self.figures[name]

    def write(
        self, folder: Path, *, recorded: RecordedRuns | None = None, pages: Mapping[str, str] | None = None
    ) -> Results:
        """Write the tables and the report to a folder.

        Args:
            recorded: where MLflow has the runs.
            pages: links to programs that show the study, by name.
        """
        from mlmclm.reports.write_report import write_report

        self.files = write_report(self.analysis, replace(self.facts, recorded=recorded, pages=pages or {}), folder)
        return self

    def write_figures(self, folder: str | Path) -> list[Path]:
        """Write the figures as SVG, PDF and CSV, and the tables in the layout of papers as LaTeX and CSV; return the files."""
        from mlmclm.reports.figure_files import write_figure_files

        return write_figure_files(self.analysis, self.facts, Path(folder))

    def predictions(self) -> pd.DataFrame:
        """Return what the models predicted for the test examples at their best learning rates, one row an example.

        Columns: key (as in `cells`), model, task, seed, and those of the task's family (docs/fine-tuning.md), NaN for other families.

        Raises:
            UserError: some cells have no predictions; the message names all of them.
        """
        import pandas as pd

        from mlmclm.tasks.predictions import predicted

        def rows(model: str, task: str, seed: int | str, result: Mapping[str, Any]) -> list[dict[str, Any]]:
            columns = {"key": result["key"], "model": model, "task": task, "seed": seed}
            return [{**columns, **row} for row in predicted(self.kept.examples(result))]

        parts = for_each(self._at_best_rates(), lambda cell: rows(*cell))
        return pd.DataFrame([row for part in parts for row in part])

    def write_predictions(self, folder: Path) -> None:
        """Write what `predictions` returns as JSON lines, to `FOLDER/MODEL/TASK/sSEED.jsonl`; it raises the same."""
        from mlmclm.tasks.predictions import write_predictions

        cells = list(self._at_best_rates())
        with Bar("predictions", len(cells), unit="cells") as bar:

            def write(cell: tuple[str, str, int | str, Mapping[str, Any]]) -> None:
                model, task, seed, result = cell
                name = f"s{seed}.jsonl" if isinstance(seed, int) else f"{seed}.jsonl"
                write_predictions(self.kept.examples(result), folder / model / task / name)
                bar.update(bar.done + 1)

            for_each(cells, write)

    def _at_best_rates(self) -> Iterator[tuple[str, str, int | str, Mapping[str, Any]]]:
        """Yield model, task, seed and result of the cells at the best learning rates.

        The seed has the form `h0-o1-d0` if head, order and dropout have different seeds.
        """
        for (model, task), by_seed in self.chosen().items():
            for seeds, result in by_seed.items():
                simplest = seeds.simplest()
                yield model, task, simplest if isinstance(simplest, int) else str(simplest), result

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
    ) -> Comparison:
        """Compare two models at their best learning rates, as the report does: seeds and test examples in one interval.

        Args:
            tasks: some of the study's tasks; by default all.
            metric: a score in place of the tasks' main one.
            where: what messages call the study; by default its name.

        Raises:
            UserError: a model or task is unknown, or no task has cells to compare.
        """
        from mlmclm.answers.comparison_of_models import compare_models

        record, where = self.record, where or self.name
        first, second = (self.model_of(name, where=where) for name in (first, second))
        all_tasks = self.analysis.grid.tasks
        for task in tasks or ():
            if task not in all_tasks:
                raise unknown("task", task, all_tasks, where=where)
        return compare_models(
            (first, second),
            self.analysis,
            self.chosen(),
            self.kept,
            tasks or all_tasks,
            whole=not tasks,
            metric=metric,
            remedy=f"`mlmclm {record.kind} {record.source or where}` computes what is missing." if record.kind else "",
        )
