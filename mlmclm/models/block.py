"""EuroBERT's and Llama's block over a packed row as one autograd function, for the CPU.

At a few hundred units of width a transformers block spends more time in element-wise passes over activations (casts of
autocast, norms, rotations) than in matrix products. Here the block is computed in the compute type from end to end,
with the query, key and value projections as one product, the gate and up projections as another, and a written-out
backward. Weights stay where transformers keeps them; the result equals the model's own forward to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from mlmclm.models.packing import Packing, attend, attend_backward

SUPPORTED = frozenset({"EuroBertModel", "LlamaModel"})
"""Classes of transformers whose block is exactly the one computed here (where `fits` says so)."""


CACHED = 1 << 17
"""Elements that element-wise passes work on at once: half a MiB in fp32, within a core's second-level cache."""


@dataclass(frozen=True)
class Shape:
    """What a block's computation needs beside tensors."""

    heads: int
    key_heads: int
    width: int
    scale: float
    epsilon: float
    causal: bool


@dataclass(frozen=True)
class Run:
    """What the layers share in one forward pass."""

    packing: Packing
    causal: bool
    cos: Tensor
    """[T, 1, width / 2] of the rotary embedding, in the compute type; likewise `sin`."""
    sin: Tensor


def fits(model: PreTrainedModel) -> bool:
    """Whether `run_blocks` computes what this transformers base model's forward does."""
    config = model.config
    return (
        type(model).__name__ in SUPPORTED
        and config.hidden_act == "silu"
        and not config.attention_bias
        and not config.mlp_bias
        and not (model.training and config.attention_dropout)
    )


def run_blocks(model: PreTrainedModel, input_ids: Tensor, packing: Packing, *, causal: bool) -> Tensor:
    """Final hidden states [T, hidden] of a model that `fits`, in the type of its weights.

    Layers are called as modules, so that what hangs on modules (ZeRO 3's gathering of weights) still sees them.

    Args:
        input_ids: int64 [1, T].
    """
    hidden = model.embed_tokens(input_ids[0])  # [T, hidden]
    dtype = hidden.dtype
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
    cos, sin = model.rotary_emb(hidden, position_ids=packing.position_ids)  # [1, T, width]
    half = cos.shape[-1] // 2
    cos, sin = (part[0, :, None, :half].to(dtype) for part in (cos, sin))  # [T, 1, width / 2]
    with torch.autocast("cpu", enabled=False):
        for layer in model.layers:
            if "forward" not in vars(layer):
                layer.forward = partial(_forward, layer, layer.forward)
            hidden = layer(hidden, run=Run(packing, causal, cos, sin))
        final: Tensor = model.norm(hidden)
    return final


def _forward(
    layer: Any, original: Callable[..., Tensor], hidden: Tensor, *args: Any, run: Run | None = None, **more: Any
) -> Tensor:
    """A layer's forward: the block of this module under `run_blocks`, transformers' own otherwise."""
    if run is None:
        return original(hidden, *args, **more)
    attention, mlp, dtype = layer.self_attn, layer.mlp, run.cos.dtype
    shape = Shape(
        heads=attention.config.num_attention_heads,
        key_heads=attention.config.num_key_value_heads,
        width=attention.head_dim,
        scale=attention.scaling,
        epsilon=layer.input_layernorm.variance_epsilon,
        causal=run.causal,
    )
    output: Tensor = _Block.apply(  # type: ignore[no-untyped-call]
        hidden,
        layer.input_layernorm.weight,
        torch.cat((attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)).to(dtype),
        attention.o_proj.weight.to(dtype),
        layer.post_attention_layernorm.weight,
        torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)).to(dtype),  # [2 * intermediate, hidden]
        mlp.down_proj.weight.to(dtype),
        run.cos,
        run.sin,
        run.packing,
        shape,
    )
    return output


