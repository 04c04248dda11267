"""`mlmclm compare`: compare two models, or two cells, on the same test examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from mlmclm.cli import options
from mlmclm.cli.output import print_json, show, show_table
from mlmclm.cli.results_of import results_of
from mlmclm.errors import UserError, for_each, unknown
from mlmclm.progress import Bar

if TYPE_CHECKING:
    from mlmclm.analysis.analyse import Analysis
    from mlmclm.results.examples import KeptExamples
    from mlmclm.studies.place import Place
    from mlmclm.sweeps.ledger import Ledger

    Sides = dict[str, tuple[str, Sequence[KeptExamples], Sequence[KeptExamples]]]


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
    from mlmclm.analysis.pairs import RESAMPLES
    from mlmclm.analysis.pairs import compare as paired
    from mlmclm.sweeps.ledger import Ledger
    from mlmclm.tasks.family import family_of

    place = options.place(store, data, task_dir)
    ledger = Ledger(place.store)
    if study is not None:
        sides, left_out, analysis = _of_models(first, second, study, task or (), rule, place, ledger)
    elif task:
        raise UserError("--task: two cells have a task already; the option is for models of a --study.")
    elif rule is not None:
        raise UserError("--rule: two cells have a learning rate already; the option is for models of a --study.")
    else:
        sides, left_out, analysis = _of_cells(first, second, metric, ledger), {}, None
    rows: list[dict[str, Any]] = []
    with Bar("comparing", 2 * RESAMPLES * len(sides), unit="resamples") as bar:
        for number, (name, (main, ones, others)) in enumerate(sides.items(), 1):
            rates = _rates("first", ones) | _rates("second", others)
            family = family_of(ones[0].result)
            pair = paired(
                ones,
                others,
                metric=metric or main,
                measures=family.measured,
                gold=family.gold_columns,
                observer=lambda count: bar.update(bar.done + count),
            )
            # McNemar's test draws no permutations, so the observer stops short of this task's share.
            bar.update(2 * RESAMPLES * number)
            rows.append(
                {"task": name, **asdict(pair), **rates, **_standing(analysis, ones[0].result, others[0].result)}
            )
    if as_json:
        plain = [{name: None if value != value else value for name, value in row.items()} for row in rows]
        print_json({"first": first, "second": second, "tasks": plain, "left_out": left_out})
    else:
        _show(first, second, rows, left_out)


def _rates(side: str, cells: Sequence[KeptExamples]) -> dict[str, Any]:
    """Return a side's learning rate (None where its seeds use different ones), and the rate of each seed in order."""
    rates = [cell.result["learning_rate"] for cell in cells]
    return {f"{side}_rate": rates[0] if len(set(rates)) == 1 else None, f"{side}_rates": rates}


def _standing(analysis: Analysis | None, *cells: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the study's analysis says of two models' scores on a task; nothing for two cells.

    `chance` is the chance level of the main score `chance_of` (NaN if it is not known), `at_chance` lists the models that
    are not above it, `constant` those that predict the same for every example with every seed, and `final` is False if
    cells are still to be run, which may change the best learning rates.
    """
    from mlmclm.analysis.chance import above_chance
    from mlmclm.analysis.results import records

    if analysis is None:
        return {}
    pairs = [(cell["model"], cell["task"]) for cell in cells]
    rows = [row for row in records(analysis.best) if (row["model"], row["task"]) in pairs]
    low = [row["model"] for row in rows if above_chance(row["test_mean"], row["test_low"], row["chance"]) == "no"]
    alike = [row["model"] for row in rows if row["constant"] and row["constant"] == row["n"]]
    told = {"chance": rows[0]["chance"], "chance_of": rows[0]["metric"], "at_chance": low, "constant": alike}
    return {**told, "final": all(row["final"] for row in rows)}


def _of_cells(first: str, second: str, metric: str | None, ledger: Ledger) -> Sides:
    """Return the two sides that these cell keys name."""
    results = []
    for key in (first, second):
        result = ledger.find(key)
        if result is None:
            raise UserError(
                f"{key}: {ledger.folder} has no result of that key; to compare models by name, give --study NAME."
            )
        results.append(result)
    metrics = [result["metric"] for result in results]
    if metric is None and metrics[0] != metrics[1]:
        raise UserError(f"the cells have different main scores ({metrics[0]}, {metrics[1]}): choose one with --metric.")
    one, other = (ledger.examples(result) for result in results)
    return {results[0]["task"]: (metrics[0], [one], [other])}


def _of_models(
    first: str, second: str, file: str, tasks: Sequence[str], rule: str | None, place: Place, ledger: Ledger
) -> tuple[Sides, dict[str, str], Analysis]:
    """Return both models' cells at their best learning rates, the reason why a task is left out, and the analysis.

    Cells are those of the seeds that both models have.

    Raises:
        UserError: a model or task is unknown, or no task has cells to compare.
    """
    from mlmclm.analysis.summary import chosen_results

    found = results_of(file, place, rule)
    names = [found.file.model_of(name, where=file) for name in (first, second)]
    for task in tasks:
        if task not in found.space.tasks:
            raise unknown("task", task, found.space.tasks, where=file)
    analysis = found.analyse()
    chosen = chosen_results(analysis, found.results)
    sides: Sides = {}
    left_out: dict[str, str] = {}
    for task in tasks or found.space.tasks:
        pair = [chosen.get((name, task), {}) for name in names]
        # The tests are paired, so a seed counts only if both models have it.
        common = sorted(pair[0].keys() & pair[1].keys())
        if not common:
            left_out[task] = "the models have no scored cells of the same seed at their best learning rates"
            continue
        one, other = (for_each([own[seeds] for seeds in common], ledger.examples) for own in pair)
        sides[task] = (one[0].result["metric"], one, other)
    if not sides:
        raise UserError(f"{', '.join(left_out)}: {next(iter(left_out.values()))}; run `mlmclm sweep {file}`.")
    return sides, left_out, analysis


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
