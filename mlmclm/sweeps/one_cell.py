"""A single cell of a grid, from a model's and a task's names to its result."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlmclm.configuration import parse_config
from mlmclm.errors import UserError
from mlmclm.finetuning.cell import CELL_THREADS, Cell, Start, cell_key, shapes_of
from mlmclm.finetuning.kept import KeptEncoder
from mlmclm.finetuning.protocol import Protocol, overridden
from mlmclm.models.folder import check_length, context_of
from mlmclm.models.warm_up import compile_kernels
from mlmclm.progress import Bar, say_once
from mlmclm.seeds import Seed, read_seed
from mlmclm.storage.place import Place
from mlmclm.sweeps.cells import SweepModel, cell_name, named_result, recorded_cell
from mlmclm.sweeps.find_model import find_model
from mlmclm.sweeps.results_store import ResultsStore
from mlmclm.sweeps.space import TaskProtocols, find_protocol, find_space
from mlmclm.tasks.declaration import Task
from mlmclm.tasks.declared_tasks import get_task
from mlmclm.tasks.load import load_task
from mlmclm.tasks.prepare_task import check_tokens, find_tokens, prepare_data
from mlmclm.tasks.prepared_task import check_vocabulary
from mlmclm.tasks.rehearsal import needs_rehearsal, rehearse

if TYPE_CHECKING:
    import pandas as pd

    from mlmclm.storage.objects import ObjectPath

DEFAULT_PROTOCOL = "standard"


@dataclass(frozen=True, repr=False)
class CellResult:
    """The result of one cell.

    Attributes:
        result: what the store keeps of it: status, scores of each split as fractions of 1, settings and costs.
        computed: whether it was computed now rather than found in the store.
    """

    cell: Cell
    result: Mapping[str, Any]
    computed: bool
    results_store: ResultsStore

    def __repr__(self) -> str:
        return f"<result of {cell_name(self.cell)}: {self.result['status']}, {dict(self.scores.get('test', {}))}>"

    @property
    def scores(self) -> Mapping[str, Mapping[str, float]]:
        """Split -> metric -> score, a fraction of 1; empty if the cell diverged."""
        return self.result["scores"] if self.result["status"] == "ok" else {}

    @property
    def path(self) -> Path | ObjectPath:
        """The result's file."""
        return self.results_store.path(self.result["key"])

    @property
    def examples_path(self) -> Path | ObjectPath | None:
        """The file with the test examples; None if none are kept."""
        path = self.results_store.examples_path(self.result["key"])
        return path if path.is_file() else None

    def predictions(self) -> pd.DataFrame:
        """Return what the model predicted for each test example; a `UserError` if the cell has no predictions."""
        import pandas as pd

        from mlmclm.tasks.predictions import predicted

        return pd.DataFrame(predicted(self.results_store.examples(self.result)))

    def write_predictions(self, path: Path) -> None:
        """Write what `predictions` returns as JSON lines."""
        from mlmclm.tasks.predictions import write_predictions

        write_predictions(self.results_store.examples(self.result), path)


@dataclass(frozen=True)
class OneCell:
    """A cell that can be computed in this process, without Ray."""

    cell: Cell
    place: Place
    source: Cell | None
    """The cell that it starts from; None for the model's own weights."""

    @property
    def key(self) -> str:
        """The cell's key, a hash of everything that can change its result."""
        return cell_key(self.cell)

    @property
    def results_store(self) -> ResultsStore:
        """The store of its result."""
        return ResultsStore(self.place.store)

    def check(self) -> None:
        """Load the model that `run` would train, and raise what it would."""
        if self.source is None and self.results_store.find(self.key) is None:
            from mlmclm.models.encoder import check_direction
            from mlmclm.models.folder import load_encoder

            check_direction(load_encoder(self.cell.model_folder), causal=self.cell.protocol.attention == "causal")

    def run(self) -> CellResult:
        """Return the result, found in the store or computed now, as a sweep's workers compute it.

        Raises:
            MlmclmError: the cell cannot be computed.
        """
        key, results_store, title = self.key, self.results_store, cell_name(self.cell)
        # The encoder to start from is only needed if the cell has to be computed.
        if self.source is not None and results_store.find(key) is None:
            keep_start(self.source, self.place)
        # A sweep, or another process like this one, may be computing the same cell.
        result, computed = results_store.ensure(key, self._compute, title=title)
        # The stored result may have another name for a model with the same weights.
        return CellResult(self.cell, named_result(result, self.cell), computed, results_store)

    def _compute(self) -> dict[str, Any]:
        from mlmclm.finetuning.run import run_cell

        make_ready(self.cell)
        with Bar(cell_name(self.cell), unit="steps") as bar:
            result = run_cell(
                self.cell,
                store=self.place.store,
                data_root=self.place.data_root,
                on_step=lambda step, steps, loss: bar.update(step, steps, note=f"loss {loss:.3f}"),
                on_examples=self.results_store.write_examples,
            )
            if result["status"] != "ok":
                bar.total = bar.done  # a diverged run ends early
            return result