class _Block(torch.autograd.Function):
    """x + attention(norm(x)), then the same with the gated feed-forward layer."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_1: Tensor,
        qkv_weight: Tensor,
        out_weight: Tensor,
        weight_2: Tensor,
        gate_up_weight: Tensor,
        down_weight: Tensor,
        cos: Tensor,
        sin: Tensor,
        packing: Packing,
        shape: Shape,
    ) -> Tensor:
        dtype = qkv_weight.dtype
        normed_1, inverse_1 = _norm(x, weight_1, shape.epsilon, dtype)
        qkv = functional.linear(normed_1, qkv_weight).view(len(x), -1, shape.width)  # [T, heads + 2 key heads, width]
        turning = shape.heads + shape.key_heads
        turned = torch.empty(len(x), turning, shape.width, dtype=dtype)
        _rotate(qkv[:, :turning], cos, sin, turned)
        query, key, value = turned[:, : shape.heads], turned[:, shape.heads :], qkv[:, turning:]
        attended, kept = attend(query, key, value, packing, shape.causal, shape.scale, 0.0)
        attended = attended.view(len(x), -1)
        middle = x + functional.linear(attended, out_weight)
        normed_2, inverse_2 = _norm(middle, weight_2, shape.epsilon, dtype)
        gate, up = functional.linear(normed_2, gate_up_weight).chunk(2, dim=-1)  # [T, intermediate] each
        active, product = torch.empty(gate.shape, dtype=dtype), torch.empty(gate.shape, dtype=dtype)
        for part in _parts(gate):
            active[part] = functional.silu(gate[part])
            torch.mul(active[part], up[part], out=product[part])
        ctx.save_for_backward(
            x, weight_1, qkv_weight, out_weight, weight_2, gate_up_weight, down_weight, cos, sin, inverse_1, normed_1,
            attended, middle, inverse_2, normed_2, gate, up, active, product, *kept.tensors,
        )  # fmt: skip
        ctx.packing, ctx.shape, ctx.kept = packing, shape, kept.without_tensors()
        return middle + functional.linear(product, down_weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (
            x, weight_1, qkv_weight, out_weight, weight_2, gate_up_weight, down_weight, cos, sin, inverse_1, normed_1,
            attended, middle, inverse_2, normed_2, gate, up, active, product, *tensors,
        ) = ctx.saved_tensors  # fmt: skip
        shape: Shape = ctx.shape
        dtype = qkv_weight.dtype

        out = grad.to(dtype)
        grad_down = out.t() @ product
        grad_product = out @ down_weight  # [T, intermediate]
        grad_gate_up = torch.empty(len(x), gate_up_weight.shape[0], dtype=dtype)
        half = grad_product.shape[1]
        for part in _parts(gate):
            torch.mul(grad_product[part], active[part], out=grad_gate_up[part, half:])
            torch.ops.aten.silu_backward.grad_input(
                grad_product[part].mul_(up[part]), gate[part], grad_input=grad_gate_up[part, :half]
            )
        grad_gate_up_weight = grad_gate_up.t() @ normed_2
        grad, grad_weight_2 = _norm_backward(grad_gate_up @ gate_up_weight, middle, weight_2, inverse_2, grad)

        out = grad.to(dtype)
        grad_out_weight = out.t() @ attended
        grad_attended = (out @ out_weight).view(len(x), shape.heads, shape.width)
        kept = ctx.kept.with_tensors(tensors)
        grad_query, grad_key, grad_value = attend_backward(grad_attended, ctx.packing, shape.scale, kept)
        turning = shape.heads + shape.key_heads
        grad_vectors = torch.empty(len(x), turning + shape.key_heads, shape.width, dtype=dtype)
        _rotate(grad_query, cos, -sin, grad_vectors[:, : shape.heads])
        _rotate(grad_key, cos, -sin, grad_vectors[:, shape.heads : turning])
        grad_vectors[:, turning:] = grad_value
        grad_qkv = grad_vectors.view(len(x), -1)
        grad_qkv_weight = grad_qkv.t() @ normed_1
        grad, grad_weight_1 = _norm_backward(grad_qkv @ qkv_weight, x, weight_1, inverse_1, grad)
        return (
            grad, grad_weight_1, grad_qkv_weight, grad_out_weight, grad_weight_2, grad_gate_up_weight,
            grad_down, None, None, None, None,
        )  # fmt: skip


def _parts(x: Tensor) -> list[slice]:
    """Slices of the rows [T, ...], each small enough to stay in a core's cache through several element-wise passes."""
    step = max(1, CACHED // math.prod(x.shape[1:]))
    return [slice(start, start + step) for start in range(0, len(x), step)]


def _norm(x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """RMSNorm of x [T, hidden] in `dtype`; and, [T, 1] in the type of x, 1 / sqrt(mean(x^2) + epsilon)."""
    normed, inverse = torch.empty(x.shape, dtype=dtype), torch.empty(len(x), 1, dtype=x.dtype)
    for part in _parts(x):
        rows = x[part]
        norm = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=torch.float32)
        inverse[part] = norm.square_().div_(x.shape[1]).add_(epsilon).rsqrt_()
        normed[part] = (rows * inverse[part]).mul_(weight)
    return normed, inverse


def _norm_backward(grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of RMSNorm with respect to its input [T, hidden], with `residual` added, and to its weight [hidden]."""
    total, grad_weight = torch.empty_like(x), torch.zeros_like(weight)
    for part in _parts(x):
        upstream, scale = grad[part].to(x.dtype), inverse[part]
        normal = x[part] * scale
        grad_weight += (upstream * normal).sum(0)
        scaled = upstream * weight
        projection = torch.linalg.vecdot(scaled, normal).div_(x.shape[1]).unsqueeze(1)  # [rows, 1]
        torch.add(scaled.addcmul_(normal, projection, value=-1).mul_(scale), residual[part], out=total[part])
    return total, grad_weight


def _rotate(vectors: Tensor, cos: Tensor, sin: Tensor, turned: Tensor) -> None:
    """Rotary embedding of [T, heads, width] by angles [T, 1, width / 2] into `turned`.

    A vector's two halves are the two coordinates.
    """
    for part in _parts(vectors):
        first, second = vectors[part].chunk(2, dim=-1)
        turned_first, turned_second = turned[part].chunk(2, dim=-1)
        torch.mul(first, cos[part], out=turned_first)
        turned_first.addcmul_(second, sin[part], value=-1)
        torch.mul(second, cos[part], out=turned_second)
        turned_second.addcmul_(first, sin[part])
