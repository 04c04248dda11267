"""torch.compile for the layers of a transformers model, one by one: all layers of a kind share what is compiled, and what hangs on
modules (ZeRO's hooks, which gather and give back weights) stays outside of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mlmclm.errors import UserError


def compile_layers(layers: Iterable[nn.Module], *, again: bool) -> None:
    """Has each layer's forward compiled when it is first called with inputs of a new kind.

    Args:
        again: keep a layer's input only, and compute the layer again in the backward pass (activation checkpointing).
    """
    for layer in layers:
        compute = torch.compile(layer.forward)
        layer.forward = partial(checkpoint, compute, use_reentrant=False) if again else compute


def check_compiler(device: torch.device) -> None:
    """Compiles a small function for the device, so that a compiler that is missing is missed before anything is trained.

    Raises:
        UserError: torch.compile does not work on this machine.
    """
    try:
        torch.compile(_trial)(torch.ones(64, device=device))
    except Exception as error:  # whatever torch, the C++ compiler or Triton raises
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise UserError(
            f"recipe.compile: torch.compile does not work on this machine for {device} ({type(error).__name__}: {' '.join(lines)[:300]}). "
            "It needs a C++ compiler (g++ or clang++; a package such as g++ or build-essential) and Python's headers: install them, or set "
            "recipe.compile to false."
        ) from error


def _trial(values: Tensor) -> Tensor:
    return values.sin() + 1
