"""Cross-entropy of a linear layer's outputs at labelled positions, in chunks; the forward pass computes its gradient too.

The whole [positions, vocabulary] matrix never exists. Each chunk's logits are visited once, because the softmax that
the loss needs is also what the gradient is made of. One buffer holds the logits of every chunk in turn.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mlmclm.backends.choice import backend_of

ROUND = 64
"""A chunk's rows are rounded up to a multiple of this: on the CPU a new shape costs milliseconds of code generation."""
APART = 96
"""Unused entries at the end of each row of logits. Rows a large power of two apart would compete for a few cache lines
(measured at 32,768 logits: 75 ms instead of 50 for a chunk's part of the weight gradient)."""
ALIGNMENT = 8
"""Hidden units added for a bias, all but one of them 0: bf16 matrix products want a multiple of this."""


class LabelledCrossEntropyHead(nn.Module):
    """The LM head: turns hidden states and labels into a summed loss.

    It holds `weight` [vocabulary, hidden] and perhaps `bias` [vocabulary], which is computed as the weight of one more
    hidden unit that is always 1.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, hidden: Tensor, labels: Tensor, *, bf16: bool, count: bool = False) -> Tensor:
        """Return the sum of -ln softmax(hidden weight' + bias)[label], an fp32 scalar (fp64 for fp64 weights).

        Args:
            hidden: [positions, hidden].
            labels: int64 [positions], none of them -100.
            bf16: multiply in bfloat16 if the device has it (sums and softmax stay fp32).
            count: return fp64 [2] without a gradient: that sum, and the number of positions whose largest logit is the
                label's.
        """
        weight: Tensor = self.weight
        if self.bias is not None:
            one = functional.pad(hidden.new_ones(len(hidden), 1), (0, ALIGNMENT - 1))
            columns = functional.pad(self.bias.unsqueeze(1), (0, ALIGNMENT - 1))  # [vocabulary, ALIGNMENT]
            hidden, weight = torch.cat((hidden, one), 1), torch.cat((weight, columns), 1)
        hits = torch.zeros((), dtype=torch.int64, device=hidden.device) if count else None
        # Decided here, because inside an autograd function gradients are always switched off.
        needed = torch.is_grad_enabled() and not count
        with torch.set_grad_enabled(needed):
            total: Tensor = _SummedCrossEntropy.apply(hidden, weight, labels, bf16, needed, hits)  # type: ignore[no-untyped-call]
        return total if hits is None else torch.stack((total.double(), hits.double()))


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, bf16: bool, needed: bool, hits: Tensor | None
    ) -> Tensor:
        backend = backend_of(hidden.device)
        kind = torch.bfloat16 if bf16 and backend.has_bf16() else weight.dtype
        matrix = weight.to(kind)  # [vocabulary, hidden]
        chunk = backend.logits_at_once
        size = min(chunk, -(-len(labels) // ROUND) * ROUND)
        padded = torch.empty(size, len(weight) + APART, dtype=kind, device=hidden.device)
        # AMX multiplies bf16 rows in steps of 32 entries: those behind a row's end are multiplied by 0, and must not be
        # NaN.
        padded[:, len(weight) :] = 0
        buffer = padded[:, : len(weight)]
        total = torch.zeros((), dtype=torch.promote_types(kind, torch.float32), device=hidden.device)
        grad_hidden, grad_weight = (torch.empty_like(hidden), torch.empty_like(weight)) if needed else (None, None)
        # Without labels there is no chunk to initialise it.
        if grad_weight is not None and len(labels) == 0:
            grad_weight.zero_()
        for start in range(0, len(labels), chunk):
            rows, target = hidden[start : start + chunk].to(kind), labels[start : start + chunk]
            count = len(target)
            padding = -count % ROUND
            if padding:
                rows = torch.cat((rows, rows.new_zeros(padding, rows.shape[1])))
            logits = buffer[: count + padding]
            torch.mm(rows, matrix.t(), out=logits)
            # Count now: `losses` overwrites the logits with their gradient.
            if hits is not None:
                hits += (logits[:count].argmax(1) == target).sum()
            total += backend.losses(padded[:count], len(weight), target)
            if grad_hidden is None or grad_weight is None:
                continue
            # Padding rows must add nothing to the weight's gradient.
            logits[count:] = 0
            grad_hidden[start : start + count] = (logits @ matrix)[:count]
            backend.add_weight_gradient(logits, rows, grad_weight, first=start == 0)
        if needed:
            # Not saved by autograd: `backward` scales these in place and hands them over without a copy.
            ctx.grads = grad_hidden, grad_weight
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError("the cross-entropy's gradients are given once; they are scaled where they lie")
        (grad_hidden, grad_weight), ctx.grads = ctx.grads, None
        return grad_hidden.mul_(upstream[0]), grad_weight.mul_(upstream[0]), None, None, None, None
