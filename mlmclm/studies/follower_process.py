"""The process that follows a study and writes to MLflow, so that MLflow takes neither the driver's time nor its memory."""

from __future__ import annotations

import math
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from mlmclm.numbers import plural
from mlmclm.progress import SECONDS_OF_SILENCE, Bar, say
from mlmclm.studies.follower import NICE, Backlog
from mlmclm.tracking.address import without_password

PROGRAM = (
    "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); "  # until it knows what to do
    "sys.path.insert(0, sys.argv[1]); import mlmclm; del sys.path[0]; "
    "from mlmclm.studies.follower import main; main()"
)
"""The process's program. Its argument is the folder of this package, which a notebook may have put on its own path only."""
START_SECONDS = 60.0
"""Seconds that the end grants the process to start, besides the time that it may spend without writing anything."""
LIMIT_AFTER_ERROR = 5.0
"""Seconds that a study which fails or is interrupted waits for MLflow: the user wants the error's message."""
SECONDS_TO_END = 2.0
"""Seconds that the process has to finish the record that it writes, and to mark runs as killed, before it is killed itself."""


class FollowerProcess:
    """A `Follower` in a process of its own; only leaving the context waits for it, and nothing is lost with it.

    Args:
        store, experiment, address: as in `Follower`.
        shown: the address for display, if it is another.
        timeout: seconds that leaving the context waits without any run being written.
        niceness: added to the process's own until the driver waits for it.
    """

    def __init__(
        self,
        store: Path,
        experiment: str,
        address: str,
        *,
        timeout: float,
        shown: str | None = None,
        niceness: int = NICE,
    ) -> None:
        self._shown, self._timeout = shown or without_password(address), timeout
        self._messages: queue.SimpleQueue[tuple[str, tuple[Any, ...]]] = queue.SimpleQueue()
        self._backlog: Backlog | None = None
        self._process = subprocess.Popen(
            # -P: a file in the working directory must not shadow a module of the standard library.
            [sys.executable, "-P", "-c", PROGRAM, str(Path(__file__).parents[2])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches the driver alone, which then ends this process
        )
        # Not on the command line, where other users could read an address's password.
        self.tell("begin", niceness, store, experiment, address)
        self._thread = threading.Thread(target=self._hand_over, name="mlmclm-follower", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.tell("stop", "FAILED" if isinstance(error, Exception) else "KILLED", LIMIT_AFTER_ERROR)
            self.close(LIMIT_AFTER_ERROR + SECONDS_TO_END)

    def tell(self, kind: str, *value: Any) -> None:
        """Call a method of the `Follower` (`put`, `stages`, `groups`, `cells`, `end`) without waiting for it."""
        self._messages.put((kind, value))

    def close(self, limit: float = math.inf) -> None:
        """Wait until MLflow has everything, under a progress bar, or the time is up; end the process, and say what is left.

        Args:
            limit: seconds to wait in all.
        """
        self.tell("end")
        with suppress(OSError):  # only root may, and the process may have ended
            os.setpriority(os.PRIO_PROCESS, self._process.pid, os.getpriority(os.PRIO_PROCESS, 0))
        reason: str | None = "interrupted"
        try:
            reason = self._wait(limit)
        except BaseException:
            self._process.terminate()  # so that it marks what it leaves
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(SECONDS_TO_END)
            raise
        finally:
            self._process.kill()  # at any moment, since it leaves whole runs or none
            code = self._process.wait()
            self._thread.join()
            what, error = (
                ("some runs", None)
                if self._backlog is None
                else (plural(self._backlog.left, "run"), self._backlog.error)
            )
            if self._backlog is None or self._backlog.left:
                by_itself = f"the process that writes to MLflow ended by itself, with exit code {code}"
                in_time = math.isinf(limit) or code
                reason = error or reason or (by_itself if in_time else f"not finished within {limit:g} s")
                say(
                    f"MLflow at {self._shown} lacks {what} ({reason}). Nothing is lost: the results are in the store, "
                    "and the same command run again, or `mlmclm tracking sync STUDY.yaml`, writes what is missing."
                )

    def _wait(self, limit: float) -> str | None:
        """Wait until the process ends or the time is up; return the reason if it was the time."""
        began = moved = time.monotonic()
        left = total = -1
        with ExitStack() as stack:
            bar: Bar | None = None
            while self._thread.is_alive():
                self._thread.join(1.0)
                now, backlog = time.monotonic(), self._backlog
                if backlog is not None and backlog.left != left:
                    moved, left, total = now, backlog.left, max(total, backlog.left)
                if now - moved > self._timeout + (START_SECONDS if backlog is None else 0):
                    return f"nothing was written for {self._timeout:g} s"
                if now - began > limit:
                    return f"not finished within {limit:g} s"
                if backlog is None or not backlog.left:
                    continue
                if bar is None and now - began > SECONDS_OF_SILENCE:
                    title = "MLflow, one run a cell (Ctrl-C leaves them for later)"
                    bar = stack.enter_context(Bar(title, total, unit="runs"))
                if bar is not None:
                    note = "" if backlog.error is None else f"trying again ({backlog.error})"
                    bar.update(total - backlog.left, total, note=note)
            if bar is not None:
                bar.complete = not left
        return None

    def _hand_over(self) -> None:
        """Send messages up to the last one, and receive progress until the process ends (the thread's main function)."""
        to, back = self._process.stdin, self._process.stdout
        assert to is not None and back is not None
        with suppress(OSError, EOFError), to, back:
            kind = ""
            while kind != "end":
                kind, value = self._messages.get()
                pickle.dump((kind, value), to, pickle.HIGHEST_PROTOCOL)
                to.flush()
            while True:
                self._backlog = pickle.load(back)
