"""Comparison of two models of a study, with the numbers of its report, or of two cells, over their test examples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from mlmclm.analysis.pairs import BOTH, EXAMPLES, SEEDS
from mlmclm.answers.outcomes import gold_of, measure_of, measures_of
from mlmclm.errors import UserError, for_each
from mlmclm.numbers import plural
from mlmclm.progress import Bar
from mlmclm.reports.text import in_notebook
from mlmclm.results.examples import ExampleSource, KeptExamples
from mlmclm.seeds import Seeds

if TYPE_CHECKING:
    from mlmclm.analysis.analyse import Analysis
    from mlmclm.analysis.setups import SetupDifference


NO_DIFFERENCE = "No clear difference"


@dataclass(frozen=True, repr=False)
class Comparison:
    """Two models, two cells, or two runs of another tool on the same test examples; differences are the first minus the second.

    Attributes:
        rows: for each task the two scores, their difference with its interval, and the noise that the interval `covers`. For two
            models of a study, the difference is that of the study's report, with the noise of seeds, of the choice of the rate,
            and of the test set, and `p_holm` is corrected over the whole study. If the noise of seeds is not known, and for two
            cells, the difference is from a paired comparison over examples (`analysis.pairs.compare_sides`).
        left_out: by name of a task or a family of tasks, the reason why it is left out.
        over: rows for families of tasks and the mean over tasks, as in the report; empty for cells, and if the user has chosen
            tasks or a score.
        notes: sentences that say what else differs between the two, and which cells are missing.
        pretraining: how many pretraining runs each model has, in words; empty for cells.
        unit: what the sides are paired over: `example` or `task`.
        sides: the names of the two.
    """

    rows: list[dict[str, Any]]
    left_out: dict[str, str]
    over: list[dict[str, Any]] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    pretraining: str = ""
    unit: str = "example"
    sides: tuple[str, str] = ("The first", "The second")

    @property
    def verdict(self) -> str:
        """Sentences that say on which tasks there is no clear difference, then on which a side is ahead; a lead at chance level doesn't count."""
        tasks: dict[str, list[str]] = {}
        rows = [*self.over, *self.rows]
        for row in [row for row in rows if "p_holm" in row] or rows:
            ahead, name = ("first", self.sides[0]) if row["difference"] > 0 else ("second", self.sides[1])
            clear = row.get("p_holm", row["p"]) < 1 - row["confidence"] and ahead not in row.get("at_chance", ())
            words = f"{name} scores higher" if row.get("apart", clear) else NO_DIFFERENCE
            tasks.setdefault(words, []).append("the mean over tasks" if row.get("kind") == "all" else row["task"])
        order = sorted(tasks, key=lambda words: (words != NO_DIFFERENCE, words))
        return "\n".join(f"{words} on {', '.join(tasks[words])}." for words in order)

    def __repr__(self) -> str:
        return (
            f"<comparison of {self.sides[0]} and {self.sides[1]} on {plural(len(self.rows), 'task')}>\n{self.verdict}"
        )

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        return in_notebook(
            self.verdict, [*self.over, *self.rows], ("task", "first", "second", "difference", "low", "high", "p")
        )


def compare_results(results: Sequence[Mapping[str, Any]], kept: ExampleSource, *, metric: str | None) -> Comparison:
    """Compare two cells by their results.

    Args:
        metric: a score in place of the main one.

    Raises:
        UserError: the cells have no score in common, or their test examples are not known.
    """
    from mlmclm.analysis.setups import setup_differences
    from mlmclm.reports.cautions import setup_sentences

    metrics = [result["metric"] for result in results]
    if metric is None and metrics[0] != metrics[1]:
        raise UserError(f"the cells have different main scores ({metrics[0]}, {metrics[1]}): choose one with --metric.")
    first, second = (kept.examples(result) for result in results)
    row = compare_examples(results[0]["task"], [first], [second], metric or metrics[0])
    notes = setup_sentences(setup_differences({"the first": results[:1], "the second": results[1:]}))
    return Comparison([row], {}, notes=tuple(notes))


