"""What the loop of fine-tuning needs to know of a task family, and nothing more."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from mlmclm.backends.packing import Packing
from mlmclm.errors import UserError
from mlmclm.tasks.load import TaskData
from mlmclm.tasks.prepared_task import PreparedTask
from mlmclm.tasks.settings import TaskSettings

Array = np.ndarray[Any, Any]
Linear = Callable[[int, int], nn.Linear]
"""Gives a freshly drawn layer of so many inputs and outputs."""
Examples = dict[str, Array]
"""Columns of one length: what each example of a split got. A column that has the name of a score is that score of each
example, NaN where it has none: its mean is the split's. Columns of objects (texts, lists) make no score: they are the predictions
themselves, for `mlmclm.results.predictions`."""


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
    """A task of one family, tokenised and ready to train. Holds no state that a cell could leave behind."""

    framed = False
    """Whether `encode` knows `special_tokens: tokenizer`."""

    def __init__(self, prepared: PreparedTask, settings: TaskSettings) -> None:
        self.prepared = prepared
        self.settings = settings

    @classmethod
    @abstractmethod
    def encode(cls, data: TaskData, tokenizer: PreTrainedTokenizerFast, settings: TaskSettings) -> dict[str, pa.Table]:
        """Tokenised tables by name, `train` among them: the work that is done once for all cells."""

    @property
    @abstractmethod
    def train_size(self) -> int:
        """Number of training rows, which `batch` takes by number."""

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

    @abstractmethod
    def evaluation_sequences(self, split: str) -> Lists:
        """All sequences that must be encoded to score `validation` or `test`."""

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
        """The metrics of a split (see `declaration.METRICS`), from all its examples."""


def fresh_layers(generator: torch.Generator, deviation: float = 0.02) -> Linear:
    """Gives layers with weights of N(0, deviation) and zero bias, drawn one after the other."""

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
    generator = torch.Generator().manual_seed(42)
    return np.sort(torch.randperm(rows, generator=generator).numpy()[:limit])


def limited(table: pa.Table, limit: int | None) -> pa.Table:
    """The table's fixed subset."""
    rows = subset(table.num_rows, limit)
    return table if rows is None else table.take(pa.array(rows))


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
