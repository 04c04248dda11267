"""Ranges of torch's profiler for this project's compiled loops, which the profiler does not see by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

ATTENTION, WEIGHTS = "attention by tiles", "weights' gradients by tiles"
LOGITS, LOOPS = "softmax of the logits and its gradient", "norms, gated units, rotary embedding, gathers"


def ranged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function as a range of this name."""
    from torch.profiler import record_function

    def call(*arguments: Any, **named: Any) -> Any:
        with record_function(name):
            return function(*arguments, **named)

    return call


@contextmanager
def own_ranges() -> Iterator[None]:
    """While this is open, attention, weight gradients and element-wise loops are ranges of the names above."""
    from mlmclm.backends.cpu import kernels, tile_attention, tiles

    loops = (
        "add",
        "norm",
        "norm_backward",
        "gated",
        "gated_backward",
        "to_blocks",
        "from_blocks",
        "softmax",
        "softmax_backward",
    )
    work = [
        *((tile_attention, name, ATTENTION) for name in ("forward", "backward")),
        (tiles, "add_weight_gradient", WEIGHTS),
        (kernels, "cross_entropy", LOGITS),
        *((kernels, name, LOOPS) for name in loops),
    ]
    with ExitStack() as stack:
        for module, name, kind in work:
            stack.enter_context(patch.object(module, name, ranged(kind, getattr(module, name))))
        yield
