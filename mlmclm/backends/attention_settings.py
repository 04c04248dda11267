"""Settings of one attention call, passed as one object."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn


class AttentionSettings(NamedTuple):
    """Settings of one attention call."""

    causal: bool
    """Hide later positions."""
    scale: float
    """Factor of the scores, the products of queries and keys."""
    dropout: float = 0.0
    window: int | None = None
    """Hide positions at this distance or more; None hides none."""
    traced: bool = False
    """torch.compile traces the call, so it must consist of torch's operations."""

    def local_mask(self, length: int, device: torch.device) -> Tensor | None:
        """Return the mask of `near`, or None if the window hides nothing."""
        if self.window is None or self.window >= length:
            return None
        return near(length, self.causal, self.window, device)


def near(length: int, causal: bool, window: int, device: torch.device) -> Tensor:
    """Return a bool [length, length] mask, True where a query (row) sees a key.

    It sees keys closer than `window` and, if causal, not later.
    """
    position = torch.arange(length, device=device)
    distance = position[:, None] - position
    return (distance < window) & (distance >= 0) if causal else distance.abs() < window


def window_of(module: nn.Module, sliding_window: int | None, causal: bool) -> int | None:
    """Return the smallest hidden distance in the requested direction, given a layer's `sliding_window` for its class's own direction.

    With `local_attention` L, transformers' ModernBertModel sees L / 2 tokens to each side (`sliding_window` is L / 2 +
    1). Its ModernBertDecoderModel counts the token itself and sees L / 2 - 1 to the left (`sliding_window` is L / 2).
    Either class can hold the weights. The window is always that of the class of the requested direction.
    """
    if sliding_window is None:
        return None
    if not getattr(module, "is_causal", True):
        return sliding_window - 1 if causal else sliding_window
    decoder = getattr(getattr(module, "config", None), "model_type", None) == "modernbert-decoder"
    return sliding_window + 1 if decoder and not causal else sliding_window
