"""An addition and the norm of its sum in one pass over both, with Triton, for GPUs."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

ROWS = 32
"""Rows per program of the backward pass, which sums their part of the weight's gradient. One program on each of an H100's
multiprocessors took 0.47 ms for 32,768 rows of 1,152, more than twice what the memory's bandwidth allows: too few loads were
under way. With this many rows, the parts are 2 % of the bytes that are read and written."""


class AddAndNorm(torch.autograd.Function):
    """hidden + pending in the dtype of `hidden`, and its norm in another dtype; weights are not cast.

    Statistics and sums are fp32. The gradients of both terms are the same, and are written in the dtype of each.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, pending: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype, centred: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the sum and its norm.

        Args:
            hidden, pending: [..., width], of one shape.
            weight: [width].
            centred: compute LayerNorm without a bias; otherwise RMSNorm.
        """
        hidden, pending = hidden.contiguous(), pending.contiguous()
        rows, width = hidden.flatten(0, -2).shape
        added, normed = torch.empty_like(hidden), torch.empty_like(hidden, dtype=dtype)
        scales = hidden.new_empty(rows, dtype=torch.float32)
        centres = torch.empty_like(scales) if centred else scales
        ctx.block = triton.next_power_of_2(width)
        _forward[(rows,)](
            hidden, pending, weight, added, normed, centres, scales, epsilon, width,
            CENTRED=centred, BLOCK=ctx.block, num_warps=_warps(ctx.block),
        )  # fmt: skip
        ctx.save_for_backward(added, weight, centres, scales)
        ctx.centred, ctx.pending = centred, pending.dtype
        ctx.set_materialize_grads(False)
        return added, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of both terms and of the weight."""
        added, weight, centres, scales = ctx.saved_tensors
        to_added, to_normed = (None if gradient is None else gradient.contiguous() for gradient in upstream)
        if to_normed is None:
            return to_added, None if to_added is None else to_added.to(ctx.pending), None, None, None, None
        rows, width = added.flatten(0, -2).shape
        programs = max(rows // ROWS, 1)
        if added.is_cuda:
            programs = max(programs, torch.cuda.get_device_properties(added.device).multi_processor_count)
        # A new tensor: the gradient of `added` must not be overwritten, since it may be that of other tensors too.
        to_hidden = torch.empty_like(added)
        same = ctx.pending == added.dtype
        to_pending = to_hidden if same else torch.empty_like(added, dtype=ctx.pending)
        parts = weight.new_empty(programs, width, dtype=torch.float32)  # of the weight's gradient
        _backward[(programs,)](
            to_normed, to_added, added, weight, centres if ctx.centred else None, scales, to_hidden,
            None if same else to_pending, parts, rows, width,
            CENTRED=ctx.centred, MORE=to_added is not None, BOTH=not same, BLOCK=ctx.block, num_warps=_warps(ctx.block),
        )  # fmt: skip
        return to_hidden, to_pending, parts.sum(0).to(weight.dtype), None, None, None


def _warps(block: int) -> int:
    return 4 if block < 2048 else 8 if block < 8192 else 16


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    hidden, pending, weight, added, normed, centres, scales, epsilon, width,
    CENTRED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    place = row * width + columns
    first = tl.load(hidden + place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(pending + place, mask=inside, other=0.0).to(tl.float32)
    # The norm is that of the sum as it is stored, which the backward pass reads.
    total = (first + second).to(added.dtype.element_ty)
    tl.store(added + place, total, mask=inside)
    values = total.to(tl.float32)
    if CENTRED:
        centre = tl.sum(values, axis=0) / width
        tl.store(centres + row, centre)
        values = tl.where(inside, values - centre, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / width + epsilon)
    tl.store(scales + row, scale)
    factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + place, values * scale * factors, mask=inside)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    to_normed, to_added, added, weight, centres, scales, to_hidden, to_pending, parts, rows, width,
    CENTRED: tl.constexpr, MORE: tl.constexpr, BOTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    part = tl.zeros((BLOCK,), dtype=tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        place = tl.cast(row, tl.int64) * width + columns
        upstream = tl.load(to_normed + place, mask=inside, other=0.0).to(tl.float32)
        values = tl.load(added + place, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scales + row)
        if CENTRED:
            values = tl.where(inside, values - tl.load(centres + row), 0.0)
        values = values * scale
        part += upstream * values
        upstream = upstream * factors
        gradient = upstream - values * (tl.sum(upstream * values, axis=0) / width)
        if CENTRED:
            gradient = gradient - tl.sum(upstream, axis=0) / width
        gradient = gradient * scale
        if MORE:
            gradient += tl.load(to_added + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(to_hidden + place, gradient, mask=inside)
        if BOTH:
            tl.store(to_pending + place, gradient, mask=inside)
    tl.store(parts + program.to(tl.int64) * width + columns, part, mask=inside)
