"""Cross-entropy of a linear layer's outputs at labelled positions, in chunks, with its gradient computed on the way forward.

The whole [positions, vocabulary] matrix never exists, and each chunk's logits are visited once: the softmax that the loss needs
is the gradient that the backward pass needs. One buffer holds the logits of every chunk in turn, and on the CPU what is done to
single logits is done a few rows at a time, within the processor's cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

CHUNK = 1024
"""Positions whose logits exist at once."""
ROUND = 64
"""A chunk's rows are rounded up to a multiple of this: on the CPU each new shape costs milliseconds of code generation."""
CACHED = 1 << 17
"""Logits that the CPU works on at once, in fp32: half a MiB, within a core's second-level cache."""
APART = 96
"""Unused entries at the end of a row of logits: rows a large power of two apart would share few lines of the cache (measured
at 32,768 logits: 75 ms in place of 50 for a chunk's part of the weight's gradient)."""


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
        size = min(CHUNK, -(-len(labels) // ROUND) * ROUND)
        whole = torch.empty(size, len(weight) + APART, dtype=kind, device=hidden.device)
        # AMX multiplies rows of bf16 in steps of 32 entries: what lies behind a row's end is multiplied by 0, and must not be NaN.
        whole[:, len(weight) :] = 0
        buffer = whole[:, : len(weight)]
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden, grad_weight = (torch.empty_like(hidden), torch.zeros_like(weight)) if needed else (None, None)
        for start in range(0, len(labels), CHUNK):
            rows, target = hidden[start : start + CHUNK].to(kind), labels[start : start + CHUNK]
            count = len(target)
            padding = -count % ROUND
            if padding:
                rows = torch.cat((rows, rows.new_zeros(padding, rows.shape[1])))
            logits = buffer[: count + padding]
            torch.mm(rows, matrix.t(), out=logits)
            total += _losses(logits[:count], target)
            if grad_hidden is None or grad_weight is None:
                continue
            logits[count:] = 0
            grad_hidden[start : start + count] = (logits @ matrix)[:count]
            grad_weight += logits.t() @ rows
        if needed:
            ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * upstream[0], grad_weight * upstream[0], None, None, None


def _losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of the rows' losses, an fp32 scalar; `logits` [rows, vocabulary] become its gradient with respect to them."""
    count, vocabulary = logits.shape
    step = max(1, CACHED // vocabulary) if logits.device.type == "cpu" else count
    scratch = torch.empty(min(step, count), vocabulary, dtype=torch.float32, device=logits.device)
    total = torch.zeros((), dtype=torch.float32, device=logits.device)
    for start in range(0, count, step):
        part, label = logits[start : start + step], labels[start : start + step].unsqueeze(1)
        values = scratch[: len(part)].copy_(part)
        chosen = values.gather(1, label)
        largest = values.amax(1, keepdim=True)
        values.sub_(largest).exp_()
        normaliser = values.sum(1, keepdim=True)
        total += (normaliser.log() + largest - chosen).sum()
        values.div_(normaliser)
        values.scatter_(1, label, values.gather(1, label) - 1)
        part.copy_(values)
    return total
