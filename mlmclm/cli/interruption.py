"""Handle SIGTERM like Ctrl-C: raise `KeyboardInterrupt` in the main thread, so that everything open is closed."""

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
"""Seconds after a SIGTERM during which further ones are ignored."""


class Interrupted(BaseException):
    """A `KeyboardInterrupt` that a command raised. Typer would end the process at the original, before our message."""


class Verbs(typer.core.TyperGroup):
    """The group of all commands; raises `Interrupted` if one of them is interrupted."""

    def invoke(self, ctx: Any) -> Any:
        """Run the requested command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise Interrupted from error


class Received:
    """The signal that ended the command: SIGTERM if one has come, else SIGINT."""

    signal = signal.SIGINT
    at = 0.0
    """Monotonic time at which SIGTERM came."""

    @property
    def exit_code(self) -> int:
        """128 plus the signal's number, as in shells: 130 or 143."""
        return 128 + self.signal


@contextmanager
def sigterm_like_ctrl_c() -> Iterator[Received]:
    """Raise `KeyboardInterrupt` on SIGTERM inside the block; do nothing outside the main thread.

    It has to be Python's own exception: Ray aborts if a signal handler raises any other one inside its C++ code.
    """
    received, owner = Received(), os.getpid()

    def interrupt(number: int, _: object) -> None:
        if os.getpid() != owner:  # a forked child inherits this handler but has nothing to close
            os._exit(128 + number)
        # A repeated SIGTERM must not interrupt the closing. After a while it raises again, because Python drops an
        # exception that is raised inside a destructor, so the first may have been lost.
        if received.signal != signal.SIGTERM or time.monotonic() - received.at > SECONDS_TO_CLOSE:
            received.signal, received.at = signal.SIGTERM, time.monotonic()
            raise KeyboardInterrupt

    # Python allows signal handlers to be set in the main thread only.
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield received
    finally:
        signal.signal(signal.SIGTERM, before)
