"""The dtype in which matrix products are computed."""

from __future__ import annotations

import torch
from torch import Tensor


def compute_type(tensor: Tensor) -> torch.dtype:
    """Return the dtype of products with this tensor: that of its device's autocast, or its own."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype
