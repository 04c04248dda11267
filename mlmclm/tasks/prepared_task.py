"""A task that is ready to train: its tokenised data in the store, its batches, head and loss, and its predictions.

Each family has a subclass of `PreparedTask`. torch, transformers and scikit-learn are imported inside the methods that
need them, because `mlmclm report` and dry runs open many prepared tasks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from mlmclm import versions
from mlmclm.errors import UserError, one_line
from mlmclm.results.chance import Chance
from mlmclm.results.examples import GROUP
from mlmclm.results.measures import Array, full_score, measure
from mlmclm.results.metrics import metric_parts
from mlmclm.storage.artifact import FolderArtifact, Origin
from mlmclm.storage.checksums import CHECKSUMS
from mlmclm.storage.files import read_json, stable_hash
from mlmclm.tasks.declaration import FAMILIES, Task
from mlmclm.tasks.metric import metrics_of
from mlmclm.tasks.settings import TaskSettings

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mlmclm.backends.packing import Packing

Linear = Callable[[int, int], "nn.Linear"]
"""Returns a newly initialised layer, given its number of inputs and of outputs."""
Examples = dict[str, Array]
"""Per-example results of a split: columns with one value per example.

A column named after a score holds that score of each example, NaN where it is undefined; the split's score is the mean.
Columns of objects (texts, lists) enter no score: they hold the predictions themselves (`mlmclm.tasks.predictions`)."""


@dataclass(frozen=True)
class Lists:
    """A column of lists of numbers, without a Python object per row: row i is `values[offsets[i]:offsets[i + 1]]`."""

    values: Array
    offsets: Array

    @staticmethod
    def of(table: pa.Table, column: str) -> Lists:
        """Return a list column of a single-batch table without copying; of lists of lists, the inner lists."""
        array = table[column].combine_chunks()
        while pa.types.is_list(array.type.value_type):
            array = array.flatten()
        return Lists(array.values.to_numpy(), array.offsets.to_numpy())

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> Array:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def __iter__(self) -> Iterator[Array]:
        return map(self.__getitem__, range(len(self)))

    @cached_property
    def lengths(self) -> Array:
        """Number of values in each row, int [rows]."""
        return np.diff(self.offsets)


@dataclass(frozen=True)
class Batch:
    """Sequences to encode together, and their targets for the loss, under keys of the family's choice."""

    sequences: list[Array]
    targets: dict[str, Array]
    token_types: list[Array] | None = None
    """Token types of each sequence, if there is more than one type. A model without token types ignores them."""


