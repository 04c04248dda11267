"""The interface of a task family, the families that there are by their names, and functions that several of them share.

A family is one class in a file of its own, in `mlmclm/tasks/families/` or in another installed package; nothing else names it. It says
which columns its tasks have, how they are checked and shown, what is computed of them, and how they are learned. Everything else asks it.
torch, transformers and scikit-learn are imported inside the methods that need them: declarations and reports do without.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa

from mlmclm.discovery import classes_in
from mlmclm.errors import UserError, unknown
from mlmclm.plugins import FAMILIES, plugin, plugin_names
from mlmclm.tasks.check import check_filled
from mlmclm.tasks.columns import Columns

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerFast

    from mlmclm.backends.packing import Packing
    from mlmclm.results.examples import KeptExamples
    from mlmclm.tasks.declaration import Judged, Part, Task
    from mlmclm.tasks.load import TaskData
    from mlmclm.tasks.prepared_task import PreparedTask
    from mlmclm.tasks.settings import TaskSettings
    from mlmclm.tasks.splits import Raw

Array = np.ndarray[Any, Any]
Linear = Callable[[int, int], "nn.Linear"]
"""Gives a freshly drawn layer of so many inputs and outputs."""
Read = Callable[[Any], "Raw"]
"""Gives the table of a declaration's split (text or `Part`) as its source has it."""
SPLITS = ("train", "validation", "test")
Examples = dict[str, Array]
"""Columns of one length: what each example of a split got. A column that has the name of a score is that score of each
example, NaN where it has none: its mean is the split's. Columns of objects (texts, lists) make no score: they are the predictions
themselves, for `mlmclm.tasks.predictions`."""


@dataclass(frozen=True)
class Lists:
    """A column of lists of numbers without a Python object a row: row i is `values[offsets[i]:offsets[i + 1]]`."""

    values: Array
    offsets: Array

    @staticmethod
    def of(table: pa.Table, column: str) -> Lists:
        """A list column of a table of one batch, without copying."""
        array = table[column].combine_chunks()
        return Lists(array.values.to_numpy(), array.offsets.to_numpy())

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> Array:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    @cached_property
    def lengths(self) -> Array:
        """int [rows]."""
        return np.diff(self.offsets)


@dataclass(frozen=True)
class Batch:
    """Sequences to encode together, and what the loss needs of them (keys are the family's own)."""

    sequences: list[Array]
    targets: dict[str, Array]
    token_types: list[Array] | None = None
    """The types of each sequence's tokens, where there are several; a model that has none does without."""


