"""AdamW (Loshchilov and Hutter, arXiv 1711.05101) with clipped gradients, for fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn


class Settings(NamedTuple):
    """AdamW's constants."""

    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    """As torch's: multiplied by the learning rate. It applies to matrices alone."""


class Optimizer(Protocol):
    """What the loop of training needs."""

    def norm(self) -> float:
        """The joint norm of all gradients."""

    def step(self, rate: float, scale: float) -> None:
        """Moves the weights by `scale` times their gradients at a learning rate, and forgets the gradients."""

    def finish(self) -> None:
        """Leaves every weight where the steps so far put it; none can follow."""


class TorchAdamW:
    """torch's fused AdamW."""

    def __init__(self, parameters: Sequence[nn.Parameter], settings: Settings) -> None:
        self.parameters = parameters
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
            torch._foreach_mul_(self._gradients(), scale)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def finish(self) -> None:
        pass

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]


def joint_norm(gradients: Sequence[Tensor]) -> float:
    """The norm of all gradients together."""
    norms = torch._foreach_norm(list(gradients))
    return float(torch.linalg.vector_norm(torch.stack([part.float() for part in norms])))
