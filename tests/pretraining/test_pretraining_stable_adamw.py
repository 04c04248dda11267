"""StableAdamW takes the steps of another library's."""

from __future__ import annotations

import pytest
import torch
from optimi import StableAdamW as Oracle
from pydantic import ValidationError
from torch import nn

from mlmclm.backends.optimizers.optimizer import Hyperparameters
from mlmclm.backends.optimizers.rules import StableAdamW
from mlmclm.plans.recipe import Recipe


@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_steps_are_those_of_torch_optimi(decay: float) -> None:
    shapes = [(7, 5), (5,), (3, 4, 2), (1,)]
    chance = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=chance) for shape in shapes]
    own, other = ([nn.Parameter(tensor.clone()) for tensor in start] for _ in range(2))
    peak, settings = 3e-2, {"betas": (0.9, 0.98), "eps": 1e-6}
    hyperparameters = Hyperparameters(0.9, 0.98, 1e-6, decay, peak)
    ours = StableAdamW.build(StableAdamW.groups(own, hyperparameters), hyperparameters)
    groups = [
        {"params": [each for each in other if each.ndim > 1], "weight_decay": decay},
        {"params": [each for each in other if each.ndim <= 1], "weight_decay": 0.0},
    ]
    oracle = Oracle(groups, lr=peak, decouple_lr=True, max_lr=peak, foreach=False, **settings)  # type: ignore[arg-type]
    held_back = 0
    for step in range(60):
        # Some steps have gradients a hundred times as large: there the rates must shrink.
        size = 100.0 if step % 17 == 16 else 1.0
        for mine, theirs in zip(own, other, strict=True):
            mine.grad = size * torch.randn(mine.shape, generator=chance)
            theirs.grad = mine.grad.clone()
        rate = peak * min(1.0, (step + 1) / 10) * (1 - step / 100)
        for optimizer in (ours, oracle):
            for group in optimizer.param_groups:
                group["lr"] = rate
        before = own[0].detach().clone()
        ours.step()
        oracle.step()
        held_back += size > 1 and float((own[0].detach() - before).abs().max()) < rate
        for mine, theirs in zip(own, other, strict=True):
            torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-5, atol=1e-6)
    assert held_back == 3


def test_zero_stages_that_divide_gradients_are_refused() -> None:
    with pytest.raises(ValidationError, match="set zero_stage: 0"):
        Recipe(optimizer="stable-adamw")
    assert Recipe(optimizer="stable-adamw", zero_stage=0).identity()["optimizer"] == "stable-adamw"
    assert "optimizer" not in Recipe().identity()
