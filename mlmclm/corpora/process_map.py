"""An ordered parallel map over clean processes, which keeps few items in flight and leaves no process behind.

Workers are plain `python -m mlmclm.corpora.process_map` processes that exchange pickled items and results over their
standard streams. Unlike forked workers they inherit no threads (a tokenizer's, torch's). Unlike spawned ones they do
not run the caller's main module again. They exit when their input ends, however the parent ended.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import chain, islice
from queue import SimpleQueue
from typing import Any, BinaryIO, Protocol, TypeVar, cast

from mlmclm.errors import EnvironmentFault

Item = TypeVar("Item")
Result = TypeVar("Result")


class Progress(Protocol):
    """Callback that takes the current activity, the amount done, the total amount (None if unknown), and what is counted."""

    def __call__(self, what: str, done: int, total: int | None, unit: str = "", /) -> None:
        """Show it."""


def silent(what: str, done: int, total: int | None, unit: str = "") -> None:
    """A `Progress` that shows nothing."""


def worker_count(workers: int | None) -> int:
    """Return `workers`, by default the number of processors that this process may use."""
    return max(1, workers) if workers is not None else len(os.sched_getaffinity(0))


def ordered_map(function: Callable[[Item], Result], items: Iterable[Item], *, workers: int) -> Iterator[Result]:
    """Map a function over items in processes that are started for this and end with it (`worker_processes`)."""
    with worker_processes(function, workers=workers) as ordered:
        yield from ordered(items)


@contextmanager
def worker_processes(
    function: Callable[[Item], Result], *, workers: int
) -> Iterator[Callable[[Iterable[Item]], Generator[Result]]]:
    """Yield a map that applies a function, which must be picklable, in `workers` processes.

    They start once there is a second item. A first one alone is computed in this process, and so are all with a single
    worker: a process takes longer to start than a small corpus to tokenise.

    Results come in the order of the items; at most four items per worker are read ahead. The map raises what the
    function raises. Closing its generator drops the items not yet begun.

    Raises:
        EnvironmentFault: a worker was killed, most often because memory ran out.
    """
    free: SimpleQueue[Callable[[Item], Result]] = SimpleQueue()

    def answer(item: Item) -> Result:
        ask = free.get()
        try:
            return ask(item)
        finally:
            free.put(ask)

    def ordered(items: Iterable[Item]) -> Generator[Result]:
        remaining = iter(items)
        first = list(islice(remaining, 2))
        items = chain(first, remaining)
        if workers == 1 or len(first) < 2:
            yield from map(function, items)
            return
        while free.qsize() < workers:
            free.put(started.enter_context(_worker(function)))
        # One thread per process waits for its answers; waiting on a pipe releases the GIL.
        threads = ThreadPoolExecutor(workers)
        running: deque[Future[Result]] = deque()
        try:
            for item in items:
                running.append(threads.submit(answer, item))
                # Enough to keep all workers busy; more would only fill memory with items and results.
                if len(running) >= 4 * workers:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            threads.shutdown(wait=True, cancel_futures=True)

    with ExitStack() as started:
        yield ordered


@contextmanager
def _worker(function: Callable[[Item], Result]) -> Iterator[Callable[[Item], Result]]:
    """Start a process and yield the function as computed there; kill the process at the end."""
    environment = {
        **os.environ,
        # The worker must find every module that the parent can import, or unpickling the function fails.
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "TOKENIZERS_PARALLELISM": "false",  # The processes are the parallelism.
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-W", "ignore", "-m", __name__]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    requests, answers = cast(BinaryIO, process.stdin), cast(BinaryIO, process.stdout)

    @contextmanager
    def alive() -> Iterator[None]:
        try:
            yield
        except (BrokenPipeError, EOFError, pickle.UnpicklingError) as error:
            raise EnvironmentFault(
                f"a worker process that prepares the corpus ended early (exit status {process.wait()}; out of "
                "memory?). Run the same command again, with fewer workers if this repeats: what is finished is kept."
            ) from error

    def send(value: Any) -> None:
        pickle.dump(value, requests, protocol=pickle.HIGHEST_PROTOCOL)
        requests.flush()

    def ask(item: Item) -> Result:
        with alive():
            send(item)
            fine, value = pickle.load(answers)  # Safe: our own process wrote it.
        if not fine:
            raise value
        return cast(Result, value)

    try:
        with alive():
            send(function)
        yield ask
    finally:
        process.kill()
        process.communicate()  # Closes the pipes and waits, so that no zombie is left.


def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Run a worker: read the function, then answer one item after another until the requests end."""
    function: Any = None
    failure: Exception | None = None
    try:
        function = pickle.load(requests)
    except Exception as error:
        # The parent reads no answer to the function itself, so send the failure as the answer to each item.
        failure = error
    while True:
        try:
            item = pickle.load(requests)
        except EOFError:
            return
        reply: tuple[bool, Any]
        try:
            reply = (True, function(item)) if failure is None else (False, failure)
        except Exception as error:
            reply = (False, error)
        pickle.dump(reply, answers, protocol=pickle.HIGHEST_PROTOCOL)
        answers.flush()


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "wb") as replies:
        # Standard output becomes standard error: nothing that a library prints may come between the answers.
        os.dup2(2, 1)
        _serve(sys.stdin.buffer, replies)
