"""StableAdamW: AdamW whose rate for each weight tensor shrinks where its gradients outgrow their running variance.

Wortsman et al. 2023 (arXiv 2304.13013, algorithm 2), with the fully decoupled weight decay of ModernBERT and Ettin.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mlmclm.backends.optimizers.optimizer import Groups


class ScaledAdamW(torch.optim.Optimizer):
    """StableAdamW with weight decay that doesn't depend on the peak rate.

    A step multiplies a decayed weight by 1 - weight_decay * rate / peak, where `rate` is the tensor's own. The stored
    moments have no bias towards 0 at the start: the betas of early steps are smaller, as in Adafactor.

    Args:
        groups: torch's parameter groups, with a `weight_decay` each.
        lr: learning rate of the next step.
        peak: the schedule's highest rate.
    """

    def __init__(self, groups: Groups, *, lr: float, peak: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "peak": peak, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take one step with the current gradients."""
        updated = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        # All weights have taken as many steps, and reading each one's count would wait for the GPU each time.
        done = next((int(self.state[p]["step"]) for p, _ in updated if self.state[p]), 0)
        for parameter, group in updated:
            self._update(parameter, parameter.grad, group, done + 1)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], step: int) -> None:
        state = self.state[parameter]
        if not state:
            state |= {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        state["step"] += 1
        first, second = state["exp_avg"], state["exp_avg_sq"]
        beta1, beta2 = (beta * (1 - beta ** (step - 1)) / (1 - beta**step) for beta in group["betas"])
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        # How far the gradient exceeds its running variance. It stays a tensor, since reading it would wait for a GPU.
        excess = gradient.square().div_(second.clamp(min=group["eps"] ** 2)).mean().sqrt().clamp_(min=1)
        rate = group["lr"] / excess
        if group["weight_decay"]:
            parameter.mul_(1 - group["weight_decay"] * rate / group["peak"])
        parameter.sub_(first / second.sqrt().add_(group["eps"]) * rate)