def one_cell(
    model: str,
    task: str,
    learning_rate: float,
    place: Place,
    *,
    seed: Seed | Mapping[str, int] = 0,
    protocol: str | None = None,
    space: str | None = None,
    settings: Mapping[str, Any] | None = None,
    start_from: str | None = None,
    prepare: bool = True,
) -> OneCell:
    """Return a cell from names; `api.finetune` describes the arguments.

    Args:
        prepare: whether to write the tokenised data to the store; otherwise the cell is only described.
    """
    try:
        is_rate = 0 < learning_rate < 1
    except TypeError as error:
        rate = repr(learning_rate)
        raise UserError(f"--lr {rate}: a learning rate is a number; write it without quotation marks.") from error
    if not is_rate:
        raise UserError(f"--lr {learning_rate:g}: a learning rate is between 0 and 1.")
    try:
        seeds = read_seed(seed)
    except ValueError as error:
        raise UserError(f"--seed {seed}: {error}.") from error
    declared = get_task(task, place.task_dirs)
    sweep_model = find_model(model, place.store, data_root=place.data_root)
    if protocol is not None and space is not None:
        raise UserError("--protocol and --space: give one of them.")
    chosen = find_protocol(protocol or DEFAULT_PROTOCOL) if space is None else find_space(space)
    resolved = _settings(chosen, task, sweep_model.folder, settings or {})
    results_store = ResultsStore(place.store)
    source = _start(start_from, chosen.start_from.get(task), sweep_model, results_store, place.task_dirs)
    task_data, recut = _data(declared, sweep_model.folder, resolved, place, write=prepare)
    cell = Cell(
        model=sweep_model.name,
        model_folder=sweep_model.folder,
        weights=sweep_model.weights,
        earlier=sweep_model.earlier,
        task=task,
        task_data=task_data,
        protocol=resolved,
        learning_rate=learning_rate,
        seed=seeds,  # as a sweep writes it, so that the cell has the same key
        declaration=declared.measured_by(chosen.metrics),
        start=Start(cell_key(source), source.task) if source else None,
        recut=recut,
    )
    (cell,) = results_store.as_filed([cell])
    return OneCell(cell, place, source)


def _settings(protocols: TaskProtocols, task: str, folder: Path, changes: Mapping[str, Any]) -> Protocol:
    """Return the cell's protocol with the options applied, and with lengths resolved for the model's context."""
    chosen = protocols.protocol_for(task)
    for axis, values in protocols.axes_of(task).items():
        if axis not in changes:
            some = ", ".join(map(str, values))
            raise UserError(f"task {task} has several values of {axis} ({some}): choose one with --set {axis}=VALUE.")
    if changes:
        chosen = parse_config(Protocol, overridden(chosen.model_dump(), dict(changes)), where="options")
    if chosen.length_share is None:
        return chosen
    context = context_of(folder)
    if context is None:
        raise UserError(f"{folder}: config.json doesn't say the model's context; use a protocol with a max_length.")
    return chosen.at_context(context)


def _start(
    start_from: str | None,
    wanted: str | None,
    model: SweepModel,
    results_store: ResultsStore,
    task_dirs: Sequence[Path],
) -> Cell | None:
    """Return the cell to start from, rebuilt from its result; None for the model's own weights.

    Args:
        wanted: the task whose best cell the protocol starts from, if any.
    """
    if start_from is None and wanted is not None:
        raise UserError(
            f"the protocol starts this task from the model's best {wanted} cell, which a sweep chooses: give --start-from KEY "
            "(the name of that cell's file in the store), or --start-from none for the model's own weights."
        )
    if start_from in (None, "none"):
        return None
    key = str(start_from)
    result = results_store.find(key)
    if result is None:
        raise UserError(f"--start-from {key}: {results_store.folder} has no result of that key.")
    for wrong, reason in (
        (result["weights"] not in model.hashes, "is of another model"),
        (result["status"] != "ok", "diverged"),
        ("start" in result, "itself starts from another cell"),
    ):
        if wrong:
            raise UserError(f"--start-from {key}: that cell {reason}.")
    return recorded_cell(result, model, task_dirs, where=f"--start-from {key}")


def _data(task: Task, folder: Path, settings: Protocol, place: Place, *, write: bool) -> tuple[str, bool]:
    """Return the fingerprint of the task's data, and whether `pair_truncation` changes its examples.

    The tokenised data are written to the store, if `write`.
    """
    check_length(folder, settings.max_length)
    data = load_task(task, store=place.store, data_root=place.data_root)
    prepared = find_tokens(task, data.fingerprint, folder, settings, place.store)
    if prepared is not None:
        check_vocabulary(prepared, folder)  # another model of this tokenizer may have prepared it
    if prepared is not None and (settings.pooling != "bos" or prepared.starts):
        rehearse(task, prepared)
        return data.fingerprint, prepared.recut
    if write:
        return data.fingerprint, prepare_data(data, folder, settings, place.store).recut
    if not needs_rehearsal(task) and (task.pair_template is None or not settings.cuts_longest):
        check_tokens(data, folder, settings)
        return data.fingerprint, False
    # Whether truncation changes any pair is known only after tokenising; these tokens are thrown away.
    with tempfile.TemporaryDirectory() as scratch:
        return data.fingerprint, prepare_data(data, folder, settings, Path(scratch)).recut


def make_ready(cell: Cell) -> None:
    """Bring this process into the state in which a sweep's workers compute a cell: threads, and compiled loops.

    The number of threads sets the order of sums, so another number would change the scores.
    """
    import torch

    from mlmclm.backends.choice import backend_of, best_device

    torch.set_num_threads(CELL_THREADS)
    compile_kernels(shapes_of([cell]), say_once)
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

    title = f"{cell_name(source)}, to keep its weights"

    def make(folder: Path) -> None:
        make_ready(source)
        with steps_bar(title) as on_step:
            keep_encoder(source, folder, store=place.store, data_root=place.data_root, on_step=on_step)

    KeptEncoder(place.store, cell_key(source)).ensure(make, title=title)
