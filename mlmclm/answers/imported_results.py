"""Results of a study that another tool has run, read into a `StudyRecord`."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mlmclm.analysis.results import observed_grid, results_table
from mlmclm.analysis.selection import check_rule
from mlmclm.answers.claim_files import read_claims
from mlmclm.answers.named_facts import named_facts
from mlmclm.answers.outcomes import Outcomes
from mlmclm.answers.record import UNKNOWN_STATES, AnalysisSetting, ComputedStates, StudyRecord
from mlmclm.answers.study_results import Results
from mlmclm.arguments import known_arguments
from mlmclm.errors import UserError, unknown
from mlmclm.numbers import rate_text
from mlmclm.plans.names import ModelName, parse_name, replicates_among
from mlmclm.readers.reader import reader_of
from mlmclm.reports.study_facts import ModelFacts, StudyFacts, TaskFacts
from mlmclm.results.chance import stated_chances

SPLITS = ("test", "validation")


@known_arguments
def import_results(
    reader: str,
    path: str | Path,
    *,
    rule: str = "mean",
    baseline: str | None = None,
    split: str = "test",
    absent: str = "missing",
    models: Collection[str] = (),
    tasks: Collection[str] = (),
    learning_rates: Collection[float] = (),
    chances: Mapping[str, float] = MappingProxyType({}),
    name: str | None = None,
) -> Results:
    """Read the results of a study that another tool has run.

    Args:
        reader: the format, one of `mlmclm.readers` that has a grid of learning rates and seeds, such as `encodeval`.
        path: a folder or file in this format.
        rule: how the best learning rate is chosen: `mean`, `per_seed` or `on_test`.
        baseline: the model that the others are compared with.
        split: `test`, or `validation` to analyse validation scores in place of test scores.
        absent: how to count a run that the grid lacks: `missing`, or `diverged` as in the published study.
        models: only these; empty for all.
        tasks: only these; empty for all.
        learning_rates: only these; empty for all.
        chances: the chance level of each task (the score without a model).
        name: the name of the study in its report; by default that of the path.

    Raises:
        UserError: a name is unknown, or the files are malformed.
    """
    for kind, value, allowed in (
        ("split", split, SPLITS),
        ("kind of absent run", absent, ("missing", "diverged")),
    ):
        if value not in allowed:
            raise unknown(kind, value, allowed)
    place = Path(path)
    source = reader_of(place, reader)
    results = source.results(place)
    if absent == "diverged":
        results += list(_absent(results))
    for key, wanted in (("model", models), ("task", tasks), ("learning_rate", learning_rates)):
        present = dict.fromkeys(result[key] for result in results)
        for choice in wanted:
            if choice not in present:
                raise unknown(key.replace("_", " "), choice, sorted(present), where=str(path))
        results = [result for result in results if not wanted or result[key] in wanted]
    if not results:
        raise UserError(f"{path}: no run of these models on these tasks at these learning rates.")
    for task, level in chances.items():
        if not -1 <= level <= 1:
            raise UserError(
                f"chance level of {task}: {level:g}; scores are fractions of 1, so expected is a number up to 1."
            )
    levels = stated_chances(chances, {result["task"] for result in results})
    resolved = place.resolve()
    flags: dict[str, Collection[str | None]] = {
        "--rule": [rule],
        "--baseline": [baseline],
        "--split": [split],
        "--absent": [absent],
        "--model": models,
        "--task": tasks,
        "--lr": [rate_text(rate) for rate in learning_rates],
        "--chance": [f"{task}={level:g}" for task, level in chances.items()],
    }
    options = [shlex.join((option, value)) for option, values in flags.items() for value in values if value is not None]
    command = " ".join(["mlmclm import", reader, shlex.quote(str(path)), *options])
    rows = [_of_split(result, split) for result in results]
    grid = observed_grid(results_table(rows))
    plans = {model: plan for model in grid.models if (plan := _plan(model)) is not None}
    ranges = {row["task"]: (0.0, 1.0) for row in rows if row["metric"] != "spearman"}
    study = name or (resolved.stem if resolved.is_file() else resolved.name)

    def about() -> tuple[StudyFacts, ComputedStates]:
        kinds = {row["task"]: row for row in rows}
        facts = StudyFacts(
            name=study,
            command=command,
            models=tuple(map(_model_facts, grid.models)),
            tasks=tuple(TaskFacts(task, task, row["family"], row["metric"]) for task, row in sorted(kinds.items())),
            protocol={"rule": rule, "scores": split},
        )
        return facts, UNKNOWN_STATES

    setting = AnalysisSetting(grid, check_rule(rule), baseline, levels, replicates_among(plans), ranges)
    # Other tools keep scores of single examples for test splits alone.
    kept = source if split == "test" else Outcomes()
    return Results(StudyRecord(study, rows, setting, kept, about, read_claims))


def _model_facts(model: str) -> ModelFacts:
    """Return the facts about a model, with those of its pretraining if its name follows the grammar of names (`plans.names`)."""
    plan = _plan(model)
    return ModelFacts(model, "external", **({} if plan is None else named_facts(plan)))


def _plan(model: str) -> ModelName | None:
    """Return the plan that a model's name states; None if it doesn't follow the grammar of names."""
    with suppress(UserError):
        return parse_name(model)
    return None


def _of_split(result: dict[str, Any], split: str) -> dict[str, Any]:
    """Return a result with the scores of a split as its test scores."""
    if split == "test" or result["status"] == "diverged":
        return result
    scores = result["scores"].get(split)
    return {**result, "scores": {"validation": scores, "test": scores}}


def _absent(results: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield a diverged result for each missing run. Each model with any run on a task should have all rates and seeds of the task."""
    grids: dict[str, set[tuple[float, int]]] = {}
    present: dict[tuple[str, str], set[tuple[float, int]]] = {}
    for result in results:
        cell = result["learning_rate"], result["seed"]
        grids.setdefault(result["task"], set()).add(cell)
        present.setdefault((result["model"], result["task"]), set()).add(cell)
    kinds = {result["task"]: (result["family"], result["metric"]) for result in results}
    for (model, task), cells in sorted(present.items()):
        for rate, seed in sorted(grids[task] - cells):
            yield {
                "key": f"{model}/{task}/lr{rate_text(rate)}_sd{seed} (absent)",
                "model": model,
                "task": task,
                "family": kinds[task][0],
                "metric": kinds[task][1],
                "learning_rate": rate,
                "seed": seed,
                "status": "diverged",
                "scores": None,
            }
