"""Coverage of intervals, false claims and power on simulated studies:  python -m benchmarks.calibration [--studies N] [--only TEXT]

Every study goes through `mlmclm.analysis.analyse`, as a user's does. Its truth is known: it is the mean over many studies of what the
rule picks in each. Beside the analysis stand Welch's test and a mixed model (statsmodels), each with the mean over tasks and the single tasks
corrected for their own tests at 5 %, by the first step of Holm's method. The smallest difference found is the lead of a model at which
80 % of comparisons claim it: a lead moves scores and nothing else, so it follows from each study of equal models. The table is a section of
RESULTS.md.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from functools import cache, partial
from typing import Annotated, NamedTuple, TypeVar

import numpy as np
import typer
from scipy import special
from statsmodels.regression.mixed_linear_model import MixedLM

from benchmarks.results import machine, write_section
from mlmclm.analysis.analyse import Analysis, analyse
from mlmclm.analysis.comparison import ALL_TASKS, holm_level
from mlmclm.analysis.effects import fold_scores
from mlmclm.analysis.failed_runs import LEAST_GAP
from mlmclm.analysis.looks import Look, bounds
from mlmclm.analysis.planned_power import noise_of, planned_effects
from mlmclm.analysis.power import smallest_differences
from mlmclm.analysis.results import Record, records
from mlmclm.analysis.simulated_choices import choose, competes
from mlmclm.results.chance import Chance
from mlmclm.results.intervals import Estimate, estimate, satterthwaite, unknown
from mlmclm.results.measures import Array, WeightedMean
from mlmclm.results.metrics import Rule
from mlmclm.seeds import Seed
from mlmclm.system import usable_cpus

K = TypeVar("K")
C = TypeVar("C")
MODELS, TASKS = (tuple(f"{kind}-{number:02}" for number in range(most)) for kind, most in (("model", 42), ("task", 12)))
RATES = tuple(1e-5 * 2**step for step in range(6))
NOISE = 0.01
"""Standard deviation of a run: one point."""
OF_ONE_TRAINING = 3
"""The number of tasks that share their trainings where a scenario says so."""
FLOOR = 0.3
"""Score at a rate at which nothing is learned; the best rate's mean is 0.7."""
TRUTHS = range(10_000, 10_200)
"""The numbers of the studies from which the truth is known."""


