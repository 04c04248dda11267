"""The comparison of runs, and the ranking of models, on scores that other tools have written; they need neither torch nor Ray."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import numpy as np

from mlmclm.analysis.effects import fold_variance
from mlmclm.analysis.model_ranks import RankedModels, TaskScores, ranking
from mlmclm.analysis.pairs import score_of_seeds
from mlmclm.analysis.selection import check_rule, picked_cells
from mlmclm.answers.comparison_of_models import Comparison, compare_examples
from mlmclm.arguments import known_arguments
from mlmclm.errors import UserError, unknown
from mlmclm.progress import Bar
from mlmclm.readers.reader import ScoredRun, reader_of
from mlmclm.results.chance import above_chance, stated_chances
from mlmclm.results.examples import GROUP, SCORES, KeptExamples, group_numbers
from mlmclm.results.intervals import estimate, holm
from mlmclm.results.measures import Array, WeightedMean
from mlmclm.results.metrics import MAIN_METRICS

SHOWN = 3
"""Maximum number of examples that a message names."""
NO_TASK = "scores"
"""Name of the only task in a format without tasks."""
_SCORE = "score"


@known_arguments
def compare(
    first: str,
    second: str,
    scores: Sequence[str | Path] = (),
    *,
    reader: str | None = None,
    tasks: Collection[str] = (),
    metric: str | None = None,
    rule: str | None = None,
    common: bool = False,
    chances: Mapping[str, float] = MappingProxyType({}),
    confidence: float = 0.95,
) -> Comparison:
    """Compare two runs on anything with a score per example; the same files always give the same numbers.

    Args:
        first: the name of a run in `scores`; without these, a file or folder that holds one run.
        second: the run that it is compared with, given in the same way.
        scores: files or folders with both runs.
        reader: the format (`mlmclm.readers`); by default it is recognised.
        tasks: only these tasks, named as in `chances`; by default all that both sides have.
        metric: a score in place of the main one.
        rule: how the learning rate is chosen where a run has several; by default `mean`.
        common: whether examples that only one side has are left out, rather than refused.
        chances: the chance level of each task (the score without a model); the task of a format without tasks is `scores`.
        confidence: of the intervals, in (0, 1).

    Returns:
        Each task's difference. The interval covers seeds and examples where a side has several seeds
            (`analysis.pairs.compare_with_seeds`); where the noise of seeds is not known, it is a paired comparison over examples
            (`analysis.pairs.compare_sides`). `p` is of the same method, and `p_holm` is corrected over the `tests` of all tasks.
            `rates_tried` is the number of learning rates from which a side's best was chosen; interval and tests ignore this choice.
            `chance` is the stated chance level, None without one, and `at_chance` lists the sides, `first` or `second`, that are not
            above it: no verdict is based on their lead.

    Raises:
        UserError: a file is malformed, the sides have different examples, a name is unknown, or a rule has nothing to choose.
    """
    if not 0 < confidence < 1:
        raise UserError(f"confidence must be between 0 and 1, not {confidence}.")
    loaded, told_by, unit = _read(scores or (first, second), reader, {first, second} if scores else None)
    if scores:
        pairs = _of_names((first, second), [run for runs in loaded for run in runs], scores, reader)
    else:
        pairs = _only_run(first, loaded[0]), _only_run(second, loaded[1])
    sides = [by_task(runs) for runs in pairs]
    if rule is not None and not any(
        len({run.learning_rate for run in runs}) > 1 for side in sides for runs in side.values()
    ):
        raise UserError(
            f"rule {check_rule(rule)}: {first} and {second} have no task with several learning rates to choose from; leave the rule out."
        )
    labels, left_out = (first, second), dict[str, str]()
    wanted = wanted_tasks([*sides[0], *sides[1]], tasks)
    for side, opposite, name in ((0, 1, first), (1, 0, second)):
        left_out |= {
            task: f"only {name} has it" for task in wanted if task in sides[side] and task not in sides[opposite]
        }
    both = [task for task in wanted if task in sides[0] and task in sides[1]]
    if not both:
        raise UserError(
            f"{first} and {second} have no task in common: {_listed(list(sides[0]))} and {_listed(list(sides[1]))}."
        )
    stated_chances(chances, both)
    rows, errors = [], []
    with Bar("comparing", len(both), unit="tasks", brief=1.0) as bar:
        for position, task in enumerate(both, 1):
            bar.update(position)
            pair = sides[0][task], sides[1][task]
            try:
                chosen = metric or common_metric(labels, pair, task)
                seeds = [
                    seeds_at_rate(label, runs, chosen, task, rule) for label, runs in zip(labels, pair, strict=True)
                ]
            except UserError as error:  # other tasks may still have a score to compare
                errors.append(error)
                left_out[task] = str(error)
                continue
            tried = [
                len({run.learning_rate for run in runs if run.metric == chosen or not run.metric}) for runs in pair
            ]
            one, other, seeds_left_out = _same_seeds(labels, seeds, task)
            (one, other), dropped = same_examples(labels, (one, other), task, told_by, unit, common)
            level = chances.get(task)
            if level is not None and level > 1 >= max(abs(run.scores).max() for run in (*one, *other)):
                raise UserError(
                    f"chance level of {task}: {level:g}; the scores of its examples are at most 1, so expected is a number up to 1."
                )
            groups = groups_of_examples(labels, (one, other))
            first_kept, second_kept = (
                [_kept(label, run, groups) for run in runs] for label, runs in zip(labels, (one, other), strict=True)
            )
            rows.append(
                compare_examples(task, first_kept, second_kept, _SCORE, confidence, seeds=True)
                | {"metric": chosen}
                | {"seeds_left_out": seeds_left_out, "examples_left_out": dropped, "rates_tried": max(tried)}
                | _standing((one, other), groups, level, confidence)
            )
    if errors and (tasks or not rows):
        raise errors[0]
    corrected = holm([row["p"] for row in rows])
    tests = sum(not math.isnan(p) for p in corrected)
    rows = [row | {"p_holm": p, "tests": tests} for row, p in zip(rows, corrected, strict=True)]
    return Comparison(rows, left_out, unit=unit, sides=(str(first), str(second)))


class RankingOfScores(NamedTuple):
    """Models in order.

    Attributes:
        tasks: the tasks that the means are over, each with the name of its score.
        examples: the number of examples by task, or of tasks where the format has no examples.
        unit: what has a score: `example` or `task`.
        seeds: the smallest and the largest number of a model's seeds on a task.
        left_out: the reason why a task is left out, by its name.
    """

    ranking: RankedModels
    tasks: Mapping[str, str]
    examples: Mapping[str, int]
    unit: str
    seeds: tuple[int, int]
    left_out: Mapping[str, str]


def rank(
    paths: Sequence[str | Path],
    *,
    reader: str | None = None,
    tasks: Collection[str] = (),
    metric: str | None = None,
    rule: str | None = None,
    common: bool = False,
    confidence: float = 0.95,
) -> RankingOfScores:
    """Rank the models of files or folders by their means over the tasks that all of them have.

    Args:
        paths: files or folders of scores, each with one model or several.
        reader, tasks, metric, rule, common, confidence: as in `compare`.

    Raises:
        UserError: a file is malformed, there are fewer than two models, they have no task in common, or different examples.
    """
    loaded, told_by, unit = _read(paths, reader)
    times = Counter(name for runs in loaded for name in {run.run for run in runs})
    sides: dict[str, dict[str, list[ScoredRun]]] = {}
    for path, runs in zip(paths, loaded, strict=True):
        for name in dict.fromkeys(run.run for run in runs):
            label = name if times[name] == 1 else f"{path}: {name}"
            sides[label] = by_task([run for run in runs if run.run == name])
    if len(sides) < 2:
        raise UserError(
            f"{', '.join(map(str, paths))}: {', '.join(sides) or 'no model'}; a ranking needs two models or more."
        )
    left_out, kept, scores, examples, counts = {}, {}, [], {}, set[int]()
    for task in wanted_tasks((task for side in sides.values() for task in side), tasks):
        if lacking := [label for label, side in sides.items() if task not in side]:
            left_out[task] = f"{', '.join(lacking[:3])}{', ...' if len(lacking) > 3 else ''} lack it"
            continue
        runs_by_side = [side[task] for side in sides.values()]
        chosen = metric or common_metric(list(sides), runs_by_side, task)
        seeds = [
            list(seeds_at_rate(label, runs, chosen, task, rule).values())
            for label, runs in zip(sides, runs_by_side, strict=True)
        ]
        seeds, _ = same_examples(list(sides), seeds, task, told_by, unit, common)
        rows = [np.stack([run.scores for run in runs]) for runs in seeds]
        if rows[0].shape[1] < 2:
            raise UserError(f"{task}: one {unit} is too little to rank on.")
        scores.append(TaskScores(rows, groups_of_examples(list(sides), seeds)))
        kept[task], examples[task] = chosen, rows[0].shape[1]
        counts |= {len(side) for side in rows}
    if not kept:
        raise UserError(
            f"the models have no task in common: {'; '.join(f'{task}: {why}' for task, why in left_out.items())}."
        )
    return RankingOfScores(
        ranking(list(sides), scores, confidence), kept, examples, unit, (min(counts), max(counts)), left_out
    )


def _read(
    paths: Sequence[str | Path], reader: str | None, only: Collection[str] | None = None
) -> tuple[list[list[ScoredRun]], str, str]:
    """Return the runs of each path, the keys that tell examples apart, and what has a score: `example` or `task`."""
    sources = [reader_of(Path(path), reader) for path in paths]
    loaded = [source.runs(Path(path), only) for source, path in zip(sources, paths, strict=True)]
    units = {source.unit for source in sources}
    if len(units) > 1:
        raise UserError(
            f"{', '.join(map(str, paths))}: some have scores of examples and others scores of tasks; take them apart."
        )
    return loaded, " or ".join(sorted({source.told_by for source in sources})), units.pop()


def _of_names(
    names: tuple[str, str], runs: Sequence[ScoredRun], paths: Sequence[str | Path], reader: str | None
) -> tuple[list[ScoredRun], list[ScoredRun]]:
    """Return the runs of both names."""
    run_names = {run.run for run in runs}
    for name in names:
        if name not in run_names:
            all_names = {label for path in paths for label in reader_of(Path(path), reader).names(Path(path))}
            raise unknown("run", name, sorted(all_names), where=", ".join(map(str, paths)))
    first, second = ([run for run in runs if run.run == name] for name in names)
    return first, second


def _only_run(path: str, runs: Sequence[ScoredRun]) -> list[ScoredRun]:
    names = list(dict.fromkeys(run.run for run in runs))
    if len(names) != 1:
        raise UserError(
            f"{path}: it has {len(names)} runs ({_listed(names)}). Name two of them: mlmclm compare RUN RUN --scores {path}"
        )
    return list(runs)


def by_task(runs: Sequence[ScoredRun]) -> dict[str, list[ScoredRun]]:
    runs_by_task: dict[str, list[ScoredRun]] = {}
    places = set()
    for run in runs:
        if run.place in places:
            seed = f", seed {run.seed}" if run.seed else ""
            raise UserError(
                f"{run.run}: {run.task or NO_TASK} has two sets of {run.metric}{seed}. Give the path of one of them."
            )
        places.add(run.place)
        runs_by_task.setdefault(run.task or NO_TASK, []).append(run)
    return runs_by_task


def wanted_tasks(known: Iterable[str], chosen: Collection[str]) -> list[str]:
    """Return the chosen ones of the known tasks, by default all; a `UserError` if one is unknown."""
    names = list(dict.fromkeys(known))
    for task in chosen:
        if task not in names:
            raise unknown("task", task, sorted(names))
    return [task for task in names if not chosen or task in chosen]


def common_metric(labels: Sequence[str], sides: Sequence[Sequence[ScoredRun]], task: str) -> str:
    """Return the metric by which to compare a task: the only one that all sides have, or the main one among several."""
    first, *rest = ([*dict.fromkeys(run.metric for run in runs)] for runs in sides)
    both = [name for name in first if all(name in metrics for metrics in rest)]
    if not both:
        place = next(place for place, names in enumerate(rest, 1) if not set(first) & set(names) or place == len(rest))
        raise UserError(
            f"{task}: no metric in common; {labels[0]} has {_listed(first)}, {labels[place]} {_listed(rest[place - 1])}."
        )
    for main in ("main_score", *MAIN_METRICS):
        for name in both:
            if name.partition(",")[0] == main:  # without the filter of lm-evaluation-harness
                return name
    if len(both) > 1:
        raise UserError(f"{task}: choose one of its scores with --metric: {_listed(both, len(both))}.")
    return both[0]


def seeds_at_rate(
    label: str, runs: Sequence[ScoredRun], metric: str, task: str, rule: str | None
) -> dict[str, ScoredRun]:
    """Return a side's run of each seed, at the chosen learning rate where there are several."""
    scored = [run for run in runs if run.metric == metric or not run.metric]
    if not scored:
        raise unknown("metric", metric, sorted({run.metric for run in runs}), where=f"{label}, {task}")
    for run in scored:
        if run.fault:
            usable = sorted({run.metric for run in runs} - {run.metric for run in runs if run.fault})
            remedy = f" --metric names another score: {_listed(usable, len(usable))}." if usable else ""
            raise UserError(f"{run.fault}{remedy}")
    if len({run.learning_rate for run in scored}) > 1:
        scored = _chosen(label, scored, task, rule)
    return {run.seed: run for run in scored}


