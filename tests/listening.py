"""Which addresses a process's family listens on, looked at again and again for the time of a block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil


def is_loopback(address: str) -> bool:
    return address == "::1" or address.removeprefix("::ffff:").startswith("127.")


@contextmanager
def watched(look: Callable[[], None] = lambda: None) -> Iterator[dict[str, set[str]]]:
    """Yields a mapping that fills while the block runs: titles of this process's descendants that listen, with their addresses.

    Args:
        look: called at each look, too.
    """
    found: dict[str, set[str]] = {}
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.5):
            look()
            for process in psutil.Process().children(recursive=True):
                try:
                    for connection in process.net_connections("inet"):
                        if connection.status == psutil.CONN_LISTEN:
                            found.setdefault(" ".join(process.cmdline()), set()).add(connection.laddr.ip)
                except psutil.Error:
                    continue

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()
