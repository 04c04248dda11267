"""A study's certificate of calibration: what its intervals cover, how often it claims what is not there, and what it can find.

The study is repeated many times with its own fitted noise (`seed_noise`), its own choice of learning rates and its own
corrections, where the true scores are known: as fitted, or equal for all models. Standard errors vary between repetitions as
their degrees of freedom say. `benchmarks/calibration.py` measures the same on studies whose noise is not the fitted one.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from scipy import special, stats

from mlmclm.analysis.comparison import holm_level, scopes, tested_kinds
from mlmclm.analysis.contrasts import Effects, mean_difference
from mlmclm.analysis.effects import NO_EFFECT, Effect, Outcome, simulated
from mlmclm.analysis.power import POWER, smallest_shown
from mlmclm.analysis.repeated_runs import RepeatedRuns, repeat_runs
from mlmclm.analysis.run_noise import RunNoise
from mlmclm.analysis.seed_noise import Fit
from mlmclm.analysis.simulated_studies import fitted
from mlmclm.results.intervals import NAN, satterthwaite
from mlmclm.results.measures import Array
from mlmclm.results.metrics import Rule

REPETITIONS = 400
TOLERANCE = 0.02
"""By how much coverage may differ from what an interval is called before it is said beside it."""
CHANCE_OF_WARNING = 0.05
"""Largest probability with which a study that makes no more false claims than it may is said to make too many."""


@dataclass(frozen=True)
class Certificate:
    """Behaviour of the study's statistics on repetitions of the study.

    Attributes:
        repetitions: the number of repetitions.
        confidence: what the intervals are to cover.
        covered: the share of the intervals of scores that cover the true score of the procedure (`effects`).
        covered_by_score: the same of each score, by (model, task).
        covered_differences: the share of the intervals of differences on single tasks that cover the true difference; NaN without any.
        covered_plain: the share of Student's intervals of the mean over seeds that cover the true score at the chosen learning
            rates; they know nothing of the choice.
        false_claims: the share of studies of equal models that tell any two apart, on a task, a family or the mean over tasks.
        smallest: the smallest true difference between two models that is found with 80 % power (`POWER`), by task and for the mean over tasks
            (`comparison.ALL_TASKS`); NaN where the noise is not known.
    """

    repetitions: int
    confidence: float
    covered: float
    covered_by_score: Mapping[tuple[str, str], float]
    covered_differences: float
    covered_plain: float
    false_claims: float
    smallest: Mapping[str, float]

    def off(self) -> bool:
        """Return whether intervals cover more or less than they are called by more than `TOLERANCE`."""
        return any(abs(share - self.confidence) > TOLERANCE for share in (self.covered, self.covered_differences))

    def claims_too_much(self) -> bool:
        """Return whether equal models are told apart in more studies than may be (1 - `confidence`); False if it is not known.

        The repetitions are a sample: of 400, a study that makes false claims in exactly 5 % has 5 % with a standard error of 1.1
        points. So a one-sided binomial test decides, at a level of `CHANCE_OF_WARNING`: 28 of 400 (7.0 %) are too many, and
        what lies between 5 % and that is not told from 5 %.
        """
        if math.isnan(self.false_claims):
            return False
        claims = round(self.false_claims * self.repetitions)
        return bool(stats.binom.sf(claims - 1, self.repetitions, 1 - self.confidence) <= CHANCE_OF_WARNING)


def certify(
    fits: Mapping[tuple[str, str], Fit],
    run_effects: Effects,
    effects: Effects,
    groups: Mapping[str, Sequence[str]],
    families: dict[str, str],
    rule: Rule,
    *,
    confidence: float = 0.95,
    power: float = POWER,
    repetitions: int = REPETITIONS,
) -> Certificate:
    """Repeat a study with its fitted noise; the same study always gives the same numbers.

    Args:
        fits, run_effects: the noise and the scores of single pretraining runs.
        effects: the scores of the models, over their runs.
        groups: the runs of each model that is compared (`replicates.groups_of`).
        families: the family of each task, by task name.
        power: that of `Certificate.smallest`.
    """
    models, tasks = list(groups), sorted(families)
    generator = np.random.default_rng(0)
    known = {pair: own for pair, own in effects.items() if not math.isnan(own.seeds.error)}
    shape = (repetitions, len(models), len(tasks))
    errors, variances, freedom = np.zeros(shape), np.full(shape, NAN), np.full(shape[1:], NAN)
    covered: dict[tuple[str, str], float] = {}
    plain = []
    runs = {model: _runs(known, model, tasks) for model in models}
    every = {column: each for own in runs.values() for column, each in own.items()}
    pretraining = repeat_runs(every, len(tasks), repetitions, generator)
    for row, model in enumerate(models):
        errors[:, row] = pretraining.errors(runs[model], generator)
        for column, task in enumerate(tasks):
            if (model, task) not in known:
                continue
            singles = {run: run_effects.get((run, task), NO_EFFECT) for run in groups[model]}
            singles = {run: single for run, single in singles.items() if math.isfinite(single.seeds.value)}
            # Where the noise of a run's seeds is not known, all of it is in that between pretraining runs.
            scored = {} if any(math.isnan(each.seeds.error) for each in singles.values()) else singles
            if scored:
                variances[:, row, column] = 0.0
                freedom[row, column] = min(each.seeds.freedom for each in scored.values())
            for run, single in scored.items():
                fit = fits[run, task].likely()
                drawn = simulated(fit, rule, fitted(fit), repetitions, generator)
                variances[:, row, column] += _variances(single, fit, drawn, rule, generator) / len(scored) ** 2
                own_errors = drawn.scores[0] - drawn.targets.mean() - single.bias
                errors[:, row, column] += own_errors / len(scored)
                if drawn.seeds > 1:
                    reach = special.stdtrit(drawn.seeds - 1, 0.5 + confidence / 2)
                    plain.append(np.mean(abs(drawn.plain - drawn.targets) <= reach * drawn.plain_error))
            noise = _noise_of_sum([column], variances[:, row], freedom[row], runs[model], pretraining)
            reach = special.stdtrit(noise.degrees(), 0.5 + confidence / 2)
            inside = abs(errors[:, row, column]) <= reach * np.sqrt(noise.own + noise.pooled)
            covered[model, task] = float(np.mean(inside))
    false_claims, within = _claims(
        errors, variances, freedom, runs, pretraining, known, families, confidence, generator
    )
    return Certificate(
        repetitions=repetitions,
        confidence=confidence,
        covered=float(np.mean(list(covered.values()))) if covered else NAN,
        covered_by_score=covered,
        covered_differences=within,
        covered_plain=float(np.mean(plain)) if plain else NAN,
        false_claims=false_claims,
        smallest=smallest_differences(known, models, families, confidence, power),
    )


def _claims(
    errors: Array,
    variances: Array,
    freedom: Array,
    runs: Mapping[str, Mapping[int, RunNoise]],
    pretraining: RepeatedRuns,
    known: Effects,
    families: dict[str, str],
    confidence: float,
    generator: np.random.Generator,
) -> tuple[float, float]:
    """Return the share of repetitions in which equal models are told apart, and of intervals on single tasks that cover 0.

    Args:
        errors: of the scores, [repetitions, models, tasks]; tasks are sorted.
        variances: what fine-tuning seeds are known to add to them, the same; NaN where it is not known.
        freedom: degrees of freedom, [models, tasks].
        runs: the pretraining runs of each model, by the number of the task.
    """
    models, tasks = list(runs), sorted(families)
    kinds = [scope for scope in scopes(families) if scope[0] in tested_kinds(families)]
    places = [[tasks.index(task) for task in members] for _, _, members in kinds]
    noises = [
        [_noise_of_sum(columns, variances[:, row], freedom[row], own, pretraining) for columns in places]
        for row, own in enumerate(runs.values())
    ]
    pairs = list(itertools.combinations(range(len(models)), 2))
    smallest: dict[str, Array] = {}
    counts: Counter[str] = Counter()
    within: list[float] = []
    for first, second in pairs:
        test_sets = [_test_noise(known, (models[first], models[second]), task) for task in tasks]
        moved, degrees = np.asarray(test_sets).T
        leads = (
            errors[:, first] - errors[:, second] + np.sqrt(moved) * generator.standard_normal(errors[:, first].shape)
        )
        for (kind, _, _), columns, one, two in zip(kinds, places, noises[first], noises[second], strict=True):
            pooled = one.pooled + two.pooled  # one estimate
            variance = one.own + two.own + pooled + moved[columns].sum()
            if np.isnan(variance).any():
                continue
            inverse = one.inverse + two.inverse + (moved[columns] ** 2 / degrees[columns]).sum()
            inverse = inverse + pooled**2 / np.minimum(one.freedom, two.freedom)
            p = 2 * special.stdtr(variance**2 / inverse, -abs(leads[:, columns].sum(axis=1)) / np.sqrt(variance))
            smallest[kind] = np.minimum(smallest.get(kind, np.ones(len(p))), p)
            counts[kind] += 1
            within += [float(np.mean(p >= 1 - confidence))] if kind == "task" else []
    # Holm's method claims something if and only if its first step does.
    claims = [least * counts[kind] * len(counts) <= 1 - confidence for kind, least in smallest.items()]
    told = float(np.any(claims, axis=0).mean()) if claims else NAN
    return told, float(np.mean(within)) if within else NAN


class _Noise(NamedTuple):
    """Noise of the sum of a model's scores over tasks, as each repetition estimates it, [repetitions] each.

    Attributes:
        own: the variance that rests on its own runs, and `inverse`, the squares of its parts divided by their degrees of freedom.
        pooled: the variance that rests on the pretraining runs of all models, and its degrees of freedom.
    """

    own: Array
    inverse: Array
    pooled: Array
    freedom: Array

    def degrees(self) -> Array:
        """Return the degrees of freedom of the whole."""
        return (self.own + self.pooled) ** 2 / (self.inverse + self.pooled**2 / self.freedom)


def _variances(effect: Effect, fit: Fit, drawn: Outcome, rule: Rule, generator: np.random.Generator) -> Array:
    """Return what each repetition takes for the variance of a run's score, [repetitions].

    Where runs fail or diverge, the variance that this adds follows the number of runs that did in the repetition: a study in which
    few happen to fail takes its scores for more precise than they are.
    """
    size, degrees = effect.seeds.error**2, effect.seeds.freedom
    causes = (
        (drawn.failures, fit.failing, replace(fit, failing=None)),
        (drawn.diverged, fit.diverging, replace(fit, diverging=None)),
    )
    rest, added = 1.0, np.zeros(len(drawn.scores[0]))
    for numbers, shares, without in causes:
        if numbers is None or shares is None or not (seen := shares.spread(shares.lost, drawn.chosen)):
            continue
        variance = simulated(without, rule, fitted(without), len(added), generator).variance
        share = min(rest, max(0.0, 1 - variance / size))
        rest -= share
        added += share * shares.spread(numbers[0], drawn.chosen) / seen
    return size * (rest * generator.chisquare(degrees, len(added)) / degrees + added)


def _noise_of_sum(
    columns: Sequence[int], variances: Array, freedom: Array, runs: Mapping[int, RunNoise], pretraining: RepeatedRuns
) -> _Noise:
    """Return what repetitions take for the noise of the sum of a model's scores over some tasks.

    Args:
        columns: the numbers of the tasks.
        variances: what fine-tuning seeds are known to add to the scores, [repetitions, T], and `freedom`, [T].
        runs: its pretraining runs, by the number of the task.
    """
    single = [column for column in columns if column not in runs]
    own, inverse = variances[:, single].sum(axis=1), (variances[:, single] ** 2 / freedom[single]).sum(axis=1)
    several = {column: runs[column] for column in columns if column in runs}
    if not several:
        return _Noise(own, inverse, np.zeros(len(own)), np.full(len(own), math.inf))
    noise = pretraining.noise(several, variances, freedom)
    apart = np.where(noise.pooled, 0.0, noise.variance)
    return _Noise(
        own + apart,
        inverse + apart**2 / noise.freedom,
        noise.variance - apart,
        np.where(noise.pooled, noise.freedom, math.inf),
    )


def _runs(known: Effects, model: str, tasks: Sequence[str]) -> dict[int, RunNoise]:
    """Return the pretraining runs behind a model's scores, by the number of the task."""
    found = ((column, known.get((model, task), NO_EFFECT).runs) for column, task in enumerate(tasks))
    return {column: runs for column, runs in found if runs is not None}


def _test_noise(known: Effects, pair: tuple[str, str], task: str) -> tuple[float, float]:
    """Return the variance that the finite test set adds to a difference, and its degrees of freedom; 0 if it is not known."""
    first, second = (known.get((model, task), NO_EFFECT) for model in pair)
    parts = first.test_set_minus(second)
    if not any(variance for variance, _ in parts):
        return 0.0, 1.0
    whole = satterthwaite(0.0, parts)
    return whole.error**2, whole.freedom


def smallest_differences(
    effects: Effects, models: Sequence[str], families: dict[str, str], confidence: float = 0.95, power: float = POWER
) -> dict[str, float]:
    """Return the smallest difference found with this power by task, and for the mean over tasks, for a typical pair of models."""
    kinds = [scope for scope in scopes(families) if scope[0] != "family"]
    found = {}
    pairs = list(itertools.combinations(models, 2))
    for kind, scope, tasks in kinds:
        differences = []
        for a, b in pairs:
            if all((model, task) in effects for model in (a, b) for task in tasks):
                level = holm_level(kind, families, len(models), confidence)
                differences.append(smallest_shown(mean_difference(effects, (a, b), tasks), level, power))
        found[scope] = float(np.median(differences)) if differences else NAN
    return found
