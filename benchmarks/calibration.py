"""Coverage of intervals, false claims and power on simulated studies:  python -m benchmarks.calibration [--studies N] [--only TEXT]

Every study goes through `mlmclm.analysis.analyse`, as a user's does. Its truth is known: it is the mean over many studies of what the
rule picks in each. Beside the analysis stands Welch's test with Holm's correction of the same studies, in the same order (the mean over
tasks first). The smallest difference found is the lead of the first model at which 80 % of its comparisons claim it: a lead moves scores
and nothing else, so it follows from each study of equal models. The table is a section of RESULTS.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from typing import Annotated, NamedTuple, TypeVar

import numpy as np
import typer
from scipy import special

from benchmarks.results import write_section
from mlmclm.analysis.analyse import Analysis, analyse
from mlmclm.analysis.comparison import ALL_TASKS, holm_level
from mlmclm.analysis.looks import Look, bounds
from mlmclm.analysis.planned_power import noise_of, planned_effects
from mlmclm.analysis.power import smallest_differences
from mlmclm.analysis.results import Record, records
from mlmclm.analysis.simulated_choices import choose, competes
from mlmclm.results.chance import Chance
from mlmclm.results.intervals import Estimate, satterthwaite, unknown
from mlmclm.results.measures import Array
from mlmclm.results.metrics import Rule
from mlmclm.seeds import Seed

K = TypeVar("K")
C = TypeVar("C")
MODELS, TASKS = ("a", "b", "c", "d"), tuple(f"task-{number}" for number in range(4))
RATES = tuple(1e-5 * 2**step for step in range(5))
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
        models: how many of the models there are.
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
    models: int = 4


class Drawn(NamedTuple):
    """The runs of a study, [models, tasks, rates, seeds]: scores, what a run that learns scores on average, and which failed."""

    validation: Array
    test: Array
    expected: Array
    failed: Array


def drawn(scenario: Scenario, number: int) -> Drawn:
    """Draw the runs of a study, whose models are equal before their truths are made equal (`offsets`)."""
    draws = np.random.default_rng([number, scenario.seeds])
    shape = (scenario.models, len(TASKS), len(RATES), scenario.seeds)

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
        both = [each * np.linspace(0.3, 2, len(RATES))[:, None] for each in both]
    if scenario.noise == "models":
        both = [each * np.where(np.arange(len(each)) % 2, 2.0, 1.0)[:, None, None, None] for each in both]
    steps = {"peak": 2.0, "end": 4.0, "unlike": 2.0}.get(scenario.curve)
    curve = np.zeros(len(RATES)) if steps is None else -abs(np.arange(len(RATES)) - steps)
    means = np.broadcast_to(0.7 + NOISE * curve, shape[:3]).copy()
    if scenario.curve == "unlike":
        means = 0.7 + 3 * (means - 0.7) * (np.arange(scenario.models) % 2)[:, None, None]
    failing = scenario.failing * (np.linspace(0, 2, len(RATES)) if scenario.rising else np.ones(len(RATES)))
    failed = draws.random(shape) < failing[:, None]
    if scenario.one:
        failed[1:] = False
    if scenario.too_high:
        failed[:, :, -1] = True
    low = np.full(shape[:3], FLOOR) if scenario.too_high else means - scenario.drop / 100
    scores = [np.where(failed, low[..., None], means[..., None]) + NOISE * each for each in both]
    return Drawn(scores[0], scores[1], np.broadcast_to(means[..., None], shape), failed)


def without_score(scenario: Scenario, number: int) -> tuple[Array, Array]:
    """Return which cells of a study have no result, and which have diverged, [models, tasks, rates, seeds] each."""
    draws = np.random.default_rng([number, scenario.seeds, 1])
    shape = (scenario.models, len(TASKS), len(RATES), scenario.seeds)
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
    validation, test, expected, failed = (each[model] for each in runs)
    lost = np.frombuffer(gaps, dtype=bool).reshape(validation.shape[1:])
    gone = diverged[model]
    learned = ~(lost | gone | failed)
    learned &= competes(learned.sum(axis=-1), (~lost).sum(axis=-1))[..., None]
    picked, counts = choose(validation, test, learned, scenario.rule)
    some = counts.any(axis=-1)
    at = [np.take_along_axis(each, picked[:, None], axis=1)[:, 0] for each in (test, expected)]
    return Truth(*(float(((each * counts).sum(axis=-1)[some] / counts.sum(axis=-1)[some]).mean()) for each in at))


def truth(scenario: Scenario, model: int, gaps: Array | None = None) -> Truth:
    """Return the truth about a model of a scenario before `offsets`; with the cells that lack a result, [rates, seeds]."""
    none = np.zeros((len(RATES), scenario.seeds), bool)
    return _truth(scenario, model, (none if gaps is None else gaps).tobytes())


def offsets(scenario: Scenario) -> Array:
    """Return what makes the models equal in what their rules deliver, [models]: unlike curves and noises deliver unlike luck."""
    return truth(scenario, 0).delivered - np.asarray([truth(scenario, own).delivered for own in range(scenario.models)])


def study(scenario: Scenario, number: int) -> list[Record]:
    """Return the results of a study."""
    validation, test, *_ = drawn(scenario, number)
    added = offsets(scenario) + np.where(np.arange(scenario.models), 0.0, scenario.lead / 100)
    lost, diverged = without_score(scenario, number)
    results = [
        result(
            MODELS[place[0]],
            TASKS[place[1]],
            RATES[place[2]],
            place[3],
            None if diverged[place] else (validation[place] + added[place[0]], test[place] + added[place[0]]),
        )
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
        needs: the lead of the first model that is claimed at the first step of the correction, in points; NaN for other pairs.
    """

    covered: bool
    false: bool
    needs: float


