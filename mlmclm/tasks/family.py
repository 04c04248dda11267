"""The interface of a task family, the families by name, and functions that several families share.

A family is one class in a file of its own, in `mlmclm/tasks/families/` or in another installed package; no other code
refers to it by name. It defines the columns of its tasks, how they are checked and shown, the head, the loss and the
metrics. All other code asks the family.

torch, transformers and scikit-learn are imported inside the methods that need them, because declarations and reports do
not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute

from mlmclm.errors import UserError
from mlmclm.registry import KINDS, Registry
from mlmclm.results.measures import Measure, WeightedMean
from mlmclm.results.metrics import metric_parts
from mlmclm.tasks.check import check_filled
from mlmclm.tasks.columns import Columns
from mlmclm.tasks.metric import added_scores, metrics_of

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerFast

    from mlmclm.backends.packing import Packing
    from mlmclm.results.examples import KeptExamples
    from mlmclm.tasks.columns import TaskData
    from mlmclm.tasks.declaration import Judged, SourceTable, Task
    from mlmclm.tasks.prepared_task import PreparedTask
    from mlmclm.tasks.settings import TaskSettings
    from mlmclm.tasks.splits import Raw

Array = np.ndarray[Any, Any]
Linear = Callable[[int, int], "nn.Linear"]
"""Returns a newly initialised layer, given its number of inputs and of outputs."""
Read = Callable[[Any], "Raw"]
"""Reads the table of a declared split (a string or `SourceTable`), unchanged from its source."""
SPLITS = ("train", "validation", "test")
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


class Family(ABC):
    """A family of tasks.

    The class reads, checks and shows data. An instance is one task, tokenised and ready to train. Cells share
    instances, so an instance holds no state that depends on a cell.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    columns: ClassVar[Mapping[str, pa.DataType]]
    """Canonical columns of a training table. `text_pair` is optional: it is null in a task that does not declare it."""
    more_columns: ClassVar[tuple[str, ...]] = ()
    """Canonical names of columns in tables other than the training table."""
    labels: ClassVar[str | None] = None
    """The column of classes (int64) or tags (list<int64>), numbered by the task's label names, if there is one."""
    metrics: ClassVar[Mapping[str, str]]
    """Label in reports of every score that `scores` can return, by the score's name; the first is the usual main score.
    Higher is better. `study.` marks the published evaluation's own variants (arXiv 2507.00994)."""
    signed: ClassVar[tuple[str, ...]] = ()
    """The scores that lie between -1 and 1, such as correlations; all others lie between 0 and 1."""
    gold_columns: ClassVar[tuple[str, ...]] = ()
    """Numeric columns of `examples` that depend on the test data alone. Cells that differ in one are not compared."""
    study_metric: ClassVar[str | None] = None
    """Main score of that study; None if the study has no such tasks."""
    judged: ClassVar[bool] = False
    """True if an evaluation split consists of queries, a corpus and relevance judgements."""
    unanswerable: ClassVar[bool] = False
    framed: ClassVar[bool] = False
    """True if `encode` supports `special_tokens: tokenizer`."""
    embeds: ClassVar[bool] = False
    """True if the fine-tuned encoder, with its pooling and prefixes, is one of sentence-transformers."""
    hub_task: ClassVar[str | None] = None
    """The Hub's name of the family, in model cards; None if it is the same as `name`."""
    token_columns: ClassVar[tuple[str, ...]] = ("input_ids",)
    overlong_words: ClassVar[str] = "cut"
    """How a sequence longer than `max_length` is made to fit, in words."""
    in_chunks: ClassVar[bool] = False
    """True if the loss is a function (`loss_of`) of the sequences' `embeddings` alone: a large batch can be encoded in
    chunks."""
    predicted: ClassVar[str] = "prediction"
    """The column of `examples` that holds the predictions themselves."""

    def __init__(self, prepared: PreparedTask, settings: TaskSettings) -> None:
        self.prepared = prepared
        self.settings = settings

    @classmethod
    def training_source(cls, task: Task, read: Read) -> Raw:
        """Read the training table, unchanged from its source."""
        return read(task.splits.train)

    @classmethod
    def evaluation(
        cls, task: Task, split: str, source: str | SourceTable | Judged, read: Read, names: tuple[str, ...]
    ) -> Any:
        """Read and check an evaluation split: one table, or an object of the family's own that `tables` takes apart."""
        return cls.table(Columns(task, split, read(source)), names)

    @classmethod
    def held_out(cls, table: pa.Table) -> Any:
        """Turn rows held out of the training table into an evaluation split, as `evaluation` returns it."""
        return table

    @classmethod
    def divided(cls, split: Any, held: Callable[[pa.Table], Array]) -> tuple[Any, Any]:
        """Divide an evaluation split into the rows for which `held` is true, and the others."""
        mask = pa.array(held(split))
        return split.filter(mask), split.filter(pa.compute.invert(mask))

    @classmethod
    def tables(cls, split: Any) -> dict[str, pa.Table]:
        """Return the tables of an evaluation split by name; a single table has the empty name."""
        return {"": split}

    @classmethod
    def table(cls, columns: Columns, names: tuple[str, ...]) -> pa.Table:
        """Return a table in canonical columns, checked."""
        table = pa.table({name: cls.column(columns, name, names) for name in cls.columns})
        check_filled(columns.task, columns.where, table)
        cls.check(columns.task, columns.where, table, names)
        return table

    @classmethod
    def label_names(cls, columns: Columns) -> tuple[str, ...]:
        """Return the names of classes or tags by number, from the training table; empty for a family without labels."""
        return columns.label_names(cls.labels, cls.columns[cls.labels]) if cls.labels else ()

    @classmethod
    def column(cls, columns: Columns, name: str, names: tuple[str, ...]) -> pa.Array:
        """Return one canonical column."""
        if name == "text_pair" and name not in columns.task.columns:
            return pa.nulls(columns.raw.table.num_rows, pa.string())
        if name == cls.labels:
            return columns.numbered(name, cls.columns[name], names)
        return columns.typed(name, cls.columns[name])

    @classmethod
    def converted(cls, task: Task, names: tuple[str, ...], train: pa.Table, *others: Any) -> tuple[Any, ...]:
        """Return the splits, training first, in the form in which examples are made of them; by default as they are."""
        return (train, *others)

    @classmethod  # noqa: B027
    def check(cls, task: Task, where: str, table: pa.Table, names: tuple[str, ...]) -> None:
        """Raise UserError for a row that the family cannot have, after the checks for an empty table and for nulls.

        The message begins with `where`, and names the row and the fault.
        """

    @classmethod  # noqa: B027
    def check_settings(cls, task: str, settings: TaskSettings) -> None:
        """Raise UserError for settings of this family alone that contradict each other."""

    @classmethod
    def label_counts(cls, table: Any, names: tuple[str, ...]) -> dict[str, float]:
        """Count the rows (or tags) of each label; a family without labels may return statistics of its own."""
        if cls.labels is None:
            return {}
        column = table[cls.labels].combine_chunks()
        counts = Counter((column.flatten() if pa.types.is_list(column.type) else column).to_pylist())
        return {label: counts[number] for number, label in enumerate(names)}

    @classmethod
    def show(cls, row: dict[str, Any], names: tuple[str, ...], text: Callable[[list[int]], str]) -> dict[str, Any]:
        """Return an encoded training row with its ids decoded by `text`: the model's input and the expected output."""
        return {"text": text(row["input_ids"])}

    @classmethod
    def overlong(cls, table: pa.Table, column: str, settings: TaskSettings) -> Array:
        """Return which sequences of a column, encoded without truncation, exceed `max_length`: bool [rows]."""
        return Lists.of(table, column).lengths > settings.max_length

    @classmethod
    def predictions(cls, kept: KeptExamples) -> Iterator[dict[str, Any]]:
        """Yield a JSON object for each test example: `row`, `gold` and `prediction`, with label names if there are any."""
        gold, predicted = (kept.columns[name].tolist() for name in ("gold", "prediction"))
        if kept.label_names:
            gold, predicted = ([kept.label_names[number] for number in side] for side in (gold, predicted))
        for row, (true, found) in enumerate(zip(gold, predicted, strict=True)):
            yield {"row": row, "gold": true, "prediction": found}

    @classmethod
    @abstractmethod
    def encode(cls, data: TaskData, tokenizer: PreTrainedTokenizerFast, settings: TaskSettings) -> dict[str, pa.Table]:
        """Tokenise a task into tables by name, one of them `train`. This runs once for all cells."""

    @cached_property
    def splits(self) -> dict[str, pa.Table]:
        """The table of each split, for families whose `encode` returns one per split."""
        return {split: self.prepared.table(split) for split in SPLITS}

    @cached_property
    def sequences(self) -> dict[str, Lists]:
        """Token ids of each split, for families whose `splits` have a column `input_ids`."""
        return {split: Lists.of(table, "input_ids") for split, table in self.splits.items()}

    @property
    def train_size(self) -> int:
        """Number of training rows, from which `batch` takes its rows."""
        return len(self.sequences["train"])

    @property
    def distinct(self) -> Lists | None:
        """Numbers of each training row's texts, if no text may occur twice in a batch, else None."""
        return None

    @abstractmethod
    def batch(self, rows: Array) -> Batch:
        """Return the training rows with these numbers (int [B]) as a batch."""

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
        """Return one vector per sequence, [S, hidden]. Only families with `in_chunks` implement it."""
        raise NotImplementedError

    def loss_of(self, vectors: Tensor, targets: dict[str, Array]) -> Tensor:
        """Compute the loss from a batch's `embeddings`. Only families with `in_chunks` implement it."""
        raise NotImplementedError

    def evaluation_sequences(self, split: str) -> Lists:
        """Return all sequences to encode in order to score `validation` or `test`."""
        return self.sequences[split]

    def token_types(self, split: str) -> Lists | None:
        """Return the token types of `evaluation_sequences`; None if all are the same."""
        return None

    @abstractmethod
    def predict(self, head: nn.Module, hidden: Tensor, packing: Packing, split: str, rows: Array) -> list[Array]:
        """Return an array of the family's own shape for each sequence (`rows`, int [S]), which `examples` works on.

        `hidden` is [T, hidden], as in `loss`; `rows` are the sequences' numbers in `evaluation_sequences`, int64 [S].
        A NaN in the model's output must stay one, because that is how a diverged model is recognised.
        """

    @abstractmethod
    def examples(self, split: str, predictions: Sequence[Array]) -> Examples:
        """Compute a split's columns, one value per example [examples], from the predictions of all its sequences in order."""

    @abstractmethod
    def scores(self, examples: Examples) -> dict[str, float]:
        """Compute the `metrics` of a split from all its examples."""

    def blind(self) -> Iterator[tuple[str, Examples]]:
        """Yield how the test split can be predicted without a model, in words, and the `examples` that this gives.

        The best score among them is the task's chance level (`chance_level`), which is not known if there is none.
        """
        yield from ()

    @classmethod
    def measures(cls, columns: Mapping[str, Array], classes: int) -> dict[str, Measure]:
        """Return `scores` as functions of example weights, with which scores are computed again on resampled examples.

        By default, a score is the mean of the column of its name.

        Args:
            columns: the numeric columns of `examples`.
            classes: the number of label names.
        """
        return {name: WeightedMean(values) for name, values in columns.items()}

    def scored(self, examples: Examples, metric: str) -> dict[str, float]:
        """Compute the `scores` of a split, and those of added metrics that enter the task's `metric`."""
        return self.scores(examples) | added_scores(metric, examples, len(self.prepared.label_names))

    @classmethod
    def measured(cls, columns: Mapping[str, Array], classes: int) -> dict[str, Measure]:
        """Return the `measures`, and those of added metrics."""
        added = {name: metric.measure(columns, classes) for name, metric in metrics_of(cls.name).items()}
        return cls.measures(columns, classes) | added

    @classmethod
    def labels_of_metrics(cls) -> dict[str, str]:
        """Return the `metrics`, and the added ones."""
        return {**cls.metrics, **{name: metric.title for name, metric in metrics_of(cls.name).items()}}

    @classmethod
    def score_range(cls, metric: str) -> tuple[float, float]:
        """Return the lowest and the highest possible value of a metric, which may join several scores by `+`."""
        signed = {*cls.signed, *(name for name, added in metrics_of(cls.name).items() if added.signed)}
        lows = [-1.0 if name in signed else 0.0 for name in metric_parts(metric)]
        return sum(lows) / len(lows), 1.0