def _chosen(label: str, runs: Sequence[ScoredRun], task: str, rule: str | None) -> list[ScoredRun]:
    """Return the runs at the best learning rate, by `rule`."""

    def row(rate: float | None, seed: str | None, status: str) -> dict[str, Any]:
        cell = {"model": label, "task": task, "setting": "", "learning_rate": rate, "status": status}
        return cell | dict.fromkeys(("seed_head", "seed_order", "seed_dropout"), int(seed or 0))

    rows = []
    for place, run in enumerate(runs):
        if run.learning_rate is None or run.validation is None:
            raise UserError(f"{label}, {task}: a run without a validation score; the learning rate cannot be chosen.")
        scores = {"validation": run.validation, "test": float(run.scores.mean()), "place": place}
        rows.append(row(run.learning_rate, run.seed, "ok") | scores)
    # The results are final, so a rate's missing seed counts as diverged: a mean over its other seeds would flatter the rate.
    present = {(run.learning_rate, run.seed) for run in runs}
    grid = itertools.product({run.learning_rate for run in runs}, {run.seed for run in runs})
    rows += [row(*cell, "diverged") for cell in grid if cell not in present]
    return [runs[row["place"]] for row in picked_cells(rows, check_rule(rule or "mean"))]


def _same_seeds(
    labels: tuple[str, str], sides: Sequence[Mapping[str, ScoredRun]], task: str
) -> tuple[list[ScoredRun], list[ScoredRun], dict[str, list[str]]]:
    """Pair the sides by seed; returns also the seeds that only one side has."""
    one, other = sides
    both = [seed for seed in one if seed in other]
    if not both:
        raise UserError(
            f"{task}: no seed in common; {labels[0]} has {_listed(list(one))}, {labels[1]} {_listed(list(other))}."
        )
    left = {label: [seed for seed in side if seed not in both] for label, side in zip(labels, sides, strict=True)}
    return (
        [one[seed] for seed in both],
        [other[seed] for seed in both],
        {name: seeds for name, seeds in left.items() if seeds},
    )


