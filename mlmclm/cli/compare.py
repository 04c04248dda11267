"""`mlmclm compare`: compare two models, or two cells, on the same test examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from typer import Argument, Option

from mlmclm.cli import options
from mlmclm.cli.output import print_json, show, show_table
from mlmclm.errors import UserError


def compare(
    first: Annotated[str, Argument(help="A model of the study; without --study the key of a cell.")],
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
    store: options.Store = options.DEFAULT_STORE,
    data: options.Data = None,
    task_dir: options.TaskDir = None,
    as_json: options.Json = False,
) -> None:
    """Compares two models example by example of the test splits, and computes no cell.

    Prints the difference of the scores (first minus second) with a paired bootstrap interval and a paired test over examples:
    McNemar's for one seed and answers that are right or wrong, else a permutation test. They say how
    certain the difference between these runs is on other examples, and nothing of what other seeds would give: see `mlmclm report`.

    A cell's key is the name of its file in the store's cells/.

    Example: mlmclm compare 1m-clm-1k 1m-mlm40-1k --study quickstart --task pydocs-kind
    """
    from mlmclm import open as open_store
    from mlmclm.studies.comparison_of_models import compare_cells

    there = open_store(store, data=data, task_dirs=task_dir)
    if study is not None:
        made = there.study(study)
        found = made.results_by(rule).compare(first, second, tasks=task, metric=metric, where=study)
    elif task:
        raise UserError("--task: two cells have a task already; the option is for models of a --study.")
    elif rule is not None:
        raise UserError("--rule: two cells have a learning rate already; the option is for models of a --study.")
    else:
        found = compare_cells(first, second, there.place, metric=metric)
    if as_json:
        plain = [{name: None if value != value else value for name, value in row.items()} for row in found.rows]
        print_json({"first": first, "second": second, "tasks": plain, "left_out": found.left_out})
    else:
        _show(first, second, found.rows, found.left_out)


def _show(first: str, second: str, rows: Sequence[Mapping[str, Any]], left_out: Mapping[str, str]) -> None:
    from mlmclm.analysis.selection import rates_text
    from mlmclm.reports import text

    confidence = f"{rows[0]['confidence']:.0%}".replace("%", " %")
    lines = [
        (
            row["task"],
            text.metric(row["metric"]),
            *(f"{text.points(row[side])} ({rates_text(row[f'{side}_rates'])})" for side in ("first", "second")),
            text.estimate(row["difference"], row["low"], row["high"], sign=True),
            text.probability(row["p"]),
            f"{row['examples']:,}",
        )
        for row in rows
    ]
    show(f"first:  {first}\nsecond: {second}")
    columns = ("task", "score", "first", "second", f"difference [{confidence}]", "p", "examples")
    show_table(columns, lines, drop=("score", "examples"))
    for test, seeds in sorted({(row["test"], row["seeds"]) for row in rows}):
        tasks = ", ".join(row["task"] for row in rows if (row["test"], row["seeds"]) == (test, seeds))
        how = {"mcnemar": "McNemar's exact test", "permutation": "permutations"}[test]
        show(f"p by {how}, seeds of each model {seeds}: {tasks}")
    for words, named in _seed_noise(rows).items():
        show(f"{', '.join(named)}: {words}")
    for row in rows:
        if row.get("at_chance"):
            # Another score may be compared than the one whose chance level is known.
            by = "" if row["chance_of"] == row["metric"] else f" in {text.metric(row['chance_of'])}"
            models = text.listing(row["at_chance"])
            show(f"{row['task']}: not above chance{by} ({text.points(row['chance'])}): {models}")
        if row.get("constant"):
            show(f"{row['task']}: the same prediction for every example: {text.listing(row['constant'])}")
        if not row.get("final", True):
            show(f"{row['task']}: the best learning rates are not final, as cells are still to be run")
    for task, reason in left_out.items():
        show(f"{task} is left out: {reason}")


def _seed_noise(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the tasks by what is to be said about seeds, which the intervals over examples don't cover."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row["equal_seeds"]:
            words = "the seeds give equal scores; their noise is not known"
        elif row["seeds"] == 1:
            words = "one seed; what other seeds would give is not known"
        else:
            words = f"what seeds other than these {row['seeds']} would give is not in the interval; see `mlmclm report`"
        found.setdefault(words, []).append(row["task"])
    return found