class Scenario(NamedTuple):
    """How studies are made.

    Attributes:
        curve: "flat", "peak": one best rate, and each step away from it costs one standard deviation, "end": the same, with the
            highest rate as the best, or "unlike": flat for half of the models, and a peak of three deviations a step for the others.
        noise: "normal", "t" (4 degrees of freedom), "skew" (reversed lognormal), "rates" (growing from 0.3 to 2 times
            with the rate), or "models" (the same, and twice as noisy for every other model); each has standard deviation 1 on average.
        correlation: of a run's validation and test noise.
        failing: the probability that a run fails.
        drop: by how much a failed run scores below the others, in points.
        rising: whether runs fail the more often the higher the rate is, from 0 to twice `failing`.
        one: whether runs of the first model only fail.
        shared: share of the variance that a seed's runs at all rates have in common.
        lead: by how much the first model is better on all tasks, in points.
        lost: share of the cells that have no result.
        diverging: share of the runs at the two highest rates that diverge.
        too_high: whether no run learns anything at the highest rate.
        training: share of the noise that the runs on the first three tasks have in common, which are then of the same trainings.
        ceiling: whether the best rate's scores are near 1, which none exceeds.
        examples: how many test examples there are, which models get right or wrong; with 0, test sets have no noise of their own.
        graded: whether the examples are queries with scores from 0 to 1, most near the ends.
        group: how many examples belong together; they then have three tenths of their difficulty in common.
        models, tasks, rates: how many there are.
    """

    rule: Rule
    seeds: int
    curve: str
    noise: str
    correlation: float
    failing: float = 0.0
    drop: float = 40.0
    rising: bool = False
    one: bool = False
    shared: float = 0.0
    lead: float = 0.0
    lost: float = 0.0
    diverging: float = 0.0
    too_high: bool = False
    training: float = 0.0
    ceiling: bool = False
    examples: int = 0
    graded: bool = False
    group: int = 1
    models: int = 4
    tasks: int = 4
    rates: int = 5

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The numbers of models, tasks, rates and seeds."""
        return self.models, self.tasks, self.rates, self.seeds


class Drawn(NamedTuple):
    """The runs of a study, [models, tasks, rates, seeds]: scores, and which failed (`failed_runs`); those that score some points less have not."""

    validation: Array
    test: Array
    failed: Array


def drawn(scenario: Scenario, number: int) -> Drawn:
    """Draw the runs of a study, whose models are equal before their truths are made equal (`offsets`)."""
    draws, shape = np.random.default_rng([number, scenario.seeds]), scenario.shape

    def noise() -> Array:
        together = np.sqrt(scenario.shared) * draws.standard_normal((*shape[:-2], 1, shape[-1]))
        return np.asarray(together + np.sqrt(1 - scenario.shared) * draws.standard_normal(shape))

    common, *own = (noise() for _ in range(3))
    both = [np.sqrt(scenario.correlation) * common + np.sqrt(1 - scenario.correlation) * each for each in own]
    if scenario.training:
        apart, together = np.sqrt(1 - scenario.training), np.sqrt(scenario.training) * np.asarray(both)[:, :, :1]
        for each, common in zip(both, together, strict=True):
            each[:, :OF_ONE_TRAINING] = common + apart * draws.standard_normal((len(each), OF_ONE_TRAINING, *shape[2:]))
    if scenario.noise == "skew":
        both = [-(np.exp(0.8 * each) - np.exp(0.32)) / np.sqrt((np.exp(0.64) - 1) * np.exp(0.64)) for each in both]
    if scenario.noise == "t":
        both = [each * np.sqrt(2 / draws.chisquare(4, shape)) for each in both]
    if scenario.noise in ("rates", "models"):
        both = [each * np.linspace(0.3, 2, scenario.rates)[:, None] for each in both]
    if scenario.noise == "models":
        both = [each * np.where(np.arange(len(each)) % 2, 2.0, 1.0)[:, None, None, None] for each in both]
    steps = {"peak": 2.0, "end": 4.0, "unlike": 2.0}.get(scenario.curve)
    curve = np.zeros(scenario.rates) if steps is None else -abs(np.arange(scenario.rates) - steps)
    means = np.broadcast_to((0.99 if scenario.ceiling else 0.7) + NOISE * curve, shape[:3]).copy()
    if scenario.curve == "unlike":
        means = 0.7 + 3 * (means - 0.7) * (np.arange(scenario.models) % 2)[:, None, None]
    failing = scenario.failing * (np.linspace(0, 2, scenario.rates) if scenario.rising else np.ones(scenario.rates))
    failed = draws.random(shape) < failing[:, None]
    if scenario.one:
        failed[1:] = False
    if scenario.too_high:
        failed[:, :, -1] = True
    low = np.full(shape[:3], FLOOR) if scenario.too_high else means - scenario.drop / 100
    scores = [np.minimum(np.where(failed, low[..., None], means[..., None]) + NOISE * each, 1.0) for each in both]
    return Drawn(scores[0], scores[1], failed & (scenario.drop >= 100 * LEAST_GAP))


def answered(scenario: Scenario, number: int, test: Array) -> Array:
    """Draw what runs with these expected test scores, [models, tasks, rates, seeds], score on each test example, [..., examples].

    Of how hard an example is, half is so for all models, and three tenths for all runs of a model.
    """
    draws, size = np.random.default_rng([number, scenario.seeds, 2]), scenario.examples
    groups = np.arange(size) // scenario.group
    hard = np.zeros((*test.shape, size))
    for part, shape in ((0.5, (1, scenario.tasks, 1, 1)), (0.3, (*test.shape[:2], 1, 1)), (0.2, test.shape)):
        together = 0.3 if scenario.group > 1 else 0.0
        own, common = (draws.standard_normal((*shape, size)) for _ in range(2))
        hard += np.sqrt(part) * (np.sqrt(1 - together) * own + np.sqrt(together) * common[..., groups])
    luck, expected = special.ndtr(hard), np.clip(test, 1e-3, 1 - 1e-3)[..., None]
    if scenario.graded:
        return np.asarray(special.betaincinv(0.5 * expected, 0.5 * (1 - expected), 1 - luck))
    return np.asarray(luck < expected, dtype=np.float64)


def without_score(scenario: Scenario, number: int) -> tuple[Array, Array]:
    """Return which cells of a study have no result, and which have diverged, [models, tasks, rates, seeds] each."""
    draws, shape = np.random.default_rng([number, scenario.seeds, 1]), scenario.shape
    lost, diverged = draws.random(shape) < scenario.lost, draws.random(shape) < scenario.diverging
    diverged[:, :, :-2] = False
    return lost, diverged


@cache
def _truths(scenario: Scenario) -> tuple[Drawn, Array]:
    """Return many studies as one, [models, studies, rates, seeds], and which of their runs diverged."""
    studies = [(*drawn(scenario, number), without_score(scenario, number)[1]) for number in TRUTHS]
    *own, diverged = (np.concatenate(each, axis=1) for each in zip(*studies, strict=True))
    return Drawn(*own), diverged


class Truth(NamedTuple):
    """The average delivery of a model's rule: the score of the runs that it picks among those that learn, and that of fresh runs there."""

    delivered: float
    fresh: float


