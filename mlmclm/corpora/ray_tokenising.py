"""Documents to tokens by Ray Data over the cluster of the current session: the same tokens in the same order.

Documents are read on the driver's node, where the source's files are, several of them at once, and tokenised wherever there is a
processor. Blocks stream through the object store, a few MiB of them at a time, and come back in order.
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
"""The resources that a task of tokenising reserves."""
NODE_LABEL = "ray.io/node-id"
BLOCK_BYTES = 1 << 20
"""Text of one task: about a second of tokenising, so that a lost one costs little and a small corpus keeps all processors busy."""


@contextmanager
def ray_encoder(vocabulary: Vocabulary) -> Iterator[Encoder]:
    """Tokenises in the current Ray session; the tokenizer goes through its object store, not through a shared disk."""
    import ray.data  # sets up its log

    from mlmclm.service.cluster import cluster_view, wait_for_a_place

    view = cluster_view()
    remedy = "Set corpus.workers: local, or add nodes with CPUs."
    check_place("Tokenising", TASK, view(), remedy=remedy)
    wait_for_a_place("tokenising", TASK, view)
    content = ray.put(vocabulary.tokenizer)
    small = replace(vocabulary, tokenizer="")

    def run(stream: Stream, starts: Mapping[str, Position]) -> Generator[Encoded]:
        with _quiet(), ray.data.DataContext.current(_context()):
            try:
                # Closing `run` closes the loop's iterator, which ends Ray Data's execution.
                for table in _dataset(stream, starts, small, content).iter_batches(
                    batch_size=None, batch_format="pyarrow", prefetch_batches=2
                ):
                    yield _from_table(table)
            except Exception as error:
                raise _explained(error) from error

    yield run


def _context() -> Any:
    """Ray Data's settings for our datasets."""
    import ray

    context = ray.data.DataContext.get_current().copy()
    context.execution_options.preserve_order = True
    context.target_max_block_size = BLOCK_BYTES
    context.enable_progress_bars = False  # ours is shown
    context.print_on_execution_start = False
    context.raise_original_map_exception = True
    return context


def _dataset(stream: Stream, starts: Mapping[str, Position], vocabulary: Vocabulary, content: ray.ObjectRef) -> Any:
    """The stream's tokens, one document a row."""
    import ray

    pieces = list(stream.numbers(starts))
    return (
        ray.data.from_items([{"piece": piece} for piece in pieces], override_num_blocks=len(pieces))
        .map_batches(
            _read,
            fn_kwargs={"stream": stream, "starts": dict(starts)},
            batch_format="pyarrow",
            num_cpus=0,  # the driver's node may offer none; reading takes little
            compute=ray.data.TaskPoolStrategy(min(FILES_AT_ONCE, len(pieces))),
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
    """The documents of pieces, one a row."""
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
"""A worker process's tokenizer: loaded once a process and study."""


def _tokenise(documents: pyarrow.Table, vocabulary: Vocabulary, content: ray.ObjectRef) -> pyarrow.Table:
    """The documents' tokens, one document a row."""
    import ray

    if content not in _loaded:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # The tasks are the parallelism.
        _loaded.clear()
        _loaded[content] = text_tokenizer(ray.get(content))
    places = zip(documents.column("piece").to_pylist(), documents.column("number").to_pylist(), strict=True)
    training, texts = documents.column("training").to_pylist(), documents.column("text").to_pylist()
    return _to_table(encode(vocabulary, _loaded[content], [Position(*place) for place in places], training, texts))


def _to_table(encoded: Encoded) -> pyarrow.Table:
    """One document a row."""
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
    """The inverse of `_to_table`."""
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
        lengths=np.diff(tokens.offsets.to_numpy()),
        bytes=column("bytes"),
        unknown=column("unknown"),
        tokens=tokens.flatten().to_numpy(),
    )


def _explained(error: Exception) -> Exception:
    """What to raise for an error of Ray Data: ours that a task raised, or an `EnvironmentFault`."""
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
    """Ray Data's log goes to its file, not to the terminal: our bar is there, and our error says what went wrong."""
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
