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
    task: Annotated[
        list[str] | None, Option(help="One of the study's tasks, in place of all; may be given several times.")
    ] = None,
    metric: Annotated[str | None, Option(help="A score in place of the tasks' main one.")] = None,
    rule: options.Rule = None,
    scores: Annotated[
        list[Path] | None,
        Option(
            metavar="FILE|FOLDER",
            help="Scores that another tool has written, with both runs in it; may be given several times.",
        ),
    ] = None,
    reader: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="The format of the scores: table, lm-eval, mteb or encodeval; by default it is recognised.",
        ),
    ] = None,
    common: Annotated[
        bool, Option("--common", help="Leave out the examples that only one side has; without this they are an error.")
    ] = False,
    chance: options.Chance = None,
    store: options.Store = options.DEFAULT_STORE,
    data: options.Data = None,
    task_dir: options.TaskDir = None,
    as_json: options.Json = False,
) -> None:
    """Compares two models, or two runs of any other tool, on the same test examples, and computes no cell.

    Of two models of a study, prints the differences of the report (first minus second): one interval for other seeds, the choice of
    the learning rate, and other test examples. Where there is one seed, and for two cells, the interval covers other test
    examples alone: McNemar's test for answers that are right or wrong, else a paired t test. Examples of one group count together.

    A cell's key is the name of its file in the store's cells/.

    Scores of other tools are a CSV, JSON Lines or Parquet file with the columns run, example and score, and group where examples
    belong together; logged samples of
    lm-evaluation-harness, results of mteb (compared over tasks), or of EncodEval.

    Example: mlmclm compare 1m-clm-1k 1m-mlm40-1k --study quickstart --task pydocs-kind

    Example: mlmclm compare mine theirs --scores scores.csv
    """
    # `Path.exists` raises where a name is too long for a file's.
    if study is None and (scores or reader or any(os.path.exists(side) for side in (first, second))):  # noqa: PTH110
        from mlmclm.answers.comparison_of_scores import compare as compare_scores

        of_files = compare_scores(
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
        _print_scores(first, second, of_files, as_json=as_json)
        return
    for option, value in (("--scores", scores), ("--reader", reader), ("--common", common), ("--chance", chance)):
        if value:
            has = "chance levels" if option == "--chance" else "their examples"
            raise UserError(f"{option}: cells have {has} in the store; the option is for scores of other tools.")
    from mlmclm.studies.api import open as open_store

    there = open_store(store, data=data, task_dirs=task_dir)
    if study is not None:
        found = there.results(study, rule=rule).compare(first, second, tasks=task, metric=metric, where=study)
    elif task:
        raise UserError("--task: two cells have a task already; the option is for models of a --study.")
    elif rule is not None:
        raise UserError("--rule: two cells have a learning rate already; the option is for models of a --study.")
    else:
        found = there.compare_cells(first, second, metric=metric)
    if as_json:
        _print_json(
            first,
            second,
            found.rows,
            over=list(map(without_nan, found.over)),
            left_out=found.left_out,
            notes=found.notes,
        )
    else:
        _show(first, second, found)


def _print_json(first: str, second: str, rows: Sequence[Mapping[str, Any]], **others: Any) -> None:
    print_json({"first": first, "second": second, "tasks": list(map(without_nan, rows)), **others})


def _print_scores(first: str, second: str, found: Comparison, *, as_json: bool) -> None:
    """Print the comparison of scores that another tool has written."""
    from mlmclm.analysis.selection import rates_text
    from mlmclm.reports import text

    if as_json:
        _print_json(first, second, found.rows, left_out=found.left_out, unit=found.unit)
        return
    show(f"first:  {first}\nsecond: {second}")
    units = f"{found.unit}s"
    confidence = f"{found.rows[0]['confidence']:.0%}".replace("%", " %")
    lines, tests = [], found.rows[0]["tests"]
    p_columns = {"p": "p"} | ({"p_holm": "p after Holm"} if tests > 1 else {})
    for row in found.rows:
        scale = _scale(row)
        rates = [f" ({rates_text(row[name])})" if name in row else "" for name in ("first_rates", "second_rates")]
        scores = [text.points(scale * row[name]) + rate for name, rate in zip(("first", "second"), rates, strict=True)]
        difference = text.estimate(*(scale * row[name] for name in ("difference", "low", "high")), sign=True)
        p_values = [text.probability(row[name]) for name in p_columns]
        lines.append([row["task"], row["metric"], *scores, difference, *p_values, f"{row['examples']:,}"])
    columns = ["task", "score", "first", "second", f"difference [{confidence}]", *p_columns.values(), units]
    show_table(columns, lines, drop=("score", units))
    unit = "Scores are points of 100, paired" if all(_scale(row) == 1 for row in found.rows) else "Paired"
    show(f"{unit} over {units}.")
    lacking = [row["task"] for row in found.rows if row["chance"] is None]
    if lacking and found.unit == "example":
        known = (
            f"The chance level of {text.listing(lacking)} is not known, so scores at chance are not recognised there."
        )
        show(f"{known} --chance TASK=VALUE states it.")
    if tests > 1:
        show(f"What is said of a task goes by p after Holm's correction over {tests} tasks.")
    for row in found.rows:
        for sentence in _about(row, found.unit):
            show(f"{row['task']}: {sentence}")
    for what, reason in found.left_out.items():
        show(f"{what} is left out: {reason}")


def _scale(row: Mapping[str, Any]) -> float:
    """Return the factor by which scores are shown as points: those that are no fractions of 1 are shown as they are."""
    return 1.0 if max(abs(row["first"]), abs(row["second"])) <= 1 else 0.01


def _about(row: Mapping[str, Any], unit: str) -> list[str]:
    """Return what is to be said about a comparison of scores, in sentences."""
    from mlmclm.reports import text

    seeds = row["covers"] != "examples"
    noise = f"other seeds, of which there are {row['seeds']} a side, and other {unit}s" if seeds else f"other {unit}s"
    ahead = "first" if row["difference"] > 0 else "second"
    if row["p_holm"] < 1 - row["confidence"] and ahead in row["at_chance"]:
        found = [f"the {ahead} scores higher, but is not above chance, so no verdict is based on it"]
    elif row["p_holm"] < 1 - row["confidence"]:
        found = [f"the {ahead} scores higher than {noise} would explain"]
    elif math.isnan(row["low"]):
        found = ["there is no clear difference, and no interval"]
    else:
        found = [f"there is no clear difference; the interval covers {noise}"]
    if row["at_chance"]:
        sides = text.listing([f"the {side}" for side in row["at_chance"]])
        found.append(f"not above chance ({text.points(_scale(row) * row['chance'])}): {sides}")
    if not seeds:
        found.append(f"p is {_TESTS[row['test']]}'s")
        if row["seeds"] > 1:
            found.append("the seeds give equal scores; their noise is not known")
        else:
            found.append("one run a side; what other seeds would give is not known")
    if row["rates_tried"] > 1:
        found.append(
            f"the best of {row['rates_tried']} learning rates was chosen on scores that share the noise of those compared, which "
            "neither interval nor p knows; `mlmclm import` compares models corrected for the choice"
        )
    if row["groups"]:
        found.append(f"{row['examples']:,} {unit}s in {row['groups']:,} groups, each of which counts as a whole")
    for label, seeds in row["seeds_left_out"].items():
        found.append(f"seeds that only {label} has are left out: {', '.join(seeds)}")
    if row["examples_left_out"]:
        found.append(f"{row['examples_left_out']:,} {unit}s that only one side has are left out")
    return found


def _show(first: str, second: str, found: Comparison) -> None:
    """Print the comparison of two models of a study, or of two cells."""
    from mlmclm.analysis.selection import rates_text
    from mlmclm.reports import text

    rows = [*found.over, *found.rows]
    corrected = any("p_holm" in row for row in rows)
    confidence = f"{rows[0]['confidence']:.0%}".replace("%", " %")
    lines = []
    for row in rows:
        rates = [
            f" ({', '.join((rates_text(row[f'{side}_rates']), *row.get(f'{side}_settings', ())))})"
            if f"{side}_rates" in row
            else ""
            for side in ("first", "second")
        ]
        means = [
            f"; mean {text.points(row[f'{side}_mean'])}" if f"{side}_mean" in row else ""
            for side in ("first", "second")
        ]
        scores = [
            text.points(row[side]) + mean + rate
            for side, mean, rate in zip(("first", "second"), means, rates, strict=True)
        ]
        name = text.family(row["task"]) if row.get("kind") == "family" else row["task"]
        holm = (text.probability(row.get("p_holm", float("nan"))),) if corrected else ()
        difference = text.estimate(row["difference"], row["low"], row["high"], sign=True)
        metric = text.metric(row["metric"]) if "metric" in row else f"mean of {row['tasks']}"
        lines.append((name, metric, *scores, difference, text.probability(row["p"]), *holm))
    show(f"first:  {first}\nsecond: {second}")
    if corrected:
        show(found.verdict, style="bold")
    columns = (
        "task",
        "score",
        "first",
        "second",
        f"difference [{confidence}]",
        "p",
        *(("p after Holm",) if corrected else ()),
    )
    show_table(columns, lines, drop=("score",))
    show("Scores are points of 100.")
    for words, tasks in _by(rows, _number_shown).items():
        show(f"{words}: {', '.join(tasks)}")
    for words, tasks in _by(rows, _covered).items():
        show(f"{words}: {', '.join(tasks)}")
    for words, tasks in _by(found.rows, _tested).items():
        show(f"{words}: {', '.join(tasks)}")
    if corrected:
        show("p after Holm is corrected over all pairs of models and all tasks of the study.")
    if found.pretraining:
        show(f"Based on {found.pretraining} of each model.")
    for row in found.rows:
        if row.get("at_chance"):
            # Another score may be compared than the one whose chance level is known.
            by = "" if row["chance_of"] == row["metric"] else f" in {text.metric(row['chance_of'])}"
            models = text.listing(row["at_chance"])
            show(f"{row['task']}: not above chance{by} ({text.points(row['chance'])}): {models}")
        if row.get("constant"):
            show(f"{row['task']}: the same prediction for every example: {text.listing(row['constant'])}")
    for note in found.notes:
        show(note)
    for task, reason in found.left_out.items():
        show(f"{task} is left out: {reason}")


def _number_shown(row: Mapping[str, Any]) -> str:
    """Say which number of a model the table holds."""
    if "p_holm" in row:
        return "Scores as in the report, of the chosen runs that learn, and plain means of all chosen runs' test scores"
    return "Plain means of the test scores"


def _by(rows: Sequence[Mapping[str, Any]], words: Callable[[Mapping[str, Any]], str]) -> dict[str, list[str]]:
    """Return the tasks by what is to be said about them."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if words(row):
            found.setdefault(words(row), []).append(row["task"])
    return found


def _covered(row: Mapping[str, Any]) -> str:
    """Say what a row's interval covers."""
    if row["covers"] == "seeds and examples":
        return "the interval covers other seeds and other test examples"
    if row["covers"] == "seeds":
        return "the interval covers other seeds; the examples are not kept, so their noise is not known"
    if not row["covers"]:
        return "no interval, as the noise of seeds is not known on some of its tasks"
    if row["equal_seeds"]:
        return "the interval covers other test examples alone; the seeds give equal scores; their noise is not known"
    if row["seeds"] == 1:
        return "the interval covers other test examples alone; one seed; what other seeds would give is not known"
    return f"the interval covers other test examples alone, not other seeds than these {row['seeds']}"


def _tested(row: Mapping[str, Any]) -> str:
    """Say which test over examples a p value is of; empty for others."""
    groups = f", {row['examples']:,} examples in {row['groups']:,} groups" if row.get("groups") else ""
    return f"p by {_TESTS[row['test']]}, seeds of each model {row['seeds']}{groups}" if "test" in row else ""
