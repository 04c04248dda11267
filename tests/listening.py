"""The addresses on which a process's descendants listen, polled for the duration of a block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil


def is_loopback(address: str) -> bool:
    return address == "::1" or address.removeprefix("::ffff:").startswith("127.")


@contextmanager
def watched(look: Callable[[], None] = lambda: None) -> Iterator[dict[str, set[str]]]:
    """Yield a mapping that is filled while the block runs: command lines of this process's listening descendants -> addresses.

    Args:
        look: called before each poll.
    """
    addresses: dict[str, set[str]] = {}
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.5):
            look()
            for process in psutil.Process().children(recursive=True):
                try:
                    for connection in process.net_connections("inet"):
                        if connection.status == psutil.CONN_LISTEN:
                            addresses.setdefault(" ".join(process.cmdline()), set()).add(connection.laddr.ip)
                except psutil.Error:
                    continue

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield addresses
    finally:
        stop.set()
        thread.join()
