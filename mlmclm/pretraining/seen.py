"""Reconstruction of the batches of any past or future step. Batches and masks are pure functions of the step."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import numpy.typing as npt

from mlmclm.corpora.blocks import Blocks
from mlmclm.corpora.mixed_blocks import MixedBlocks, rows_of_length
from mlmclm.corpora.order import step_tokens
from mlmclm.corpora.row_lengths import row_lengths
from mlmclm.corpora.tokenizer import vocabulary
from mlmclm.errors import UserError
from mlmclm.objectives.clm import Causal
from mlmclm.plans.names import ModelName
from mlmclm.plans.recipe import Recipe
from mlmclm.plans.segments import Segment, samples_of, segment_at
from mlmclm.plans.stages import history
from mlmclm.pretraining.collator import Collator, separator
from mlmclm.storage.files import whole_file, whole_folder

if TYPE_CHECKING:
    import pyarrow

FORMATS = (".parquet", ".jsonl")
ROW_GROUP_TOKENS = 4_000_000
"""Number of tokens to collect before writing a row group of a Parquet file."""


@dataclass(frozen=True)
class TrainingBatch:
    """The global batch of one step."""

    step: int
    """Optimiser steps taken before this one."""
    blocks: npt.NDArray[np.int64]
    """Indices of its blocks in the corpus's training split, [batch]. In a mix, the sources follow each other by name."""
    input_ids: npt.NDArray[np.int64]
    """[batch, length]."""
    labels: npt.NDArray[np.int64] | None
    """[batch, length], -100 where nothing is predicted; None without an objective."""
    lengths: npt.NDArray[np.int64]
    """[batch], number of tokens in each row without padding."""

    def records(self) -> Iterator[dict[str, object]]:
        """Yield one mapping per row of the batch, without padding."""
        for row, (block, length) in enumerate(zip(self.blocks.tolist(), self.lengths.tolist(), strict=True)):
            record = {"step": self.step, "row": row, "block": block, "input_ids": self.input_ids[row, :length].tolist()}
            yield record if self.labels is None else record | {"labels": self.labels[row, :length].tolist()}


def training_batches(
    blocks: Blocks | MixedBlocks,
    recipe: Recipe,
    steps: range,
    *,
    model: ModelName | None,
    tokenizer: Path,
    masked: bool = True,
) -> Iterator[TrainingBatch]:
    """Yield the global batches of some steps, one at a time.

    Args:
        model: the model whose inputs and labels to yield; None yields the unmasked tokens, which are the same for all
            models of a study.
        masked: whether to yield a model's inputs and labels; else the tokens before masking.
    """
    tokens_of, end = vocabulary(tokenizer), separator(recipe, tokenizer)
    segments = history(model, recipe).segments if model is not None else ()
    seeds = recipe.seeds_of(1 if model is None else model.replicate)
    labelled = masked and bool(segments)
    # In a study without phases, the order is that of one long segment, whatever the objective.
    segments = segments or (Segment(Causal(), 0, steps.stop, 0),)
    rows_in = cache(lambda length, mix: rows_of_length(blocks, length, recipe.rows, tokenizer, mix))
    for step in steps:
        samples, segment = samples_of(segments, step, recipe), segment_at(segments, step)
        resolved = recipe.during(segment.phase)
        length = resolved.block_length
        rows = np.arange(len(samples))
        chosen, tokens = step_tokens(rows_in(length, resolved.mix), samples, seeds.order, rows)
        filled = end if recipe.rows == "chunks" else None
        lengths = np.full(len(rows), length) if filled is None else row_lengths(tokens, filled)
        label = Collator(segment.objective, tokens_of, recipe.corruption, seeds.masks, end)
        input_ids, labels = label(tokens, rows=rows, step=step) if labelled else (tokens, None)
        yield TrainingBatch(step, chosen, input_ids, labels, lengths)


def export(batches: Iterable[TrainingBatch], path: Path) -> None:
    """Write batches to a file atomically, with one row per sequence: step, row, block, input_ids and any labels.

    Memory use does not depend on the number of batches.

    Args:
        batches: at least one batch.
        path: a path that ends in one of `FORMATS`.

    Raises:
        EnvironmentFault: if the disk is full or not writable.
    """
    with whole_file(path) as handle:
        if path.suffix == ".jsonl":
            for batch in batches:
                handle.writelines(f"{json.dumps(record)}\n".encode() for record in batch.records())
            return
        _write_parquet(_tables(batches), handle)


def export_data_set(batches: Iterable[TrainingBatch], steps: range, bounds: Sequence[int], folder: Path) -> None:
    """Write the batches of these steps as a data set: a Parquet file per interval, from 0 to the first bound and so on.

    Its columns are `input_ids` and `step`. The names of the files begin with `train` and give their first step and the
    step after their last. The folder appears once it is complete.

    Raises:
        UserError: the folder exists.
        EnvironmentFault: the disk is full or not writable.
    """
    if folder.exists():
        raise UserError(f"--export {folder}: it exists already; name a new folder.")
    with whole_folder(folder) as temporary:
        ends = [*(bound for bound in bounds if bound < steps.stop), steps.stop]
        for number, group in groupby(batches, key=lambda batch: bisect_right(ends, batch.step)):
            tables = (table.select(["input_ids", "step"]) for table in _tables(group))
            name = f"train-{max(steps.start, ends[number - 1]):09}-{ends[number]:09}.parquet"
            _write_parquet(tables, temporary / name)


def _write_parquet(tables: Iterator[pyarrow.Table], where: Path | BinaryIO) -> None:
    from pyarrow.parquet import ParquetWriter

    # The writer needs the schema before any rows; it depends on whether there are labels.
    first = next(tables)
    with ParquetWriter(where, first.schema, compression="zstd") as writer:
        for table in chain([first], tables):
            writer.write_table(table)


def _tables(batches: Iterable[TrainingBatch]) -> Iterator[pyarrow.Table]:
    """Combine batches into tables of about `ROW_GROUP_TOKENS` tokens each."""
    import pyarrow

    waiting: list[pyarrow.RecordBatch] = []
    for batch in batches:
        waiting.append(_columns(batch))
        if len(waiting) * batch.input_ids.size >= ROW_GROUP_TOKENS:
            yield pyarrow.Table.from_batches(waiting)
            waiting.clear()
    if waiting:
        yield pyarrow.Table.from_batches(waiting)


def _columns(batch: TrainingBatch) -> pyarrow.RecordBatch:
    """Return a batch as Arrow columns, with tokens and labels as lists of int32."""
    import pyarrow

    rows, length = batch.input_ids.shape
    ends = np.cumsum([0, *batch.lengths], dtype=np.int32)
    real = np.arange(length) < batch.lengths[:, None]  # all but padding

    def lists(values: npt.NDArray[np.int64]) -> pyarrow.ListArray:
        return pyarrow.ListArray.from_arrays(ends, values.astype(np.int32)[real])

    columns = {
        "step": np.full(rows, batch.step),
        "row": np.arange(rows),
        "block": batch.blocks,
        "input_ids": lists(batch.input_ids),
    }
    return pyarrow.record_batch(columns if batch.labels is None else columns | {"labels": lists(batch.labels)})
