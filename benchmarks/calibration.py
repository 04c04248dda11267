"""Coverage of intervals and rates of false claims on simulated studies:  python -m benchmarks.calibration [--studies N]

Every study goes through `mlmclm.analysis.analyse`, as a user's does. Its true scores are known: four models on six tasks at six
learning rates, whose seeds' noise validation and test scores share with a correlation. An interval covers the true score of the
procedure: the mean over many studies of the true score at the chosen rates (`effects`). How often it covers the true score at the
rates that the study itself chose is measured too, and beside it stands what the studies' own certificates say. Its table is a section
of RESULTS.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from typing import Annotated, NamedTuple, TypeVar

import numpy as np
import typer

from benchmarks.results import write_section
from mlmclm.analysis.analyse import analyse
from mlmclm.analysis.results import Record, records
from mlmclm.analysis.simulated_choices import choose
from mlmclm.results.chance import Chance
from mlmclm.results.measures import Array
from mlmclm.results.metrics import Rule
from mlmclm.seeds import Seed

K = TypeVar("K")
C = TypeVar("C")
MODELS, TASKS = ("a", "b", "c", "d"), tuple(f"task-{number}" for number in range(6))
RATES = tuple(1e-5 * 2**step for step in range(6))
NOISE = 0.01
"""Standard deviation of a run: one point."""
OF_ONE_TRAINING = 3
"""The number of tasks that share their trainings where a scenario says so."""
FLOOR = 0.3
"""Score of a failed run; the best rate's mean is 0.7."""
TRUTHS = range(10_000, 10_100)
"""The numbers of the studies from which `procedure` knows the truth."""


class Scenario(NamedTuple):
    """How studies are made.

    Attributes:
        curve: "flat", "peak": one best rate, and each step away from it costs one standard deviation, or "end": the same, with the
            highest rate as the best.
        noise: "normal", "t" (4 degrees of freedom), "skew" (reversed lognormal), or "rates" (growing from 0.3 to 2 times
            with the rate); each has standard deviation 1 on average.
        correlation: of a run's validation and test noise.
        failing: the probability that a run fails.
        shared: share of the variance that a seed's runs at all rates have in common.
        lead: by how much the first model is better on all tasks, in points.
        lost: share of the cells that have no result.
        diverging: share of the runs at the two highest rates that diverge.
        too_high: whether no run learns anything at the highest rate.
        training: share of the noise that the runs on the first three tasks have in common, which are then of the same trainings.
    """

    rule: Rule
    seeds: int
    curve: str
    noise: str
    correlation: float
    failing: float = 0.0
    shared: float = 0.0
    lead: float = 0.0
    lost: float = 0.0
    diverging: float = 0.0
    too_high: bool = False
    training: float = 0.0


class Counts(NamedTuple):
    """Numbers of true and of all statements of one study, about the procedure and about the rates that the study chose.

    Attributes:
        claims: differences that are claimed and not there.
        choices: the mean probability that the chosen rates are chosen again, as it is stated, and the true one.
        regrets: the mean regret of the choice, as it is stated, and the true one, in standard deviations of a run.
        certified: shares that the study's own certificate states: of scores covered, of differences covered, and of studies of
            equal models with a claim.
    """

    scores: tuple[int, int]
    differences: tuple[int, int]
    chosen_scores: tuple[int, int]
    chosen_differences: tuple[int, int]
    flat: tuple[int, int]
    claims: int
    found: tuple[int, int]
    optimism: float
    choices: tuple[float, float]
    regrets: tuple[float, float]
    certified: tuple[float, float, float]


def noise(kind: str, shared: float, shape: tuple[int, ...], draws: np.random.Generator) -> Array:
    """Draw noise of standard deviation 1, [..., rates, seeds]."""
    common = draws.standard_normal((*shape[:-2], 1, shape[-1]))
    values = np.sqrt(shared) * common + np.sqrt(1 - shared) * draws.standard_normal(shape)
    return np.asarray(values)