class Family(ABC):
    """A family of tasks. The class reads, checks and shows data. An instance is one task, tokenised and ready to train; it holds no
    state that a cell could leave behind.

    Class attributes:
        name: in declarations.
        title: in reports.
        columns: the type of each column of a training table, by canonical name. `text_pair` is optional: where the task
            doesn't declare it, it is null.
        more_columns: canonical names of other tables than the training table.
        labels: the column of classes (int64) or tags (list<int64>), which the task's label names number; None without any.
        metrics: the words in reports of every score that `scores` can give, by the score's name; the first is the usual main one.
            Correlations (matthews, spearman, pearson) are between -1 and 1, all others between 0 and 1; more is better. `study.` are the
            published evaluation's own variants (arXiv 2507.00994).
        study_metric: the main score in that study; None where it has no such tasks.
        judged: whether a split to evaluate on is queries, a corpus and judgements.
        unanswerable: whether a task can have questions without an answer.
        framed: whether `encode` knows `special_tokens: tokenizer`.
        token_columns: columns of token ids in the tables of `encode`.
        overlong_words: how a sequence is fitted that is longer than `max_length`.
        in_chunks: whether the loss is `loss_of` the sequences' `embeddings`, so that a large batch can be encoded a chunk at a time.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    columns: ClassVar[Mapping[str, pa.DataType]]
    more_columns: ClassVar[tuple[str, ...]] = ()
    labels: ClassVar[str | None] = None
    metrics: ClassVar[Mapping[str, str]]
    study_metric: ClassVar[str | None] = None
    judged: ClassVar[bool] = False
    unanswerable: ClassVar[bool] = False
    framed: ClassVar[bool] = False
    token_columns: ClassVar[tuple[str, ...]] = ("input_ids",)
    overlong_words: ClassVar[str] = "cut"
    in_chunks: ClassVar[bool] = False

    def __init__(self, prepared: PreparedTask, settings: TaskSettings) -> None:
        self.prepared = prepared
        self.settings = settings

    @classmethod
    def training_source(cls, task: Task, read: Read) -> Raw:
        """The table to train on as its source has it."""
        return read(task.splits.train)

    @classmethod
    def evaluation(cls, task: Task, split: str, source: str | Part | Judged, read: Read, names: tuple[str, ...]) -> Any:
        """A split to evaluate on: one table, or an object of the family's own that `tables` takes apart."""
        return cls.table(Columns(task, split, read(source)), names)

    @classmethod
    def held_out(cls, table: pa.Table) -> Any:
        """A split as `evaluation` gives it, of rows that were held out of the training table."""
        return table

    @classmethod
    def tables(cls, split: Any) -> dict[str, pa.Table]:
        """The tables of a split to evaluate on, by their names; one alone needs none."""
        return {"": split}

    @classmethod
    def table(cls, columns: Columns, names: tuple[str, ...]) -> pa.Table:
        """A table in canonical columns, checked."""
        table = pa.table({name: cls.column(columns, name, names) for name in cls.columns})
        check_filled(columns.task, columns.where, table)
        cls.check(columns.task, columns.where, table, names)
        return table

    @classmethod
    def column(cls, columns: Columns, name: str, names: tuple[str, ...]) -> pa.Array:
        """One canonical column."""
        if name == "text_pair" and name not in columns.task.columns:
            return pa.nulls(columns.raw.table.num_rows, pa.string())
        if name == cls.labels:
            return columns.numbered(name, cls.columns[name], names)
        return columns.typed(name, cls.columns[name])

    @classmethod  # noqa: B027
    def check(cls, task: Task, where: str, table: pa.Table, names: tuple[str, ...]) -> None:
        """Checks a table beyond its having rows and no nulls; `where` starts each message.

        Raises:
            UserError: it says which row is wrong, and how.
        """

    @classmethod  # noqa: B027
    def check_settings(cls, task: str, settings: TaskSettings) -> None:
        """Checks the settings that this family alone uses.

        Raises:
            UserError: they don't fit together.
        """

    @classmethod
    def label_counts(cls, table: Any, names: tuple[str, ...]) -> dict[str, float]:
        """The number of rows (of items, of tags) of each label; another family's own numbers."""
        if cls.labels is None:
            return {}
        column = table[cls.labels].combine_chunks()
        counts = Counter((column.flatten() if pa.types.is_list(column.type) else column).to_pylist())
        return {label: counts[number] for number, label in enumerate(names)}

    @classmethod
    def show(cls, row: dict[str, Any], names: tuple[str, ...], text: Callable[[list[int]], str]) -> dict[str, Any]:
        """An encoded training row in words: what the model is given and what it should say.

        Args:
            text: decodes tokens.
        """
        return {"text": text(row["input_ids"])}

    @classmethod
    def overlong(cls, table: pa.Table, column: str, settings: TaskSettings) -> Array:
        """bool [rows]: the sequences of a column, encoded whole, that don't fit in `max_length`."""
        return Lists.of(table, column).lengths > settings.max_length

    @classmethod
    def predictions(cls, kept: KeptExamples) -> Iterator[dict[str, Any]]:
        """A JSON object of each test example: `row`, `gold` and `prediction`, by the labels' names where they have any.

        Raises:
            KeyError: an earlier version computed the cell and kept no predictions.
        """
        gold, predicted = (kept.columns[name].tolist() for name in ("gold", "prediction"))
        if kept.label_names:
            gold, predicted = ([kept.label_names[number] for number in side] for side in (gold, predicted))
        for row, (true, found) in enumerate(zip(gold, predicted, strict=True)):
            yield {"row": row, "gold": true, "prediction": found}

    @classmethod
    @abstractmethod
    def encode(cls, data: TaskData, tokenizer: PreTrainedTokenizerFast, settings: TaskSettings) -> dict[str, pa.Table]:
        """Tokenised tables by name, `train` among them: the work that is done once for all cells."""

    @cached_property
    def sequences(self) -> dict[str, Lists]:
        """The token ids of each split, where `encode` gives each a table with `input_ids`."""
        return {split: Lists.of(self.prepared.table(split), "input_ids") for split in SPLITS}

    @property
    def train_size(self) -> int:
        """Number of training rows, which `batch` takes by number."""
        return len(self.sequences["train"])

    @abstractmethod
    def batch(self, rows: Array) -> Batch:
        """The training rows of these numbers."""

    @abstractmethod
    def head(self, hidden: int, linear: Linear) -> nn.Module:
        """The layers on top of the encoder, with chance from `linear` alone."""

    @abstractmethod
    def loss(self, head: nn.Module, hidden: Tensor, packing: Packing, targets: dict[str, Array]) -> Tensor:
        """The loss of a batch, a scalar in fp32.

        Args:
            hidden: [T, hidden] final states of the batch's sequences.
        """

    def embeddings(self, hidden: Tensor, packing: Packing) -> Tensor:
        """One vector a sequence, [S, hidden], of a family whose loss is computed `in_chunks`."""
        raise NotImplementedError

    def loss_of(self, vectors: Tensor, targets: dict[str, Array]) -> Tensor:
        """The loss of a batch's `embeddings`, of a family whose loss is computed `in_chunks`."""
        raise NotImplementedError

    def evaluation_sequences(self, split: str) -> Lists:
        """All sequences that must be encoded to score `validation` or `test`."""
        return self.sequences[split]

    def token_types(self, split: str) -> Lists | None:
        """The token types of `evaluation_sequences`; None where all are the same."""
        return None

    @abstractmethod
    def predict(self, head: nn.Module, hidden: Tensor, packing: Packing, split: str, rows: Array) -> list[Array]:
        """What `score` needs of these sequences (rows of `evaluation_sequences`), one array each; NaN stays NaN."""

    @abstractmethod
    def examples(self, split: str, predictions: Sequence[Array]) -> Examples:
        """What each example of a split got, in the split's order, from the predictions of all its sequences in order."""

    @abstractmethod
    def scores(self, examples: Examples) -> dict[str, float]:
        """The `metrics` of a split, from all its examples."""


