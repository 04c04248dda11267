"""torch.compile for the layers of a transformers model, one by one.

All layers of a kind share the compiled code, and hooks on modules (ZeRO's, which gather and release weights) stay
outside it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mlmclm.errors import UserError


def compile_layers(layers: Iterable[nn.Module], *, again: bool) -> None:
    """Compile each layer's forward when it is first called with inputs of a new kind.

    With `again`, keep only a layer's input, and compute the layer again in the backward pass (activation checkpointing).
    """
    for layer in layers:
        # Compile the forward method, not the module, so that the module's hooks are not compiled.
        compute = torch.compile(layer.forward)
        layer.forward = partial(checkpoint, compute, use_reentrant=False) if again else compute


def check_compiler(device: torch.device) -> None:
    """Raise a `UserError` before training starts if torch.compile does not work for the device on this machine."""
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
