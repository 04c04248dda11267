"""`mlmclm finetune`: compute a single cell of a grid, without Ray."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from mlmclm.cli import options
from mlmclm.cli.output import print_json, show, show_table
from mlmclm.errors import UserError

if TYPE_CHECKING:
    from mlmclm.finetuning.cell import Cell
    from mlmclm.finetuning.protocol import Protocol
    from mlmclm.study.place import Place
    from mlmclm.sweeps.cells import SweepModel
    from mlmclm.sweeps.ledger import Ledger
    from mlmclm.sweeps.protocols import TaskProtocols
    from mlmclm.tasks.declaration import Task

DEFAULT_PROTOCOL = "standard"


def register(app: typer.Typer) -> None:
    """Register the command."""
    app.command("finetune")(finetune)


def _stream(name: str, what: str) -> Any:
    return typer.Option(f"--{name}-seed", min=0, help=f"Of {what} alone.")


def finetune(
    model: Annotated[
        str,
        typer.Argument(
            help="A model's folder, its name in a study of the store (NAME or STUDY/NAME), or on the Hub (OWNER/NAME)."
        ),
    ],
    task: Annotated[str, typer.Argument(help="A task's name.")],
    learning_rate: Annotated[float, typer.Option("--lr", help="Peak learning rate.")],
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of head, order and dropout.")] = 0,
    head_seed: Annotated[int | None, _stream("head", "the head's initial weights")] = None,
    order_seed: Annotated[int | None, _stream("order", "the order of the data")] = None,
    dropout_seed: Annotated[int | None, _stream("dropout", "dropout")] = None,
    protocol: Annotated[
        str | None,
        typer.Option(
            "--protocol",
            metavar="NAME|FILE",
            help=f"How to fine-tune: a packaged protocol or a file like them; {DEFAULT_PROTOCOL!r} by default.",
        ),
    ] = None,
    space: Annotated[
        str | None, typer.Option("--space", metavar="NAME|FILE", help="Fine-tune as this search space does.")
    ] = None,
    causal: Annotated[
        bool | None, typer.Option("--causal/--bidirectional", help="What a token sees, in place of the protocol's.")
    ] = None,
    pooling: Annotated[
        str | None, typer.Option("--pooling", help="mean, bos or last, in place of the protocol's.")
    ] = None,
    changed: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A setting in place of the protocol's, such as epochs=2; needed for the axes of its grid.",
        ),
    ] = None,
    start_from: Annotated[
        str | None,
        typer.Option(
            "--start-from",
            metavar="KEY|none",
            help="Begin with the encoder of another cell of this model, by its key, or with the model's own; needed where the "
            "protocol starts the task from another one.",
        ),
    ] = None,
    predictions: Annotated[
        Path | None,
        typer.Option(
            "--predictions",
            metavar="FILE",
            help="Write what it predicted for each test example, as JSON lines: classes, numbers, tags, answers or rankings.",
        ),
    ] = None,
    store: options.Store = options.DEFAULT_STORE,
    data: options.Data = None,
    task_dir: options.TaskDir = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Read the data, show the cell and its key, and train nothing.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Fine-tunes one model on one task at one learning rate with one seed, and prints the scores.

    It is a cell as a sweep computes it, on one thread of the CPU or on the GPU: what a sweep has computed is found here, and the
    other way round. The result is a file of the store, named by a hash of all that can change it.

    Example: mlmclm finetune 1m-clm-1k pydocs-kind --lr 1e-3 --seed 0 --space quickstart
    """
    from mlmclm.finetuning.cell import Cell, Start, cell_key
    from mlmclm.progress import say
    from mlmclm.seeds import Seeds
    from mlmclm.sweeps.cells import cell_name
    from mlmclm.sweeps.find_model import find_model
    from mlmclm.sweeps.ledger import Ledger
    from mlmclm.tasks.registry import get_task

    if dry_run and predictions is not None:
        raise UserError("--predictions: a dry run trains nothing that could predict; leave one of the two out.")
    if not 0 < learning_rate < 1:
        raise UserError(f"--lr {learning_rate:g}: a learning rate is between 0 and 1.")
    place = options.place(store, data, task_dir)
    declared = get_task(task, place.task_dirs)
    found = find_model(model, place.store, data_root=place.data_root)
    changes = _changes(changed or (), causal=causal, pooling=pooling)
    chosen = _protocols(protocol, space)
    settings = _settings(chosen, task, found.folder, changes)
    ledger = Ledger(place.store)
    source = _source(start_from, chosen.start_from.get(task), found, ledger, place.task_dirs)
    task_data, recut = _task_data(declared, found.folder, settings, place.store, place.data_root, dry_run=dry_run)
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
        _show_plan(cell, ledger, as_json=as_json)
        return
    # The encoder to start from is only needed if the cell has to be computed.
    if source is not None and ledger.find(cell_key(cell)) is None:
        keep_start(source, store=place.store, data_root=place.data_root)
    # A sweep, or another command like this one, may be computing the same cell.
    with ledger.claimed(
        cell_key(cell), lambda other: say(f"{cell_name(cell)}: waiting for {other}, which computes it")
    ):
        result, computed = ledger.complete(cell, lambda cell: _compute(cell, ledger, place))
    _show(cell, result, ledger, computed=computed, as_json=as_json)
    if predictions is not None:
        from mlmclm.tasks.predictions import write_predictions

        write_predictions(ledger.examples(result), predictions)
        say(f"predictions: {predictions}")


