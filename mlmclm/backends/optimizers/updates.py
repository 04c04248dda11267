"""Steps of an optimiser with gradient clipping, for fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn


class Updates(Protocol):
    """The optimiser interface that the fine-tuning loop needs."""

    def norm(self) -> float:
        """Return the joint norm of all gradients."""

    def step(self, rate: float, scale: float) -> None:
        """Update the weights with `scale` times their gradients at this learning rate, then discard the gradients."""

    def settle(self) -> None:
        """Bring every weight up to date with the steps taken."""

    def finish(self) -> None:
        """Bring every weight up to date with the steps taken; no step may follow."""


class TorchUpdates:
    """The steps of one of torch's optimisers. No update is ever postponed, so there is nothing to settle."""

    def __init__(self, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        self.parameters, self.optimizer = parameters, optimizer

    def norm(self) -> float:
        return joint_norm(self._gradients())

    def step(self, rate: float, scale: float) -> None:
        if scale != 1:
            # `scale` is the clipping factor, which the caller derives from `norm`.
            torch._foreach_mul_(self._gradients(), scale)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def settle(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]


def joint_norm(gradients: Sequence[Tensor]) -> float:
    """Return the norm of all gradients together."""
    # The norm of the norms: no copy of all gradients in one vector.
    norms = torch._foreach_norm(list(gradients))
    return float(torch.linalg.vector_norm(torch.stack([part.float() for part in norms])))
