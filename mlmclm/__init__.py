"""mlmclm: how should this text encoder be pretrained, and how sure can we be?"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlmclm import tune as tune

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "tune":  # loaded when it is first used, because Ray takes seconds
        return import_module("mlmclm.tune")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
