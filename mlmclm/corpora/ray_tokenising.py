"""Tokenising with Ray Data on the cluster of the current session: the same tokens in the same order as locally.

Documents are read on the driver's node, where the source's files are, several files at once. They are tokenised on
any node with a free processor. Blocks stream through the object store, a few MiB at a time, and come back in order.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mlmclm.corpora.documents import TRAIN
from mlmclm.corpora.shard_writer import Position
from mlmclm.corpora.streams import Stream
from mlmclm.corpora.tokenising import Encoded, Encoder, Vocabulary, batches, encode
from mlmclm.corpora.tokenizer import text_tokenizer
from mlmclm.errors import EnvironmentFault, MlmclmError
from mlmclm.service.placement import check_place

if TYPE_CHECKING:
    import pyarrow
    import ray

FILES_AT_ONCE = 4
TASK = {"CPU": 1}
"""The resources that a tokenising task reserves."""
NODE_LABEL = "ray.io/node-id"
BLOCK_BYTES = 1 << 20
"""Bytes of text per task: about a second of tokenising, so that a lost task costs little and even a small corpus keeps
all processors busy."""


@contextmanager
def ray_encoder(vocabulary: Vocabulary) -> Iterator[Encoder]:
    """Tokenise in the current Ray session; the tokenizer travels through the object store, not over a shared disk."""
    import ray.data  # Now, because it sets up the log that `_quiet` changes.

    from mlmclm.service.cluster import cluster_view, wait_for_a_place

    view = cluster_view()
    remedy = "Set corpus.workers: local, or add nodes with CPUs."
    # Raises if no node can ever run a task, which Ray would wait for without end.
    check_place("Tokenising", TASK, view(), remedy=remedy)
    wait_for_a_place("tokenising", TASK, view)
    # The tokenizer goes into the object store once, instead of with the arguments of every task.
    content = ray.put(vocabulary.tokenizer)
    small = replace(vocabulary, tokenizer="")

    def run(stream: Stream, starts: Mapping[str, Position]) -> Generator[Encoded]:
        with _quiet(), ray.data.DataContext.current(_context()):
            try:
                # Closing `run` closes this loop's iterator, which ends Ray Data's execution.
                for table in _dataset(stream, starts, small, content).iter_batches(
                    batch_size=None, batch_format="pyarrow", prefetch_batches=2
                ):
                    yield _from_table(table)
            except Exception as error:
                raise _explained(error) from error

    yield run


def _context() -> Any:
    """Return Ray Data's settings for tokenising."""
    import ray

    context = ray.data.DataContext.get_current().copy()
    context.execution_options.preserve_order = True  # The blocks must not depend on which task ends first.
    context.target_max_block_size = BLOCK_BYTES
    context.enable_progress_bars = False  # We show our own.
    context.print_on_execution_start = False
    context.raise_original_map_exception = True  # So that `_explained` finds the error that a task raised.
    return context


def _dataset(stream: Stream, starts: Mapping[str, Position], vocabulary: Vocabulary, content: ray.ObjectRef) -> Any:
    """Return a dataset of the stream's tokens, one document per row."""
    import ray

    pieces = list(stream.numbers(starts))
    return (
        # One block per piece, so that pieces are read by tasks of their own.
        ray.data.from_items([{"piece": piece} for piece in pieces], override_num_blocks=len(pieces))
        .map_batches(
            _read,
            fn_kwargs={"stream": stream, "starts": dict(starts)},
            batch_format="pyarrow",
            num_cpus=0,  # The driver's node may offer no CPUs, and reading takes little.
            compute=ray.data.TaskPoolStrategy(min(FILES_AT_ONCE, len(pieces))),
            # The files may be on the driver's node only.
            label_selector={NODE_LABEL: ray.get_runtime_context().get_node_id()},
        )
        .map_batches(
            _tokenise,
            fn_kwargs={"vocabulary": vocabulary, "content": content},
            batch_format="pyarrow",
            num_cpus=TASK["CPU"],
        )
    )


