"""Handle signals that end a command: the first raises `KeyboardInterrupt` in the main thread, so that everything open is closed."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import typer.core

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a command: from Ctrl-C, from its supervisor (a service manager, `ray job stop`), from a closed terminal."""
SECONDS_TO_CLOSE = 30.0
"""Seconds after a signal during which further ones are ignored."""


class Interrupted(BaseException):
    """Raised in place of a command's `KeyboardInterrupt`, at which Typer would end the process before our message."""


class Verbs(typer.core.TyperGroup):
    """The group of all commands; raises `Interrupted` if one of them is interrupted."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the requested command. For a word that is a subcommand or an option of another command, the error names that."""
        word = args[0]
        if word not in self.commands and not ctx.resilient_parsing:
            flag, verbs = f"--{word}", self.commands.items()
            places = [f"{name} {word}" for name, verb in verbs if word in getattr(verb, "commands", ())]
            places += [f"{name} {flag}" for name, verb in verbs if any(flag in option.opts for option in verb.params)]
            if places:
                ctx.fail(f"No such command {word!r}. Did you mean {', '.join(f'{place!r}' for place in places[:3])}?")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the requested command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise Interrupted from error


class Received:
    """The signal that ended the command; SIGINT if none has come."""

    signal = signal.SIGINT
    at = -math.inf
    """Monotonic time at which it came."""

    @property
    def exit_code(self) -> int:
        """128 plus the signal's number, as in shells: 130 or 143."""
        return 128 + self.signal


@contextmanager
def ended_by_signals() -> Iterator[Received]:
    """Raise `KeyboardInterrupt` on a signal inside the block; do nothing outside the main thread.

    It has to be Python's own exception: Ray aborts if a signal handler raises any other one inside its C++ code.
    """
    received, owner = Received(), os.getpid()

    def interrupt(number: int, _: object) -> None:
        if os.getpid() != owner:  # a forked child inherits this handler but has nothing to close
            os._exit(128 + number)
        # A repeated signal must not interrupt the closing. After `SECONDS_TO_CLOSE` it raises again: the first exception may
        # have been lost, because Python drops an exception that is raised inside a destructor.
        if time.monotonic() - received.at > SECONDS_TO_CLOSE:
            received.signal, received.at = signal.Signals(number), time.monotonic()
            raise KeyboardInterrupt
        with suppress(OSError):  # the terminal may be closed
            os.write(2, b"mlmclm: closing, which takes some seconds\n")

    # Python allows signal handlers to be set in the main thread only.
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    # A signal that the parent process ignores (nohup, a script's background job) stays ignored.
    before = {sign: handler for sign in ENDING if (handler := signal.getsignal(sign)) != signal.SIG_IGN}
    for sign in before:
        signal.signal(sign, interrupt)
    try:
        yield received
    finally:
        for sign, handler in before.items():
            # Once everything is closed and reported, a further Ctrl-C would only interrupt the libraries' exit handlers.
            finished = sign == signal.SIGINT and received.at > -math.inf
            signal.signal(sign, signal.SIG_IGN if finished else handler)
