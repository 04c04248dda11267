"""`mlmclm finetune`: compute a single cell of a grid, without Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from mlmclm.cli import options
from mlmclm.errors import UserError
from mlmclm.progress import say
from mlmclm.seeds import Seeds

DEFAULT_PROTOCOL = "standard"


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
            help=f"How to fine-tune: a packaged protocol, or a file in the same format; {DEFAULT_PROTOCOL!r} by default.",
        ),
    ] = None,
    space: Annotated[str | None, Option(metavar="NAME|FILE", help="Fine-tune as this search space does.")] = None,
    causal: Annotated[
        bool | None, Option("--causal/--bidirectional", help="What a token sees, in place of the protocol's.")
    ] = None,
    pooling: Annotated[str | None, Option(help="mean, bos or last, in place of the protocol's.")] = None,
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

    The cell is computed as in a sweep, on one thread of the CPU or on the GPU, and each uses the other's results. A result is a
    file in the store, named by a hash of everything that can change it.

    Example: mlmclm finetune 1m-clm-1k pydocs-kind --lr 1e-3 --seed 0 --space quickstart
    """
    from mlmclm.cli import one_cell
    from mlmclm.finetuning.cell import Cell, Start, cell_key
    from mlmclm.sweeps.cells import cell_name
    from mlmclm.sweeps.find_model import find_model
    from mlmclm.sweeps.ledger import Ledger
    from mlmclm.sweeps.protocols import find_protocol
    from mlmclm.sweeps.space import find_space
    from mlmclm.tasks.declared_tasks import get_task

    if dry_run and predictions is not None:
        raise UserError("--predictions: a dry run predicts nothing; leave out --predictions or --dry-run.")
    if not 0 < learning_rate < 1:
        raise UserError(f"--lr {learning_rate:g}: a learning rate is between 0 and 1.")
    place = options.place(store, data, task_dir)
    declared = get_task(task, place.task_dirs)
    found = find_model(model, place.store, data_root=place.data_root)
    changes = one_cell.changed_settings(changed or (), causal=causal, pooling=pooling)
    if protocol is not None and space is not None:
        raise UserError("--protocol and --space: give one of them.")
    chosen = find_protocol(protocol or DEFAULT_PROTOCOL) if space is None else find_space(space)
    settings = one_cell.settings_of(chosen, task, found.folder, changes)
    ledger = Ledger(place.store)
    source = one_cell.start_of(start_from, chosen.start_from.get(task), found, ledger, place.task_dirs)
    task_data, recut = one_cell.data_of(declared, found.folder, settings, place, dry_run=dry_run)
    streams = [seed if own is None else own for own in (head_seed, order_seed, dropout_seed)]
    cell = Cell(
        model=found.name,
        model_folder=found.folder,
        weights=found.weights,
        task=task,
        task_data=task_data,
        protocol=settings,
        learning_rate=learning_rate,
        seed=Seeds(*streams).simplest(),  # as a sweep writes it, so that the cell has the same key
        declaration=declared.measured_by(chosen.metrics),
        start=Start(cell_key(source), source.task) if source else None,
        recut=recut,
    )
    if dry_run:
        one_cell.show_plan(cell, ledger, as_json=as_json)
        return
    # The encoder to start from is only needed if the cell has to be computed.
    if source is not None and ledger.find(cell_key(cell)) is None:
        one_cell.keep_start(source, place)
    # A sweep, or another command like this one, may be computing the same cell.
    with ledger.claimed(
        cell_key(cell), lambda other: say(f"{cell_name(cell)}: waiting for {other}, which computes it")
    ):
        result, computed = ledger.complete(cell, lambda cell: one_cell.compute(cell, ledger, place))
    one_cell.show_result(cell, result, ledger, computed=computed, as_json=as_json)
    if predictions is not None:
        from mlmclm.tasks.predictions import write_predictions

        write_predictions(ledger.examples(result), predictions)
        say(f"predictions: {predictions}")
