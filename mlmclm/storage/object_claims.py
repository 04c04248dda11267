"""Claims on an object store, which has no locks: whoever creates the object holds the claim, and renews it.

A claim whose content has not changed for a lease, by the clock of the process that looks, is dead and is removed. Its
holder may have died on any machine, also on this one. Only time in which the store answered counts, because a holder
cannot renew its claim during an outage.

Where the store creates objects exclusively, as S3 does, a claim has one holder. Elsewhere two processes may both see no
claim and both write; each reads back after that, and the one whose content is there holds it. Two processes can then
still hold a claim for a moment. That costs time only: equal keys mean equal results.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
import uuid
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from mlmclm.errors import MlmclmError, StorageFault
from mlmclm.storage.claims import LEASE_SECONDS, RENEWALS_A_LEASE, Claims, Holder, read_claim
from mlmclm.storage.objects import ObjectPath, read_all
from mlmclm.storage.patience import NoAnswer

SECONDS_FOR_RELEASE = 5.0
"""How long a release is tried at first: without it, others wait for a lease."""
SECONDS_UNTIL_DOUBTFUL = 0.9
"""If it took so long to create a claim, the client may have given up a request that the store carries out later."""


class ObjectClaims(Claims):
    """The claims below an address (`root`), as one process sees them; thread-safe.

    A claim is dead after `lease` seconds without renewal.
    """

    def __init__(self, root: ObjectPath, *, lease: float = LEASE_SECONDS) -> None:
        self._objects = root / "claims"
        self._lease = lease
        self._seen = {}

    def holder(self, name: str) -> str | None:
        path = self._objects / name
        try:
            content = path.read_bytes()
            held = read_claim(content)
            who = f"process {held['process']} on {held['host']}"
            if self._unchanged(name, content, path.bucket.availability.lost) < self._lease:
                return who
            if path.read_bytes() == content:
                try:
                    path.hurried().unlink(missing_ok=True)
                except NoAnswer:
                    # If it were asked again later, it could delete a claim that has been renewed meanwhile.
                    return who
        except FileNotFoundError:
            pass
        self._seen.pop(name, None)
        return None

    def held(self, prefix: str) -> dict[str, Holder]:
        paths = [path for path in self._objects.iterdir() if path.name.startswith(prefix)]
        found = {}
        for path, content in zip(paths, read_all(paths), strict=True):
            if content is not None:
                held = read_claim(content)
                alive = time.time() - held.get("renewed", 0.0) < self._lease
                found[path.name.removeprefix(prefix)] = Holder(held["host"], held["process"], held.get("since"), alive)
        return found

    def _take(self, name: str, stack: ExitStack) -> bool:
        path, now = self._objects / name, round(time.time(), 3)
        who = {"host": platform.node(), "process": os.getpid(), "since": now, "token": uuid.uuid4().hex}
        asked = time.monotonic()
        # The claim that is there may be our own: if the answer to our request was lost, it has been made twice.
        with suppress(FileExistsError):
            path.write_bytes(_content(who), new=True)
        doubtful = time.monotonic() - asked >= SECONDS_UNTIL_DOUBTFUL
        with suppress(FileNotFoundError):
            if _ours(path, who):
                stack.callback(self._release, path, who, doubtful)
                stack.enter_context(self._renewed(name, partial(_renew, path, who)))
                return True
        if doubtful:
            self._release_later(path, who)
        return False

    def _release(self, path: ObjectPath, who: dict[str, Any], doubtful: bool) -> None:
        """Remove a claim of ours; look again later if that failed, or if a late request may make it anew."""
        if not _remove(path, who, SECONDS_FOR_RELEASE) or doubtful:
            self._release_later(path, who)

    def _release_later(self, path: ObjectPath, who: dict[str, Any]) -> None:
        """Look for a claim of ours for a lease, and remove it, while this process does other things."""

        def look() -> None:
            for _ in range(RENEWALS_A_LEASE):
                time.sleep(self._lease / RENEWALS_A_LEASE)
                _remove(path, who)

        threading.Thread(target=look, name=f"mlmclm release {path.name}", daemon=True).start()


def _content(who: dict[str, Any]) -> bytes:
    return json.dumps({**who, "renewed": time.time()}).encode()


def _ours(path: ObjectPath, who: dict[str, Any]) -> bool:
    return bool(read_claim(path.read_bytes()).get("token") == who["token"])


def _renew(path: ObjectPath, who: dict[str, Any]) -> None:
    """Renew a claim of ours; if the store is out of reach, the next renewal is soon."""
    path = path.hurried()
    with suppress(MlmclmError, FileNotFoundError, FileExistsError):
        tag = path.tag()  # before the content, so that a change after it is noticed
        if not _ours(path, who):
            return
        try:
            path.write_bytes(_content(who), tag=tag)
        except NoAnswer:
            raise
        except StorageFault:  # a store that doesn't know this condition
            path.write_bytes(_content(who))


def _remove(path: ObjectPath, who: dict[str, Any], seconds: float = 0.0) -> bool:
    """Remove a claim if it is ours; return whether the store has answered.

    Args:
        seconds: how long this is tried. Each try looks at the claim again: if an earlier one has removed ours but its
            answer was lost, the claim can be another process's by now.
    """
    path = path.hurried()

    def look_and_remove() -> None:
        if _ours(path, who):
            path.unlink(missing_ok=True)

    try:
        path.bucket.availability.keep_asking(look_and_remove, waits=seconds)
    except FileNotFoundError:
        pass
    except MlmclmError:
        return False
    return True
