"""Cross-entropy of a linear layer's outputs at labelled positions, in chunks, with its gradient computed on the way forward.

The whole [positions, vocabulary] matrix never exists, and each chunk's logits are visited once: the softmax that the loss needs
is the gradient that the backward pass needs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

CHUNK = 1024
"""Positions whose logits exist at once."""
ROUND = 64
"""The last chunk's rows are rounded up to a multiple of this: on the CPU each new shape costs milliseconds of code generation."""


class LabelledCrossEntropyHead(nn.Module):
    """The LM head: holds `weight` [vocabulary, hidden], and turns hidden states and labels into a summed loss."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, hidden: Tensor, labels: Tensor, *, bf16: bool) -> Tensor:
        """Sum of -ln softmax(hidden weight')[label], an fp32 scalar.

        Args:
            hidden: [positions, hidden].
            labels: int64 [positions], none of them -100.
            bf16: multiply in bfloat16 (sums and softmax stay fp32).
        """
        total: Tensor = _SummedCrossEntropy.apply(hidden, self.weight, labels, bf16, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
        return total


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, bf16: bool, needed: bool) -> Tensor:
        kind = torch.bfloat16 if bf16 else weight.dtype
        matrix = weight.to(kind)  # [vocabulary, hidden]
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden, grad_weight = (torch.empty_like(hidden), torch.zeros_like(weight)) if needed else (None, None)
        for start in range(0, len(labels), CHUNK):
            rows, target = hidden[start : start + CHUNK].to(kind), labels[start : start + CHUNK]
            count = len(target)
            padding = -count % ROUND
            if padding:
                rows = functional.pad(rows, (0, 0, 0, padding))
            logits = (rows @ matrix.T).float()  # [count + padding, vocabulary]
            logits[count:] = 0
            index = torch.arange(count, device=hidden.device)
            chosen = logits[index, target]
            largest = logits.amax(-1, keepdim=True)
            logits.sub_(largest).exp_()
            normaliser = logits.sum(-1, keepdim=True)
            total += (normaliser[:count, 0].log() + largest[:count, 0] - chosen).sum()
            if grad_hidden is None or grad_weight is None:
                continue
            logits.div_(normaliser)  # the softmax
            logits[index, target] -= 1
            logits[count:] = 0
            gradient = logits.to(kind)
            grad_hidden[start : start + count] = (gradient @ matrix)[:count]
            grad_weight += gradient.T @ rows
        if needed:
            ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * upstream[0], grad_weight * upstream[0], None, None, None