def _changes(pairs: Sequence[str], *, causal: bool | None, pooling: str | None) -> dict[str, Any]:
    """Return the protocol settings that the options change."""
    changes: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise UserError(f"--set {pair}: write KEY=VALUE, such as epochs=2.")
        changes[name] = None if value == "null" else value  # as YAML reads it
    if causal is not None:
        changes["attention"] = "causal" if causal else "bidirectional"
    if pooling is not None:
        changes["pooling"] = pooling
    return changes


def _protocols(protocol: str | None, space: str | None) -> TaskProtocols:
    """Return the protocol or search space that the options name, or the default protocol."""
    from mlmclm.sweeps.protocols import find_protocol
    from mlmclm.sweeps.space import find_space

    if protocol is not None and space is not None:
        raise UserError("--protocol and --space: give one of them.")
    return find_protocol(protocol or DEFAULT_PROTOCOL) if space is None else find_space(space)


def _source(
    start_from: str | None, wanted: str | None, model: SweepModel, ledger: Ledger, task_dirs: Sequence[Path]
) -> Cell | None:
    """Return the cell to start from, rebuilt from its result; None for the model's own weights.

    Args:
        wanted: the task whose best cell the protocol starts from, if any.

    Raises:
        UserError: `--start-from` is missing, or names a cell that cannot be started from.
    """
    from mlmclm.finetuning.cell import Cell, cell_key
    from mlmclm.finetuning.protocol import Protocol
    from mlmclm.seeds import read_seed
    from mlmclm.tasks.registry import get_task

    if start_from is None and wanted is not None:
        raise UserError(
            f"the protocol starts this task from the model's best {wanted} cell, which a sweep chooses: give --start-from KEY "
            "(the name of that cell's file in the store), or --start-from none for the model's own weights."
        )
    if start_from in (None, "none"):
        return None
    key = str(start_from)
    result = ledger.find(key)
    if result is None:
        raise UserError(f"--start-from {key}: {ledger.folder} has no result of that key.")
    for wrong, what in (
        (result["weights"] != model.weights, "is of another model"),
        (result["status"] != "ok", "diverged"),
        ("start" in result, "starts from another itself"),
    ):
        if wrong:
            raise UserError(f"--start-from {key}: that cell {what}.")
    declaration = get_task(result["task"], task_dirs)
    cell = Cell(
        model=model.name,
        model_folder=model.folder,
        weights=model.weights,
        task=result["task"],
        task_data=result["task_data"],
        protocol=Protocol.of_result(result["protocol"]),
        learning_rate=result["learning_rate"],
        seed=read_seed(result["seed"]),
        declaration=declaration.model_copy(update={"metric": result["metric"]}),  # a space may choose another one
        recut="pair_truncation" in result["protocol"],  # recorded only where it changed the examples
    )
    # A key hashes everything that can change a result, so a different one means that another engine computed it.
    if cell_key(cell) != key:
        raise UserError(f"--start-from {key}: another version of mlmclm computed it (engine {result.get('engine')}).")
    return cell


def make_ready(cell: Cell) -> None:
    """Bring this process into the state in which a sweep's workers compute a cell: threads, and compiled loops."""
    import torch

    from mlmclm.finetuning.cell import CELL_THREADS
    from mlmclm.finetuning.run import shapes_of
    from mlmclm.models.warm_up import prepare
    from mlmclm.progress import say_once

    torch.set_num_threads(CELL_THREADS)
    if not torch.cuda.is_available():
        prepare(shapes_of([cell]), say_once)


def keep_start(source: Cell, *, store: Path, data_root: Path | None) -> None:
    """Compute and keep the encoder of the cell to start from, unless it is kept already."""
    from mlmclm.finetuning.cell import cell_key
    from mlmclm.finetuning.kept import kept_folder, set_aside_damaged
    from mlmclm.finetuning.run import keep_encoder
    from mlmclm.progress import Bar, say
    from mlmclm.sweeps.cells import cell_name
    from mlmclm.sweeps.starts import KeptWeights

    kept, title = KeptWeights(store), f"{cell_name(source)}, to keep its weights"
    set_aside_damaged(kept_folder(store, cell_key(source)))
    with kept.claimed(cell_key(source), lambda other: say(f"{title}: waiting for {other}, which computes it")):
        if not kept.missing([source]):
            return
        make_ready(source)
        with Bar(title, unit="steps") as bar:
            keep_encoder(
                source, store=store, data_root=data_root, on_step=lambda step, steps, loss: bar.update(step, steps)
            )


