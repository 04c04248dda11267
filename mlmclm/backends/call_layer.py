"""Call of a model's layer with a backend's computation in place of the layer's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn


def call_layer(layer: nn.Module, hidden: Tensor, block: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `block(hidden)`, computed within a call of the layer as a module.

    Hooks on the module (ZeRO 3's, which gather and release weights) run as for the layer's own forward.
    """
    # Patched once per layer; calls without `block` still get transformers' own forward.
    if "forward" not in vars(layer):
        layer.forward = partial(_forward, layer.forward)
    return layer(hidden, block=block)


def _forward(
    original: Callable[..., Tensor],
    hidden: Tensor,
    *args: Any,
    block: Callable[[Tensor], Tensor] | None = None,
    **more: Any,
) -> Tensor:
    return original(hidden, *args, **more) if block is None else block(hidden)
