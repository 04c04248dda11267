"""Compute all tables of a study from its cells' results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

import numpy as np
import pandas as pd

from mlmclm.analysis.across_tasks import typical_table
from mlmclm.analysis.comparison import claim_table, comparison_table, overall_table
from mlmclm.analysis.components import components_table
from mlmclm.analysis.contrasts import Effects
from mlmclm.analysis.effects import effect
from mlmclm.analysis.failed_runs import failure_table, with_failures, with_unseen
from mlmclm.analysis.model_ranks import ranks_table
from mlmclm.analysis.model_runs import Runs, runs_of
from mlmclm.analysis.noise_checks import NoiseChecks, noise_checks
from mlmclm.analysis.power import smallest_differences
from mlmclm.analysis.replicates import groups_of, over_replicates
from mlmclm.analysis.results import (
    NO_RANGES,
    Grid,
    Ranges,
    Record,
    cells_by_pair,
    coverage_table,
    observed_grid,
    records,
    results_table,
)
from mlmclm.analysis.seed_noise import Fit, fit_task, likeness
from mlmclm.analysis.selection import (
    best_table,
    check_rule,
    chosen_table,
    counting,
    curve_table,
    picked_cells,
    resolved,
    with_settings,
)
from mlmclm.analysis.setups import SetupDifference, setup_differences
from mlmclm.analysis.shared_trainings import seed_correlations, tasks_by_training
from mlmclm.analysis.stability import stability_table
from mlmclm.errors import UserError, unknown
from mlmclm.results.chance import NO_CHANCES, Chances, chance_of
from mlmclm.results.measures import Array
from mlmclm.results.metrics import Rule


@dataclass(frozen=True)
class Analysis:
    """All tables of a study; each is described at the function that makes it (`results_table`, `coverage_table`, ...).

    Scores are fractions of 1, and rows have a fixed order. If the grid varies settings other than the learning rate,
    every table except `cells` and `coverage` describes only the best setting of each (model, task)
    (`selection.resolved`).
    """

    cells: pd.DataFrame
    coverage: pd.DataFrame
    curves: pd.DataFrame
    chosen: pd.DataFrame
    best: pd.DataFrame
    stability: pd.DataFrame
    components: pd.DataFrame
    overall: pd.DataFrame
    comparisons: pd.DataFrame
    claims: pd.DataFrame
    """Empty without a baseline."""
    ranks: pd.DataFrame
    typical: pd.DataFrame
    failures: pd.DataFrame
    runs: Mapping[tuple[str, str], Runs]
    fits: Mapping[tuple[str, str], Fit]
    """The runs of each (model, task) that has any cell, and their fitted noise (`seed_noise`)."""
    effects: Effects
    """The scores that are compared, by model and task: of a model with replicates, over them (`replicates`)."""
    run_effects: Effects
    """The scores of single pretraining runs."""
    groups: Mapping[str, Sequence[str]]
    """The pretraining runs of each model that is compared (`replicates.groups_of`)."""
    chances: Chances
    grid: Grid
    baseline: str | None
    """The untrained model."""
    rule: Rule
    confidence: float
    setups: tuple[SetupDifference, ...] = ()
    """In what the models' cells were computed differently."""

    @cached_property
    def smallest(self) -> Mapping[str, float]:
        """The smallest true difference found with 80 % power by task and for the mean over tasks; without the baseline."""
        models = [model for model in self.groups if model != self.baseline]
        return smallest_differences(self.effects, models, self.families, self.confidence)

    @cached_property
    def noise(self) -> NoiseChecks:
        """Checks of what the intervals take for granted."""
        return noise_checks(self.runs, self.fits, self.run_effects)

    @property
    def models(self) -> list[str]:
        """The models that were requested or have results, sorted."""
        return sorted({str(name) for name in self.coverage["model"]})

    @property
    def families(self) -> dict[str, str]:
        """The family of each task that was requested or has results; empty for a task without any result."""
        return {task: family for row in records(self.best) for task, family in [(row["task"], row["family"])]}

    @property
    def missing(self) -> int:
        """The number of grid cells without a result."""
        return int(self.coverage["missing"].sum())

    @property
    def diverged(self) -> int:
        """The number of diverged cells."""
        return int(self.coverage["diverged"].sum())


