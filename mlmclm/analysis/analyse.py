"""Compute all tables of a study from its cells' results."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

import numpy as np
import pandas as pd

from mlmclm.analysis.comparison import comparison_table, overall_table
from mlmclm.analysis.contrasts import Effects
from mlmclm.analysis.effects import effect
from mlmclm.analysis.failed_runs import with_failures, with_unseen
from mlmclm.analysis.model_runs import Runs, runs_of
from mlmclm.analysis.noise_checks import NoiseChecks, noise_checks
from mlmclm.analysis.power import smallest_differences
from mlmclm.analysis.replicates import over_replicates, runs_by_model
from mlmclm.analysis.results import (
    NO_RANGES,
    Grid,
    Pairs,
    Ranges,
    Record,
    cells_by_pair,
    coverage_table,
    observed_grid,
    records,
    results_table,
)
from mlmclm.analysis.seed_noise import Fit, fit_tasks
from mlmclm.analysis.selection import best_setting, best_table, check_rule, chosen_table, picked_cells, with_settings
from mlmclm.analysis.setups import SetupDifference, setup_differences
from mlmclm.analysis.shared_trainings import in_common, seed_correlations, tasks_by_training
from mlmclm.errors import UserError, unknown
from mlmclm.registry import KINDS
from mlmclm.results.chance import NO_CHANCES, Chances, chance_of
from mlmclm.results.measures import Array
from mlmclm.results.metrics import Rule


@dataclass(frozen=True)
class Analysis:
    """All tables of a study; each is described at the function that makes it (`results_table`, `coverage_table`, ...).

    Each statistic of this package (`statistics/`) is a table too, under its name: `analysis.stability`.

    Scores are fractions of 1, and rows have a fixed order. If the grid varies settings other than the learning rate,
    every table except `cells` and `coverage` describes only the best setting of each (model, task)
    (`selection.best_setting`).
    """

    cells: pd.DataFrame
    coverage: pd.DataFrame
    chosen: pd.DataFrame
    best: pd.DataFrame
    overall: pd.DataFrame
    comparisons: pd.DataFrame
    pairs: Pairs
    runs: Mapping[tuple[str, str], Runs]
    fits: Mapping[tuple[str, str], Fit]
    """`pairs`, `runs`, `fits`: the cells of each (model, task) that has any, the same cells as arrays, and their fitted noise (`seed_noise`)."""
    effects: Effects
    """The scores that are compared, by (model, task); a model with replicates has one score over all of them (`replicates`)."""
    run_effects: Effects
    """The scores of single pretraining runs."""
    groups: Mapping[str, Sequence[str]]
    """The pretraining runs of each model that is compared (`replicates.runs_by_model`)."""
    chances: Chances
    ranges: Ranges
    grid: Grid
    baseline: str | None
    """The untrained model."""
    rule: Rule
    confidence: float
    setups: tuple[SetupDifference, ...] = ()
    """Differences in how the models' cells were computed."""

    def __getattr__(self, name: str) -> pd.DataFrame:
        """Return the table of a statistic of this package, which is computed when it is first asked for."""
        statistics = KINDS["statistic"]
        if not statistics.is_built_in(name):
            raise AttributeError(f"an analysis has no {name!r}")
        table = self.__dict__[name] = statistics[name](self)
        return table

    def listed(self, pair: tuple[str, str]) -> tuple[Runs, Fit]:
        """Return the runs of a (model, task) and their noise, without learning rates that the grid added because of scores (`Grid.added`)."""
        runs, added = self.runs[pair], self.grid.added.get((*pair, self.pairs[pair][0]["setting"]), ())
        keep = np.asarray([rate not in added for rate in runs.rates])
        return runs.at(list(itertools.compress(runs.rates, keep))), self.fits[pair].at(keep)

    @cached_property
    def smallest(self) -> Mapping[str, float]:
        """The smallest true difference found with 80 % power, by task and for their mean; the baseline is left out if several models are trained."""
        trained = [model for model in self.groups if model != self.baseline]
        models = trained if len(trained) > 1 else list(self.groups)
        return smallest_differences([self.effects], models, self.families, self.confidence)

    @cached_property
    def noise(self) -> NoiseChecks:
        """Checks of the intervals' assumptions."""
        return noise_checks(self.runs, self.fits, self.run_effects)

    @cached_property
    def models(self) -> list[str]:
        """The models that were requested or have results, sorted."""
        return sorted({str(name) for name in self.coverage["model"]})

    @cached_property
    def families(self) -> dict[str, str]:
        """The family of each task that was requested or has results; an empty string for a task without any result."""
        return {task: family for row in records(self.best) for task, family in [(row["task"], row["family"])]}

    @cached_property
    def model_of(self) -> dict[str, str]:
        """The model that each pretraining run belongs to, by the run's name."""
        return {run: model for model, runs in self.groups.items() for run in runs}

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
        ranges: the ranges of the tasks' main scores; intervals of means stay within them.
        chances: the chance levels of the tasks' main scores.
        constant: takes a cell's row of `results_table`, and returns whether the cell predicted the same for every test example.
            It is called for cells at chosen learning rates only.
        folds: takes the `results_table` rows of some cells of one (model, task), and returns their mean scores, each without one
            fold of the test examples (`effects.fold_scores`). It returns None if their predictions are not known; then no
            interval covers the noise of the test set.
        replicate_of: the model that a further pretraining run is a replicate of, by the run's name.
        confidence: the confidence level of all intervals, in (0, 1).

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
    observed = observed_grid(cells)
    requested = grid or observed
    models = sorted({*requested.models, *observed.models})
    if baseline is not None and baseline not in models:
        raise unknown("baseline model", baseline, models)
    by_pair = cells_by_pair(cells)
    coverage = coverage_table(by_pair, requested)
    # A setting is chosen together with its rate, so intervals cover the choice among all settings and rates.
    choices = with_settings(by_pair, requested)
    choice_runs, choice_fits = _fitted(choices, chances)
    # From here on only the best setting counts; `cells` itself stays complete for the results and coverage tables.
    masks = {pair: best_setting(model_runs, chosen_rule) for pair, model_runs in choice_runs.items()}
    pairs: Pairs = by_pair
    runs, fits = choice_runs, choice_fits
    if choices is not by_pair:
        rates = {pair: {*itertools.compress(choice_runs[pair].rates, mask)} for pair, mask in masks.items()}
        pairs = {
            pair: [cell for cell, row in zip(group, choices[pair], strict=True) if row["learning_rate"] in rates[pair]]
            for pair, group in by_pair.items()
        }
        runs, fits = _fitted(pairs, chances)
    picked = {pair: picked_cells(group, chosen_rule, runs[pair]) for pair, group in pairs.items()}
    correlations = seed_correlations(runs, tasks_by_training(results))
    run_effects = {}
    for pair, mask in masks.items():
        model, task = pair
        alike = {
            other_task: correlation * in_common(picked[pair], picked.get((model, other_task), []), fits[pair].shared)
            for other_task, correlation in correlations.get(task, {}).items()
        }
        run_effect = effect(choice_runs[pair], choice_fits[pair], chosen_rule, folds=folds(picked[pair]))
        chosen = run_effect.chosen[mask] if len(run_effect.chosen) else run_effect.chosen
        run_effects[pair] = replace(run_effect, chosen=chosen, alike=alike)
    best = best_table(
        pairs,
        runs,
        picked,
        requested,
        rule=chosen_rule,
        effects=run_effects,
        ranges=ranges,
        chances=chances,
        constant=constant,
        not_run={(row["model"], row["task"]): row["missing"] for row in records(coverage)},
        confidence=confidence,
    )
    # From here on, a model's score is over all of its replicates.
    groups = runs_by_model(models, replicate_of)
    effects = over_replicates(run_effects, groups)
    at_chance = {
        (replicate_of.get(row["model"], row["model"]), row["task"])
        for row in records(best)
        if row["above_chance"] == "no"
    }
    # A task without any result has no known family yet.
    families = dict.fromkeys(requested.tasks, "") | {task: group[0]["family"] for (_, task), group in by_pair.items()}
    return Analysis(
        cells=cells,
        coverage=coverage,
        chosen=chosen_table(picked),
        best=best,
        overall=overall_table(effects, list(groups), families, ranges=ranges, chances=chances, confidence=confidence),
        comparisons=comparison_table(effects, list(groups), families, at_chance=at_chance, confidence=confidence),
        pairs=pairs,
        runs=runs,
        fits=fits,
        effects=effects,
        run_effects=run_effects,
        groups=groups,
        chances=chances,
        ranges=ranges,
        grid=requested,
        baseline=baseline,
        rule=chosen_rule,
        confidence=confidence,
        setups=setup_differences({model: [cell for cell in results if cell["model"] == model] for model in models}),
    )


def _fitted(pairs: Pairs, chances: Chances) -> tuple[dict[tuple[str, str], Runs], dict[tuple[str, str], Fit]]:
    """Return the runs of every (model, task) that has any cell as arrays, and their fitted noise."""
    tasks = {
        task: with_failures(
            {model: runs_of(group) for (model, group_task), group in pairs.items() if group_task == task},
            chance_of(chances, [task]),
        )
        for task in sorted({task for _, task in pairs})
    }
    tasks = dict(zip(tasks, with_unseen(list(tasks.values())), strict=True))
    runs = {(model, task): tasks[task][model] for model, task in pairs}
    fits = zip(tasks, fit_tasks(list(tasks.values())), strict=True)
    return runs, {(model, task): fit for task, by_model in fits for model, fit in by_model.items()}
