"""An ordered parallel map over clean processes, which keeps few items in flight and leaves no process behind."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import chain, islice
from multiprocessing import parent_process
from multiprocessing.context import SpawnContext, SpawnProcess
from types import ModuleType
from typing import Any, TypeVar

from mlmclm.errors import EnvironmentFault
from mlmclm.system import usable_cpus

# The executor is the standard library's, which lacks what is added here: its `map` reads all items at once (until
# Python 3.14) and may hang if its start is interrupted; joblib's workers outlive a killed parent and print tracebacks.
# joblib was no faster on 200 batches of 40 texts.
Item = TypeVar("Item")
Result = TypeVar("Result")


def ordered_map(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Map a function over items in processes that are started for this and end with it (`worker_processes`)."""
    with worker_processes(function) as ordered:
        yield from ordered(items)


@contextmanager
def worker_processes(function: Callable[[Item], Result]) -> Iterator[Callable[[Iterable[Item]], Generator[Result]]]:
    """Yield a map that applies a function, which must be picklable, in as many processes as there are usable processors.

    The processes start once there is a second item. A single item is computed in this process, and so are all items if there
    is one processor: a process takes longer to start than a small corpus to tokenise.

    Results come in the order of the items; at most four items per worker are read ahead. The map raises what the
    function raises. Closing its generator drops the items not yet begun.

    Raises:
        EnvironmentFault: a worker was killed, most often because memory ran out.
    """
    workers = usable_cpus()
    with ExitStack() as stack:

        @cache
        def pool() -> ProcessPoolExecutor:
            return stack.enter_context(ProcessPoolExecutor(workers, _Context(), _begin, (pickle.dumps(function),)))

        def ordered(items: Iterable[Item]) -> Generator[Result]:
            remaining = iter(items)
            first = list(islice(remaining, 2))
            items = chain(first, remaining)
            if workers == 1 or len(first) < 2:
                yield from map(function, items)
                return
            processes, running = pool(), deque[Future[Result]]()
            try:
                for item in items:
                    with _uninterrupted():  # it may start a process
                        running.append(processes.submit(_answer, item))
                    # Enough to keep all workers busy; more would only fill memory with items and results.
                    if len(running) >= 4 * workers:
                        yield running.popleft().result()
                while running:
                    yield running.popleft().result()
            except BrokenProcessPool as error:
                raise EnvironmentFault(
                    "a worker process that prepares the corpus ended early (out of memory?). Run the same command "
                    "again, with fewer workers if this repeats: what is finished is kept."
                ) from error
            finally:
                for future in running:
                    future.cancel()

        yield ordered


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let Ctrl-C wait for the end of the block, and keep it from the processes that are started there.

    An executor that is interrupted while it starts a process doesn't record that process, and may wait for the others forever.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # which a new process inherits
    # The mask is this thread's. Any other thread may receive the signal, and Python then interrupts the main thread.
    handler, came = signal.getsignal(signal.SIGINT), threading.Event()
    main = threading.current_thread() is threading.main_thread() and handler is not None
    if main:
        signal.signal(signal.SIGINT, lambda *_: came.set())
    try:
        yield
    finally:
        if main:
            signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if came.is_set():
            signal.raise_signal(signal.SIGINT)


_hidden = threading.Lock()
"""Held while the main module is hidden."""


class _Process(SpawnProcess):
    """A process that doesn't run the caller's main module again, so that a script needs no `if __name__` guard."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        with _hidden:
            main = sys.modules["__main__"]
            sys.modules["__main__"] = ModuleType("__main__")  # has no file
            try:
                return SpawnProcess._Popen(process_obj)
            finally:
                sys.modules["__main__"] = main


class _Context(SpawnContext):
    Process = _Process


_pickled: bytes
"""The function of a worker process, sent once and not with each item: it may hold a tokenizer."""


def _begin(pickled: bytes) -> None:
    """Prepare a worker process, which ends with its parent, however that ends."""
    global _pickled
    _pickled = pickled
    # One thread per process. Some libraries read these variables when they are loaded, while the function is unpickled.
    os.environ.update(TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")
    warnings.simplefilter("ignore")
    os.dup2(2, 1)  # Nothing that a library prints may come between the parent's output.
    # Ctrl-C reaches all processes; the parent then ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@cache
def _function() -> Callable[[Any], Any]:
    function: Callable[[Any], Any] = pickle.loads(_pickled)  # Safe: the parent wrote it.
    return function


def _answer(item: Any) -> Any:
    return _function()(item)
