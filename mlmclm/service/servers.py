"""Server processes on loopback: choose a free port, wait until a server answers, end it with its children."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from mlmclm.errors import EnvironmentFault, UserError
from mlmclm.progress import say

HOST = "127.0.0.1"
START_SECONDS = 300.0
"""Longest time for a server to answer after its start, in seconds; on an idle machine it takes some ten."""
LINES_SHOWN = 15
"""Number of lines of a server's output in the message about its failed start."""
DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens addresses of this machine without any proxy that the environment names: a proxy must not see tokens."""


@contextmanager
def server_process(
    command: Sequence[str], what: str, url: str, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server during the block; the block begins when the server answers.

    Args:
        what: the server's name, for messages.
        url: address that answers with status 200 once the server is ready.
        log: file for the server's output.
        environment: variables in addition to this process's.

    Raises:
        EnvironmentFault: it exits or doesn't answer in `START_SECONDS`; the message has its last output.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            # The server gets its own process group, so that Ctrl-C reaches only this process, which then ends the server
            # with all its workers.
            start_new_session=True,
        )
    try:
        _wait(process, what, url, log)
        yield process
    finally:
        _stop(process)


def _wait(process: subprocess.Popen[bytes], what: str, url: str, log: Path) -> None:
    say(f"{what} is starting: waiting up to {START_SECONDS:.0f} s for an answer at {url}")
    deadline = time.monotonic() + START_SECONDS
    reason = f"it doesn't answer at {url} after {START_SECONDS:.0f} s"
    while time.monotonic() < deadline:
        if process.poll() is not None:
            reason = f"it has ended with exit code {process.returncode}"
            break
        try:
            with DIRECTLY.open(url, timeout=2) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.2)
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-LINES_SHOWN:]
    output = "\n".join(["Its last output:", *lines]) if lines else "It has printed nothing."
    raise EnvironmentFault(f"{what} doesn't start: {reason}. {output}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server's process group, first with SIGTERM and then with SIGKILL."""
    for sign, seconds in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(process.pid, sign)
            process.wait(seconds)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def port_for(port: int | None, option: str = "--port") -> int:
    """Return a free port, or the given one after a check that it can be used.

    Raises:
        UserError: the given port is taken or not allowed; the message names `option`.
    """
    with socket.socket() as probe:
        if port is not None:
            # The server may bind a port in TIME_WAIT, such as that of a previous run, so the probe must too.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port or 0))
        except (OSError, OverflowError) as error:
            raise UserError(
                f"Port {port} cannot be used ({error}). Choose another with {option}, or leave it out."
            ) from error
        return int(probe.getsockname()[1])