class Counts(NamedTuple):
    """Statements about one study: of scores, and of pairs by scope, by the analysis and by Welch's test."""

    scores: tuple[int, int]
    fresh: tuple[int, int]
    tasks: tuple[Pair, ...]
    mean: tuple[Pair, ...]
    welch_tasks: tuple[Pair, ...]
    welch_mean: tuple[Pair, ...]
    planned: tuple[float, float]
    """The differences, in points, that a plan of the same study says to be found in 80 %, by this study's noise: on a task, and the mean."""


def counted(scenario: Scenario, number: int) -> Counts:
    """Analyse one study, and count what is true of its statements."""
    chances = dict.fromkeys(TASKS, Chance(FLOOR, "as made")) if scenario.too_high else {}
    found = analyse(
        study(scenario, number), rule=scenario.rule, ranges=dict.fromkeys(TASKS, (-9.0, 9.0)), chances=chances
    )
    gaps, added = without_score(scenario, number)[0], offsets(scenario)
    true = {
        (MODELS[model], TASKS[task]): own + added[model]
        for model, task in np.ndindex(scenario.models, len(TASKS))
        for own in [np.asarray(truth(scenario, model, gaps[model, task] if scenario.lost else None))]
    }
    true |= {(MODELS[0], task): true[MODELS[0], task] + scenario.lead / 100 for task in TASKS}
    best = records(found.best)
    inside = [row["score_low"] <= true[row["model"], row["task"]][0] <= row["score_high"] for row in best]
    again = [
        row.get("fresh_low", math.nan) <= true[row["model"], row["task"]][1] <= row.get("fresh_high", math.nan)
        for row in best
    ]

    def pair(row: Record, low: float, high: float, p: float, needs: float) -> Pair:
        scope = TASKS if row["scope"] == ALL_TASKS else [row["scope"]]
        actual = float(np.mean([true[row["model_a"], task][0] - true[row["model_b"], task][0] for task in scope]))
        actual = 0.0 if not scenario.lead and not scenario.lost else actual
        wrong = p < 0.05 and (low + high) * actual <= 0
        return Pair(low <= actual <= high, wrong, 100 * needs if row["model_a"] == MODELS[0] else math.nan)

    ours: dict[str, list[Pair]] = {"task": [], "all": []}
    for row in records(found.comparisons):
        if row["kind"] in ours and not math.isnan(row["low"]):
            level = holm_level(row["kind"], found.families, scenario.models, 0.95)
            needs = row["error"] * float(special.stdtrit(row["freedom"], 1 - level / 2)) - row["difference"]
            ours[row["kind"]].append(pair(row, row["low"], row["high"], row["p_holm"], needs))
    theirs = _welch(records(found.chosen), records(found.comparisons), scenario, pair)
    scores, fresh = ((sum(own), len(own)) for own in (inside, again))
    pairs = tuple(ours["task"]), tuple(ours["all"]), tuple(theirs["task"]), tuple(theirs["all"])
    return Counts(scores, fresh, *pairs, _planned(found, scenario))