def same_examples(
    labels: Sequence[str],
    sides: Sequence[list[ScoredRun]],
    task: str,
    told_by: str,
    unit: str,
    common: bool,
) -> tuple[list[list[ScoredRun]], int]:
    """Return the sides with their examples in one order, and how many examples are left out.

    Raises:
        UserError: the sides have different examples, and `common` is not given, or they have none in common.
    """
    labelled = [(label, run) for label, runs in zip(labels, sides, strict=True) for run in runs]
    wanted = dict.fromkeys(labelled[0][1].identities)
    union = dict(wanted)
    for label, run in labelled[1:]:
        identities = dict.fromkeys(run.identities)
        if not common and identities.keys() != wanted.keys():
            _refuse(labelled[0], (label, run), list(wanted), list(identities), task, told_by, unit)
        union |= identities
        wanted = {identity: None for identity in wanted if identity in identities}
    if not wanted:
        raise UserError(f"{task}: {' and '.join(labels)} have no {unit} in common.")
    return [[run.only(list(wanted)) for run in runs] for runs in sides], len(union) - len(wanted)


def _refuse(
    first: tuple[str, ScoredRun],
    second: tuple[str, ScoredRun],
    one: Sequence[tuple[str, str]],
    other: Sequence[tuple[str, str]],
    task: str,
    told_by: str,
    unit: str,
) -> NoReturn:
    """Raise the error that two runs have different examples; it names some of them."""
    sides = [f"{label}, seed {run.seed}" if run.seed else label for label, run in (first, second)]
    names = [{name for name, _ in identities} for identities in (one, other)]
    parts = []
    for identities, other_names, label in ((one, names[1], sides[0]), (other, names[0], sides[1])):
        lacking = [name for name, _ in identities if name not in other_names]
        if lacking:
            parts.append(f"{len(lacking):,} only in {label} ({_listed(lacking)})")
    both = set(one) & set(other)
    changed = [identity[0] for identity in one if identity[0] in names[1] and identity not in both]
    if changed:
        parts.append(f"{len(changed):,} of the same name are others, by their {told_by} ({_listed(changed)})")
    remedy = f" --common compares the {len(both):,} that both have." if len(both) > 1 else ""
    raise UserError(
        f"{task}: {sides[0]} and {sides[1]} cannot be paired, as their {unit}s differ: {'; '.join(parts)}.{remedy}"
    )


