"""A single cell of a grid, from options to its result: the work of `mlmclm finetune`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.text import Text

from mlmclm.cli.output import print_json, show, show_table
from mlmclm.configuration import parse
from mlmclm.errors import UserError
from mlmclm.finetuning.cell import CELL_THREADS, Cell, cell_key, shapes_of
from mlmclm.finetuning.kept import KeptEncoder
from mlmclm.finetuning.protocol import Protocol, overridden
from mlmclm.models.folder import check_length, context_of
from mlmclm.models.warm_up import prepare
from mlmclm.progress import Bar, bars, say, say_once
from mlmclm.results.metrics import metric_parts
from mlmclm.seeds import seed_value
from mlmclm.studies.place import Place
from mlmclm.sweeps.cells import SweepModel, cell_name
from mlmclm.sweeps.ledger import Ledger, named
from mlmclm.sweeps.protocols import TaskProtocols
from mlmclm.sweeps.recorded_cell import recorded_cell
from mlmclm.sweeps.starts import KeptWeights
from mlmclm.tasks.declaration import Task
from mlmclm.tasks.load import load_task
from mlmclm.tasks.prepare_task import prepare_data
from mlmclm.tasks.prepared_task import find_data


def changed_settings(pairs: Sequence[str], *, causal: bool | None, pooling: str | None) -> dict[str, Any]:
    """Return the protocol settings that the options change; raise UserError for a pair without `=`."""
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


def settings_of(found: TaskProtocols, task: str, folder: Path, changes: dict[str, Any]) -> Protocol:
    """Return the cell's protocol with the options applied, and with lengths resolved for the model's context.

    Raises:
        UserError: a setting has several values to choose from, is unknown, or doesn't fit the model.
    """
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


def start_of(
    start_from: str | None, wanted: str | None, model: SweepModel, ledger: Ledger, task_dirs: Sequence[Path]
) -> Cell | None:
    """Return the cell to start from, rebuilt from its result; None for the model's own weights.

    Args:
        wanted: the task whose best cell the protocol starts from, if any.

    Raises:
        UserError: `--start-from` is missing, or names a cell that cannot be started from.
    """
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
        ("start" in result, "itself starts from another cell"),
    ):
        if wrong:
            raise UserError(f"--start-from {key}: that cell {what}.")
    return recorded_cell(result, model, task_dirs, where=f"--start-from {key}")


def data_of(task: Task, folder: Path, settings: Protocol, place: Place, *, dry_run: bool) -> tuple[str, bool]:
    """Return the fingerprint of the task's data, and whether `pair_truncation` changes its examples.

    The tokenised data are written to the store, except in a dry run.
    """
    check_length(folder, settings.max_length)
    with bars() as progress:
        data = load_task(task, store=place.store, data_root=place.data_root, progress=progress)
    there = find_data(data, folder, settings, place.store)
    if there is not None and (settings.pooling != "bos" or there.starts):
        return data.fingerprint, there.recut
    if not dry_run:
        return data.fingerprint, prepare_data(data, folder, settings, place.store).recut
    if task.pair_template is None or not settings.cuts_longest:
        return data.fingerprint, False
    # Whether truncation changes any pair is known only after tokenising; a dry run throws the tokens away.
    with tempfile.TemporaryDirectory() as nowhere:
        return data.fingerprint, prepare_data(data, folder, settings, Path(nowhere)).recut


def make_ready(cell: Cell) -> None:
    """Bring this process into the state in which a sweep's workers compute a cell: threads, and compiled loops.

    The number of threads sets the order of sums, so another number would change the scores.
    """
    import torch

    from mlmclm.backends.choice import backend_of, best_device

    torch.set_num_threads(CELL_THREADS)
    prepare(shapes_of([cell]), say_once)
    backend = backend_of(best_device()).described(cell.protocol.precision)
    say_once(f"fine-tuning computes with the backend {backend}")


@contextmanager
def steps_bar(title: str) -> Iterator[Callable[[int, int, float], None]]:
    """Show a bar, and yield a function that takes the step, the number of steps and the loss."""
    with Bar(title, unit="steps") as bar:
        yield lambda step, steps, loss: bar.update(step, steps)


def keep_start(source: Cell, place: Place) -> None:
    """Compute and keep the encoder of the cell to start from, unless it is kept already."""
    from mlmclm.finetuning.run import keep_encoder

    kept, title = KeptWeights(place.store), f"{cell_name(source)}, to keep its weights"
    KeptEncoder(place.store, cell_key(source)).find()  # sets a damaged one aside
    with kept.claimed(cell_key(source), lambda other: say(f"{title}: waiting for {other}, which computes it")):
        if not kept.missing([source]):
            return
        make_ready(source)
        with steps_bar(title) as on_step:
            keep_encoder(source, store=place.store, data_root=place.data_root, on_step=on_step)


def compute(cell: Cell, ledger: Ledger, place: Place) -> dict[str, Any]:
    """Return a cell's result, computed now."""
    from mlmclm.finetuning.run import run_cell

    make_ready(cell)
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


def show_plan(cell: Cell, ledger: Ledger, *, as_json: bool) -> None:
    """Print what a cell is, and whether it has a result."""
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


def show_result(cell: Cell, result: dict[str, Any], ledger: Ledger, *, computed: bool, as_json: bool) -> None:
    """Print a cell's scores, and the files of its result."""
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
    show(f"result: {path} ({'computed now' if computed else 'found in the store'})")
    if kept:
        show(f"examples: {examples}")
