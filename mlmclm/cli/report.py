"""`mlmclm report`: write tables and a report from the results so far."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from mlmclm.cli import options
from mlmclm.cli.results_of import results_of
from mlmclm.cli.study_report import command_of, writable, write_study_report
from mlmclm.errors import for_each
from mlmclm.progress import Bar, say

if TYPE_CHECKING:
    from mlmclm.analysis.analyse import Analysis
    from mlmclm.seeds import Seeds
    from mlmclm.sweeps.ledger import Ledger


def report(
    file: options.StudyOrSweep,
    store: options.Store = options.DEFAULT_STORE,
    data: options.Data = None,
    task_dir: options.TaskDir = None,
    export: Annotated[
        bool, Option("--export", help="Also write to MLflow what it lacks, like `tracking sync`.")
    ] = False,
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
    as_json: options.Json = False,
) -> None:
    """Analyses the results that a study or sweep has so far and writes its tables and its HTML report; prepares and computes nothing.

    If the store is read-only, results are printed, and a report is only written with `--to`.

    Example: mlmclm report quickstart
    """
    from mlmclm.sweeps.ledger import Ledger

    place = options.place(store, data, task_dir)
    found = results_of(file, place, rule)
    place, analysis = found.place, found.analyse()
    facts = found.facts(found.command or command_of(found.verb, [file], data, task_dir))
    own = place.study_folder(found.file)
    folder = to or (own if writable(own) else None)
    if folder is None:
        say(f"the report is not written: {own} is read-only; name another folder with --to.")
    with ExitStack() as stack:
        tracking = None
        if export:
            from mlmclm.studies.study_tracking import StudyTracking

            tracking = stack.enter_context(StudyTracking(found.file, place, patient=True))
            tracking.stored(found.prepared, found.space, found.results)
        write_study_report(analysis, facts, found.space, place, tracking, folder=folder, as_json=as_json)
    if predictions is not None:
        _write_predictions(analysis, found.results, Ledger(place.store), predictions)


def _write_predictions(analysis: Analysis, results: list[dict[str, Any]], ledger: Ledger, folder: Path) -> None:
    """Write one file for each cell at a chosen learning rate.

    Raises:
        UserError: some cells have no predictions; the message names all of them.
    """
    from mlmclm.analysis.summary import chosen_results
    from mlmclm.tasks.predictions import write_predictions

    cells = [
        (folder / model / task / f"{_name(seeds)}.jsonl", result)
        for (model, task), by_seed in chosen_results(analysis, results).items()
        for seeds, result in by_seed.items()
    ]
    with Bar("predictions", len(cells), unit="cells") as bar:

        def write(cell: tuple[Path, Mapping[str, Any]]) -> None:
            path, result = cell
            write_predictions(ledger.examples(result), path)
            bar.update(bar.done + 1)

        for_each(cells, write)


def _name(seeds: Seeds) -> str:
    """Format a seed for a file name: `s0`, or `h0-o1-d0` where the streams have seeds of their own."""
    simplest = seeds.simplest()
    return f"s{simplest}" if isinstance(simplest, int) else str(simplest)