FAMILIES: Registry[type[Family]] = KINDS["family"]
"""The families by name, from `mlmclm/tasks/families/`, other packages and notebooks."""


def family_of(result: Mapping[str, Any]) -> type[Family]:
    """Return the family of a cell's result; raise UserError if no installed package has it any longer."""
    name = result["family"]
    family = FAMILIES.find(name)
    if family is None:
        raise UserError(
            f"result {result['key']} (task {result['task']}): no installed package has its family {name!r}. Install the one that it "
            "came from."
        )
    return family


def subset(rows: int, limit: int | None) -> Array | None:
    """Return a fixed random subset of row numbers, ascending; None if `limit` keeps all rows."""
    if limit is None or limit >= rows:
        return None
    import torch

    # A fixed seed and not the cell's: all cells of a task must see the same data.
    generator = torch.Generator().manual_seed(42)
    return np.sort(torch.randperm(rows, generator=generator).numpy()[:limit])


def limited(table: pa.Table, limit: int | None) -> pa.Table:
    """Return the table's fixed random subset of at most `limit` rows."""
    rows = subset(table.num_rows, limit)
    return table if rows is None else table.take(pa.array(rows))


def limited_splits(data: TaskData, settings: TaskSettings) -> dict[str, pa.Table]:
    """Return the splits of a task, each a single table, cut to the number of rows that the settings allow."""
    limits = (settings.max_train_examples, settings.max_evaluation_examples, settings.max_evaluation_examples)
    return {split: limited(getattr(data, split), limit) for split, limit in zip(SPLITS, limits, strict=True)}