def drawn(scenario: Scenario, number: int) -> tuple[Array, Array, Array]:
    """Return the scores of a study, validation and test [models, tasks, rates, seeds], and the expected ones [models, tasks, rates]."""
    draws = np.random.default_rng([number, scenario.seeds])
    shape = (len(MODELS), len(TASKS), len(RATES), scenario.seeds)
    common, first, second = (noise(scenario.noise, scenario.shared, shape, draws) for _ in range(3))
    both = [np.sqrt(scenario.correlation) * common + np.sqrt(1 - scenario.correlation) * own for own in (first, second)]
    if scenario.training:
        apart, together = np.sqrt(1 - scenario.training), np.sqrt(scenario.training) * np.asarray(both)[:, :, :1]
        for own, common in zip(both, together, strict=True):
            own[:, :OF_ONE_TRAINING] = common + apart * draws.standard_normal(
                (len(MODELS), OF_ONE_TRAINING, *shape[2:])
            )
    if scenario.noise == "skew":
        both = [-(np.exp(0.8 * own) - np.exp(0.32)) / np.sqrt((np.exp(0.64) - 1) * np.exp(0.64)) for own in both]
    if scenario.noise == "t":
        both = [own * np.sqrt(2 / draws.chisquare(4, shape)) for own in both]
    if scenario.noise == "rates":
        both = [own * np.linspace(0.3, 2, len(RATES))[:, None] for own in both]
    best = {"peak": 3.0, "end": 5.0}.get(scenario.curve)
    steps = np.zeros(len(RATES)) if best is None else -abs(np.arange(len(RATES)) - best)
    means = np.broadcast_to(0.7 + NOISE * steps, shape[:3]).copy()
    means[0] += scenario.lead / 100
    scores = [means[..., None] + NOISE * own for own in both]
    failed = draws.random(shape) < scenario.failing
    if scenario.too_high:
        failed[:, :, -1], means[:, :, -1] = True, FLOOR
    scores = [np.where(failed, FLOOR + 0.3 * NOISE * draws.standard_normal(shape), own) for own in scores]
    expected = (1 - scenario.failing) * means + scenario.failing * FLOOR
    return scores[0], scores[1], expected


def without_score(scenario: Scenario, number: int) -> tuple[Array, Array]:
    """Return which cells of a study have no result, and which have diverged, [models, tasks, rates, seeds] each."""
    draws = np.random.default_rng([number, scenario.seeds, 1])
    shape = (len(MODELS), len(TASKS), len(RATES), scenario.seeds)
    lost, diverged = draws.random(shape) < scenario.lost, draws.random(shape) < scenario.diverging
    diverged[:, :, :-2] = False
    return lost, diverged


def study(scenario: Scenario, number: int) -> tuple[list[Record], Array]:
    """Return the results of a study, and the expected test score at each rate, [models, tasks, rates]."""
    validation, test, expected = drawn(scenario, number)
    results = _results(validation, test, *without_score(scenario, number))
    if scenario.training:
        for each in results:
            if each["task"] in TASKS[:OF_ONE_TRAINING]:
                each["curve"] = [[1, f"{each['model']}/{each['learning_rate']}/{each['seed']}"]]
    return results, expected


@cache
def _truths(scenario: Scenario) -> tuple[Array, ...]:
    """Return what `drawn` does for the studies from which the truth is known, as if they were one, and which runs diverged."""
    studies = ((*drawn(scenario, number), without_score(scenario, number)[1]) for number in TRUTHS)
    return tuple(map(np.concatenate, zip(*studies, strict=True)))


class Procedure(NamedTuple):
    """The procedure over many studies.

    Attributes:
        score: the mean expected score at the chosen rates.
        chosen: how often each rate is chosen, [rates].
        regret: how much higher the best rate's expected score is.
    """

    score: float
    chosen: Array
    regret: float


def procedure(scenario: Scenario, lost: Array) -> Procedure:
    """Return the truth about the procedure where these runs have no result, [rates, seeds]."""
    validation, test, expected, diverged = _truths(scenario)
    picked, counts = choose(validation, test, ~(lost | diverged), scenario.rule, diverged & ~lost)
    counts = np.broadcast_to(counts, picked.shape)
    scores = float(np.take_along_axis(expected, picked, axis=-1)[counts].mean())
    chosen = np.bincount(picked[counts], minlength=len(RATES)) / counts.sum()
    return Procedure(scores, chosen, float(expected.max(axis=-1).mean()) - scores)


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


