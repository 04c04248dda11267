"""AdamW (Loshchilov and Hutter, arXiv 1711.05101) with gradient clipping, for fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn


class AdamWSettings(NamedTuple):
    """Hyperparameters of AdamW."""

    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    """Multiplied by the learning rate, as in torch. Applied to matrices only."""


class Optimizer(Protocol):
    """The optimiser interface that the fine-tuning loop needs."""

    def norm(self) -> float:
        """Return the joint norm of all gradients."""

    def step(self, rate: float, scale: float) -> None:
        """Update the weights with `scale` times their gradients at this learning rate, then discard the gradients."""

    def settle(self) -> None:
        """Bring every weight up to date with the steps taken."""

    def finish(self) -> None:
        """Bring every weight up to date with the steps taken; no step may follow."""


class TorchAdamW:
    """torch's fused AdamW. No step is ever postponed, so there is nothing to settle."""

    def __init__(self, parameters: Sequence[nn.Parameter], settings: AdamWSettings) -> None:
        self.parameters = parameters
        # Norms and biases get no weight decay, as is usual.
        matrices = [parameter for parameter in parameters if parameter.ndim > 1]
        vectors = [parameter for parameter in parameters if parameter.ndim <= 1]
        groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": settings.weight_decay}]
        self.optimizer = torch.optim.AdamW(
            [*groups, {"params": vectors, "weight_decay": 0.0}] if vectors else groups,
            betas=(settings.beta1, settings.beta2),
            eps=settings.epsilon,
            fused=True,
        )

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