def mean_of(column: Array) -> float:
    """Return the mean over the examples that have a value."""
    return float(np.mean(column[~np.isnan(column)]))


def means(examples: Examples) -> dict[str, float]:
    """Return `mean_of` each numeric column."""
    return {name: mean_of(column) for name, column in examples.items() if column.dtype != object}


def objects(rows: Sequence[Any]) -> Array:
    """Return an object column of texts or lists."""
    # Not np.array(rows): lists of equal length would become a two-dimensional array.
    return np.fromiter(rows, dtype=object, count=len(rows))


def ending(tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the id that closes every sequence: the end-of-sequence token, else BERT's separator, else UserError."""
    for token in (tokenizer.eos_token_id, tokenizer.sep_token_id):
        if token is not None:
            return int(token)
    raise UserError(
        f"the tokenizer in {tokenizer.name_or_path} has no end-of-sequence token; every sequence must end with one."
    )


def token_ids(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[list[int]]:
    """Tokenise each text without special tokens."""
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False, return_attention_mask=False)
    ids: list[list[int]] = encoded["input_ids"]
    return ids


def token_spans(
    tokenizer: PreTrainedTokenizerFast, texts: list[str]
) -> tuple[list[list[int]], list[list[tuple[int, int]]]]:
    """Tokenise as `token_ids` does; also return the (start, end) characters of each token."""
    options = {"add_special_tokens": False, "verbose": False, "return_attention_mask": False}
    encoded = tokenizer(texts, return_offsets_mapping=True, **options)
    return encoded["input_ids"], encoded["offset_mapping"]


def closed(ids: list[int], end: int, longest: int) -> list[int]:
    """Return the ids followed by the closing token, truncated to `longest` tokens in all."""
    return [*ids[: longest - 1], end]


def int_lists(rows: Sequence[Any]) -> pa.Array:
    """Return a list<int32> column."""
    return pa.array(rows, pa.list_(pa.int32()))
