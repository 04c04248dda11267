"""Copies of the host's tensors to a device."""

from __future__ import annotations

import torch
from torch import Tensor


def pinned(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a tensor of the host in memory from which the device copies while the host goes on, where there is such."""
    return tensor.pin_memory() if torch.device(device).type == "cuda" else tensor


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a tensor of the host on a device.

    From memory that isn't pinned a copy to a GPU would wait until this has done all that was submitted before.
    """
    return pinned(tensor, device).to(device, non_blocking=True)
