"""A whole study's results to all of its tables: `analyse`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pandas as pd

from mlmclm.analysis.comparison import claim_table, comparison_table, overall_table
from mlmclm.analysis.results import Grid, Record, coverage_table, observed_grid, records, results_table
from mlmclm.analysis.selection import best_table, check_rule, chosen_table, curve_table, settled
from mlmclm.analysis.stability import stability_table
from mlmclm.errors import UserError, unknown


@dataclass(frozen=True)
class Analysis:
    """All tables of a study; scores are fractions of 1, rows are in a fixed order. Where a grid has other settings than the
    learning rate, all but `cells` and `coverage` are of each (model, task)'s best setting (`selection.settled`).

    Attributes:
        cells: one row a cell (`results.results_table`).
        coverage: expected, present, diverged and missing cells by model and task (`results.coverage_table`).
        curves: score against learning rate (`selection.curve_table`).
        chosen: the cells at the chosen learning rates (`selection.chosen_table`).
        best: best learning rate and the test score there (`selection.best_table`).
        stability: sensitivity to seed and learning rate (`stability.stability_table`).
        overall: means over tasks (`comparison.overall_table`).
        comparisons: model against model (`comparison.comparison_table`).
        claims: each model against the baseline (`comparison.claim_table`); empty without a baseline.
        grid: the cells that were asked for.
        baseline: the untrained model, or None.
        rule: how the learning rate was chosen, "mean" or "per_seed".
        confidence: of all intervals.
    """

    cells: pd.DataFrame
    coverage: pd.DataFrame
    curves: pd.DataFrame
    chosen: pd.DataFrame
    best: pd.DataFrame
    stability: pd.DataFrame
    overall: pd.DataFrame
    comparisons: pd.DataFrame
    claims: pd.DataFrame
    grid: Grid
    baseline: str | None
    rule: str
    confidence: float

    @property
    def missing(self) -> int:
        """How many cells of the grid have no result."""
        return int(self.coverage["missing"].sum())

    @property
    def diverged(self) -> int:
        """How many cells diverged."""
        return int(self.coverage["diverged"].sum())


def analyse(
    results: Iterable[Record],
    baseline: str | None = None,
    *,
    grid: Grid | None = None,
    rule: str = "mean",
    confidence: float = 0.95,
) -> Analysis:
    """Turns the results of cells into all tables of the study; the order of `results` changes nothing.

    Args:
        results: the result files' JSON, one a cell.
        baseline: the untrained model that the others must beat; None for a study without.
        grid: the cells that were asked for, so that missing ones are counted; by default the smallest full grid that
            holds all results.
        rule: how the best learning rate is chosen, see `selection`.
        confidence: of all intervals, in (0, 1).

    Raises:
        UserError: no results, an unknown rule or baseline, a confidence outside (0, 1), or results that don't belong
            together.
    """
    if not 0 < confidence < 1:
        raise UserError(f"confidence must be between 0 and 1, not {confidence}.")
    chosen_rule = check_rule(rule)
    cells = results_table(results)
    if cells.empty:
        raise UserError("there is no result to analyse yet: run the sweep first.")
    seen = observed_grid(cells)
    asked = grid or seen
    models = sorted({*asked.models, *seen.models})
    if baseline is not None and baseline not in models:
        raise unknown("baseline model", baseline, models)
    families = {row["task"]: row["family"] for row in records(cells)}
    families |= {task: "" for task in asked.tasks if task not in families}
    own = settled(cells, asked, rule=chosen_rule)
    chosen = chosen_table(own, asked, rule=chosen_rule)
    comparisons = comparison_table(chosen, models, families, confidence=confidence)
    return Analysis(
        cells=cells,
        coverage=coverage_table(cells, asked),
        curves=curve_table(own, asked, confidence=confidence),
        chosen=chosen,
        best=best_table(own, asked, rule=chosen_rule, confidence=confidence),
        stability=stability_table(own, chosen, baseline=baseline, confidence=confidence),
        overall=overall_table(chosen, models, families, confidence=confidence),
        comparisons=comparisons,
        claims=claim_table(comparisons, models if baseline is not None else [], baseline or ""),
        grid=asked,
        baseline=baseline,
        rule=chosen_rule,
        confidence=confidence,
    )
