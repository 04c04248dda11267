"""Claims on an object store, which has no locks: whoever creates the object holds the claim, and renews it.

A claim whose content has not changed for a lease, by the clock of the process that looks, is dead and is removed. Its
holder may have died on any machine, also on this one.

Where the store creates objects exclusively, as S3 does, a claim has one holder. Elsewhere two processes may both see no
claim and both write; each reads back after that, and the one whose content is there holds it. Two processes can then
still hold a claim for a moment. That costs time only: equal keys mean equal results.
"""

from __future__ import annotations

import json
import os
import platform
import time
import uuid
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from mlmclm.errors import EnvironmentFault
from mlmclm.storage.claims import LEASE_SECONDS, RENEWALS_A_LEASE, Claims, Holder, read_claim
from mlmclm.storage.objects import ObjectPath, read_all


class ObjectClaims(Claims):
    """The claims below an address (`root`), as one process sees them; thread-safe.

    A claim is dead after `lease` seconds without renewal.
    """

    def __init__(self, root: ObjectPath, *, lease: float = LEASE_SECONDS) -> None:
        self._objects = root / "claims"
        self._lease = lease
        self._seen: dict[str, tuple[Any, float]] = {}
        self._looked: dict[str, float] = {}

    def holder(self, name: str) -> str | None:
        path = self._objects / name
        try:
            content = path.read_bytes()
            if time.monotonic() - self._unchanged_since(name, content) < self._lease:
                held = read_claim(content)
                return f"process {held['process']} on {held['host']}"
            if path.read_bytes() == content:
                path.unlink(missing_ok=True)
        except FileNotFoundError:
            pass
        self._seen.pop(name, None)
        return None

    def silence(self, name: str) -> float:
        # A driver asks this of every busy worker each second, but the store is asked as often as claims are renewed.
        now = time.monotonic()
        if now - self._looked.get(name, -self._lease) >= self._lease / RENEWALS_A_LEASE:
            self._looked[name] = now
            try:
                self._unchanged_since(name, (self._objects / name).read_bytes())
            except (EnvironmentFault, FileNotFoundError):
                self._seen.pop(name, None)
        return now - self._seen[name][1] if name in self._seen else 0.0

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
        content = _content(who)
        try:
            path.write_bytes(content, new=True)
            if path.read_bytes() != content:
                return False
        except (FileExistsError, FileNotFoundError):
            return False
        stack.callback(_release, path, who)
        stack.enter_context(self._renewed(name, partial(_renew, path, who)))
        return True


def _content(who: dict[str, Any]) -> bytes:
    return json.dumps({**who, "renewed": time.time()}).encode()


def _ours(path: ObjectPath, who: dict[str, Any]) -> bool:
    return bool(read_claim(path.read_bytes()).get("token") == who["token"])


def _renew(path: ObjectPath, who: dict[str, Any]) -> None:
    with suppress(EnvironmentFault, FileNotFoundError):  # the store may be out of reach for a moment
        if _ours(path, who):
            path.write_bytes(_content(who))


def _release(path: ObjectPath, who: dict[str, Any]) -> None:
    with suppress(EnvironmentFault, FileNotFoundError):
        if _ours(path, who):
            path.unlink(missing_ok=True)