def _settings(found: TaskProtocols, task: str, folder: Path, changes: dict[str, Any]) -> Protocol:
    """Return the cell's protocol with the options applied, and with lengths resolved for the model's context."""
    from mlmclm.configuration import parse
    from mlmclm.finetuning.protocol import Protocol, overridden
    from mlmclm.models.folder import context_of

    chosen = found.protocol_for(task)
    for axis, values in found.axes_of(task).items():
        if axis not in changes:
            some = ", ".join(map(str, values))
            raise UserError(f"task {task} has several values of {axis} ({some}): choose one with --set {axis}=VALUE.")
    if changes:
        chosen = parse(Protocol, overridden(chosen.model_dump(), changes), where="options")
    if chosen.length_share is None:
        return chosen
    context = context_of(folder)
    if context is None:
        raise UserError(f"{folder}: config.json doesn't say the model's context; use a protocol with a max_length.")
    return chosen.at_context(context)


def _task_data(
    task: Task, folder: Path, settings: Protocol, store: Path, data_root: Path | None, *, dry_run: bool
) -> tuple[str, bool]:
    """Return the fingerprint of the task's data, and whether `pair_truncation` changes its examples.

    The tokenised data are written to the store, except in a dry run.
    """
    from mlmclm.models.folder import check_length
    from mlmclm.progress import bars
    from mlmclm.tasks.load import load_task
    from mlmclm.tasks.prepared_task import find_data

    check_length(folder, settings.max_length)
    with bars() as progress:
        data = load_task(task, store=store, data_root=data_root, progress=progress)
    there = find_data(data, folder, settings, store)
    if there is not None and (settings.pooling != "bos" or there.starts):
        return data.fingerprint, there.recut
    # Imported late because it loads torch, which isn't needed if the data are tokenised already.
    from mlmclm.tasks.prepare_task import prepare_data

    if not dry_run:
        return data.fingerprint, prepare_data(data, folder, settings, store).recut
    if task.pair_template is None or not settings.cuts_longest:
        return data.fingerprint, False
    # Whether truncation changes any pair is known only after tokenising; a dry run throws the tokens away.
    with tempfile.TemporaryDirectory() as nowhere:
        return data.fingerprint, prepare_data(data, folder, settings, Path(nowhere)).recut


def _compute(cell: Cell, ledger: Ledger, place: Place) -> dict[str, Any]:
    import torch

    from mlmclm.finetuning.cell import CELL_THREADS
    from mlmclm.finetuning.run import run_cell, shapes_of
    from mlmclm.models.warm_up import prepare
    from mlmclm.progress import Bar, say_once
    from mlmclm.sweeps.cells import cell_name

    # As in a sweep: the number of threads sets the order of sums, so another number would change the scores.
    torch.set_num_threads(CELL_THREADS)
    if not torch.cuda.is_available():
        prepare(shapes_of([cell]), say_once)
    with Bar(cell_name(cell), unit="steps") as bar:
        result = run_cell(
            cell,
            store=place.store,
            data_root=place.data_root,
            on_step=lambda step, steps, loss: bar.update(step, steps, note=f"loss {loss:.3f}"),
            on_examples=ledger.write_examples,
        )
        if result["status"] != "ok":
            bar.total = bar.done  # a diverged run ends early
        return result


def _show_plan(cell: Cell, ledger: Any, *, as_json: bool) -> None:
    from mlmclm.finetuning.cell import cell_key
    from mlmclm.seeds import seed_value
    from mlmclm.sweeps.cells import cell_name

    key = cell_key(cell)
    there = ledger.find(key) is not None
    if as_json:
        print_json(
            {
                "key": key,
                "file": str(ledger.path(key)),
                "there": there,
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
        )
        return
    show(f"{cell_name(cell)}: nothing is trained now (--dry-run)")
    show(f"key: {key}")
    show(f"result: {ledger.path(key)} ({'there' if there else 'to be computed'})")
    show(f"model: {cell.model_folder} (weights {cell.weights})")
    show(f"task: {cell.task} (data {cell.task_data})")
    for name, value in cell.identity().items():
        show(f"protocol.{name}: {value}")


def _show(cell: Cell, result: dict[str, Any], ledger: Any, *, computed: bool, as_json: bool) -> None:
    from mlmclm.results.metrics import metric_parts
    from mlmclm.sweeps.cells import cell_name
    from mlmclm.sweeps.ledger import named

    result = named(result, cell)  # it may have been filed under another name of the same weights
    path, examples = ledger.path(result["key"]), ledger.examples_path(result["key"])
    kept = examples.is_file()
    if as_json:
        files = {"file": str(path), "examples_file": str(examples) if kept else None}
        print_json({**result, **files, "computed": computed})
        return
    if result["status"] == "diverged":
        show(f"{cell_name(cell)}: diverged at step {result['diverged_step']}")
    else:
        main, validation = metric_parts(result["metric"]), result["scores"]["validation"]
        rows = [
            (Text(name, style="bold" if name in main else ""), f"{validation[name]:.4f}", f"{value:.4f}")
            for name, value in result["scores"]["test"].items()
        ]
        show_table(("metric", "validation", "test"), rows, title=cell_name(cell))
    show(f"result: {path} ({'computed now' if computed else 'was there'})")
    if kept:
        show(f"examples: {examples}")
