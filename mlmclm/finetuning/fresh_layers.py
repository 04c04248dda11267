"""New layers for a head, drawn from a generator of their own."""

from __future__ import annotations

import torch
from torch import nn

from mlmclm.tasks.prepared_task import Linear


def fresh_layers(generator: torch.Generator, deviation: float = 0.02) -> Linear:
    """Return a factory of linear layers with weights from N(0, deviation) and zero bias, drawn one after the other."""

    def linear(inputs: int, outputs: int) -> nn.Linear:
        # On the meta device the constructor's own initialisation draws nothing from torch's global generator.
        with torch.device("meta"):
            layer = nn.Linear(inputs, outputs)
        layer.to_empty(device="cpu")
        with torch.no_grad():
            layer.weight.normal_(0.0, deviation, generator=generator)
            layer.bias.zero_()
        return layer

    return linear
