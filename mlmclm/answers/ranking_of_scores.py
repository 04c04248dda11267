"""The ranking of models by scores that other tools have written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mlmclm.analysis.model_ranks import RankedModels, TaskScores, ranking
from mlmclm.answers.comparison_of_scores import (
    by_task,
    common_metric,
    groups_of_examples,
    read,
    same_examples,
    seeds_at_rate,
    wanted_tasks,
)
from mlmclm.errors import UserError
from mlmclm.readers.reader import ScoredRun


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
    loaded = [(path, *read(Path(path), reader)) for path in paths]
    units = {source.unit for _, source, _ in loaded}
    if len(units) > 1:
        raise UserError("some files have scores of examples and others scores of tasks; rank them apart.")
    told_by, unit = " or ".join(sorted({source.told_by for _, source, _ in loaded})), units.pop()
    times = Counter(name for _, _, runs in loaded for name in {run.run for run in runs})
    sides: dict[str, dict[str, list[ScoredRun]]] = {}
    for path, _, runs in loaded:
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
