"""`mlmclm decide`: say whether one model of a study is better than another, or which seeds to run next."""

from __future__ import annotations

from typing import Annotated

import typer
from typer import Argument, Option

from mlmclm.cli import options
from mlmclm.cli.output import print_json, show

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