def _results(validation: Array, test: Array, lost: Array, diverged: Array) -> list[Record]:
    return [
        result(
            MODELS[place[0]],
            TASKS[place[1]],
            RATES[place[2]],
            place[3],
            None if diverged[place] else (validation[place], test[place]),
        )
        for place in itertools.product(*map(range, test.shape))
        if not lost[place]
    ]


def counted(scenario: Scenario, number: int) -> Counts:
    """Analyse one study, and count what is true of its statements."""
    results, expected = study(scenario, number)
    chances = dict.fromkeys(TASKS, Chance(FLOOR, "as made")) if scenario.too_high else {}
    found = analyse(results, rule=scenario.rule, ranges=dict.fromkeys(TASKS, (-9.0, 9.0)), chances=chances)
    picked: dict[tuple[str, str], list[int]] = {}
    for row in records(found.chosen):
        picked.setdefault((row["model"], row["task"]), []).append(RATES.index(row["learning_rate"]))
    truth = {pair: float(expected[_place(*pair)][rates].mean()) for pair, rates in picked.items()}
    best = records(found.best)
    even, gaps = scenario._replace(lead=0.0), without_score(scenario, number)[0]
    places = [_place(row["model"], row["task"]) for row in best]
    true = {place: procedure(even, gaps[place]) for place in places}
    compared = [row for row in records(found.comparisons) if row["kind"] == "task"]
    differences = [(row, truth[row["model_a"], row["scope"]] - truth[row["model_b"], row["scope"]]) for row in compared]
    leads = [
        _true(scenario, true, row["model_a"], row["scope"]) - _true(scenario, true, row["model_b"], row["scope"])
        for row in compared
    ]
    scores = [_true(scenario, true, row["model"], row["task"]) for row in best]
    again = [true[_place(*pair)].chosen[rates].mean() for pair, rates in picked.items()]
    level = [row["sd_rates_low"] == 0 for row in records(found.stability)]
    claims = [row for row in records(found.comparisons) if row["p_holm"] < 0.05 and _is_false(scenario, row)]
    first = [row for row in compared if row["model_a"] == MODELS[0]]
    return Counts(
        (sum(row["score_low"] <= own <= row["score_high"] for row, own in zip(best, scores, strict=True)), len(best)),
        (sum(row["low"] <= own <= row["high"] for row, own in zip(compared, leads, strict=True)), len(compared)),
        (sum(row["score_low"] <= truth[row["model"], row["task"]] <= row["score_high"] for row in best), len(best)),
        (sum(row["low"] <= own <= row["high"] for row, own in differences), len(compared)),
        (sum(level), len(level)),
        len(claims),
        (sum(row["p_holm"] < 0.05 for row in first), len(first)),
        float(np.mean([row["test_mean"] - truth[row["model"], row["task"]] for row in best])),
        (_mean(best, "p_chosen"), float(np.mean(again))),
        (_mean(best, "regret") / NOISE, float(np.mean([own.regret for own in true.values()])) / NOISE),
        (found.certificate.covered, found.certificate.covered_differences, found.certificate.false_claims),
    )


def _lead(scenario: Scenario, model: str) -> float:
    return (1 - scenario.failing) * scenario.lead / 100 if model == MODELS[0] else 0.0


def _true(scenario: Scenario, true: Mapping[tuple[int, int], Procedure], model: str, task: str) -> float:
    return _lead(scenario, model) + true[_place(model, task)].score


def _place(model: str, task: str) -> tuple[int, int]:
    return MODELS.index(model), TASKS.index(task)


def _mean(rows: list[Record], name: str) -> float:
    return float(np.mean([row[name] for row in rows]))


def _is_false(scenario: Scenario, row: Record) -> bool:
    """Whether a claimed difference isn't there. Models that lack different cells are as good as others."""
    difference = _lead(scenario, row["model_a"]) - _lead(scenario, row["model_b"])
    return difference * float(row["difference"]) <= 0