def _planned(found: Analysis, scenario: Scenario) -> tuple[float, float]:
    """Return what a plan of the same study says, as a dry run does after a first study."""
    noise, models = noise_of(found), list(found.groups)
    if noise.keys() != set(TASKS):
        return math.nan, math.nan
    effects = planned_effects(noise, dict.fromkeys(TASKS, scenario.seeds), len(RATES), models)
    smallest = smallest_differences(effects, models, found.families)
    return 100 * float(np.median([smallest[task] for task in TASKS])), 100 * smallest[ALL_TASKS]


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


def _welch(
    chosen: Sequence[Record], rows: Sequence[Record], scenario: Scenario, pair: Callable[..., Pair]
) -> dict[str, list[Pair]]:
    """Compare the chosen runs' test scores by Welch's test, of tasks that share a training by their means over seeds."""
    scores: dict[tuple[str, str], dict[int, float]] = {}
    for cell in chosen:
        scores.setdefault((cell["model"], cell["task"]), {})[int(cell["seed"])] = cell["test"]
    together = TASKS[:OF_ONE_TRAINING] if scenario.training else ()
    found: dict[str, list[Pair]] = {"task": [], "all": []}
    pairs = math.comb(scenario.models, 2)
    for row in rows:
        if row["kind"] not in found:
            continue
        groups, weights = [], []
        for model, sign in ((row["model_a"], 1.0), (row["model_b"], -1.0)):
            scope = list(TASKS) if row["scope"] == ALL_TASKS else [row["scope"]]
            if shared := [task for task in scope if task in together and len(scope) > 1]:
                seeds = set.intersection(*(set(scores[model, task]) for task in shared))
                groups.append([float(np.mean([scores[model, task][seed] for task in shared])) for seed in seeds])
                weights.append(sign * len(shared) / len(scope))
            for task in (task for task in scope if task not in shared):
                groups.append(list(scores.get((model, task), {}).values()))
                weights.append(sign / len(scope))
        own = _weighted(groups, weights)
        if math.isnan(own.low):
            continue
        tests = pairs * (1 if row["kind"] == "all" else len(TASKS))
        needs = own.error * float(special.stdtrit(own.freedom, 1 - 0.025 / tests)) - own.value
        found[row["kind"]].append(pair(row, own.low, own.high, min(1.0, own.p * tests), needs))
    return found


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
    with ProcessPoolExecutor() as pool:
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
    row = [scenario.rule, str(scenario.seeds), described(scenario)]
    row += [share([count.scores for count in counts]), share([count.fresh for count in counts])]
    for names in (("tasks", "mean"), ("welch_tasks", "welch_mean")):
        pairs: Mapping[str, list[Pair]] = {
            name: [own for count in counts for own in getattr(count, name)] for name in names
        }
        row += [share([(own.covered, 1) for own in each]) for each in pairs.values()]
        row.append(
            f"{np.mean([any(own.false for name in names for own in getattr(count, name)) for count in counts]):.3f}"
        )
        for each in pairs.values():
            leads = [own.needs for own in each if not math.isnan(own.needs)]
            row.append(f"{np.quantile(leads, 0.8):.2f}" if leads else "")
    for name, planned in zip(("tasks", "mean"), np.nanmedian([count.planned for count in counts], axis=0), strict=True):
        leads = [own.needs for count in counts for own in getattr(count, name) if not math.isnan(own.needs)]
        row.append(f"{planned:.2f} (power {np.mean(np.asarray(leads) <= planned):.2f})")
    return row


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
]  # fmt: skip


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
        f"{studies} studies a row, of equal models on {len(TASKS)} tasks at {len(RATES)} rates; nominal coverage .95, false claims at most .05. "
        "`needs` is the difference in points that 80 % of the studies find; `planned` is what a plan says after one such study (median), with the "
        "power measured there. Welch's test with Holm's correction stands beside.",
        "",
        "| rule | seeds | kind | score covered | fresh covered | tasks covered | mean covered | studies that claim | needs: task | mean "
        "| Welch: tasks covered | mean covered | studies that claim | needs: task | mean | planned: task | mean |",
        f"{'|---' * 17}|",
    ]
    for scenario, counts in counts_of([each for each in SCENARIOS if only in described(each)], counted, studies):
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
