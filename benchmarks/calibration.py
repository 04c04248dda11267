"""Coverage of intervals, false claims and power on simulated studies:  python -m benchmarks.calibration [--studies N] [--only TEXT]

Every study goes through `mlmclm.analysis.analyse`, as a user's does. Its true scores are known: they are means, over many studies, of the
scores that the selection rule picks. The analysis is compared with Welch's test and a mixed model (statsmodels). Both correct the mean over
tasks and the single tasks separately, at 5 % each, by the first step of Holm's method. The smallest detectable difference is the lead at which
80 % of the comparisons claim it. A lead only shifts scores, so it follows from each study of equal models. The table is a section of
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
from mlmclm.analysis.power import difference_found, differences, smallest_differences
from mlmclm.analysis.results import Record, records
from mlmclm.analysis.simulated_choices import choose, competes
from mlmclm.results.chance import Chance
from mlmclm.results.intervals import Estimate, estimate, satterthwaite, without_error
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
"""The number of tasks that share their trainings in scenarios with `training`."""
FLOOR = 0.3
"""Score at a learning rate at which a model learns nothing; the mean at the best rate is 0.7."""
TRUTHS = range(10_000, 10_200)
"""The numbers of the studies from which true scores are computed."""


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
        rising: whether the probability of failure rises with the learning rate, from 0 to twice `failing`.
        one: whether only runs of the first model fail.
        shared: share of the variance that a seed's runs at all rates have in common.
        lead: by how much the first model is better on all tasks, in points.
        lost: share of the cells that have no result.
        diverging: share of the runs at the two highest rates that diverge.
        too_high: whether no run learns anything at the highest rate.
        training: share of the noise that is common to the first three tasks, whose results are then of the same trainings.
        ceiling: whether the scores at the best rate are near the maximum of 1.
        examples: the number of test examples, each right or wrong; with 0, the test set adds no noise.
        graded: whether the examples are queries with scores from 0 to 1, most of them near 0 or 1.
        group: the number of examples in a group; they have three tenths of their difficulty in common.
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
    """The runs of a study, [models, tasks, rates, seeds]: scores, and which failed in the sense of `analysis.failed_runs`."""

    validation: Array
    test: Array
    failed: Array


def drawn(scenario: Scenario, number: int) -> Drawn:
    """Draw the runs of a study of equal models; `offsets` makes their true scores equal too."""
    draws, shape = np.random.default_rng([number, scenario.seeds]), scenario.shape

    def noise() -> Array:
        together = np.sqrt(scenario.shared) * draws.standard_normal((*shape[:-2], 1, shape[-1]))
        return np.asarray(together + np.sqrt(1 - scenario.shared) * draws.standard_normal(shape))

    common, *rest = (noise() for _ in range(3))
    both = [np.sqrt(scenario.correlation) * common + np.sqrt(1 - scenario.correlation) * side for side in rest]
    if scenario.training:
        apart, together = np.sqrt(1 - scenario.training), np.sqrt(scenario.training) * np.asarray(both)[:, :, :1]
        for side, common in zip(both, together, strict=True):
            side[:, :OF_ONE_TRAINING] = common + apart * draws.standard_normal((len(side), OF_ONE_TRAINING, *shape[2:]))
    if scenario.noise == "skew":
        both = [-(np.exp(0.8 * side) - np.exp(0.32)) / np.sqrt((np.exp(0.64) - 1) * np.exp(0.64)) for side in both]
    if scenario.noise == "t":
        both = [side * np.sqrt(2 / draws.chisquare(4, shape)) for side in both]
    if scenario.noise in ("rates", "models"):
        both = [side * np.linspace(0.3, 2, scenario.rates)[:, None] for side in both]
    if scenario.noise == "models":
        both = [side * np.where(np.arange(len(side)) % 2, 2.0, 1.0)[:, None, None, None] for side in both]
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
    scores = [np.minimum(np.where(failed, low[..., None], means[..., None]) + NOISE * side, 1.0) for side in both]
    return Drawn(scores[0], scores[1], failed & (scenario.drop >= 100 * LEAST_GAP))


def answered(scenario: Scenario, number: int, test: Array) -> Array:
    """Draw the scores on single test examples, [..., examples], of runs with these expected scores, [models, tasks, rates, seeds].

    Half of the variance of an example's difficulty is common to all models, and three tenths to all runs of a model.
    """
    draws, size = np.random.default_rng([number, scenario.seeds, 2]), scenario.examples
    groups = np.arange(size) // scenario.group
    hard = np.zeros((*test.shape, size))
    for part, shape in ((0.5, (1, scenario.tasks, 1, 1)), (0.3, (*test.shape[:2], 1, 1)), (0.2, test.shape)):
        together = 0.3 if scenario.group > 1 else 0.0
        single, common = (draws.standard_normal((*shape, size)) for _ in range(2))
        hard += np.sqrt(part) * (np.sqrt(1 - together) * single + np.sqrt(together) * common[..., groups])
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
    *drawn_parts, diverged = (np.concatenate(parts, axis=1) for parts in zip(*studies, strict=True))
    return Drawn(*drawn_parts), diverged


class Truth(NamedTuple):
    """True scores of a model: of the runs that the rule picks among those that learn, and of fresh runs at the picked rates."""

    delivered: float
    fresh: float


@cache
def _truth(scenario: Scenario, model: int, gaps: bytes) -> Truth:
    runs, diverged = _truths(scenario)
    validation, test, failed = (array[model] for array in runs)
    lost = np.frombuffer(gaps, dtype=bool).reshape(validation.shape[1:])
    gone = diverged[model]
    learned = ~(lost | gone | failed)
    learned &= competes(learned.sum(axis=-1), (~lost).sum(axis=-1))[..., None]
    picked, counts = choose(validation, test, learned, scenario.rule)
    some = counts.any(axis=-1)
    means = np.where(failed, 0.0, test).sum(axis=(0, 2)) / np.maximum((~failed).sum(axis=(0, 2)), 1)
    at = np.take_along_axis(test, picked[:, None], axis=1)[:, 0], means[picked]
    return Truth(*(float(((scores * counts).sum(axis=-1)[some] / counts.sum(axis=-1)[some]).mean()) for scores in at))


def truth(scenario: Scenario, model: int, gaps: Array | None = None) -> Truth:
    """Return the true scores of a model before `offsets`; `gaps` are the cells without a result, [rates, seeds]."""
    none = np.zeros(scenario.shape[2:], bool)
    return _truth(scenario, model, (none if gaps is None else gaps).tobytes())


def offsets(scenario: Scenario) -> Array:
    """Return what to add to the models' scores, [models], so that their true scores are equal whatever their curves and noise."""
    delivered = np.asarray([truth(scenario, model).delivered for model in range(scenario.models)])
    return delivered[0] - delivered


