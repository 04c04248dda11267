"""Messages between workers' threads that write a state together.

Collectives belong to the main threads, so the messages go through the process group's key-value store.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from mlmclm.errors import EnvironmentFault

SECONDS = 0.1
"""Seconds between two checks for a message."""
FOLDER, FINISHED, END = "folder", "finished", "end"
"""Names of rank 0's messages: the folder to write to, the path of that folder once all have written, and the end of the exchange."""


def sent_by(rank: int) -> str:
    """Return the name of a worker's message "I have sent my files". The name of "I have written them" is its rank alone."""
    return f"{rank} sent"


class PeerError(EnvironmentFault):
    """Another worker has failed; the text is its reason."""


class Peers:
    """The workers that write a state's folder together, as seen by one of them."""

    def __init__(self, title: str = "", rank: int = 0, world: int = 1) -> None:
        """Set up the exchange.

        Args:
            title: name of what is written; a process group uses each name once.
            world: number of workers; 1 for a worker that writes alone and exchanges nothing.
        """
        self.rank, self.world = rank, world
        if world > 1:
            self._store = PrefixStore(title, _get_default_store())

    def tell(self, name: str, message: dict[str, Any]) -> None:
        """Leave a message for the other workers."""
        if self.world > 1:
            self._store.set(name, json.dumps(message))

    def told(self, name: str) -> dict[str, Any]:
        """Wait for a message and return it.

        A worker that dies leaves none; the launcher then ends the others.

        Raises:
            PeerError: the sender has failed instead of sending the message.
        """
        # A blocking `get` would keep the main thread from the store.
        while not self._store.check([name]):
            time.sleep(SECONDS)
        message: dict[str, Any] = json.loads(self._store.get(name))
        if "error" in message:
            raise PeerError(message["error"])
        return message

    @contextmanager
    def together(self) -> Iterator[None]:
        """Pass an error in the block on to the other workers, and raise theirs at its end."""
        with self.passing_on():
            yield
        if self.rank > 0:
            self.told(END)
            return
        for name in (FOLDER, END):  # FOLDER too, for workers that wait for it although rank 0 had nothing to write
            self.tell(name, {})

    @contextmanager
    def passing_on(self) -> Iterator[None]:
        """Pass an error in the block on to the other workers."""
        names = (FOLDER, FINISHED, END) if self.rank == 0 else (str(self.rank), sent_by(self.rank))
        try:
            yield
        except BaseException as error:
            reason = f"worker {self.rank} on {platform.node()}: {error}"
            for name in names:
                self.tell(name, {"error": str(error) if isinstance(error, PeerError) else reason})
            raise


ALONE = Peers()
