"""Verbs that say what the results of a study, or scores of any tool, show; they compute and prepare nothing."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from mlmclm.cli import options
from mlmclm.cli.output import claims_as_json, print_json, show, show_advice, show_claims, show_results, show_table
from mlmclm.numbers import without_nan
from mlmclm.progress import say


def report(
    file: options.StudyOrSweep,
    store: options.Store = options.DEFAULT_STORE,
    data: options.Data = None,
    task_dir: options.TaskDir = None,
    rule: options.Rule = None,
    to: Annotated[
        Path | None, Option(metavar="FOLDER", help="Write here, in place of the store's studies/NAME.")
    ] = None,
    predictions: Annotated[
        Path | None,
        Option(
            metavar="FOLDER",
            help="Also write what each model predicted for the test examples at its best learning rate: "
            "FOLDER/MODEL/TASK/sSEED.jsonl.",
        ),
    ] = None,
    figures: Annotated[
        Path | None,
        Option(
            metavar="FOLDER",
            help="Also write the figures as SVG, PDF and CSV, and the tables as LaTeX (booktabs) and CSV, for a paper.",
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Analyses the results that a study or sweep has so far and writes its tables and its HTML report; prepares and computes nothing.

    If the store is read-only, results are printed, and a report is only written with `--to`.

    Examples:

    mlmclm report quickstart

    mlmclm report quickstart --figures figures
    """
    from mlmclm.answers.record import is_bundle
    from mlmclm.studies.api import open as open_store

    opened = open_store(store, data=data, task_dirs=task_dir)
    if not is_bundle(Path(file)):
        results = opened.study(file).report(rule=rule, to=to)
    else:
        results = opened.results(file, rule=rule)
        results = results if to is None else results.write(to)
    if results.report is None:
        say("the report is not written: the place of the results is read-only, or a bundle; name a folder with --to.")
    if predictions is not None:
        results.write_predictions(predictions)
    show_results(results, as_json=as_json, figures=[] if figures is None else results.write_figures(figures))


def advise(
    file: options.StudyOrSweep,
    store: options.Store = options.DEFAULT_STORE,
    data: options.Data = None,
    task_dir: options.TaskDir = None,
    rule: options.Rule = None,
    as_json: options.Json = False,
) -> None:
    """Says which model and learning rate the results so far advise, how sure that is, what it is based on, and what would settle the rest.

    The report's first screen has the same words. Nothing is computed or written.

    Example: mlmclm advise quickstart
    """
    from mlmclm.studies.api import open as open_store

    advice = open_store(store, data=data, task_dirs=task_dir).results(file, rule=rule).advice
    if as_json:
        print_json(asdict(advice))
    else:
        show_advice(advice)


def claims(
    file: options.StudyOrSweep,
    claims: options.Claims = None,
    store: options.Store = options.DEFAULT_STORE,
    data: options.Data = None,
    task_dir: options.TaskDir = None,
    rule: options.Rule = None,
    as_json: options.Json = False,
) -> None:
    """Says of each claim whether the results so far show it: seen, contradicted, too small to tell, or not tested here, and why.

    By default the claims are those of the study file, or all packaged ones. The report has the same table. Nothing is computed or written.

    Example: mlmclm claims quickstart
    """
    from mlmclm.studies.api import open as open_store

    verdicts = open_store(store, data=data, task_dirs=task_dir).results(file, rule=rule).claims(*claims or ())
    if as_json:
        print_json({"claims": claims_as_json(verdicts)})
    else:
        show_claims(verdicts)


CODES = {"better": 0, "not better": 1, "undecided": 3}