@cache
def _truth(scenario: Scenario, model: int, gaps: bytes) -> Truth:
    runs, diverged = _truths(scenario)
    validation, test, failed = (each[model] for each in runs)
    lost = np.frombuffer(gaps, dtype=bool).reshape(validation.shape[1:])
    gone = diverged[model]
    learned = ~(lost | gone | failed)
    learned &= competes(learned.sum(axis=-1), (~lost).sum(axis=-1))[..., None]
    picked, counts = choose(validation, test, learned, scenario.rule)
    some = counts.any(axis=-1)
    means = np.where(failed, 0.0, test).sum(axis=(0, 2)) / np.maximum((~failed).sum(axis=(0, 2)), 1)
    at = np.take_along_axis(test, picked[:, None], axis=1)[:, 0], means[picked]
    return Truth(*(float(((each * counts).sum(axis=-1)[some] / counts.sum(axis=-1)[some]).mean()) for each in at))


def truth(scenario: Scenario, model: int, gaps: Array | None = None) -> Truth:
    """Return the truth about a model of a scenario before `offsets`; with the cells that lack a result, [rates, seeds]."""
    none = np.zeros(scenario.shape[2:], bool)
    return _truth(scenario, model, (none if gaps is None else gaps).tobytes())


def offsets(scenario: Scenario) -> Array:
    """Return what makes the models equal in what their rules deliver, [models]: unlike curves and noises deliver unlike luck."""
    return truth(scenario, 0).delivered - np.asarray([truth(scenario, own).delivered for own in range(scenario.models)])


def study(scenario: Scenario, number: int) -> list[Record]:
    """Return the results of a study; those on single examples, [examples], are under "answered"."""
    added = offsets(scenario) + np.where(np.arange(scenario.models), 0.0, scenario.lead / 100)
    validation, test = (each + added[:, None, None, None] for each in drawn(scenario, number)[:2])
    lost, diverged = without_score(scenario, number)
    examples = answered(scenario, number, test) if scenario.examples else None
    test = test if examples is None else examples.mean(axis=-1)
    results = [
        result(
            MODELS[place[0]],
            TASKS[place[1]],
            RATES[place[2]],
            place[3],
            None if diverged[place] else (validation[place], test[place]),
        )
        | ({} if examples is None else {"answered": examples[place]})
        for place in itertools.product(*map(range, test.shape))
        if not lost[place]
    ]
    if scenario.training:
        for each in results:
            if each["task"] in TASKS[:OF_ONE_TRAINING]:
                each["curve"] = [[1, f"{each['model']}/{each['learning_rate']}/{each['seed']}"]]
    return results


def result(model: str, task: str, rate: float, seed: Seed, scores: tuple[float, float] | None) -> Record:
    """Return the result of a cell, given its validation and test score; None if it diverged."""
    found: Record = {"status": "diverged", "scores": None, "diverged_step": 1}
    if scores is not None:
        named = {split: {"accuracy": score} for split, score in zip(("validation", "test"), scores, strict=True)}
        found = {"status": "ok", "scores": named, "diverged_step": None}
    return {
        "key": f"{model}/{task}/{rate}/{seed}",
        "model": model,
        "task": task,
        "family": "sequence-classification",
        "metric": "accuracy",
        "learning_rate": rate,
        "seed": seed,
        **found,
    }


class Pair(NamedTuple):
    """The comparison of two equal models, or of two with a true difference.

    Attributes:
        covered: whether the interval covers the true difference.
        false: whether a difference is claimed that is not there.
        needs: the lead of the one and of the other that is claimed at the first step of the correction, in points.
    """

    covered: bool
    false: bool
    needs: tuple[float, float]


