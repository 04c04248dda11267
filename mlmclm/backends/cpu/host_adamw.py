"""AdamW over weights and moments that the workers of one machine have in common (ZeRO 0 and 1 on CPUs).

Each worker updates what it owns, by the gradients that it has summed: no weight, moment or gradient is sent or updated twice, and the
machine holds weights and moments once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mlmclm.backends.cpu.host import Host


class Common(NamedTuple):
    """What all workers have of one weight."""

    first: Tensor
    second: Tensor
    """Adam's moments, in the weight's shape."""
    owned: list[nn.Parameter]
    """This worker's parts of the weight."""


class HostAdamW(torch.optim.AdamW):
    """torch's AdamW until `divide`; then each worker's part of it."""

    host: Host | None = None

    def divide(self, host: Host, step: int) -> None:
        """Moves the weights, the same on all workers, to common memory, with moments of zero after so many steps; collective."""
        self.common: dict[nn.Parameter, Common] = {}
        for group in self.param_groups:
            weights = group["params"]
            rooms = [host.zeros([weight.shape for weight in weights]) for _ in range(3)]
            for weight, room, first, second in zip(weights, *rooms, strict=True):
                if host.rank == 0:
                    room.copy_(weight.detach())
                weight.data = room
                self.common[weight] = Common(first, second, [nn.Parameter(part) for part in host.owned(room)])
            group["params"] = [part for weight in weights for part in self.common[weight].owned]
        self.state.clear()
        for common in self.common.values():
            firsts, seconds = host.owned(common.first), host.owned(common.second)
            for part, first, second in zip(common.owned, firsts, seconds, strict=True):
                self.state[part] = {"step": torch.tensor(float(step)), "exp_avg": first, "exp_avg_sq": second}
        host.meet()
        self.host = host

    def step(self, closure: Any = None) -> Any:
        """One step; in it, workers wait for each other once."""
        if self.host is None:
            return super().step(closure)
        for weight, common in self.common.items():
            gradients = [None] * len(common.owned) if weight.grad is None else self.host.owned(weight.grad)
            for part, gradient in zip(common.owned, gradients, strict=True):
                part.grad = gradient
        loss = super().step(closure)
        self.zero_grad()
        self.host.meet()
        return loss
