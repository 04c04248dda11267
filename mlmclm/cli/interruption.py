"""SIGTERM ends a command as Ctrl-C does: a `KeyboardInterrupt` in the main thread, whereupon everything that is open closes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer.core

SECONDS_TO_CLOSE = 30.0
"""For this time after a SIGTERM others are ignored."""


class Interrupted(BaseException):
    """A `KeyboardInterrupt` that has left a verb. Typer would end the process at the original, before our message."""


class Verbs(typer.core.TyperGroup):
    """The group of all verbs; raises `Interrupted` where one of them is interrupted."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the verb that was asked for."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise Interrupted from error


class Received:
    """The signal that ended the command; SIGINT as long as no other has come."""

    signal = signal.SIGINT
    at = 0.0
    """When it came, for SIGTERM; by the monotonic clock."""

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as shells have it: 130 or 143."""
        return 128 + self.signal


@contextmanager
def sigterm_like_ctrl_c() -> Iterator[Received]:
    """Has SIGTERM raise `KeyboardInterrupt` for the time of the block; does nothing outside the main thread.

    The exception is Python's own because Ray passes no other from a signal handler through its C++ code: it aborts.
    """
    received, owner = Received(), os.getpid()

    def interrupt(number: int, _: object) -> None:
        if os.getpid() != owner:  # a forked child, which has nothing to close
            os._exit(128 + number)
        # A second one does not interrupt the closing; but Python drops an exception that meets a destructor.
        if received.signal != signal.SIGTERM or time.monotonic() - received.at > SECONDS_TO_CLOSE:
            received.signal, received.at = signal.SIGTERM, time.monotonic()
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield received
    finally:
        signal.signal(signal.SIGTERM, before)