def study(scenario: Scenario, number: int) -> list[Record]:
    """Return the results of a study; "answered" has the scores on single examples, [examples]."""
    added = offsets(scenario) + np.where(np.arange(scenario.models), 0.0, scenario.lead / 100)
    validation, test = (scores + added[:, None, None, None] for scores in drawn(scenario, number)[:2])
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
        for row in results:
            if row["task"] in TASKS[:OF_ONE_TRAINING]:
                row["curve"] = [[1, f"{row['model']}/{row['learning_rate']}/{row['seed']}"]]
    return results


def result(model: str, task: str, rate: float, seed: Seed, scores: tuple[float, float] | None) -> Record:
    """Return the result of a cell, given its validation and test score; None if it diverged."""
    outcome: Record = {"status": "diverged", "scores": None, "diverged_step": 1}
    if scores is not None:
        named = {split: {"accuracy": score} for split, score in zip(("validation", "test"), scores, strict=True)}
        outcome = {"status": "ok", "scores": named, "diverged_step": None}
    return {
        "key": f"{model}/{task}/{rate}/{seed}",
        "model": model,
        "task": task,
        "family": "sequence-classification",
        "metric": "accuracy",
        "learning_rate": rate,
        "seed": seed,
        **outcome,
    }


class Pair(NamedTuple):
    """The comparison of two equal models, or of two with a true difference.

    Attributes:
        covered: whether the interval covers the true difference.
        false: whether a difference is claimed that does not exist, or with the wrong sign.
        needs: the leads of the first and of the second model, in points, that the first step of the correction would claim.
    """

    covered: bool
    false: bool
    needs: tuple[float, float]


