"""The properties of a model that decide which kernels it needs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """What kernels are compiled for."""

    heads: int
    key_heads: int
    width: int
    """Units of a head."""
    fused: bool
    """Computed by `Reference.blocks`, where the backend has them."""
    dropout: bool
    """In attention."""
    weights: str
    """torch's name of their type; likewise that of products."""
    products: str
