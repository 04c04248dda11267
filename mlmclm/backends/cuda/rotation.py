"""The rotary embedding of queries and keys out of one product's vectors, in one pass forward and one backward."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable


class Rotation(torch.autograd.Function):
    """Queries, keys and values [1, T, heads, width] out of one product's vectors, the first two rotated in place."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, heads: list[int], cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values.

        Args:
            vectors: [1, T, sum of `heads`, width].
            heads: numbers of heads of queries, keys and values.
            cos, sin: [1, T, width], whose second half repeats the first.
        """
        ctx.save_for_backward(cos, sin)
        ctx.heads = heads
        # Nothing else reads the vectors: a linear layer keeps its input, not its output.
        vectors = vectors.detach().contiguous()
        rotated = vectors[:, :, : heads[0] + heads[1]]
        _rotate(rotated, rotated, cos, sin, back=False)
        return torch.split(vectors, heads, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the vectors."""
        _, length, _, width = upstream[0].shape
        vectors = upstream[0].new_empty(1, length, sum(ctx.heads), width)
        query, key, value = torch.split(vectors, ctx.heads, 2)
        for gradient, target in zip(upstream[:2], (query, key), strict=True):
            _rotate(gradient, target, *ctx.saved_tensors, back=True)
        value.copy_(upstream[2])
        return vectors, None, None, None


def _rotate(source: Tensor, target: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> None:
    """Write `source` [1, T, heads, width], rotated by the angles of cos and sin or `back`, to `target`, which may be the same."""
    if source.stride(3) != 1:
        source = source.contiguous()
    _, length, heads, width = source.shape
    assert cos.shape[-1] == width, "the whole head is rotated"
    _rotated[(length,)](
        source, source.stride(1), source.stride(2), target, target.stride(1), target.stride(2), cos, cos.stride(1),
        sin, sin.stride(1), heads, width // 2, BACK=back, HEADS=triton.next_power_of_2(heads),
        HALF=triton.next_power_of_2(width // 2),
    )  # fmt: skip


@triton.jit
def _rotated(  # type: ignore[no-untyped-def]
    source, source_row, source_head, target, target_row, target_head, cos, cos_row, sin, sin_row, heads, half,
    BACK: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, HEADS)[:, None].to(tl.int64), tl.arange(0, HALF)[None, :]
    inside = (head < heads) & (column < half)
    cosine = tl.load(cos + token * cos_row + column, mask=column < half, other=0.0).to(tl.float32)
    sine = tl.load(sin + token * sin_row + column, mask=column < half, other=0.0).to(tl.float32)
    if BACK:
        sine = -sine
    place = source + token * source_row + head * source_head + column
    first = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(place + half, mask=inside, other=0.0).to(tl.float32)
    place = target + token * target_row + head * target_head + column
    tl.store(place, first * cosine - second * sine, mask=inside)
    tl.store(place + half, second * cosine + first * sine, mask=inside)