def compare_models(
    names: tuple[str, str],
    analysis: Analysis,
    chosen: Mapping[tuple[str, str], Mapping[Seeds, Mapping[str, Any]]],
    kept: ExampleSource,
    tasks: Sequence[str],
    *,
    whole: bool,
    metric: str | None = None,
    remedy: str = "",
) -> Comparison:
    """Compare two models of a study, each at its best learning rates.

    Args:
        chosen: the results at these learning rates, by (model, task) and seed.
        tasks: the tasks to compare on.
        whole: whether `tasks` are all tasks of the study.
        metric: a score in place of the tasks' main one.
        remedy: the end of the error message if no task can be compared.

    Raises:
        UserError: the names are the same, there is no such score, or no task can be compared; the message says why.
    """
    from mlmclm.analysis.comparison import against
    from mlmclm.reports.cautions import setup_sentences
    from mlmclm.reports.wording import pretraining_runs, unfinished, warnings

    for name in names:
        if name not in analysis.groups:
            model = next(model for model, runs in analysis.groups.items() if name in runs)
            raise UserError(
                f"{name} is a pretraining run of {model}, and models are compared over their runs; name {model}."
            )
    if names[0] == names[1]:
        raise UserError(f"{names[0]} is named twice; name two models.")
    reported = [row for row in against(analysis.comparisons, names[0]) if row["model_b"] == names[1]]
    rows, left_out = [], dict[str, str]()
    with Bar("comparing", len(tasks), unit="tasks", brief=1.0) as bar:
        for number, task in enumerate(tasks, 1):
            sides = [
                {
                    (run, seed): result
                    for run in analysis.groups[name]
                    for seed, result in chosen.get((run, task), {}).items()
                }
                for name in names
            ]
            row = next((row for row in reported if (row["kind"], row["scope"]) == ("task", task)), None)
            if not all(sides) or row is None:
                lacking = [name for name, side in zip(names, sides, strict=True) if not side]
                left_out[task] = f"no cell of {' and '.join(lacking)} has a score there"
            else:
                try:
                    compared = _of_task(analysis, row, sides, kept, metric) | _standing(analysis, names, task)
                    rows.append(compared | _plain_means(analysis, compared, names))
                except _LeftOut as reason:
                    left_out[task] = str(reason)
            bar.update(number)
    if not rows:
        reasons: dict[str, list[str]] = {}
        for task, why in left_out.items():
            reasons.setdefault(why, []).append(task)
        raise UserError("; ".join([*(f"{', '.join(scopes)}: {why}" for why, scopes in reasons.items()), remedy]))
    over: list[dict[str, Any]] = []
    for row in reported if whole and metric is None else ():
        if row["kind"] == "task" or (row["kind"] == "all" and len(tasks) == 1):
            continue
        if math.isnan(row["difference"]):
            left_out[row["scope"]] = "not both models have a score on each of its tasks"
        else:
            over.append(_of_several(analysis, row))
    notes = setup_sentences(_between(analysis, names))
    notes += [*filter(None, [unfinished(analysis, names)]), *warnings(analysis)]
    pretraining = pretraining_runs({name: analysis.groups[name] for name in names})
    return Comparison(rows, left_out, over, tuple(notes), pretraining, sides=names)


class _LeftOut(Exception):
    """Says why two models cannot be compared on a task."""


def _of_task(
    analysis: Analysis,
    reported: Mapping[str, Any],
    sides: Sequence[Mapping[tuple[str, Seeds], Mapping[str, Any]]],
    kept: ExampleSource,
    metric: str | None,
) -> dict[str, Any]:
    """Return the comparison of two models on a task: the report's, or one over examples where the report has no interval."""
    task = reported["scope"]
    main = next(iter(sides[0].values()))["metric"]
    if metric in (None, main) and not math.isnan(reported["low"]):
        rates = _rates("first", sides[0].values()) | _rates("second", sides[1].values())
        effect_a, effect_b = (analysis.effects[reported[side], task] for side in ("model_a", "model_b"))
        return {
            "task": task,
            "metric": main,
            "first": effect_a.score().value,
            "second": effect_b.score().value,
            **_difference(analysis, reported),
            "seeds": min(map(len, sides)),
            "covers": SEEDS if effect_a.folds is None or effect_b.folds is None else BOTH,
            **rates,
        }
    # A comparison over examples alone uses the first pretraining run of each model.
    first = [
        {seed: result for (run, seed), result in results.items() if run == reported[side]}
        for results, side in zip(sides, ("model_a", "model_b"), strict=True)
    ]
    common = sorted(first[0].keys() & first[1].keys())
    if not common:
        raise _LeftOut("the models have no scored cells of the same seed at their best learning rates")
    try:
        one, two = (for_each([results[seeds] for seeds in common], kept.examples) for results in first)
    except UserError as error:
        reason, *rest = str(error).splitlines()
        more = " (and other cells)" if rest else ""
        raise _LeftOut(f"{reason.rstrip('.')}{more}") from error
    seeds = metric not in (None, main)
    return compare_examples(task, one, two, metric or main, analysis.confidence, seeds=seeds)


