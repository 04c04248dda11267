"""Answers that follow from the results of a study, wherever they are kept: in a store, or in a published bundle."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlmclm.errors import MlmclmError, UserError, for_each, unknown
from mlmclm.progress import Bar
from mlmclm.studies.known_noise import fold_reader
from mlmclm.tasks.family import family_of
from mlmclm.tasks.predictions import predicts_the_same

if TYPE_CHECKING:
    import pandas as pd

    from mlmclm.analysis.analyse import Analysis
    from mlmclm.analysis.results import Grid
    from mlmclm.reports.advice import Advice
    from mlmclm.reports.drawing import Figure
    from mlmclm.reports.study_facts import StudyFacts
    from mlmclm.results.chance import Chances
    from mlmclm.results.examples import ExampleSource
    from mlmclm.seeds import Seeds
    from mlmclm.studies.comparison_of_models import ComparisonOfModels


class StudyAnswers(ABC):
    """Answers that follow from the results of a study, of which there is at least one.

    The tables are DataFrames, the same as the CSV files beside the report (docs/report.md); scores in them are
    fractions of 1. Cells without a result count as missing.

    Attributes:
        rows: the results, one a cell, as the store keeps them.
        failure: the error of zero-shot evaluations that failed.
        report: the report's page, once it is written.
    """

    rows: list[dict[str, Any]]
    failure: MlmclmError | None = None
    report: Path | None = None

    @property
    @abstractmethod
    def name(self) -> str:
        """The study's name."""

    @property
    @abstractmethod
    def runs(self) -> str:
        """The address of the runs behind the results, or the command that shows them; empty if nothing has them."""

    @property
    @abstractmethod
    def analysis(self) -> Analysis:
        """All tables, as the report shows them."""

    @property
    @abstractmethod
    def facts(self) -> StudyFacts:
        """The facts that the report shows beside the results."""

    @property
    @abstractmethod
    def advice(self) -> Advice:
        """Advice from the results: the answer, how sure it is, what it rests on, and what would settle the rest."""

    @property
    @abstractmethod
    def kept(self) -> ExampleSource:
        """The source of the outcomes of each cell's test examples."""

    @abstractmethod
    def model_of(self, name: str, *, where: str) -> str:
        """Return a model's name as the study spells it. If there is no such model, the `UserError` starts with `where`."""

    @abstractmethod
    def remedy(self, where: str) -> str:
        """Say what computes missing cells, in a sentence."""

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
        """The best learning rate of each model on each task, the test score there and that of a fresh run, with their intervals."""
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
            raise unknown("figure", name, self.figures, where=self.name)
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

        def rows(model: str, task: str, seed: str, result: Mapping[str, Any]) -> list[dict[str, Any]]:
            return [
                {"model": model, "task": task, "seed": seed, **row} for row in predicted(self.kept.examples(result))
            ]

        parts = for_each(self._at_best_rates(), lambda each: rows(*each))
        return pd.DataFrame([row for part in parts for row in part])

    def write_predictions(self, folder: Path) -> None:
        """Write what `predictions` returns as JSON lines, to `FOLDER/MODEL/TASK/sSEED.jsonl`; it raises the same."""
        from mlmclm.tasks.predictions import write_predictions

        cells = list(self._at_best_rates())
        with Bar("predictions", len(cells), unit="cells") as bar:

            def write(cell: tuple[str, str, str, Mapping[str, Any]]) -> None:
                model, task, seed, result = cell
                write_predictions(self.kept.examples(result), folder / model / task / f"{seed}.jsonl")
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

        where = where or self.name
        first, second = (self.model_of(name, where=where) for name in (first, second))
        known = self.analysis.grid.tasks
        for task in tasks or ():
            if task not in known:
                raise unknown("task", task, known, where=where)
        return compare_models(
            (first, second),
            self.analysis,
            self.chosen(),
            self.kept,
            tasks or known,
            whole=not tasks,
            metric=metric,
            remedy=self.remedy(where),
        )


def analyse_results(
    results: Sequence[dict[str, Any]],
    baseline: str | None,
    kept: ExampleSource,
    *,
    grid: Grid,
    rule: str,
    chances: Chances,
    replicate_of: Mapping[str, str],
) -> Analysis:
    """Return all tables of a study, with the noise of its test examples.

    Args:
        kept: what has the outcomes of test examples.
        results, baseline, grid, rule, chances, replicate_of: as in `analysis.analyse.analyse`.
    """
    from mlmclm.analysis.analyse import analyse

    by_key = {result["key"]: result for result in results}

    def constant(row: Mapping[str, Any]) -> bool:
        try:
            return predicts_the_same(kept.examples(by_key[row["key"]]))
        except UserError:  # it diverged, or its examples are damaged
            return False

    return analyse(
        results,
        baseline,
        folds=fold_reader(kept, results),
        ranges={result["task"]: family_of(result).score_range(result["metric"]) for result in results},
        chances=chances,
        constant=constant,
        grid=grid,
        rule=rule,
        replicate_of=replicate_of,
    )
