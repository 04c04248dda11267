"""Copies of the host's tensors to a device."""

from __future__ import annotations

import torch
from torch import Tensor


def pinned(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a host tensor in pinned memory, from which a GPU copies while the host goes on; for other devices, the same tensor."""
    return tensor.pin_memory() if torch.device(device).type == "cuda" else tensor


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a host tensor on a device.

    For a GPU it is pinned first: a copy from other memory would wait until the GPU has finished all submitted work.
    """
    return pinned(tensor, device).to(device, non_blocking=True)