def _of_several(analysis: Analysis, reported: Mapping[str, Any]) -> dict[str, Any]:
    """Return the comparison of two models on a family of tasks, or on all."""
    from mlmclm.analysis.results import records

    means = {
        row["model"]: row["mean"]
        for row in records(analysis.overall)
        if (row["kind"], row["scope"]) == (reported["kind"], reported["scope"])
    }
    effects = analysis.effects
    tasks = [
        name for name, family in analysis.families.items() if reported["kind"] == "all" or family == reported["scope"]
    ]
    pair = reported["model_a"], reported["model_b"]
    tested = all(effects[model, task].folds is not None for model in pair for task in tasks)
    return {
        "kind": reported["kind"],
        "task": reported["scope"],
        "tasks": reported["tasks"],
        "first": means[pair[0]],
        "second": means[pair[1]],
        **_difference(analysis, reported),
        "covers": "" if math.isnan(reported["low"]) else BOTH if tested else SEEDS,
    }


def _difference(analysis: Analysis, reported: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a difference, as in the report."""
    from mlmclm.reports.wording import clearly_different

    numbers = {name: reported[name] for name in ("difference", "low", "high", "p", "p_holm", "p_verdict", "tests")}
    return {
        **numbers,
        "confidence": analysis.confidence,
        "apart": clearly_different(dict(reported), analysis.confidence),
    }


def _between(analysis: Analysis, names: Sequence[str]) -> list[SetupDifference]:
    """Return the differences between how the cells of two models were computed."""
    from mlmclm.analysis.setups import SetupDifference

    differences = [
        SetupDifference(setup.what, {name: setup.values[name] for name in names if name in setup.values}, setup.tasks)
        for setup in analysis.setups
    ]
    return [difference for difference in differences if difference.may_differ]


def compare_examples(
    task: str,
    first: Sequence[KeptExamples],
    second: Sequence[KeptExamples],
    metric: str,
    confidence: float = 0.95,
    *,
    seeds: bool = False,
) -> dict[str, Any]:
    """Compare two sides over their test examples, one cell a seed, in the form of `Comparison.rows`.

    Args:
        seeds: whether the interval covers other seeds too, where their noise is known.
    """
    from mlmclm.analysis.pairs import check_same_examples, compare_sides, compare_with_seeds

    gold, row = gold_of(first[0]), dict[str, Any]()
    if seeds and len(first) > 1:
        for cell in (*first[1:], *second):
            check_same_examples(first[0], cell, gold)
        one, other = ([measure_of(cell, metric) for cell in side] for side in (first, second))
        row = compare_with_seeds(one, other, first[0].rows, confidence, first[0].groups)
    if math.isnan(row.get("low", math.nan)):
        measures = measures_of(first[0], metric)
        pair = compare_sides(first, second, metric=metric, measures=measures, gold=gold, confidence=confidence)
        row = asdict(pair) | {"covers": EXAMPLES}
    rates = [_rates(side, [cell.result for cell in cells]) for side, cells in (("first", first), ("second", second))]
    return {"task": task, "metric": metric, **row, **rates[0], **rates[1]}


def _rates(side: str, results: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a side's learning rate (None where its seeds use different ones), the rates of all seeds in order, and, if the
    grid has several settings, the settings that these results use; empty if the rates are not known."""
    used = [(result["learning_rate"], result.get("setting", "")) for result in results]
    rates, settings = [rate for rate, _ in used], list(dict.fromkeys(setting for _, setting in used if setting))
    if None in rates:
        return {}
    columns = {f"{side}_rate": rates[0] if len(set(rates)) == 1 else None, f"{side}_rates": rates}
    return {**columns, **({f"{side}_settings": settings} if settings else {})}


def _plain_means(analysis: Analysis, row: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return each model's mean test score over all runs; the report's scores leave out runs that do not learn."""
    from mlmclm.analysis.results import records

    if "p_holm" not in row:
        return {}
    means = {
        name: [
            best["test_mean"]
            for best in records(analysis.best)
            if best["model"] in analysis.groups[name] and best["task"] == row["task"]
        ]
        for name in names
    }
    first, second = (sum(means[name]) / len(means[name]) for name in names)
    return {"first_mean": first, "second_mean": second}


def _standing(analysis: Analysis, names: Sequence[str], task: str) -> dict[str, Any]:
    """Return what the study's analysis says about two models' scores on a task.

    `chance` is the chance level of the main score `chance_of` (NaN if it is not known), `at_chance` lists the models that
    are not above it, `constant` those that predict the same for every example with every seed, and `final` is False if
    cells are still to be run, which may change the best learning rates.
    """
    from mlmclm.analysis.results import records
    from mlmclm.results.chance import above_chance

    rows = [row for row in records(analysis.best) if row["model"] in names and row["task"] == task]
    low = [row["model"] for row in rows if above_chance(row["score"], row["score_low"], row["chance"]) == "no"]
    alike = [row["model"] for row in rows if row["constant"] and row["constant"] == row["n"]]
    facts = {"chance": rows[0]["chance"], "chance_of": rows[0]["metric"], "at_chance": low, "constant": alike}
    return {**facts, "final": all(row["final"] for row in rows)}
