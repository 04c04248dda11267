"""Properties of a model that decide which kernels it needs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """Properties for which kernels are compiled."""

    heads: int
    key_heads: int
    width: int
    """Head dimension."""
    fused: bool
    """The model runs through `Reference.blocks`, if the backend supports it."""
    dropout: bool
    """Attention has dropout."""
    weights: str
    """torch's name of the weights' dtype."""
    products: str
    """torch's name of the dtype of matrix products."""