@dataclass(frozen=True)
class PreparedTask(ABC):
    """A task's tokenised data, a folder of memory-mapped Arrow files, with the settings that it is trained with.

    Cells share instances, so an instance holds no state that depends on a cell.
    """

    key: str
    folder: Path
    family: str
    task_data: str
    label_names: tuple[str, ...]
    settings: TaskSettings = field(compare=False)
    """Tasks that share the data may differ in the settings of training and of predictions."""
    unanswerable: bool = False
    """Question answering: True if the empty answer can be correct."""
    recut: bool = False
    """Pairs: True if truncating the longer text gave other sequences than truncating the joined text
    (`texts.encode_texts`)."""
    starts: bool = False
    """True if each sequence begins with a special token (which `pooling: bos` needs)."""

    @property
    def kind(self) -> type[Any]:
        """The family (a `tasks.family.Family`; that module imports this one)."""
        return FAMILIES[self.family]

    @cached_property
    def rows(self) -> dict[str, int]:
        """Number of rows of each table."""
        return dict(read_json(self.folder / "meta.json")["rows"])

    @cached_property
    def training_data(self) -> str:
        """Fingerprint of everything in the task that training depends on: its tokenised rows, its family and its labels."""
        rows = read_json(self.folder / CHECKSUMS)["train.arrow"]["sha256"]
        return stable_hash([FAMILIES.keyed(self.family), rows, self.label_names, self.unanswerable])

    @cached_property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """Number of rows and of tokens of each table that has tokens."""
        sizes: dict[str, tuple[int, int]] = {}
        for name, ids in self.token_ids():
            rows, tokens = len(ids), len(pa.compute.list_flatten(ids, recursive=True))
            sizes[name] = rows, sizes.get(name, (rows, 0))[1] + tokens
        return sizes

    def token_ids(self) -> Iterator[tuple[str, pa.ChunkedArray]]:
        """Open every table; yield its name with each of its columns of token ids. Raises what `table` does."""
        for name in self.rows:
            table = self.table(name)
            for column in self.kind.token_columns:
                if column in table.column_names:
                    yield name, table[column]

    def table(self, name: str) -> pa.Table:
        """Open one of the tables that the family's `encode` returned; raise UserError if its file is damaged."""
        try:
            with pa.memory_map(str(self.folder / f"{name}.arrow")) as source:
                return pa.ipc.open_file(source).read_all()
        except (pa.ArrowException, OSError) as error:
            raise UserError(
                f"{self.folder / name}.arrow cannot be read; is it cut short? ({one_line(error)}) Delete {self.folder}: "
                "the same command makes it again."
            ) from error

    @cached_property
    def columns(self) -> dict[str, dict[str, Any]]:
        """The columns of each table that hold numbers, as arrays [rows], or lists of numbers, as `Lists`."""
        return {name: _numeric_columns(self.table(name)) for name in self.rows}

    @property
    def groups(self) -> Examples:
        """The column of the test examples' groups; empty if the task declares none."""
        return {GROUP: self.columns[GROUP][GROUP]} if GROUP in self.rows else {}

    @property
    def distinct(self) -> Lists | None:
        """Numbers of each training row's texts, if no text may occur twice in a batch, else None."""
        return None

    def batch(self, rows: Array) -> Batch:
        """Return the training rows with these numbers (int [B]) as a batch; by default, all columns of numbers are targets."""
        columns = self.columns["train"]
        ids, types = columns["input_ids"], columns.get("token_types")
        targets = {name: column[rows] for name, column in columns.items() if not isinstance(column, Lists)}
        return Batch([ids[row] for row in rows], targets, None if types is None else [types[row] for row in rows])

    @abstractmethod
    def head(self, hidden: int, linear: Linear) -> nn.Module:
        """Return the layers on top of hidden states [tokens, hidden]; all random initialisation must come from `linear`."""

    @abstractmethod
    def loss(self, head: nn.Module, hidden: Tensor, packing: Packing, targets: dict[str, Array]) -> Tensor:
        """Compute the loss of a batch, a scalar in fp32.

        Args:
            hidden: final hidden states of the batch's sequences, [T, hidden].
        """

    def embeddings(self, hidden: Tensor, packing: Packing) -> Tensor:
        """Return one vector per sequence, [S, hidden]. Only families that embed (`Family.embeds`) implement it."""
        raise NotImplementedError

    def loss_of(self, vectors: Tensor, targets: dict[str, Array]) -> Tensor:
        """Compute the loss from a batch's `embeddings`. Only families that embed (`Family.embeds`) implement it."""
        raise NotImplementedError

    @abstractmethod
    def predict(self, head: nn.Module, hidden: Tensor, packing: Packing, split: str, rows: Array) -> list[Array]:
        """Return one array per sequence, in a shape of the family's choice, from which `examples` computes its columns.

        `hidden` is [T, hidden], as in `loss`; `rows` are the sequences' numbers in the split's `input_ids`, int64 [S].
        A NaN in the model's output must stay NaN, because a diverged model is recognised by it.
        """

    @abstractmethod
    def examples(self, split: str, predictions: Sequence[Array]) -> Examples:
        """Compute a split's columns, one value per example [examples], from the predictions of all its sequences in order."""

    def blind(self) -> Iterator[tuple[str, Examples]]:
        """Yield each way to predict the test split without a model: a phrase for it, and the `examples` that it gives."""
        yield from ()

    def chance(self, metric: str) -> Chance | None:
        """Return the best score that the test split gives without a model (`blind`); None if the family has no such way."""
        levels = []
        for how, examples in self.blind():
            numbers = numeric(examples)
            score = measure(metric, self.kind.measured(numbers, len(self.label_names)))
            levels.append(Chance(full_score(score, numbers), how))
        return max(levels, key=lambda level: level.score, default=None)

    def scores(self, examples: Examples, metric: str = "") -> dict[str, float]:
        """Compute the family's scores of a split, and those of added metrics that enter the task's `metric`."""
        classes, numbers, metrics = len(self.label_names), numeric(examples), metrics_of(self.family)
        added = {name: metrics[name].measure(numbers, classes) for name in metric_parts(metric) if name in metrics}
        return self.kind.scores(examples, classes) | {name: full_score(score, numbers) for name, score in added.items()}


