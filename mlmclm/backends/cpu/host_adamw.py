"""AdamW over weights and moments that the workers of one machine share (ZeRO 0 and 1 on CPUs).

Each worker updates the part that it owns, with the gradients that it has summed. No weight, moment or gradient is sent
or updated twice, and the machine holds weights and moments once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mlmclm.backends.cpu.host import Host


class Common(NamedTuple):
    """Shared memory of one weight."""

    first: Tensor
    second: Tensor
    """Adam's moments, `first` and `second`, in the weight's shape."""
    owned: list[nn.Parameter]
    """This worker's parts of the weight."""


class HostAdamW(torch.optim.AdamW):
    """torch's AdamW; after `divide`, restricted to the parts that this worker owns."""

    host: Host | None = None

    def divide(self, host: Host, step: int) -> None:
        """Move the weights, equal on all workers, to shared memory, with zero moments at this step; collective."""
        self.common: dict[nn.Parameter, Common] = {}
        for group in self.param_groups:
            weights = group["params"]
            rooms = [host.zeros([weight.shape for weight in weights]) for _ in range(3)]
            for weight, room, first, second in zip(weights, *rooms, strict=True):
                if host.rank == 0:
                    room.copy_(weight.detach())
                weight.data = room
                self.common[weight] = Common(first, second, [nn.Parameter(part) for part in host.owned(room)])
            # torch's AdamW sees only this worker's parts, each as a parameter of its own.
            group["params"] = [part for weight in weights for part in self.common[weight].owned]
        self.state.clear()
        for common in self.common.values():
            firsts, seconds = host.owned(common.first), host.owned(common.second)
            for part, first, second in zip(common.owned, firsts, seconds, strict=True):
                # Views of shared memory as optimiser state: torch updates the moments in place.
                self.state[part] = {"step": torch.tensor(float(step)), "exp_avg": first, "exp_avg_sq": second}
        # Nobody may read a weight before rank 0 has written it.
        host.meet()
        self.host = host

    def step(self, closure: Any = None) -> Any:
        """Take one step, in which the workers wait for each other once."""
        if self.host is None:
            return super().step(closure)
        for weight, common in self.common.items():
            gradients = [None] * len(common.owned) if weight.grad is None else self.host.owned(weight.grad)
            for part, gradient in zip(common.owned, gradients, strict=True):
                part.grad = gradient
        loss = super().step(closure)
        self.zero_grad()
        # The next forward pass reads all parts, so all must be updated.
        self.host.meet()
        return loss
