"""Tokenising with Ray Data on the cluster of the current session: the same tokens in the same order as locally.

Documents are read on the driver's node, where the source's files are, several files at once. They are tokenised on
any node with a free processor. Blocks stream through the object store, a few MiB at a time, and come back in order.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from mlmclm.cluster.placement import check_place
from mlmclm.cluster.ray_cluster import Session
from mlmclm.corpora.prepare_corpus import Elsewhere
from mlmclm.corpora.shard_writer import Position
from mlmclm.corpora.streams import Stream
from mlmclm.corpora.tokenising import Encoder, Tokeniser, text_batches
from mlmclm.errors import EnvironmentFault, MlmclmError

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


def on_cluster(session: Session | None) -> Elsewhere | None:
    """Return the encoder with which `prepare_corpus` tokenises in `session`, or else in this process's session; None without either.

    `session` is opened when there is text to tokenise. A session that this process already has is left open.
    """
    # No `import ray`: a process without a session must not pay for the import.
    running = "ray" in sys.modules and sys.modules["ray"].is_initialized()
    if session is None and not running:
        return None

    @contextmanager
    def encoder(tokeniser: Tokeniser) -> Iterator[Encoder]:
        with session() if session is not None else nullcontext(), ray_encoder(tokeniser) as encode:
            yield encode

    return encoder


@contextmanager
def ray_encoder(tokeniser: Tokeniser) -> Iterator[Encoder]:
    """Tokenise in the current Ray session; the tokenizer travels through the object store, not over a shared disk."""
    import ray.data  # Now, because it sets up the log that `_quiet` changes.

    from mlmclm.cluster.cluster import cluster_view, wait_for_a_place

    view = cluster_view()
    remedy = "Set corpus.workers: local, or add nodes with CPUs."
    # Raises if no node can ever run a task; without it, Ray would wait forever.
    check_place("Tokenising", TASK, view(), remedy=remedy)
    wait_for_a_place("tokenising", TASK, view)
    # Put into the object store once, instead of sent with the arguments of every task.
    stored = ray.put(tokeniser)

    def run(stream: Stream, starts: Mapping[str, Position]) -> Generator[pyarrow.Table]:
        with _quiet(), ray.data.DataContext.current(_context()):
            try:
                # Closing `run` closes this iterator, which ends Ray Data's execution.
                yield from _dataset(stream, starts, stored).iter_batches(
                    batch_size=None, batch_format="pyarrow", prefetch_batches=2
                )
            except Exception as error:
                raise _explained(error) from error

    yield run


def _context() -> Any:
    import ray

    context = ray.data.DataContext.get_current().copy()
    context.execution_options.preserve_order = True  # The blocks must not depend on which task ends first.
    context.target_max_block_size = BLOCK_BYTES
    context.enable_progress_bars = False  # We show our own.
    context.print_on_execution_start = False
    context.raise_original_map_exception = True  # So that `_explained` finds the error that a task raised.
    return context


def _dataset(stream: Stream, starts: Mapping[str, Position], tokeniser: ray.ObjectRef) -> Any:
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
        .map_batches(_tokenise, fn_kwargs={"tokeniser": tokeniser}, batch_format="pyarrow", num_cpus=TASK["CPU"])
    )


def _read(pieces: pyarrow.Table, stream: Stream, starts: Mapping[str, Position]) -> Iterator[pyarrow.Table]:
    return text_batches(stream, pieces["piece"].to_pylist(), starts)


def _tokenise(documents: pyarrow.Table, tokeniser: ray.ObjectRef) -> pyarrow.Table:
    tokens: pyarrow.Table = _fetched(tokeniser)(documents)
    return tokens


@lru_cache(maxsize=1)
def _fetched(tokeniser: ray.ObjectRef) -> Tokeniser:
    """Return a worker process's tokeniser, fetched once per process and call of `ray_encoder`."""
    import ray

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # The tasks are the parallelism.
    fetched: Tokeniser = ray.get(tokeniser)
    return fetched


def _explained(error: Exception) -> Exception:
    """Return the exception to raise for an error of Ray Data: our own error from a task, or an `EnvironmentFault`."""
    # Ray wraps a task's error, possibly several times. Some wrappers are also instances of the error's class; they hold
    # the plain error as `cause`.
    current: BaseException | None = error
    while current is not None:
        cause = getattr(current, "cause", None)
        for candidate in (current, cause):
            if isinstance(candidate, MlmclmError) and not hasattr(candidate, "cause"):
                return candidate
        current = cause if isinstance(cause, BaseException) else current.__cause__
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
    with ExitStack() as restored:
        for handler in handlers:
            restored.callback(handler.setLevel, handler.level)
            handler.setLevel(logging.CRITICAL)
        yield