def _read(pieces: pyarrow.Table, stream: Stream, starts: Mapping[str, Position]) -> Iterator[pyarrow.Table]:
    """Read the documents of pieces, one per row (a Ray Data task)."""
    import pyarrow

    for batch in batches(stream, pieces.column("piece").to_pylist(), starts):
        yield pyarrow.table(
            {
                "piece": pyarrow.array([document.place.piece for document in batch], pyarrow.int64()),
                "number": pyarrow.array([document.place.number for document in batch], pyarrow.int64()),
                "training": pyarrow.array([document.part == TRAIN for document in batch], pyarrow.bool_()),
                "text": pyarrow.array([document.text for document in batch], pyarrow.string()),
            }
        )


_loaded: dict[ray.ObjectRef, Any] = {}
"""A worker process's tokenizer, by the object reference of its content: loaded once per process and `ray_encoder`."""


def _tokenise(documents: pyarrow.Table, vocabulary: Vocabulary, content: ray.ObjectRef) -> pyarrow.Table:
    """Tokenise documents, one per row (a Ray Data task)."""
    import ray

    if content not in _loaded:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # The tasks are the parallelism.
        _loaded.clear()  # Ray reuses worker processes: an earlier corpus's tokenizer must not stay in memory.
        _loaded[content] = text_tokenizer(ray.get(content))
    places = zip(documents.column("piece").to_pylist(), documents.column("number").to_pylist(), strict=True)
    training, texts = documents.column("training").to_pylist(), documents.column("text").to_pylist()
    return _to_table(encode(vocabulary, _loaded[content], [Position(*place) for place in places], training, texts))


def _to_table(encoded: Encoded) -> pyarrow.Table:
    """Convert to an Arrow table, one document per row."""
    import pyarrow

    ends = np.concatenate([np.zeros(1, dtype=np.int64), encoded.lengths.cumsum()])
    columns = {
        "piece": encoded.pieces,
        "number": encoded.numbers,
        "training": encoded.training,
        "bytes": encoded.bytes,
        "unknown": encoded.unknown,
    }
    tokens = pyarrow.LargeListArray.from_arrays(pyarrow.array(ends), pyarrow.array(encoded.tokens))
    return pyarrow.table({**{name: pyarrow.array(column) for name, column in columns.items()}, "tokens": tokens})


def _from_table(table: pyarrow.Table) -> Encoded:
    """Convert from an Arrow table: the inverse of `_to_table`."""
    import pyarrow

    def column(name: str) -> Any:
        return table.column(name).to_numpy()

    tokens = table.column("tokens").combine_chunks()
    if isinstance(tokens, pyarrow.ChunkedArray):
        tokens = tokens.chunk(0)
    return Encoded(
        pieces=column("piece"),
        numbers=column("number"),
        training=column("training"),
        lengths=np.diff(tokens.offsets.to_numpy()),  # A slice's offsets don't start at 0; their differences are right.
        bytes=column("bytes"),
        unknown=column("unknown"),
        tokens=tokens.flatten().to_numpy(),
    )


def _explained(error: Exception) -> Exception:
    """Return the exception to raise for an error of Ray Data: our own error from a task, or an `EnvironmentFault`."""
    # Ray wraps a task's error, possibly several times. Some wrappers are also of the error's own class; these have a
    # `cause`, and the plain error is behind it.
    seen: BaseException | None = error
    while seen is not None:
        cause = getattr(seen, "cause", None)
        for found in (seen, cause):
            if isinstance(found, MlmclmError) and not hasattr(found, "cause"):
                return found
        seen = cause if isinstance(cause, BaseException) else seen.__cause__
    reason = str(error).strip().splitlines()
    return EnvironmentFault(
        f"tokenising on the Ray cluster failed ({type(error).__name__}: {reason[-1] if reason else ''}). Run the same command again: what is finished "
        "is kept. `corpus.workers: local` tokenises on this machine alone."
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Ray Data's log off the terminal, which shows our progress bar and our error; its file still gets it all."""
    handlers = [
        handler
        for handler in logging.getLogger("ray.data").handlers
        if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler)
    ]
    before = [handler.level for handler in handlers]
    for handler in handlers:
        handler.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for handler, level in zip(handlers, before, strict=True):
            handler.setLevel(level)