def decide(
    new: Annotated[str, Argument(help="The model that may be better.")],
    base: Annotated[str, Argument(help="The model that it is compared with.")],
    study: Annotated[str, Option(metavar="NAME|FILE", help="The study or sweep with both, by its name or file.")],
    most: Annotated[
        int | None,
        Option(min=2, metavar="NUMBER", help="Seeds at which the comparison ends; by default 9, as at the first look."),
    ] = None,
    store: options.Store = options.DEFAULT_STORE,
    data: options.Data = None,
    task_dir: options.TaskDir = None,
    rule: options.Rule = None,
    as_json: options.Json = False,
) -> None:
    """Says whether a model is better than another on the mean over tasks, and ends with 0 for better, 1 for not better, 3 for undecided.

    The command may be repeated after more seeds. The store records each look at the results, and over all looks at most 5 % of comparisons
    of equal models end in favour of one. An undecided answer names the next seeds and their cost.

    Example: mlmclm decide 1m-mlm40-1k 1m-clm-1k --study quickstart
    """
    from mlmclm.reports.decision import decide as decide_on
    from mlmclm.studies.api import open as open_store

    opened = open_store(store, data=data, task_dirs=task_dir)
    results = opened.results(study, rule=rule)
    names = [results.model_of(name, where=study) for name in (new, base)]
    # Looks at a published study are not recorded.
    folder = None if results.record.source else opened.place.study_folder(results.name)
    verdict = decide_on(results.analysis, results.facts.basis, *names, most=most, folder=folder)
    if as_json:
        print_json(verdict.as_dict())
    else:
        for number, sentence in enumerate(verdict.sentences):
            show(sentence, style=None if number else "bold")
    raise typer.Exit(CODES[verdict.decision])


def rank(
    scores: Annotated[list[Path], Argument(metavar="FOLDER|FILE...", help="Scores of models, one or several in each.")],
    task: options.OneTask = None,
    metric: options.Metric = None,
    rule: options.Rule = None,
    reader: options.Reader = None,
    common: options.Common = False,
    as_json: options.Json = False,
) -> None:
    """Ranks models by their means over tasks, with the groups that show no clear difference and the ranks that each model may have.

    A model's best rank is 1 plus the number of models shown to be better, its worst is N minus the number shown to be worse (Holm's method
    over all pairs). All these ranges hold together at 95 %.

    Example: mlmclm rank results/*
    """
    from mlmclm.answers.comparison_of_scores import rank as rank_scores
    from mlmclm.reports import text

    scored = rank_scores(scores, reader=reader, tasks=task or (), metric=metric, rule=rule, common=common)
    ranked = scored.ranking
    if as_json:
        pairs = []
        for first, second, diff, p_holm in ranked.pairs:
            numbers = {"difference": diff.value, "low": diff.low, "high": diff.high, "p": diff.p, "p_holm": p_holm}
            pairs.append({"first": first, "second": second, **without_nan(numbers)})
        facts = {"tasks": scored.tasks, "examples": scored.examples, "unit": scored.unit, "seeds": scored.seeds}
        models = [model._asdict() for model in ranked.models]
        print_json({"models": models, "groups": ranked.groups, "pairs": pairs, **facts, "left_out": scored.left_out})
        return
    scale = 1.0 if max(abs(model.score) for model in ranked.models) <= 1 else 0.01
    rows = [
        [
            str(model.best) if model.best == model.worst else f"{model.best} to {model.worst}",
            model.model,
            text.points(scale * model.score),
            " ".join(chr(ord("a") + index) for index, group in enumerate(ranked.groups) if model.model in group),
        ]
        for model in ranked.models
    ]
    unit = ", points of 100" if scale == 1 else ""
    show_table(["rank", "model", f"mean of {text.plural(len(scored.tasks), 'task')}{unit}", "group"], rows)
    clear = sum(pair.p_holm < 0.05 for pair in ranked.pairs)
    show(
        f"{clear:,} of {text.plural(len(ranked.pairs), 'pair')} differ clearly; models of one letter show no clear difference."
    )
    noise = f"other {scored.unit}s" if scored.seeds[1] == 1 else f"other {scored.unit}s and other seeds"
    show(f"The ranks hold together at 95 % for {noise}; they do not cover how the models were chosen.")
    for name, why in scored.left_out.items():
        show(f"{name} is left out: {why}")
