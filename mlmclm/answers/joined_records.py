"""Joining of records: parts of one study that were computed separately become one record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from mlmclm.analysis.results import Grid
from mlmclm.answers.outcomes import Outcomes, joined_tables
from mlmclm.answers.record import StudyRecord
from mlmclm.errors import UserError
from mlmclm.models.sources import named_models
from mlmclm.numbers import plural
from mlmclm.progress import say

MAY_DIFFER = ("name", "models", "replicates", "baseline", "per_model", "tasks", "card")
"""Keys of the study's file in which the parts of one study may differ."""


def joined(parts: Mapping[str, StudyRecord]) -> StudyRecord:
    """Return the published records of the parts of one study as one; models may overlap.

    A model that several parts have with equal weights gets the cells of all these parts. If its weights differ, because each
    part has pretrained the model, only the first part's cells are used. If two parts have different scores for a cell, the
    first part's scores are used. In both cases a message says so.

    Args:
        parts: the records, by their names in messages.

    Raises:
        UserError: the parts differ in their recipe, corpus, data or search space.
    """
    where, first = next(iter(parts.items()))
    for name, part in parts.items():
        _check_alike(where, first, name, part)
    owners: dict[str, tuple[str, str]] = {}
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    outcomes: dict[str, dict[str, pa.Table]] = {}
    labels: Mapping[str, tuple[str, ...]] = {}
    for name, part in parts.items():
        retrained = [
            model for model, sha in part.states.weights.items() if owners.setdefault(model, (sha, name))[0] != sha
        ]
        unlike = 0
        for model in retrained:
            say(f"{model}: its weights in {name} differ from those in {owners[model][1]}, whose cells alone are used")
        for row in part.rows:
            if row["model"] in retrained:
                continue
            earlier = rows.setdefault((row["model"], row["key"]), row)
            unlike += earlier["scores"] != row["scores"]
            if earlier is row and (table := part.outcomes.table_of(row)) is not None:
                outcomes.setdefault(row["task"], {}).setdefault(row["key"], table)
        if unlike:
            say(
                f"{name}: {plural(unlike, 'cell')} that an earlier part has too with slightly other scores; those of the earlier part count"
            )
        labels = {**part.outcomes.labels, **labels}
    records, computed = list(parts.values()), [part.states for part in parts.values()]
    models = {model.name: model for part in reversed(records) for model in part.facts.models}
    tasks = {task.name: task for part in reversed(records) for task in part.facts.tasks}
    grid = _grid([part.setting.grid for part in records])
    study = {**first.study, "models": _joined_models([part.study["models"] for part in records])}
    if "tasks" in study:
        study["tasks"] = list(grid.tasks)
    zero_shot = {(fact.model, fact.task): fact for part in reversed(records) for fact in part.facts.zero_shot}
    facts = replace(
        first.facts,
        models=tuple(models[name] for name in grid.models),
        tasks=tuple(tasks[name] for name in grid.tasks),
        zero_shot=tuple(zero_shot.values()),
    )
    stages = {(stage.key, stage.work.began): stage for part in computed for stage in part.stages}
    states = replace(
        computed[0],
        weights={model: sha for model, (sha, _) in owners.items()},
        task_data={task: data for part in reversed(computed) for task, data in part.task_data.items()},
        stages=tuple(stages.values()),
    )
    return replace(
        first,
        rows=list(rows.values()),
        setting=replace(
            first.setting,
            grid=grid,
            baseline=next((part.setting.baseline for part in records if part.setting.baseline is not None), None),
            chances={task: chance for part in reversed(records) for task, chance in part.setting.chances.items()},
            replicate_of={
                run: model
                for part in records
                for run, model in part.setting.replicate_of.items()
                if model in grid.models
            },
        ),
        kept=Outcomes(
            {task: joined_tables(by_key.values()) for task, by_key in outcomes.items()},
            {key: labels[key] for _, key in rows if key in labels},
        ),
        about=lambda: (facts, states),
        study=study,
        files={name: content for part in reversed(records) for name, content in part.files.items()},
    )


def _check_alike(where: str, first: StudyRecord, name: str, part: StudyRecord) -> None:
    """Raise a `UserError` with the differences of two records if they are not parts of one study."""
    differing = [
        f"{key}: {ours!r} and {theirs!r}"
        for key in dict.fromkeys((*first.study, *part.study))
        if key not in MAY_DIFFER and (ours := first.study.get(key)) != (theirs := part.study.get(key))
    ]
    our_states, their_states = first.states, part.states
    if our_states.shared != their_states.shared:
        differing.append(f"corpus, tokenizer or recipe: {our_states.shared} and {their_states.shared}")
    ours, theirs = our_states.task_data, their_states.task_data
    differing += [
        f"data of task {task}: {ours[task]} and {theirs[task]}"
        for task in ours
        if theirs.get(task, ours[task]) != ours[task]
    ]
    if differing:
        raise UserError(
            f"{where} and {name} are not parts of one study. They differ in {'; '.join(differing)}. Analyse each by itself."
        )


def _joined_models(declared: Sequence[Any]) -> Any:
    """Return the models of several files: names, or a mapping of names to sources."""
    if any(isinstance(models, Mapping) for models in declared):
        named = [models if isinstance(models, Mapping) else named_models(models) for models in declared]
        return {name: source for models in reversed(named) for name, source in models.items()}
    return list(dict.fromkeys(name for models in declared for name in models))


def _grid(grids: Sequence[Grid]) -> Grid:
    """Return the grid of all parts; a cell of it that no part has counts as missing."""
    # Each part adds rates for all of its models together. A model of several parts has therefore been tried at the rates of each.
    added: dict[tuple[str, str, str], dict[float, None]] = {}
    for grid in grids:
        for key, rates in grid.added.items():
            added.setdefault(key, {}).update(dict.fromkeys(rates))
    return Grid(
        tuple(dict.fromkeys(model for grid in grids for model in grid.models)),
        tuple(dict.fromkeys(task for grid in grids for task in grid.tasks)),
        tuple(dict.fromkeys(rate for grid in grids for rate in grid.learning_rates)),
        tuple(dict.fromkeys(seed for grid in grids for seed in grid.seeds)),
        {task: settings for grid in reversed(grids) for task, settings in grid.settings.items()},
        added={key: tuple(rates) for key, rates in added.items()},
        grows=any(grid.grows for grid in grids),
    )
