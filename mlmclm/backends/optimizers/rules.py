"""The built-in optimisers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from mlmclm.backends.optimizers.optimizer import Groups, Hyperparameters, Optimizer

if TYPE_CHECKING:
    import torch
    from torch import nn


class AdamW(Optimizer):
    """torch's fused AdamW (Loshchilov and Hutter, arXiv 1711.05101). A backend may take the same steps in another way."""

    name = "adamw"

    @classmethod
    def build(cls, groups: Groups, settings: Hyperparameters) -> torch.optim.Optimizer:
        import torch

        return torch.optim.AdamW(groups, **cls.options(settings))

    @staticmethod
    def options(settings: Hyperparameters) -> dict[str, Any]:
        """Return the arguments of torch's AdamW."""
        return {"lr": 0.0, "betas": settings[:2], "eps": settings.epsilon, "fused": True}

    @classmethod
    def groups(cls, parameters: Iterable[nn.Parameter], settings: Hyperparameters) -> Groups:
        """Return one group with weight decay on all parameters, as in the study (arXiv 2507.00994)."""
        return [{"params": list(parameters), "weight_decay": settings.weight_decay}]


class StableAdamW(Optimizer):
    """AdamW whose rate for each weight tensor shrinks where its gradients outgrow their running variance.

    Weight decay is decoupled: it doesn't depend on the peak rate. Ettin's models were trained so (arXiv 2507.11412).
    """

    name = "stable-adamw"
    whole_gradients = True

    @classmethod
    def build(cls, groups: Groups, settings: Hyperparameters) -> torch.optim.Optimizer:
        from mlmclm.backends.optimizers.stable_adamw import ScaledAdamW

        return ScaledAdamW(groups, lr=0.0, peak=settings.peak, betas=settings[:2], eps=settings.epsilon)