def analyse(
    results: Iterable[Record],
    baseline: str | None = None,
    *,
    grid: Grid | None = None,
    rule: str = "mean",
    ranges: Ranges = NO_RANGES,
    chances: Chances = NO_CHANCES,
    constant: Callable[[Record], bool] = lambda _: False,
    folds: Callable[[Sequence[Record]], Array | None] = lambda _: None,
    replicate_of: Mapping[str, str] = MappingProxyType({}),
    confidence: float = 0.95,
) -> Analysis:
    """Compute all tables of a study from its cells' results; the order of `results` does not matter.

    Args:
        results: the JSON objects of the result files, one per cell.
        baseline: the untrained model that the others must beat; None if the study has none.
        grid: the requested cells, against which missing ones are counted; by default `observed_grid`.
        rule: how the best learning rate is chosen; see `selection`.
        ranges: the ranges of the tasks' main scores, which no interval of a mean leaves.
        chances: the chance levels of the tasks' main scores.
        constant: whether a cell, given its row of `results_table`, predicted the same for every test example. It is asked
            about the cells at chosen learning rates.
        folds: the scores of some cells of one (model, task), averaged over them, without one fold of the test examples after
            the other (`effects.fold_scores`), given their rows of `results_table`; None if their predictions are not known,
            and then the noise of the test set is in no interval.
        replicate_of: the model that a further pretraining run is a replicate of, by the run's name.
        confidence: of all intervals, in (0, 1).

    Raises:
        UserError: there are no results, the rule or the baseline is unknown, `confidence` is outside (0, 1), the
            results don't belong together.
    """
    if not 0 < confidence < 1:
        raise UserError(f"confidence must be between 0 and 1, not {confidence}.")
    chosen_rule = check_rule(rule)
    results = list(results)
    cells = results_table(results)
    if cells.empty:
        raise UserError("there is no result to analyse yet: run the sweep first.")
    # Results outside the requested grid are compared too.
    seen = observed_grid(cells)
    asked = grid or seen
    models = sorted({*asked.models, *seen.models})
    if baseline is not None and baseline not in models:
        raise unknown("baseline model", baseline, models)
    # A task without any result has no known family yet.
    families = dict.fromkeys(asked.tasks, "") | {row["task"]: row["family"] for row in records(cells)}
    # From here on only the best setting counts; `cells` itself stays complete for the results and coverage tables.
    own = resolved(cells, asked, rule=chosen_rule, fitted=lambda each: _fitted(each, chances)[0])
    runs, fits = _fitted(own, chances)
    chosen = chosen_table(own, rule=chosen_rule, runs=runs)
    choice_runs, choice_fits = runs, fits
    several = len(own) < len(cells)
    if several:
        candidates = with_settings(cells, asked)
        choice_runs, choice_fits = _fitted(candidates, chances)
        codes = candidates["learning_rate"].groupby([cells["model"], cells["task"], cells["setting"]]).unique()
    run_effects = {}
    for pair, group in cells_by_pair(own).items():
        picked = picked_cells(counting(group, runs[pair], chosen_rule), chosen_rule)
        found = effect(choice_runs[pair], choice_fits[pair], chosen_rule, folds=folds(picked))
        if several and len(found.chosen):
            mine = np.isin(choice_runs[pair].rates, codes[(*pair, group[0]["setting"])])
            found = replace(found, chosen=found.chosen[mine])
        run_effects[pair] = found
    alike = seed_correlations(runs, tasks_by_training(results))
    run_effects = {pair: replace(found, alike=alike.get(pair[1], {})) for pair, found in run_effects.items()}
    coverage = coverage_table(cells, asked)
    best = best_table(
        own,
        asked,
        rule=chosen_rule,
        effects=run_effects,
        runs=runs,
        ranges=ranges,
        chances=chances,
        constant=constant,
        not_run={(row["model"], row["task"]): row["missing"] for row in records(coverage)},
        confidence=confidence,
    )
    # From here on models are compared, over their replicates.
    groups = groups_of(models, replicate_of)
    compared, effects = list(groups), over_replicates(run_effects, groups)
    own_name = {run: model for model, members in groups.items() for run in members}
    at_chance = {(own_name[row["model"]], row["task"]) for row in records(best) if row["above_chance"] == "no"}
    comparisons = comparison_table(effects, compared, families, at_chance=at_chance, confidence=confidence)
    overall = overall_table(effects, compared, families, ranges=ranges, chances=chances, confidence=confidence)
    diverged = {
        (own_name[row["model"]], row["task"])
        for row in records(coverage)
        if row["present"] == row["diverged"] > 0 and not row["missing"]
    }
    return Analysis(
        cells=cells,
        coverage=coverage,
        curves=curve_table(own, asked, ranges=ranges, confidence=confidence),
        chosen=chosen,
        best=best,
        stability=stability_table(
            own, chosen, runs, fits, run_effects, baseline=baseline, added=asked.added, confidence=confidence
        ),
        components=components_table(
            own, runs, run_effects, added=asked.added, replicate_of=replicate_of, confidence=confidence
        ),
        overall=overall,
        comparisons=comparisons,
        claims=claim_table(
            comparisons,
            compared if baseline is not None else [],
            baseline or "",
            diverged=diverged,
            confidence=confidence,
        ),
        ranks=ranks_table(overall, comparisons, confidence),
        typical=typical_table(effects, compared, sorted(families), confidence),
        failures=failure_table(runs, groups),
        runs=runs,
        fits=fits,
        effects=effects,
        run_effects=run_effects,
        groups=groups,
        chances=chances,
        grid=asked,
        baseline=baseline,
        rule=chosen_rule,
        confidence=confidence,
        setups=setup_differences({model: [each for each in results if each["model"] == model] for model in models}),
    )


def _fitted(cells: pd.DataFrame, chances: Chances) -> tuple[dict[tuple[str, str], Runs], dict[tuple[str, str], Fit]]:
    """Arrange the runs of every (model, task) that has any cell, and fit their noise."""
    groups = cells_by_pair(cells)
    tasks = {
        task: with_failures(
            {model: runs_of(group) for (model, own), group in groups.items() if own == task},
            chance_of(chances, [task]),
        )
        for task in sorted({task for _, task in groups})
    }
    tasks = dict(zip(tasks, with_unseen(list(tasks.values())), strict=True))
    runs = {(model, task): tasks[task][model] for model, task in groups}
    like = likeness(list(tasks.values()))
    return runs, {(model, task): fit for task, own in tasks.items() for model, fit in fit_task(own, like).items()}
