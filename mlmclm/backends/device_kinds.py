"""Kinds of devices, and the user's choices among them and their backends. Needs no torch."""

from __future__ import annotations

import os
from functools import cache
from typing import Literal

from mlmclm.registry import KINDS

Device = Literal["cpu", "cuda"]
Choice = Literal["auto", "cpu", "cuda"]

BACKEND = "MLMCLM_BACKEND"
"""Variable for the user's choice of a backend (`mlmclm.backends`), which workers follow."""


def keyed_backend() -> dict[str, str]:
    """Return the backend's entry in the keys of its results: none, unless the user has named a backend that isn't built in."""
    name = os.environ.get(BACKEND, "")
    return {"backend": KINDS["backend"].keyed(name)} if name and _is_added(name) else {}


@cache
def _is_added(name: str) -> bool:
    # Looking up a member would import torch, which most processes that make keys for built-in backends do not need.
    registry = KINDS["backend"]
    return name in registry.registered or any(point.name == name for point in registry.points())


KINDS["backend"].on_change(_is_added.cache_clear)