class Counts(NamedTuple):
    """Statements about one study: of scores, and of pairs by scope, by the analysis, by Welch's test and by a mixed model."""

    scores: tuple[int, int]
    fresh: tuple[int, int]
    tasks: tuple[Pair, ...]
    mean: tuple[Pair, ...]
    welch_tasks: tuple[Pair, ...]
    welch_mean: tuple[Pair, ...]
    mixed_tasks: tuple[Pair, ...]
    mixed_mean: tuple[Pair, ...]
    planned: tuple[float, float]
    """The differences, in points, that a plan of the same study says to be found in 80 %, by this study's noise: on a task, and the mean."""


def counted(scenario: Scenario, number: int) -> Counts:
    """Analyse one study, and count what is true of its statements."""
    chances = dict.fromkeys(TASKS, Chance(FLOOR, "as made")) if scenario.too_high else {}
    results = study(scenario, number)
    answers = {each["key"]: each["answered"] for each in results if scenario.examples}

    def folds(rows: Sequence[Record]) -> Array | None:
        if not answers:
            return None
        own = np.mean([answers[row["key"]] for row in rows], axis=0)
        return fold_scores(WeightedMean(own), len(own), np.arange(len(own)) // scenario.group)

    ranges = dict.fromkeys(TASKS, (-9.0, 9.0))
    found = analyse(results, rule=scenario.rule, ranges=ranges, chances=chances, folds=folds)
    gaps, added = without_score(scenario, number)[0], offsets(scenario)
    true = {
        (MODELS[model], TASKS[task]): own + added[model]
        for model, task in np.ndindex(scenario.shape[:2])
        for own in [np.asarray(truth(scenario, model, gaps[model, task] if scenario.lost else None))]
    }
    tasks = TASKS[: scenario.tasks]
    true |= {(MODELS[0], task): true[MODELS[0], task] + scenario.lead / 100 for task in tasks}
    best = records(found.best)
    inside = [row["score_low"] <= true[row["model"], row["task"]][0] <= row["score_high"] for row in best]
    again = [
        row.get("fresh_low", math.nan) <= true[row["model"], row["task"]][1] <= row.get("fresh_high", math.nan)
        for row in best
    ]

    def pair(row: Record, low: float, high: float, p: float, claimed: float, value: float) -> Pair:
        scope = tasks if row["scope"] == ALL_TASKS else [row["scope"]]
        actual = float(np.mean([true[row["model_a"], task][0] - true[row["model_b"], task][0] for task in scope]))
        actual = 0.0 if not scenario.lead and not scenario.lost else actual
        wrong = p < 0.05 and (low + high) * actual <= 0
        return Pair(low <= actual <= high, wrong, (100 * (claimed - value), 100 * (claimed + value)))

    ours: dict[str, list[Pair]] = {"task": [], "all": []}
    for row in records(found.comparisons):
        if row["kind"] in ours and not math.isnan(row["low"]):
            level = holm_level(row["kind"], found.families, scenario.models, 0.95)
            claimed = row["error"] * float(special.stdtrit(row["freedom"], 1 - level / 2))
            ours[row["kind"]].append(pair(row, row["low"], row["high"], row["p_holm"], claimed, row["difference"]))
    pairs = [tuple(ours["task"]), tuple(ours["all"])]
    scores: dict[tuple[str, str], dict[int, float]] = {}
    for cell in records(found.chosen):
        scores.setdefault((cell["model"], cell["task"]), {})[int(cell["seed"])] = cell["test"]
    for peer in (partial(_welch, scores, scenario), _mixed(scores, scenario)):
        theirs: dict[str, list[Pair]] = {"task": [], "all": []}
        for row in (row for row in records(found.comparisons) if row["kind"] in theirs):
            scope = tasks if row["scope"] == ALL_TASKS else (row["scope"],)
            own = peer((row["model_a"], row["model_b"]), scope)
            if not math.isnan(own.low):
                tests = math.comb(scenario.models, 2) * (1 if row["kind"] == "all" else len(tasks))
                claimed = own.error * float(special.stdtrit(own.freedom, 1 - 0.025 / tests))
                p = min(1.0, own.p * tests)
                theirs[row["kind"]].append(pair(row, own.low, own.high, p, claimed, own.value))
        pairs += [tuple(theirs["task"]), tuple(theirs["all"])]
    covered = [(sum(each), len(each)) for each in (inside, again)]
    tasks_and_means = dict(zip(Counts._fields[2:-1], pairs, strict=False))
    return Counts(scores=covered[0], fresh=covered[1], planned=_planned(found, scenario), **tasks_and_means)


def _planned(found: Analysis, scenario: Scenario) -> tuple[float, float]:
    """Return what a plan of the same study says, as a dry run does after a first study."""
    noise, models = noise_of(found), list(found.groups)
    if noise.keys() != set(found.families):
        return math.nan, math.nan
    effects = planned_effects(noise, scenario.seeds, scenario.rates, models)
    smallest = smallest_differences(effects, models, found.families)
    return 100 * float(np.median([smallest[task] for task in noise])), 100 * smallest[ALL_TASKS]


def looked(scenario: Scenario, number: int) -> tuple[bool, ...]:
    """Return whether looks as seeds are added decide for one of the first two models, by the bounds and by plain tests, and one look at the end."""
    looks, results = [], study(scenario, number)
    for seeds in LOOKS:
        found = analyse([each for each in results if each["seed"] < seeds], rule=scenario.rule)
        row = next(row for row in records(found.comparisons) if row["kind"] == "all")
        looks.append(Look(seeds, row["difference"], row["p"]))
    limits = bounds(tuple(LOOKS), LOOKS[-1])
    return (
        any(look.p < limit for look, limit in zip(looks, limits, strict=True)),
        any(look.p < 0.05 for look in looks),
        looks[-1].p < 0.05,
    )


Chosen = Mapping[tuple[str, str], Mapping[int, float]]
"""The chosen runs' test scores, by model and task and by seed."""


def _shared(scenario: Scenario) -> tuple[str, ...]:
    """Return the tasks that share a training."""
    return TASKS[:OF_ONE_TRAINING] if scenario.training else ()


def _welch(scores: Chosen, scenario: Scenario, models: tuple[str, str], tasks: Sequence[str]) -> Estimate:
    """Compare two models' means over tasks by Welch's test, of tasks that share a training by their means over seeds."""
    groups, weights = [], []
    for model, sign in zip(models, (1.0, -1.0), strict=True):
        if shared := [task for task in tasks if task in _shared(scenario) and len(tasks) > 1]:
            seeds = set.intersection(*(set(scores[model, task]) for task in shared))
            groups.append([float(np.mean([scores[model, task][seed] for task in shared])) for seed in seeds])
            weights.append(sign * len(shared) / len(tasks))
        for task in (task for task in tasks if task not in shared):
            groups.append(list(scores.get((model, task), {}).values()))
            weights.append(sign / len(tasks))
    return _weighted(groups, weights)


MOST_ROWS = 500
"""Scores to which a mixed model is fitted; with those of the paper's size it takes minutes."""


def _mixed(scores: Chosen, scenario: Scenario) -> Callable[[tuple[str, str], Sequence[str]], Estimate]:
    """Fit a mixed model by REML, and return the comparison of two models' means over tasks by it.

    Each model has a mean on each task, and each training a random effect: that of a model with a seed, on the tasks that share it if some do,
    otherwise on all of them. Its degrees of freedom are those between trainings.
    """
    cells, shared = list(scores), _shared(scenario)
    rows = [(cell, seed, value) for cell, own in scores.items() for seed, value in own.items()]
    sides = [(model, bool(shared) and task not in shared) for (model, task), _, _ in rows]
    trainings = [repr((*side, seed)) for side, (_, seed, _) in zip(sides, rows, strict=True)]
    freedom = len(set(trainings)) - len(set(sides))
    if len(rows) > MOST_ROWS or not freedom:
        return lambda models, tasks: unknown(math.nan)
    design = np.eye(len(cells))[[cells.index(cell) for cell, _, _ in rows]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns where the variance of trainings is 0
        fit = MixedLM([100 * value for _, _, value in rows], design, trainings).fit(reml=True)
    # statsmodels' own covariance is not always one where the variance of trainings is 0.
    same = np.asarray(trainings)[:, None] == np.asarray(trainings)
    precision = np.linalg.inv(fit.scale * np.eye(len(rows)) + float(fit.cov_re[0, 0]) * same)
    covariance = np.linalg.inv(design.T @ precision @ design)

    def compare(models: tuple[str, str], tasks: Sequence[str]) -> Estimate:
        if not all((model, task) in scores for model in models for task in tasks):
            return unknown(math.nan)
        weights = np.zeros(len(cells))
        for model, sign in zip(models, (1.0, -1.0), strict=True):
            weights[[cells.index((model, task)) for task in tasks]] = sign / len(tasks)
        error = math.sqrt(weights @ covariance @ weights) / 100
        return estimate(float(weights @ fit.fe_params) / 100, error, freedom)

    return compare


def _weighted(groups: Sequence[Sequence[float]], weights: Sequence[float]) -> Estimate:
    """Return a weighted sum of groups' means with Welch's interval; without one where a group has fewer than two scores."""
    if min(map(len, groups)) < 2:
        return unknown(math.nan)
    value = math.fsum(weight * float(np.mean(own)) for weight, own in zip(weights, groups, strict=True))
    parts = [
        (weight**2 * float(np.var(own, ddof=1)) / len(own), len(own) - 1)
        for weight, own in zip(weights, groups, strict=True)
    ]
    return satterthwaite(value, parts)


def counts_of(kinds: Iterable[K], counted: Callable[[K, int], C], studies: int) -> Iterator[tuple[K, list[C]]]:
    """Yield each kind of studies with the counts of several, each made and analysed from its number by `counted`."""
    with ProcessPoolExecutor(usable_cpus()) as pool:
        for kind in kinds:
            yield kind, list(pool.map(partial(counted, kind), range(studies), chunksize=4))


def covering_zero(rows: Sequence[Record], kind: str) -> tuple[int, int]:
    """Return how many intervals of differences cover 0, and how many there are, on single tasks ("task") or on their mean ("all")."""
    covering = [row["low"] <= 0 <= row["high"] for row in rows if row["kind"] == kind]
    return sum(covering), len(covering)


def share(parts: Sequence[tuple[int, int]]) -> str:
    """Return a share of all statements."""
    whole = sum(number for _, number in parts)
    return f"{sum(part for part, _ in parts) / whole:.3f}" if whole else ""


def described(scenario: Scenario) -> str:
    """Name what a scenario has beside the first one."""
    usual = Scenario(scenario.rule, scenario.seeds, "peak", "normal", 0.5)
    parts = zip(Scenario._fields, scenario, usual, strict=True)
    return ", ".join(f"{name} {value}" for name, value, other in parts if value != other) or "base"


def row_of(scenario: Scenario, counts: Sequence[Counts]) -> list[str]:
    """Return a row of the table."""
    row = [scenario.rule, str(scenario.seeds), described(scenario), str(len(counts))]
    row.append(f"{share([count.scores for count in counts])} / {share([count.fresh for count in counts])}")
    for peer in ("", "welch_", "mixed_"):
        names = f"{peer}tasks", f"{peer}mean"
        pairs: list[list[Pair]] = [[own for count in counts for own in getattr(count, name)] for name in names]
        row.append(" / ".join(share([(own.covered, 1) for own in each]) for each in pairs))
        wrong = [[any(own.false for own in getattr(count, name)) for name in names] for count in counts]
        found = np.mean(wrong, axis=0) if peer else [np.any(wrong, axis=1).mean()]
        row.append(" / ".join(f"{each:.3f}" for each in found) if any(pairs) else "")
        row.append(" / ".join(f"{np.quantile(leads, 0.8):.2f}" for each in pairs if (leads := _leads(each))))
    planned = np.nanmedian([count.planned for count in counts], axis=0)
    found_at = [[lead for count in counts for lead in _leads(getattr(count, name))] for name in ("tasks", "mean")]
    row.append(" / ".join(f"{each:.2f}" for each in planned))
    row.append(
        " / ".join(f"{np.mean(np.asarray(own) <= each):.2f}" for own, each in zip(found_at, planned, strict=True))
    )
    return row


def _leads(pairs: Sequence[Pair]) -> list[float]:
    """Return the leads that the comparisons would claim, in points."""
    return [lead for own in pairs for lead in own.needs]


BASE = Scenario("mean", 3, "peak", "normal", 0.5)
SCENARIOS = [
    *(Scenario(rule, seeds, "peak", "normal", 0.5) for rule in ("mean", "per_seed") for seeds in (2, 3, 5, 10)),
    *(Scenario(rule, seeds, curve, "normal", correlation) for rule in ("mean", "per_seed") for seeds in (3, 5)
      for curve, correlation in (("flat", 0.0), ("flat", 0.9), ("unlike", 0.5), ("unlike", 0.9))),
    *(Scenario(rule, seeds, "peak", noise, 0.5) for rule in ("mean", "per_seed") for seeds in (3, 5)
      for noise in ("t", "skew", "rates", "models")),
    *(BASE._replace(seeds=seeds, failing=0.1, drop=drop, rising=True, one=one) for seeds in (3, 5)
      for drop in (4.0, 15.0) for one in (False, True)),
    *(BASE._replace(seeds=seeds, failing=0.2) for seeds in (3, 5)),
    *(BASE._replace(seeds=seeds, shared=0.5) for seeds in (3, 5)),
    *(BASE._replace(seeds=seeds, lost=0.1) for seeds in (3, 5)),
    *(BASE._replace(seeds=seeds, curve=curve, diverging=0.3) for curve in ("peak", "end") for seeds in (3, 5)),
    *(BASE._replace(seeds=seeds, too_high=True) for seeds in (3, 5)),
    *(BASE._replace(seeds=seeds, training=training, models=models) for seeds in (3, 5) for training in (0.5, 0.9) for models in (2, 4)),
    *(BASE._replace(seeds=seeds, noise="skew", ceiling=True) for seeds in (3, 5)),
    *(BASE._replace(seeds=seeds, examples=examples, graded=examples == 50) for seeds in (3, 5) for examples in (50, 71, 277)),
    *(BASE._replace(seeds=seeds, examples=280, group=group) for seeds in (3, 5) for group in (5, 20)),
]  # fmt: skip
PAPER = BASE._replace(seeds=5, models=len(MODELS), tasks=len(TASKS), rates=len(RATES))
OF_PAPER = 5
"""Studies of the paper's size: each has as many results as 38 others."""


LOOKS = (3, 5, 7, 9)
LOOKED_AT = [
    BASE._replace(seeds=LOOKS[-1], models=2, lead=lead, curve=curve)
    for lead, curve in ((0.0, "peak"), (0.0, "flat"), (0.8, "peak"))
]


def main(
    studies: Annotated[int, typer.Option(help="Studies of each kind.")] = 200,
    only: Annotated[str, typer.Option(help="Only kinds whose description has this text.")] = "",
) -> None:
    """Measure all scenarios."""
    lines = [
        f"`python -m benchmarks.calibration --studies {studies}`, {date.today():%d %B %Y}, {machine()}.",
        "",
        "Studies of equal models; nominal coverage .95, false claims at most .05. `needs` is the difference in points that 80 % of the studies "
        "find; `planned` is what a plan says after one such study (median), and `power` is measured there. The chosen runs' test scores are "
        "compared by Welch's test and by a mixed model too, which know nothing of the choice, of lost runs and of test examples; each takes 5 % for "
        "the mean, and 5 % for the tasks.",
        "",
        "| rule | seeds | kind | studies | score / fresh covered | task / mean covered | studies that claim | needs: task / mean "
        "| Welch: task / mean covered | claim: task / mean | needs | mixed model: task / mean covered | claim: task / mean | needs "
        "| planned: task / mean | power |",
        f"{'|---' * 16}|",
    ]
    for number, kinds in ((studies, SCENARIOS), (OF_PAPER, [PAPER])):
        for scenario, counts in counts_of([each for each in kinds if only in described(each)], counted, number):
            lines.append(f"| {' | '.join(row_of(scenario, counts))} |")
            print(lines[-1], flush=True)
    lines += [
        "",
        f"Looks at {', '.join(map(str, LOOKS))} seeds: studies that decide for one of two models, by `analysis.looks`, by plain tests, and by one at the end",
        "",
    ]
    lines += ["| kind | bounds | plain tests | one test |", "|---|---|---|---|"]
    for scenario, found in counts_of(
        [each for each in LOOKED_AT if only in f"looks, {described(each)}"], looked, studies
    ):
        shares = (f"{np.mean(each):.3f}" for each in zip(*found, strict=True))
        lines.append(f"| {described(scenario)} | {' | '.join(shares)} |")
        print(lines[-1], flush=True)
    if not only:
        write_section("Calibration: intervals and claims on simulated studies", lines)


if __name__ == "__main__":
    typer.run(main)