def counts_of(kinds: Iterable[K], counted: Callable[[K, int], C], studies: int) -> Iterator[tuple[K, list[C]]]:
    """Yield each kind of studies with the counts of several, each made and analysed from its number by `counted`."""
    with ProcessPoolExecutor() as pool:
        for kind in kinds:
            yield kind, list(pool.map(partial(counted, kind), range(studies), chunksize=4))


def covering_zero(rows: Sequence[Record], kind: str) -> tuple[int, int]:
    """Return how many intervals of differences cover 0, and how many there are, on single tasks ("task") or on their mean ("all")."""
    covering = [row["low"] <= 0 <= row["high"] for row in rows if row["kind"] == kind]
    return sum(covering), len(covering)


def share(parts: list[tuple[int, int]]) -> str:
    """Return a share of all statements."""
    return f"{sum(part for part, _ in parts) / sum(whole for _, whole in parts):.3f}"


SCENARIOS = [
    *(Scenario(rule, seeds, curve, "normal", correlation) for rule in ("mean", "per_seed") for seeds in (2, 3, 5, 10)
      for curve in ("flat", "peak") for correlation in (0.0, 0.5, 0.9)),
    *(Scenario(rule, seeds, "peak", kind, 0.5) for rule in ("mean", "per_seed") for seeds in (2, 3, 5, 10)
      for kind in ("t", "skew", "rates")),
    *(Scenario(rule, seeds, "peak", "normal", 0.5, failing=0.2) for rule in ("mean", "per_seed") for seeds in (2, 3, 5, 10)),
    *(Scenario("mean", seeds, "peak", "normal", 0.5, shared=0.5) for seeds in (3, 5)),
    *(Scenario(rule, seeds, "peak", "normal", 0.5, lost=0.1) for rule in ("mean", "per_seed") for seeds in (3, 5)),
    *(Scenario(rule, seeds, curve, "normal", 0.5, diverging=0.3) for curve in ("peak", "end") for rule in ("mean", "per_seed")
      for seeds in (3, 5)),
    *(Scenario(rule, seeds, "peak", "normal", 0.5, failing, too_high=True) for rule in ("mean", "per_seed") for seeds in (3, 5)
      for failing in (0.0, 0.1)),
    *(Scenario("mean", seeds, "peak", "normal", 0.5, training=training) for seeds in (3, 5) for training in (0.5, 0.9)),
]  # fmt: skip


def main(studies: Annotated[int, typer.Option(help="Studies of each kind.")] = 100) -> None:
    """Measure all scenarios."""
    lines = [
        f"{studies} studies a row, of 4 models on 6 tasks at 6 rates; nominal coverage .95, false claims at most .05.",
        "",
        "| rule | seeds | curve | noise | correlation | failing | shared | missing | diverging | highest rate learns | "
        "of one training | score covered | difference covered | "
        "at the study's rates: score | difference | "
        "studies of equal models with a claim | the certificates say: score | difference | claims | "
        "p_chosen: said | true | regret, deviations: said | true | bias of the plain mean, deviations | flat: sensitivity not told from 0 |",
        f"{'|---' * 25}|",
    ]
    for scenario, counts in counts_of(SCENARIOS, counted, studies):
        row = [
            scenario.rule, str(scenario.seeds), scenario.curve, scenario.noise, f"{scenario.correlation:g}",
            f"{scenario.failing:g}", f"{scenario.shared:g}", f"{scenario.lost:g}", f"{scenario.diverging:g}",
            "no" if scenario.too_high else "yes", f"{scenario.training:g}",
            share([count.scores for count in counts]),
            share([count.differences for count in counts]),
            share([count.chosen_scores for count in counts]),
            share([count.chosen_differences for count in counts]),
            f"{np.mean([count.claims > 0 for count in counts]):.3f}",
            *(f"{own:.3f}" for own in np.mean([count.certified for count in counts], axis=0)),
            *(f"{own:.2f}" for own in np.mean([count.choices + count.regrets for count in counts], axis=0)),
            f"{np.mean([count.optimism for count in counts]) / NOISE:+.2f}",
            share([count.flat for count in counts]) if scenario.curve == "flat" else "",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(row)} |")
        print(lines[-1], flush=True)
    write_section("Calibration: intervals and claims on simulated studies", lines)


if __name__ == "__main__":
    typer.run(main)
