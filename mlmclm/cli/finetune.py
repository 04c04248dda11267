"""`mlmclm finetune`: compute a single cell of a grid, without Ray."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from mlmclm.cli import options
from mlmclm.cli.output import flat, print_json, show, show_table
from mlmclm.errors import UserError
from mlmclm.progress import say

if TYPE_CHECKING:
    from mlmclm.sweeps.one_cell import CellResult, OneCell


def finetune(
    model: Annotated[
        str,
        Argument(
            help="A model's folder, its name in a study of the store (NAME or STUDY/NAME), or on the Hub (OWNER/NAME)."
        ),
    ],
    task: Annotated[str, Argument(help="A task's name.")],
    learning_rate: Annotated[float, Option("--lr", help="Peak learning rate.")],
    seed: Annotated[int, Option(min=0, help="Seed of head, order and dropout.")] = 0,
    head_seed: Annotated[int | None, Option(min=0, help="Seed of the head's initial weights alone.")] = None,
    order_seed: Annotated[int | None, Option(min=0, help="Seed of the order of the data alone.")] = None,
    dropout_seed: Annotated[int | None, Option(min=0, help="Seed of dropout alone.")] = None,
    protocol: Annotated[
        str | None,
        Option(
            metavar="NAME|FILE",
            help="How to fine-tune: a packaged protocol, or a file in the same format; 'standard' by default.",
        ),
    ] = None,
    space: Annotated[str | None, Option(metavar="NAME|FILE", help="Fine-tune as this search space does.")] = None,
    changed: Annotated[
        list[str] | None,
        Option(
            "--set",
            metavar="KEY=VALUE",
            help="A setting in place of the protocol's, such as epochs=2; needed for the axes of its grid.",
        ),
    ] = None,
    start_from: Annotated[
        str | None,
        Option(
            metavar="KEY|none",
            help="Begin with the encoder of another cell of this model, by its key, or with the model's own; needed where the "
            "protocol starts the task from another one.",
        ),
    ] = None,
    predictions: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Write what it predicted for each test example, as JSON lines: classes, numbers, tags, answers or rankings.",
        ),
    ] = None,
    store: options.Store = options.DEFAULT_STORE,
    data: options.Data = None,
    task_dir: options.TaskDir = None,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Read the data, show the cell and its key, and train nothing.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Fine-tunes one model on one task at one learning rate with one seed, and prints the scores.

    The cell is computed as in a sweep, on one thread of the CPU or on the GPU, and sweeps and this command reuse each other's results:
    a result is a file in the store, named by a hash of everything that can change it.

    Example: mlmclm finetune 1m-clm-1k pydocs-kind --lr 1e-3 --seed 0 --space quickstart
    """
    from mlmclm.storage.place import open_place
    from mlmclm.sweeps.one_cell import one_cell

    if dry_run and predictions is not None:
        raise UserError("--predictions: a dry run predicts nothing; leave out --predictions or --dry-run.")
    stream_seeds = {"head": head_seed, "order": order_seed, "dropout": dropout_seed}
    cell = one_cell(
        model,
        task,
        learning_rate,
        open_place(store=store, data=data, task_dirs=task_dir),
        seed={stream: seed if value is None else value for stream, value in stream_seeds.items()},
        protocol=protocol,
        space=space,
        settings=_settings(changed or ()),
        start_from=start_from,
        prepare=not dry_run,
    )
    if dry_run:
        cell.check()
        _show_plan(cell, as_json=as_json)
        return
    result = cell.run()
    _show_result(result, as_json=as_json)
    if predictions is not None:
        result.write_predictions(predictions)
        say(f"predictions: {predictions}")


def _settings(pairs: Sequence[str]) -> dict[str, Any]:
    """Return the protocol settings that the options change; raise UserError for a pair without `=`."""
    changes: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise UserError(f"--set {pair}: write KEY=VALUE, such as epochs=2.")
        changes[name] = None if value == "null" else value  # as YAML reads it
    return changes


def _show_plan(planned: OneCell, *, as_json: bool) -> None:
    """Print what a cell is, and whether it has a result."""
    from mlmclm.seeds import seed_value
    from mlmclm.sweeps.cells import cell_name

    cell, key, results_store = planned.cell, planned.key, planned.results_store
    facts = {
        "key": key,
        "file": str(results_store.path(key)),
        "there": results_store.find(key) is not None,
        "model": cell.model,
        "folder": str(cell.model_folder),
        "weights": cell.weights,
        "task": cell.task,
        "task_data": cell.task_data,
        "learning_rate": cell.learning_rate,
        "seed": seed_value(cell.seed),
        "protocol": cell.identity(),
        "metric": cell.declared.metric,
        "start": cell.start.key if cell.start else None,
    }
    if as_json:
        print_json(facts)
        return
    show(f"{cell_name(cell)}: nothing is trained now (--dry-run)")
    for name, value in flat(facts):
        show(f"{name}: {value}")


def _show_result(cell_result: CellResult, *, as_json: bool) -> None:
    """Print a cell's scores, and the files of its result."""
    from rich.text import Text

    from mlmclm.results.metrics import metric_parts
    from mlmclm.sweeps.cells import cell_name

    result, examples, name = cell_result.result, cell_result.examples_path, cell_name(cell_result.cell)
    if as_json:
        files = {"file": str(cell_result.path), "examples_file": str(examples) if examples else None}
        print_json({**result, **files, "computed": cell_result.computed})
        return
    if result["status"] == "diverged":
        show(f"{name}: diverged at step {result['diverged_step']}")
    else:
        main, validation = metric_parts(result["metric"]), cell_result.scores["validation"]
        rows = [
            (Text(metric, style="bold" if metric in main else ""), f"{validation[metric]:.4f}", f"{value:.4f}")
            for metric, value in cell_result.scores["test"].items()
        ]
        show_table(("metric", "validation", "test"), rows, title=f"{name}, fractions of 1")
    show(f"result: {cell_result.path} ({'computed now' if cell_result.computed else 'found in the store'})")
    if examples:
        show(f"examples: {examples}")
