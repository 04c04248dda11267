"""An ordered parallel map over processes that starts clean, keeps little in flight and dies with its parent.

Workers are plain `python -m mlmclm.corpora.workers` processes that answer pickled items on their standard streams.
Unlike a forked pool they inherit no threads (a tokenizer's, torch's); unlike a spawned one they do not run the
caller's main module again; and the end of their input, however the parent ended, ends them.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from queue import SimpleQueue
from typing import Any, BinaryIO, TypeVar

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
    """`map(function, items)` over `workers` processes, in the order of the items; one worker is this process itself.

    At most four items a worker are read ahead. `function` and `setup` (run once in each worker) are module-level
    functions of importable modules. An exception of either is raised here.

    Raises:
        EnvironmentFault: a worker was killed, most often for want of memory.
    """
    if workers == 1:
        if setup is not None:
            setup(*setup_arguments)
        yield from map(function, items)
        return
    with ExitStack() as stack:
        free: SimpleQueue[_Worker] = SimpleQueue()
        for _ in range(workers):
            free.put(stack.enter_context(_Worker((function, setup, setup_arguments))))

        def answer(item: Item) -> Result:
            worker = free.get()
            try:
                return worker.ask(item)
            finally:
                free.put(worker)

        threads = stack.enter_context(ThreadPoolExecutor(workers))
        running: deque[Future[Result]] = deque()
        try:
            for item in items:
                running.append(threads.submit(answer, item))
                if len(running) >= 4 * workers:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            threads.shutdown(wait=True, cancel_futures=True)


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
