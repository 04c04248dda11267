"""mlmclm: how should this text encoder be pretrained, and how sure can we be?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlmclm.registry import register as register

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Imported when it is first used, so that `import mlmclm` takes no time.
    if name == "register":
        from mlmclm.registry import register

        return register
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
