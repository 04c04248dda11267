"""ModernBERT's blocks on GPUs, by kernels of the project's own in Triton.

Liger's gated unit with GELU uses the approximation by tanh, and ModernBERT's GELU is the exact one. Liger has no kernel
for an addition with LayerNorm. As in `liger`, a block's last addition is pending until the next norm performs it. The tests run the
kernels in Triton's interpreter, on the CPU, and on a GPU where there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from mlmclm.backends.attention_settings import AttentionSettings, window_of
from mlmclm.backends.call_layer import call_layer
from mlmclm.backends.compute_type import compute_type
from mlmclm.backends.cuda.add_and_norm import AddAndNorm
from mlmclm.backends.cuda.liger import LigerRun
from mlmclm.backends.cuda.rotation import Rotation
from mlmclm.backends.packing import Chosen, Packing

BLOCK = 1024


def fits(model: PreTrainedModel) -> bool:
    """Return whether `run_blocks` computes the same as this transformers base model's forward."""
    if type(model).__name__ != "ModernBertModel" or model.dtype == torch.float64:
        return False
    config = model.config
    dropout = config.embedding_dropout or config.attention_dropout or config.mlp_dropout
    return config.hidden_activation == "gelu" and not config.norm_bias and not (dropout and model.training)


def run_blocks(
    model: PreTrainedModel,
    input_ids: Tensor,
    packing: Packing,
    attend: Callable[..., Tensor],
    *,
    causal: bool,
    chosen: Chosen | None = None,
) -> Tensor:
    """Compute `Reference.blocks` for a model that `fits`, the last layer's feed-forward half for `chosen` tokens alone.

    Args:
        attend: `Reference.packed_attention` over the batch's packing.
    """
    states: tuple[Tensor, ...] = (model.embeddings(input_ids),)  # [1, T, hidden]
    hidden = states[0]
    kinds = dict.fromkeys(model.config.layer_types)
    angles = {kind: model.rotary_emb(hidden, packing.position_ids, kind) for kind in kinds}
    for number, layer in enumerate(model.layers, start=1):
        last = chosen.tokens if chosen is not None and number == len(model.layers) else None
        cos, sin = angles[layer.attention_type]
        states = call_layer(layer, partial(_block, layer, LigerRun(attend, causal, cos, sin, last)), *states)
    norm, dtype = model.final_norm, hidden.dtype
    final: Tensor = call_layer(norm, lambda *states: _add_and_norm(norm, dtype, *states)[1], *states)
    return final.squeeze(0)


def _block(layer: Any, run: LigerRun, hidden: Tensor, pending: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute y = x + attention(norm(x)), and what the gated feed-forward layer adds to y; x is hidden + pending.

    Returns:
        y and the addition, [1, T, hidden] each.
    """
    attention, dtype = layer.attn, compute_type(hidden)
    if pending is None:  # the first layer, which has no norm
        normed = hidden.to(dtype)
    else:
        hidden, normed = _add_and_norm(layer.attn_norm, dtype, hidden, pending)
    vectors = attention.Wqkv(normed).unflatten(2, (-1, attention.head_dim))
    query, key, value = Rotation.apply(vectors, [vectors.shape[2] // 3] * 3, run.cos, run.sin)  # type: ignore[no-untyped-call]
    window = window_of(attention, attention.sliding_window, run.causal)
    settings = AttentionSettings(run.causal, attention.head_dim**-0.5, window=window)
    attended = run.attend(*(part.transpose(1, 2) for part in (query, key, value)), settings=settings).flatten(2)
    if run.chosen is not None:
        hidden, attended = hidden[:, run.chosen], attended[:, run.chosen]
    hidden, normed = _add_and_norm(layer.mlp_norm, dtype, hidden, attention.Wo(attended))
    gated = _GatedGelu.apply(layer.mlp.Wi(normed))  # type: ignore[no-untyped-call]
    return hidden, layer.mlp.Wo(gated)


def _add_and_norm(norm: Any, dtype: torch.dtype, hidden: Tensor, pending: Tensor) -> tuple[Tensor, Tensor]:
    """Return hidden + pending, and its LayerNorm in `dtype`."""
    return AddAndNorm.apply(hidden, pending, norm.weight, norm.eps, dtype, True)  # type: ignore[no-untyped-call]


class _GatedGelu(torch.autograd.Function):
    """GELU of the first half of vectors [..., 2 width], times the second half.

    The backward pass overwrites the vectors with their gradient, so it can run once.
    """

    @staticmethod
    def forward(ctx: Any, joined: Tensor) -> Tensor:
        joined = joined.contiguous()
        width = joined.shape[-1] // 2
        gated = joined.new_empty(*joined.shape[:-1], width)
        _gated_gelu[(gated.numel() // width, triton.cdiv(width, BLOCK))](joined, gated, width, BLOCK=BLOCK)
        ctx.save_for_backward(joined)
        return gated

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> Tensor:
        (joined,) = ctx.saved_tensors
        to_gated, width = upstream[0].contiguous(), joined.shape[-1] // 2
        grid = (to_gated.numel() // width, triton.cdiv(width, BLOCK))
        _gated_gelu_backward[grid](joined, to_gated, width, BLOCK=BLOCK)
        return joined


@triton.jit
def _gated_gelu(joined, gated, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, columns, value, gate, below = _halves(joined, width, BLOCK)
    tl.store(gated + row * width + columns, value * below * gate, mask=columns < width)


@triton.jit
def _gated_gelu_backward(joined, to_gated, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, columns, value, gate, below = _halves(joined, width, BLOCK)
    inside = columns < width
    upstream = tl.load(to_gated + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    density = 0.3989422804014327 * tl.exp(-0.5 * value * value)
    place = joined + row * 2 * width + columns
    tl.store(place, upstream * gate * (below + value * density), mask=inside)
    tl.store(place + width, upstream * value * below, mask=inside)


@triton.jit
def _halves(joined, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Read a program's part of both halves of a row; the normal distribution function of the first is the last result."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    place = joined + row * 2 * width + columns
    value = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(place + width, mask=inside, other=0.0).to(tl.float32)
    return row, columns, value, gate, 0.5 * (1.0 + tl.erf(value * 0.7071067811865476))
