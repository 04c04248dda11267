"""An ordered parallel map over processes that starts clean, keeps little in flight and dies with its parent.

Workers are plain `python -m mlmclm.corpora.process_map` processes that answer pickled items on their standard streams.
Unlike a forked pool they inherit no threads (a tokenizer's, torch's); unlike a spawned one they do not run the
caller's main module again; and the end of their input, however the parent ended, ends them.
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
from queue import SimpleQueue
from typing import Any, BinaryIO, Generic, Self, TypeVar, cast

from mlmclm.errors import EnvironmentFault

Item = TypeVar("Item")
Result = TypeVar("Result")

Progress = Callable[[str, int, int | None], None]
"""Called as (what is being done, how much is done, of how much or None where that is unknown)."""


def silent(what: str, done: int, total: int | None) -> None:
    """The `Progress` that shows nothing."""


def worker_count(workers: int | None) -> int:
    """`workers`, or the number of processors that this process may use."""
    return max(1, workers) if workers is not None else len(os.sched_getaffinity(0))


def ordered_map(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    *,
    workers: int,
    setup: Callable[..., None] | None = None,
    setup_arguments: tuple[Any, ...] = (),
) -> Iterator[Result]:
    """`Workers.map` by workers that live as long as it takes."""
    with Workers(function, workers=workers, setup=setup, setup_arguments=setup_arguments) as started:
        yield from started.map(items)


class Workers(Generic[Item, Result]):
    """`workers` processes that apply one function; one worker is this process itself. A context manager.

    `function` and `setup` (run once in each worker) are module-level functions of importable modules.
    """

    def __init__(
        self,
        function: Callable[[Item], Result],
        *,
        workers: int,
        setup: Callable[..., None] | None = None,
        setup_arguments: tuple[Any, ...] = (),
    ) -> None:
        """Nothing is started yet."""
        self._task = (function, setup, setup_arguments)
        self._function, self._count = function, workers
        self._stack = ExitStack()
        self._free: SimpleQueue[_Worker] = SimpleQueue()

    def __enter__(self) -> Self:
        """Starts the processes."""
        _, setup, arguments = self._task
        if self._count == 1 and setup is not None:
            setup(*arguments)
        with ExitStack() as stack:
            for _ in range(self._count if self._count > 1 else 0):
                self._free.put(stack.enter_context(_Worker(self._task)))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        """Ends them."""
        self._stack.close()

    def map(self, items: Iterable[Item]) -> Generator[Result]:
        """`map(function, items)`, in the order of the items; at most four items a worker are read ahead.

        An exception of `function` or `setup` is raised here. Closing the iterator drops what is not begun.

        Raises:
            EnvironmentFault: a worker was killed, most often for want of memory.
        """
        if self._count == 1:
            yield from map(self._function, items)
            return
        threads = ThreadPoolExecutor(self._count)
        running: deque[Future[Result]] = deque()
        try:
            for item in items:
                running.append(threads.submit(self._answer, item))
                if len(running) >= 4 * self._count:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            threads.shutdown(wait=True, cancel_futures=True)

    def _answer(self, item: Item) -> Result:
        worker = self._free.get()
        try:
            return cast(Result, worker.ask(item))
        finally:
            self._free.put(worker)


class _Worker:
    """One worker process; a context manager that ends it."""

    def __init__(self, task: tuple[Any, ...]) -> None:
        """Starts the process and hands it (function, setup, setup's arguments)."""
        environment = {
            **os.environ,
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
        """The worker itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Ends the process at once: by now nobody waits for an answer."""
        self._process.kill()
        self._process.communicate()

    def ask(self, item: Any) -> Any:
        """The function's result for an item."""
        self._send(item)
        try:
            fine, value = pickle.load(_not_none(self._process.stdout))  # Written by our own process.
        except (EOFError, pickle.UnpicklingError) as error:
            raise self._killed() from error
        if not fine:
            raise value
        return value

    def _send(self, value: Any) -> None:
        """Writes one value to the process."""
        stream = _not_none(self._process.stdin)
        try:
            pickle.dump(value, stream, protocol=pickle.HIGHEST_PROTOCOL)
            stream.flush()
        except BrokenPipeError as error:
            raise self._killed() from error

    def _killed(self) -> EnvironmentFault:
        """The error for a process that ended too early."""
        return EnvironmentFault(
            f"a worker process that prepares the corpus ended early (exit status {self._process.wait()}; out of "
            "memory?). Run the same command again, with fewer workers if it happens again: what is finished is kept."
        )


def _not_none(stream: Any) -> Any:
    """The pipe of a process that was started with one."""
    if stream is None:
        raise RuntimeError("the worker has no pipe")
    return stream


def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """A worker's life: the task, then one answer an item until the requests end."""
    function: Any = None
    failure: Exception | None = None
    try:
        function, setup, arguments = pickle.load(requests)
        if setup is not None:
            setup(*arguments)
    except Exception as error:
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
        os.dup2(2, 1)  # Whatever a library prints must not get between the answers.
        _serve(sys.stdin.buffer, replies)