class Counts(NamedTuple):
    """Statements about one study: about scores, and about pairs by the analysis, by Welch's test and by a mixed model."""

    scores: tuple[int, int]
    fresh: tuple[int, int]
    tasks: tuple[Pair, ...]
    mean: tuple[Pair, ...]
    welch_tasks: tuple[Pair, ...]
    welch_mean: tuple[Pair, ...]
    mixed_tasks: tuple[Pair, ...]
    mixed_mean: tuple[Pair, ...]
    planned: tuple[float, float]
    """The differences, in points, that a plan of the same study states for 80 % power given this study's noise: on a task, and on the mean."""


def counted(scenario: Scenario, number: int) -> Counts:
    """Analyse one study, and check its statements against the truth."""
    chances = dict.fromkeys(TASKS, Chance(FLOOR, "as made")) if scenario.too_high else {}
    results = study(scenario, number)
    answers = {row["key"]: row["answered"] for row in results if scenario.examples}

    def folds(rows: Sequence[Record]) -> Array | None:
        if not answers:
            return None
        means = np.mean([answers[row["key"]] for row in rows], axis=0)
        return fold_scores(WeightedMean(means), len(means), np.arange(len(means)) // scenario.group)

    ranges = dict.fromkeys(TASKS, (-9.0, 9.0))
    analysis = analyse(results, rule=scenario.rule, ranges=ranges, chances=chances, folds=folds)
    gaps, added = without_score(scenario, number)[0], offsets(scenario)
    true = {
        (MODELS[model], TASKS[task]): expected + added[model]
        for model, task in np.ndindex(scenario.shape[:2])
        for expected in [np.asarray(truth(scenario, model, gaps[model, task] if scenario.lost else None))]
    }
    tasks = TASKS[: scenario.tasks]
    true |= {(MODELS[0], task): true[MODELS[0], task] + scenario.lead / 100 for task in tasks}
    best = records(analysis.best)
    covers = [row["score_low"] <= true[row["model"], row["task"]][0] <= row["score_high"] for row in best]
    fresh_covers = [
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
    for row in records(analysis.comparisons):
        if row["kind"] in ours and not math.isnan(row["low"]):
            level = holm_level(row["kind"], analysis.families, scenario.models, 0.95)
            claimed = row["error"] * float(special.stdtrit(row["freedom"], 1 - level / 2))
            ours[row["kind"]].append(pair(row, row["low"], row["high"], row["p_holm"], claimed, row["difference"]))
    pairs = [tuple(ours["task"]), tuple(ours["all"])]
    scores: dict[tuple[str, str], dict[int, float]] = {}
    for cell in records(analysis.chosen):
        scores.setdefault((cell["model"], cell["task"]), {})[int(cell["seed"])] = cell["test"]
    for peer in (partial(_welch, scores, scenario), _mixed(scores, scenario)):
        peer_pairs: dict[str, list[Pair]] = {"task": [], "all": []}
        for row in (row for row in records(analysis.comparisons) if row["kind"] in peer_pairs):
            scope = tasks if row["scope"] == ALL_TASKS else (row["scope"],)
            compared = peer((row["model_a"], row["model_b"]), scope)
            if not math.isnan(compared.low):
                tests = math.comb(scenario.models, 2) * (1 if row["kind"] == "all" else len(tasks))
                claimed = compared.error * float(special.stdtrit(compared.freedom, 1 - 0.025 / tests))
                p = min(1.0, compared.p * tests)
                peer_pairs[row["kind"]].append(pair(row, compared.low, compared.high, p, claimed, compared.value))
        pairs += [tuple(peer_pairs["task"]), tuple(peer_pairs["all"])]
    covered = [(sum(covered_rows), len(covered_rows)) for covered_rows in (covers, fresh_covers)]
    tasks_and_means = dict(zip(Counts._fields[2:-1], pairs, strict=False))
    return Counts(scores=covered[0], fresh=covered[1], planned=_planned(analysis, scenario), **tasks_and_means)


def _planned(analysis: Analysis, scenario: Scenario) -> tuple[float, float]:
    """Return what a plan states for 80 % power after a first study (`Counts.planned`), like `needs` over all pairs and tasks."""
    noise = noise_of(analysis)
    if noise.keys() != set(analysis.families):
        return math.nan, math.nan
    studies, names = planned_effects(noise, scenario.seeds, scenario.rates, scenario.models)
    level = holm_level("task", analysis.families, scenario.models, 0.95)
    wholes = [contrast.whole for task in noise for contrast in differences(studies, names, [task])]
    on_task = difference_found([(whole.error, whole.freedom) for whole in wholes], level)
    smallest = smallest_differences(studies, names, analysis.families, compared=scenario.models)
    return 100 * on_task, 100 * smallest[ALL_TASKS]


def looked(scenario: Scenario, number: int) -> tuple[bool, ...]:
    """Return whether interim looks find a difference of two models: by `analysis.looks`, by uncorrected tests, and by one test at the end."""
    looks, results = [], study(scenario, number)
    for seeds in LOOKS:
        analysis = analyse([row for row in results if row["seed"] < seeds], rule=scenario.rule)
        row = next(row for row in records(analysis.comparisons) if row["kind"] == "all")
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
    """Compare two models' means over tasks by Welch's test; tasks that share trainings enter by their mean for each seed."""
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
"""Maximum number of scores to which a mixed model is fitted; with a study of the paper's size it takes minutes."""


def _mixed(scores: Chosen, scenario: Scenario) -> Callable[[tuple[str, str], Sequence[str]], Estimate]:
    """Fit a mixed model by REML, and return the comparison of two models' means over tasks by it.

    Each model has a mean on each task, and each training a random effect. A training is a model with a seed, on the tasks that share it if
    some do, otherwise on all tasks. The degrees of freedom are those between trainings.
    """
    cells, shared = list(scores), _shared(scenario)
    rows = [(cell, seed, value) for cell, by_seed in scores.items() for seed, value in by_seed.items()]
    sides = [(model, bool(shared) and task not in shared) for (model, task), _, _ in rows]
    trainings = [repr((*side, seed)) for side, (_, seed, _) in zip(sides, rows, strict=True)]
    freedom = len(set(trainings)) - len(set(sides))
    if len(rows) > MOST_ROWS or not freedom:
        return lambda models, tasks: without_error(math.nan)
    design = np.eye(len(cells))[[cells.index(cell) for cell, _, _ in rows]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns where the variance of trainings is 0
        fit = MixedLM([100 * value for _, _, value in rows], design, trainings).fit(reml=True)
    # The covariance of statsmodels is not always valid if the variance of trainings is 0.
    same = np.asarray(trainings)[:, None] == np.asarray(trainings)
    precision = np.linalg.inv(fit.scale * np.eye(len(rows)) + float(fit.cov_re[0, 0]) * same)
    covariance = np.linalg.inv(design.T @ precision @ design)

    def compare(models: tuple[str, str], tasks: Sequence[str]) -> Estimate:
        if not all((model, task) in scores for model in models for task in tasks):
            return without_error(math.nan)
        weights = np.zeros(len(cells))
        for model, sign in zip(models, (1.0, -1.0), strict=True):
            weights[[cells.index((model, task)) for task in tasks]] = sign / len(tasks)
        error = math.sqrt(weights @ covariance @ weights) / 100
        return estimate(float(weights @ fit.fe_params) / 100, error, freedom)

    return compare


def _weighted(groups: Sequence[Sequence[float]], weights: Sequence[float]) -> Estimate:
    """Return a weighted sum of groups' means with Welch's interval; without one where a group has fewer than two scores."""
    if min(map(len, groups)) < 2:
        return without_error(math.nan)
    value = math.fsum(weight * float(np.mean(group)) for weight, group in zip(weights, groups, strict=True))
    parts = [
        (weight**2 * float(np.var(group, ddof=1)) / len(group), len(group) - 1)
        for weight, group in zip(weights, groups, strict=True)
    ]
    return satterthwaite(value, parts)


def counts_of(kinds: Iterable[K], counted: Callable[[K, int], C], studies: int) -> Iterator[tuple[K, list[C]]]:
    """Yield each kind of studies with the counts of its studies, each of which `counted` makes from its number and analyses."""
    with ProcessPoolExecutor(usable_cpus()) as pool:
        for kind in kinds:
            yield kind, list(pool.map(partial(counted, kind), range(studies), chunksize=4))


def covering_zero(rows: Sequence[Record], kind: str) -> tuple[int, int]:
    """Return how many intervals of differences cover 0, and how many there are, on single tasks ("task") or on their mean ("all")."""
    covering = [row["low"] <= 0 <= row["high"] for row in rows if row["kind"] == kind]
    return sum(covering), len(covering)


def share(parts: Sequence[tuple[int, int]]) -> str:
    """Return the share of true statements, given pairs of their number and of the number of all."""
    total = sum(number for _, number in parts)
    return f"{sum(part for part, _ in parts) / total:.3f}" if total else ""


def described(scenario: Scenario) -> str:
    """Name the settings in which a scenario differs from the basic one."""
    usual = Scenario(scenario.rule, scenario.seeds, "peak", "normal", 0.5)
    parts = zip(Scenario._fields, scenario, usual, strict=True)
    return ", ".join(f"{name} {value}" for name, value, usual_value in parts if value != usual_value) or "base"


def row_of(scenario: Scenario, counts: Sequence[Counts]) -> list[str]:
    """Return a row of the table."""
    row = [scenario.rule, str(scenario.seeds), described(scenario), str(len(counts))]
    row.append(f"{share([count.scores for count in counts])} / {share([count.fresh for count in counts])}")
    for peer in ("", "welch_", "mixed_"):
        names = f"{peer}tasks", f"{peer}mean"
        pairs: list[list[Pair]] = [[pair for count in counts for pair in getattr(count, name)] for name in names]
        row.append(" / ".join(share([(pair.covered, 1) for pair in scope]) for scope in pairs))
        wrong = [[any(pair.false for pair in getattr(count, name)) for name in names] for count in counts]
        claiming = np.mean(wrong, axis=0) if peer else [np.any(wrong, axis=1).mean()]
        row.append(" / ".join(f"{rate:.3f}" for rate in claiming) if any(pairs) else "")
        row.append(" / ".join(f"{np.quantile(leads, 0.8):.2f}" for scope in pairs if (leads := _leads(scope))))
    planned = np.nanmedian([count.planned for count in counts], axis=0)
    by_scope = [[lead for count in counts for lead in _leads(getattr(count, name))] for name in ("tasks", "mean")]
    row.append(" / ".join(f"{goal:.2f}" for goal in planned))
    row.append(
        " / ".join(f"{np.mean(np.asarray(part) <= goal):.2f}" for part, goal in zip(by_scope, planned, strict=True))
    )
    return row


def _leads(pairs: Sequence[Pair]) -> list[float]:
    """Return the leads, in points, that the comparisons would claim."""
    return [lead for pair in pairs for lead in pair.needs]


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
        "find; `planned` is what a plan says after one such study (median), over all pairs and tasks too, and `power` is measured there. The "
        "chosen runs' test scores are compared by Welch's test and by a mixed model too, which know nothing of the choice, of lost runs and "
        "of test examples; each takes 5 % for "
        "the mean, and 5 % for the tasks.",
        "",
        "| rule | seeds | kind | studies | score / fresh covered | task / mean covered | studies that claim | needs: task / mean "
        "| Welch: task / mean covered | claim: task / mean | needs | mixed model: task / mean covered | claim: task / mean | needs "
        "| planned: task / mean | power |",
        f"{'|---' * 16}|",
    ]
    for number, kinds in ((studies, SCENARIOS), (OF_PAPER, [PAPER])):
        for scenario, counts in counts_of([kind for kind in kinds if only in described(kind)], counted, number):
            lines.append(f"| {' | '.join(row_of(scenario, counts))} |")
            print(lines[-1], flush=True)
    lines += [
        "",
        f"Looks at {', '.join(map(str, LOOKS))} seeds: studies that decide for one of two models, by `analysis.looks`, by plain tests, and by one at the end",
        "",
    ]
    lines += ["| kind | bounds | plain tests | one test |", "|---|---|---|---|"]
    for scenario, decisions in counts_of(
        [kind for kind in LOOKED_AT if only in f"looks, {described(kind)}"], looked, studies
    ):
        shares = (f"{np.mean(decided):.3f}" for decided in zip(*decisions, strict=True))
        lines.append(f"| {described(scenario)} | {' | '.join(shares)} |")
        print(lines[-1], flush=True)
    if not only:
        write_section("Calibration: intervals and claims on simulated studies", lines)


if __name__ == "__main__":
    typer.run(main)