def _standing(
    sides: tuple[Sequence[ScoredRun], Sequence[ScoredRun]],
    groups: Array | None,
    chance: float | None,
    confidence: float,
) -> dict[str, Any]:
    """Return the chance level of a task, and the sides whose intervals are not entirely above it."""
    if chance is None:
        return {"chance": None, "at_chance": []}
    at_chance = []
    for side, runs in zip(("first", "second"), sides, strict=True):
        effect = score_of_seeds([WeightedMean(run.scores) for run in runs], len(runs[0].examples), groups)
        low = effect.score(confidence).low
        if math.isnan(low) and effect.folds is not None:  # the noise of seeds is not known
            variance, freedom = fold_variance(effect.folds)
            low = estimate(effect.seeds.value, math.sqrt(variance) or math.nan, freedom, confidence=confidence).low
        if above_chance(effect.seeds.value, low, chance) == "no":
            at_chance.append(side)
    return {"chance": chance, "at_chance": at_chance}


def groups_of_examples(labels: Sequence[str], sides: Sequence[Sequence[ScoredRun]]) -> Array | None:
    """Return the number of each example's group, or None without groups; a `UserError` if the runs group examples differently."""
    grouped = [(label, run.groups) for label, runs in zip(labels, sides, strict=True) for run in runs if run.groups]
    for label, groups in grouped[1:]:
        if list(groups) != list(grouped[0][1]):
            place = next(place for place, (a, b) in enumerate(zip(groups, grouped[0][1], strict=True)) if a != b)
            example = sides[0][0].examples[place]
            raise UserError(
                f"{sides[0][0].task or NO_TASK}: example {example!r} is in group {groups[place]!r} for {label} and in "
                f"{grouped[0][1][place]!r} for {grouped[0][0]}."
            )
    return group_numbers(grouped[0][1]) if grouped else None


def _kept(label: str, run: ScoredRun, groups: Array | None) -> KeptExamples:
    """Return a run's scores in the form of a cell's examples."""
    result = {"key": label, "task": run.task or NO_TASK, "learning_rate": run.learning_rate}
    return KeptExamples(result, {SCORES: run.scores} | ({} if groups is None else {GROUP: groups}), ())


def _listed(names: Sequence[str], most: int = SHOWN) -> str:
    shown = ", ".join(name or "(no name)" for name in names[:most])
    return f"{shown}, ..." if len(names) > most else shown or "(none)"