class StoredPreparation(FolderArtifact):
    """A task's tokenised data in the store."""

    kind = "tasks"
    part = "prepared"
    again = "`mlmclm study` or `mlmclm sweep` sets it aside and makes it again"

    def origin(self) -> Origin:
        """Read what the data were made from, except the tokenizer, of which only a hash in the key is known."""
        meta = read_json(self.folder / "meta.json")
        facts = {name: meta[name] for name in ("family", "task_data") if name in meta}
        return Origin({**facts, **meta.get("settings", {})}, {"task": meta.get("task")})

    def open(self, settings: TaskSettings) -> PreparedTask:
        """Open intact data, to train with these settings."""
        meta = read_json(self.folder / "meta.json")
        more = {name: meta.get(name, False) for name in ("unanswerable", "recut", "starts")}
        facts = meta["family"], meta["task_data"], tuple(meta["label_names"])
        prepared: PreparedTask = FAMILIES[meta["family"]].prepared(self.key, self.folder, *facts, settings, **more)
        return prepared


def prepared_key(task: Task, task_data: str, tokenizer: str, settings: TaskSettings) -> str:
    """Return the key (hex) of prepared data, given the fingerprint of the task's data and the tokenizer's hash."""
    encoding = settings.encoding(pairs=task.pair_template is not None)
    return stable_hash([versions.PREPARED_TASKS, FAMILIES.keyed(task.family), task_data, tokenizer, encoding])


def check_vocabulary(prepared: PreparedTask, tokenizer_folder: Path) -> None:
    """Raise UserError for a damaged table, or a token id outside the vocabulary of the model in the folder, if there is one."""
    for _, ids in prepared.token_ids():
        check_token_ids(ids, tokenizer_folder)


def check_token_ids(ids: pa.ChunkedArray, tokenizer_folder: Path) -> None:
    """Raise UserError for a token id outside the vocabulary of the model in the folder, if there is one."""
    config = tokenizer_folder / "config.json"
    size = read_json(config).get("vocab_size") if config.is_file() else None
    largest = None if size is None else pa.compute.max(pa.compute.list_flatten(ids, recursive=True)).as_py()
    if largest is not None and largest >= size:
        raise UserError(
            f"{tokenizer_folder}: the tokenizer gives the id {largest}, and the model's vocabulary has {size} "
            "(vocab_size of config.json). Is it another model's tokenizer?"
        )


def numeric(examples: Examples) -> Examples:
    """Return the columns that scores are computed from."""
    return {name: values for name, values in examples.items() if values.dtype != object}


def mean_of(column: Array) -> float:
    """Return the mean over the examples that have a value."""
    return float(np.mean(column[~np.isnan(column)]))


def means(examples: Examples) -> dict[str, float]:
    """Return `mean_of` each numeric column."""
    return {name: mean_of(column) for name, column in numeric(examples).items()}


def objects(rows: Sequence[Any]) -> Array:
    """Return an object column of texts or lists."""
    # Not np.array(rows): lists of equal length would become a two-dimensional array.
    return np.fromiter(rows, dtype=object, count=len(rows))


def _numeric_columns(table: pa.Table) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for column in table.schema:
        inner = column.type
        while pa.types.is_list(inner):
            inner = inner.value_type
        if pa.types.is_primitive(inner):
            lists = pa.types.is_list(column.type)
            columns[column.name] = Lists.of(table, column.name) if lists else table[column.name].to_numpy()
    return columns