@cache
def families() -> dict[str, type[Family]]:
    """All families by name: of every file in `mlmclm/tasks/families/`, and of other installed packages.

    Raises:
        UserError: two have the same name.
    """
    own = [kind for kind in classes_in("mlmclm.tasks.families") if issubclass(kind, Family)]
    found: dict[str, type[Family]] = {}
    for family in (*own, *(plugin(FAMILIES, name) for name in plugin_names(FAMILIES))):
        if found.setdefault(family.name, family) is not family:
            raise UserError(
                f"{family.__module__}: the family {family.name!r} is already there, from {found[family.name].__module__}."
            )
    return found


def get_family(name: str) -> type[Family]:
    """The family of this name.

    Raises:
        UserError: there is none, with the nearest and all there are.
    """
    if name not in families():
        raise unknown("family", name, families())
    return families()[name]


def fresh_layers(generator: torch.Generator, deviation: float = 0.02) -> Linear:
    """Gives layers with weights of N(0, deviation) and zero bias, drawn one after the other."""
    import torch
    from torch import nn

    def linear(inputs: int, outputs: int) -> nn.Linear:
        with torch.device("meta"):
            layer = nn.Linear(inputs, outputs)
        layer.to_empty(device="cpu")
        with torch.no_grad():
            layer.weight.normal_(0.0, deviation, generator=generator)
            layer.bias.zero_()
        return layer

    return linear


def subset(rows: int, limit: int | None) -> Array | None:
    """The fixed random subset of `limit` of so many rows, ascending; None where all are kept."""
    if limit is None or limit >= rows:
        return None
    import torch

    generator = torch.Generator().manual_seed(42)
    return np.sort(torch.randperm(rows, generator=generator).numpy()[:limit])


def limited(table: pa.Table, limit: int | None) -> pa.Table:
    """The table's fixed subset."""
    rows = subset(table.num_rows, limit)
    return table if rows is None else table.take(pa.array(rows))


def limited_splits(data: TaskData, settings: TaskSettings) -> dict[str, pa.Table]:
    """The splits of a task whose splits are tables each, with the rows that the settings leave."""
    limits = (settings.max_train_examples, settings.max_evaluation_examples, settings.max_evaluation_examples)
    return {split: limited(getattr(data, split), limit) for split, limit in zip(SPLITS, limits, strict=True)}


def mean_of(column: Array) -> float:
    """The mean over the examples that have a value."""
    return float(np.mean(column[~np.isnan(column)]))


def means(examples: Examples) -> dict[str, float]:
    """`mean_of` each column of numbers."""
    return {name: mean_of(column) for name, column in examples.items() if column.dtype != object}


def objects(rows: Sequence[Any]) -> Array:
    """A column of texts or lists, one object a row."""
    column = np.empty(len(rows), dtype=object)
    for number, row in enumerate(rows):
        column[number] = row
    return column


def ending(tokenizer: PreTrainedTokenizerFast) -> int:
    """The id that closes every sequence: end of sequence, else BERT's separator.

    Raises:
        UserError: the tokenizer has neither.
    """
    for token in (tokenizer.eos_token_id, tokenizer.sep_token_id):
        if token is not None:
            return int(token)
    raise UserError(
        f"the tokenizer in {tokenizer.name_or_path} has no end-of-sequence token; every sequence must end with one."
    )


def token_ids(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[list[int]]:
    """Ids of each text without special tokens."""
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False, verbose=False, return_attention_mask=False)[
        "input_ids"
    ]
    return ids


def closed(ids: list[int], end: int, longest: int) -> list[int]:
    """The ids cut to fit, and the closing token."""
    return [*ids[: longest - 1], end]


def int_lists(rows: Sequence[Any]) -> pa.Array:
    """A list<int32> column."""
    return pa.array(rows, pa.list_(pa.int32()))
