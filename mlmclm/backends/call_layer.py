"""Call of a model's layer with a backend's computation in place of the layer's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn


def call_layer(layer: nn.Module, block: Callable[..., Any], *states: Tensor) -> Any:
    """Return `block(*states)`, computed within a call of the layer as a module.

    Hooks on the module (ZeRO 3's, which gather and release weights) run as for the layer's own forward.
    """
    # Patched once per layer; calls without `block` still get transformers' own forward.
    if "forward" not in vars(layer):
        layer.forward = partial(_forward, layer.forward)
    return layer(*states, block=block)


def _forward(original: Callable[..., Any], *args: Any, block: Callable[..., Any] | None = None, **more: Any) -> Any:
    return original(*args, **more) if block is None else block(*args)
