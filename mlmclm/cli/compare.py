"""`mlmclm compare`: compare two models, two cells, or two runs of any other tool, on the same test examples."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from mlmclm.cli import options
from mlmclm.cli.output import print_json, show, show_table
from mlmclm.errors import UserError
from mlmclm.numbers import without_nan

if TYPE_CHECKING:
    from mlmclm.answers.comparison_of_models import Comparison


_TESTS = {"mcnemar": "McNemar's mid-p test", "t": "a paired t test"}


def compare(
    first: Annotated[
        str,
        Argument(
            help="A model of the study; a run in the files of --scores; without either, a file or folder of scores, or the key of a cell."
        ),
    ],
    second: Annotated[str, Argument(help="The other.")],
    study: Annotated[
        str | None,
        Option(
            metavar="NAME|FILE",
            help="The study or sweep with the models, by its name in the store or its file; each model is taken at its best learning rate, "
            "or rates by seed.",
        ),
    ] = None,
    task: options.OneTask = None,
    metric: options.Metric = None,
    rule: options.Rule = None,
    scores: Annotated[
        list[Path] | None,
        Option(
            metavar="FILE|FOLDER",
            help="Scores that another tool has written, with both runs in it; may be given several times.",
        ),
    ] = None,
    reader: options.Reader = None,
    common: options.Common = False,
    chance: options.Chance = None,
    store: options.Store = options.DEFAULT_STORE,
    data: options.Data = None,
    task_dir: options.TaskDir = None,
    as_json: options.Json = False,
) -> None:
    """Compares two models, or two runs of any other tool, on the same test examples, and computes no cell.

    For two models of a study, prints the report's differences (first minus second), each with one interval that covers other seeds, the
    choice of the learning rate, and other test examples. With a single seed, and for two cells, the interval covers other test examples
    alone: McNemar's test for answers that are right or wrong, else a paired t test. Examples of one group count together.

    A cell's key is the name of its file in the store's cells/.

    Scores of other tools are a CSV, JSON Lines or Parquet file with the columns run, example and score, and group where examples
    belong together; logged samples of lm-evaluation-harness; results of mteb (compared over tasks); or results of EncodEval.

    Example: mlmclm compare 1m-clm-1k 1m-mlm40-1k --study quickstart --task pydocs-kind

    Example: mlmclm compare mine theirs --scores scores.csv
    """
    # `Path.exists` raises an error for text that is too long for a file's name.
    if study is None and (scores or reader or any(os.path.exists(side) for side in (first, second))):  # noqa: PTH110
        from mlmclm.answers.comparison_of_scores import compare as compare_scores

        comparison = compare_scores(
            first,
            second,
            scores or (),
            reader=reader,
            tasks=task or (),
            metric=metric,
            rule=rule,
            common=common,
            chances=options.chance_levels(chance or ()),
        )
        _print(first, second, comparison, {"left_out": comparison.left_out, "unit": comparison.unit}, as_json=as_json)
        return
    for option, value in (("--scores", scores), ("--reader", reader), ("--common", common), ("--chance", chance)):
        if value:
            has = "chance levels" if option == "--chance" else "their examples"
            raise UserError(f"{option}: cells have {has} in the store; the option is for scores of other tools.")
    from mlmclm.studies.api import open as open_store

    opened = open_store(store, data=data, task_dirs=task_dir)
    if study is not None:
        comparison = opened.results(study, rule=rule).compare(first, second, tasks=task, metric=metric, where=study)
    elif task:
        raise UserError("--task: two cells have a task already; the option is for models of a --study.")
    elif rule is not None:
        raise UserError("--rule: two cells have a learning rate already; the option is for models of a --study.")
    else:
        comparison = opened.compare_cells(first, second, metric=metric)
    over = list(map(without_nan, comparison.over))
    more = {"over": over, "left_out": comparison.left_out, "notes": comparison.notes}
    _print(first, second, comparison, more, as_json=as_json)


def _print(first: str, second: str, comparison: Comparison, more: Mapping[str, Any], *, as_json: bool) -> None:
    if not as_json:
        _show(first, second, comparison)
        return
    print_json({"first": first, "second": second, "tasks": list(map(without_nan, comparison.rows)), **more})


def _show(first: str, second: str, comparison: Comparison) -> None:
    """Print a comparison of models, cells or scores."""
    from mlmclm.analysis.selection import rates_text
    from mlmclm.reports import text
    from mlmclm.reports.wording import chance_unknown

    task_rows = comparison.rows
    rows, of_tool = [*comparison.over, *task_rows], any("rates_tried" in row for row in task_rows)
    corrected, tests = any("p_holm" in row for row in rows), rows[0].get("tests", 0)
    lines = []
    for row in rows:
        sides, scale = [], _scale(row)
        for side in ("first", "second"):
            mean = f"; mean {text.points(row[f'{side}_mean'])}" if f"{side}_mean" in row else ""
            used = (
                (rates_text(row[f"{side}_rates"]), *row.get(f"{side}_settings", ())) if f"{side}_rates" in row else ()
            )
            sides.append(text.points(scale * row[side]) + mean + (f" ({', '.join(used)})" if used else ""))
        name = text.family(row["task"]) if row.get("kind") == "family" else row["task"]
        metric = text.metric(row["metric"]) if "metric" in row else f"mean of {row['tasks']}"
        difference = text.estimate(*(scale * row[end] for end in ("difference", "low", "high")), sign=True)
        p_values = (row["p"], *((row.get("p_holm", math.nan),) if corrected else ()))
        lines.append((name, metric, *sides, difference, *map(text.probability, p_values)))
    show(f"first:  {first}\nsecond: {second}")
    if corrected:
        show(comparison.verdict, style="bold")
    confidence = f"{rows[0]['confidence']:.0%}".replace("%", " %")
    p_columns = ("p", *(("p after Holm",) if corrected else ()))
    show_table(("task", "score", "first", "second", f"difference [{confidence}]", *p_columns), lines, drop=("score",))
    if all(_scale(row) == 1 for row in rows):
        show("Scores are points of 100.")
    for describe, described in ((_number_shown, rows), (_covered, rows), (_tested, task_rows), (_choice, task_rows)):
        for sentence, tasks in _by(described, describe, comparison.unit).items():
            show(f"{sentence}: {', '.join(tasks)}")
    if corrected and tests > 1:
        corrected_over = f"the {tests} tasks" if of_tool else "all pairs of models and all tasks of the study"
        show(f"p after Holm is corrected over {corrected_over}.")
    if comparison.pretraining:
        show(f"Based on {comparison.pretraining} of each model.")
    lacking = [row["task"] for row in task_rows if row.get("chance", 0) is None]
    if lacking and comparison.unit == "example":
        show(f"{chance_unknown(lacking)} --chance TASK=VALUE states it.")
    for row in task_rows:
        if row.get("at_chance"):
            # The compared score may not be the one whose chance level is known.
            chance_metric = row.get("chance_of", row["metric"])
            by = "" if chance_metric == row["metric"] else f" in {text.metric(chance_metric)}"
            models = text.listing([{"first": first, "second": second}.get(side, side) for side in row["at_chance"]])
            lead = ", whose lead counts in no verdict" if of_tool else ""
            show(f"{row['task']}: not above chance{by} ({text.points(_scale(row) * row['chance'])}): {models}{lead}")
        if row.get("constant"):
            show(f"{row['task']}: the same prediction for every example: {text.listing(row['constant'])}")
        for label, seeds in row.get("seeds_left_out", {}).items():
            show(f"{row['task']}: seeds that only {label} has are left out: {', '.join(seeds)}")
        if row.get("examples_left_out"):
            show(f"{row['task']}: {row['examples_left_out']:,} {comparison.unit}s that only one side has are left out")
    for note in comparison.notes:
        show(note)
    for task, reason in comparison.left_out.items():
        show(f"{task} is left out: {reason}")


def _scale(row: Mapping[str, Any]) -> float:
    """Return the factor of scores in the table, which shows points: 0.01 for scores above 1, which it then shows unscaled, else 1."""
    return 1.0 if max(abs(row["first"]), abs(row["second"])) <= 1 else 0.01


def _by(
    rows: Sequence[Mapping[str, Any]], describe: Callable[[Mapping[str, Any], str], str], unit: str
) -> dict[str, list[str]]:
    """Return the tasks grouped by the sentence that describes their rows."""
    tasks: dict[str, list[str]] = {}
    for row in rows:
        if sentence := describe(row, unit):
            tasks.setdefault(sentence, []).append(row["task"])
    return tasks


def _number_shown(row: Mapping[str, Any], unit: str) -> str:
    """Return, in words, which scores of the two sides the table shows."""
    if "rates_tried" in row:
        return f"Means over {row['examples']:,} {unit}s"
    if "p_holm" in row:
        return "Scores as in the report, of the chosen runs that learn, and plain means of all chosen runs' test scores"
    return "Plain means of the test scores"


def _covered(row: Mapping[str, Any], unit: str) -> str:
    """Return, in words, which sources of noise a row's interval covers."""
    if row["covers"] == "seeds and examples":
        return f"the interval covers other seeds and other test {unit}s"
    if row["covers"] == "seeds":
        return "the interval covers other seeds; the examples are not kept, so their noise is not known"
    if not row["covers"]:
        return "no interval, as the noise of seeds is not known on some of its tasks"
    alone = f"the interval covers other test {unit}s alone"
    if row["equal_seeds"]:
        return f"{alone}; the seeds give equal scores; their noise is not known"
    if row["seeds"] == 1:
        return f"{alone}; one seed; what other seeds would give is not known"
    return f"{alone}, not other seeds than these {row['seeds']}"


def _tested(row: Mapping[str, Any], unit: str) -> str:
    """Return, in words, which test over examples gave the p value, and how examples are grouped; empty for other rows."""
    test = f"p by {_TESTS[row['test']]}, seeds of each side {row['seeds']}" if "test" in row else ""
    groups = f"{row['examples']:,} {unit}s in {row['groups']:,} groups" if row.get("groups") else ""
    return "; ".join(filter(None, (test, groups)))


def _choice(row: Mapping[str, Any], _: str) -> str:
    """Return a note that the learning rate was chosen on scores that share the noise of those compared; empty if none was chosen."""
    if row.get("rates_tried", 1) == 1:
        return ""
    return (
        f"the best of {row['rates_tried']} learning rates was chosen on scores that share the noise of those compared, which neither interval nor "
        "p knows; `mlmclm import` compares models corrected for the choice"
    )
