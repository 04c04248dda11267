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
from contextlib import ExitStack
from itertools import chain, islice
from queue import SimpleQueue
from typing import Any, BinaryIO, Generic, Self, TypeVar, cast

from mlmclm.errors import EnvironmentFault

Item = TypeVar("Item")
Result = TypeVar("Result")

Progress = Callable[[str, int, int | None], None]
"""Callback that takes the current activity, the amount done, and the total amount (None if unknown)."""


def silent(what: str, done: int, total: int | None) -> None:
    """A `Progress` that shows nothing."""


def worker_count(workers: int | None) -> int:
    """Return `workers`, by default the number of processors that this process may use."""
    return max(1, workers) if workers is not None else len(os.sched_getaffinity(0))


def ordered_map(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    *,
    workers: int,
    setup: Callable[..., None] | None = None,
    setup_arguments: tuple[Any, ...] = (),
) -> Iterator[Result]:
    """Run `Workers.map` with workers that are started for it and end with it."""
    with Workers(function, workers=workers, setup=setup, setup_arguments=setup_arguments) as started:
        yield from started.map(items)


class Workers(Generic[Item, Result]):
    """A context manager of `workers` processes that apply one function.

    They start once there is a second item. A first one alone is computed in this process, and so are all with a single
    worker: a process takes longer to start than a small corpus to tokenise.

    `function` and `setup`, which runs once in each worker, must be module-level functions of importable modules.
    """

    def __init__(
        self,
        function: Callable[[Item], Result],
        *,
        workers: int,
        setup: Callable[..., None] | None = None,
        setup_arguments: tuple[Any, ...] = (),
    ) -> None:
        """Store the task; nothing is started yet."""
        self._task = (function, setup, setup_arguments)
        self._count = workers
        self._started = self._ready_here = False
        self._stack = ExitStack()
        self._free: SimpleQueue[_Worker] = SimpleQueue()

    def __enter__(self) -> Self:
        """Return itself; nothing is started yet."""
        return self

    def __exit__(self, *error: object) -> None:
        """End the processes."""
        self._stack.close()

    def map(self, items: Iterable[Item]) -> Generator[Result]:
        """Yield the function's results in the order of the items, reading at most four items per worker ahead.

        Exceptions of `function` and `setup` are raised here. Closing the generator drops the items not yet begun.

        Raises:
            EnvironmentFault: a worker was killed, most often because memory ran out.
        """
        remaining = iter(items)
        first = list(islice(remaining, 2))
        items = chain(first, remaining)
        if self._count == 1 or len(first) < 2:
            yield from self._map_here(items)
            return
        self._start()
        # One thread per process waits for its answers; waiting on a pipe releases the GIL.
        threads = ThreadPoolExecutor(self._count)
        running: deque[Future[Result]] = deque()
        try:
            for item in items:
                running.append(threads.submit(self._answer, item))
                # Enough to keep all workers busy; more would only fill memory with items and results.
                if len(running) >= 4 * self._count:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            threads.shutdown(wait=True, cancel_futures=True)

    def _map_here(self, items: Iterable[Item]) -> Iterator[Result]:
        function, setup, arguments = self._task
        if setup is not None and not self._ready_here:
            setup(*arguments)
        self._ready_here = True
        return map(function, items)

    def _start(self) -> None:
        """Start the processes, if they aren't running."""
        if self._started:
            return
        # If a process cannot be started, this stack ends those before it.
        with ExitStack() as stack:
            for _ in range(self._count):
                self._free.put(stack.enter_context(_Worker(self._task)))
            self._stack = stack.pop_all()
        self._started = True

    def _answer(self, item: Item) -> Result:
        worker = self._free.get()
        try:
            return cast(Result, worker.ask(item))
        finally:
            self._free.put(worker)


class _Worker:
    """One worker process; a context manager that ends it."""

    def __init__(self, task: tuple[Any, ...]) -> None:
        """Start the process and send it `task`: the function, `setup`, and the arguments of `setup`."""
        environment = {
            **os.environ,
            # The worker must find every module that the parent can import, or unpickling the task fails.
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "TOKENIZERS_PARALLELISM": "false",  # The processes are the parallelism.
            "OMP_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        self._send(task)

    def __enter__(self) -> _Worker:
        """Return the worker itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Kill the process: by now nobody waits for an answer."""
        self._process.kill()
        self._process.communicate()  # Closes the pipes and waits, so that no zombie is left.

    def ask(self, item: Any) -> Any:
        """Return the function's result for an item."""
        self._send(item)
        try:
            fine, value = pickle.load(_not_none(self._process.stdout))  # Safe: our own process wrote it.
        except (EOFError, pickle.UnpicklingError) as error:
            raise self._killed() from error
        if not fine:
            raise value
        return value

    def _send(self, value: Any) -> None:
        """Send one value to the process."""
        stream = _not_none(self._process.stdin)
        try:
            pickle.dump(value, stream, protocol=pickle.HIGHEST_PROTOCOL)
            stream.flush()
        except BrokenPipeError as error:
            raise self._killed() from error

    def _killed(self) -> EnvironmentFault:
        """Return the error for a process that ended too early."""
        return EnvironmentFault(
            f"a worker process that prepares the corpus ended early (exit status {self._process.wait()}; out of "
            "memory?). Run the same command again, with fewer workers if it happens again: what is finished is kept."
        )


def _not_none(stream: Any) -> Any:
    """Return a process's pipe, which its type says may be None."""
    if stream is None:
        raise RuntimeError("the worker has no pipe")
    return stream


def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Run a worker: read the task, then answer one item after another until the requests end."""
    function: Any = None
    failure: Exception | None = None
    try:
        function, setup, arguments = pickle.load(requests)
        if setup is not None:
            setup(*arguments)
    except Exception as error:
        # The parent reads no answer to the task: a failure is the answer to each item instead.
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
        # Standard output becomes standard error: nothing that a library prints may get between the answers.
        os.dup2(2, 1)
        _serve(sys.stdin.buffer, replies)
