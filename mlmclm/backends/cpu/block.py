"""EuroBERT's and Llama's block over a packed row as one autograd function, for the CPU.

At hidden sizes of a few hundred, a transformers block spends more time in element-wise passes over activations
(autocast's casts, norms, rotations) than in matrix products. Here the block is computed in the compute dtype from end
to end. The query, key and value projections are one product, the gate and up projections another, and the backward pass
is written by hand. Weights stay where transformers keeps them; the result equals the model's own forward up to
rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from mlmclm.backends.attention_settings import AttentionSettings
from mlmclm.backends.call_layer import call_layer
from mlmclm.backends.compute_type import compute_type
from mlmclm.backends.cpu import kernels, tiles
from mlmclm.backends.cpu.packed_attention import Heads, Kept, attend, attend_backward
from mlmclm.backends.packing import Chosen, Packing

SUPPORTED = frozenset({"EuroBertModel", "LlamaModel"})
"""Classes of transformers whose block is exactly the one computed here (if `fits` agrees)."""


@dataclass(frozen=True)
class Shape:
    """Dimensions and constants of a block."""

    heads: int
    key_heads: int
    width: int
    epsilon: float
    attention: AttentionSettings

    def split(self, queries: Tensor, others: Tensor | None = None) -> tuple[Heads, Heads, Heads]:
        """Return query, key and value.

        Args:
            queries: [T', heads, width].
            others: keys and values, [T, 2 * key heads, width]; None if they follow the queries, in [T, heads + 2 * key
                heads, width].
        """
        first = self.heads if others is None else 0
        rows = queries if others is None else others
        keys, values = (Heads(rows, start, self.key_heads) for start in (first, first + self.key_heads))
        return Heads(queries, 0, self.heads), keys, values


@dataclass(frozen=True)
class BlockRun:
    """Arguments of a layer's block in one forward pass."""

    packing: Packing
    causal: bool
    cos: Tensor
    """Cosines, [T, width / 2], of the rotary embedding; `sin` has the same shape."""
    sin: Tensor
    dtype: torch.dtype
    """Dtype of the matrix products."""
    chosen: Chosen | None
    """Tokens whose states this layer returns; None for all."""


def fits(model: PreTrainedModel) -> bool:
    """Return whether `run_blocks` computes the same as this transformers base model's forward."""
    config = model.config
    return (
        type(model).__name__ in SUPPORTED
        and config.hidden_act == "silu"
        and not config.attention_bias
        and not config.mlp_bias
        and not (model.training and config.attention_dropout)
    )


def run_blocks(
    model: PreTrainedModel, input_ids: Tensor, packing: Packing, *, causal: bool, chosen: Chosen | None = None
) -> Tensor:
    """Compute `Reference.blocks` for a model that `fits`.

    Layers are called as modules, so that hooks on modules (ZeRO 3's gathering of weights) still run. Of tokens that are
    not `chosen`, the last layer computes only keys and values.
    """
    hidden = model.embed_tokens(input_ids[0])  # [T, hidden]
    dtype = compute_type(hidden)
    cos, sin = model.rotary_emb(hidden, position_ids=packing.position_ids)  # [1, T, width]
    # transformers repeats the angles for both halves of a vector; the loops need them once.
    half = cos.shape[-1] // 2
    kind = torch.promote_types(dtype, torch.float32)
    cos, sin = (part[0, :, :half].to(kind).contiguous() for part in (cos, sin))  # [T, width / 2]
    with torch.autocast("cpu", enabled=False):
        for number, layer in enumerate(model.layers, start=1):
            last = chosen if number == len(model.layers) else None
            run = BlockRun(packing, causal, cos, sin, dtype, last)
            hidden = call_layer(layer, partial(_block, layer, run), hidden)
        final: Tensor = model.norm(hidden)
    return final if chosen is None else final[: chosen.number]


def _block(layer: Any, run: BlockRun, hidden: Tensor) -> Tensor:
    """Compute a layer's block."""
    attention, mlp = layer.self_attn, layer.mlp
    shape = Shape(
        heads=attention.config.num_attention_heads,
        key_heads=attention.config.num_key_value_heads,
        width=attention.head_dim,
        epsilon=layer.input_layernorm.variance_epsilon,
        attention=AttentionSettings(run.causal, attention.scaling),
    )
    # Weights are arguments, because autograd gives gradients only to tensors it was passed.
    output: Tensor = _Block.apply(  # type: ignore[no-untyped-call]
        hidden, layer.input_layernorm.weight,
        attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight, attention.o_proj.weight,
        layer.post_attention_layernorm.weight, mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight,
        run, shape,
    )  # fmt: skip
    return output


def _cast(weights: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    """Stack matrices by rows, in the given dtype."""
    # Assignment casts while it copies; `torch.cat` would need a cast copy of each matrix first.
    out = torch.empty(sum(map(len, weights)), weights[0].shape[1], dtype=dtype)
    start = 0
    for weight in weights:
        out[start : start + len(weight)] = weight
        start += len(weight)
    return out


class _Block(torch.autograd.Function):
    """The block: x + attention(norm(x)), then the same with the gated feed-forward layer."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_1: Tensor,
        query_weight: Tensor,
        key_weight: Tensor,
        value_weight: Tensor,
        out_weight: Tensor,
        weight_2: Tensor,
        gate_weight: Tensor,
        up_weight: Tensor,
        down_weight: Tensor,
        run: BlockRun,
        shape: Shape,
    ) -> Tensor:
        dtype, chosen = run.dtype, run.chosen
        qkv_weight = _cast((query_weight, key_weight, value_weight), dtype)
        gate_up_weight = _cast((gate_weight, up_weight), dtype)  # [2 * intermediate, hidden]
        # The dtype of weight gradients: that of the weights, not of the products.
        ctx.kind = out_weight.dtype
        out_weight, down_weight = out_weight.to(dtype), down_weight.to(dtype)
        normed_1, inverse_1 = kernels.norm(x, weight_1, shape.epsilon, dtype)
        if chosen is None:
            heads = shape.split(functional.linear(normed_1, qkv_weight).view(len(x), -1, shape.width))
            residual = x
        else:
            # Every token needs a key and a value, but only chosen ones a query.
            query_part, key_value_part = qkv_weight.tensor_split((shape.heads * shape.width,))
            queries = functional.linear(normed_1[chosen.rows], query_part).view(-1, shape.heads, shape.width)
            heads = shape.split(queries, functional.linear(normed_1, key_value_part).view(len(x), -1, shape.width))
            residual = x[chosen.rows]
        attended, kept = attend(*heads, run.packing, shape.attention, (run.cos, run.sin), chosen)
        attended = attended.view(len(residual), -1)
        middle = kernels.add(residual, functional.linear(attended, out_weight))
        normed_2, inverse_2 = kernels.norm(middle, weight_2, shape.epsilon, dtype)
        gate_up = functional.linear(normed_2, gate_up_weight)  # [T, 2 * intermediate]
        output = kernels.add(middle, functional.linear(kernels.gated(gate_up), down_weight))
        # The feed-forward layer's product is not kept: the backward pass computes it again from `gate_up`.
        ctx.save_for_backward(
            x, weight_1, qkv_weight, out_weight, weight_2, gate_up_weight, down_weight, inverse_1, normed_1,
            attended, middle, inverse_2, normed_2, gate_up, *kept.tensors,
        )  # fmt: skip
        ctx.shape, ctx.kept = shape, replace(kept, tensors=())
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (
            x, weight_1, qkv_weight, out_weight, weight_2, gate_up_weight, down_weight, inverse_1, normed_1,
            attended, middle, inverse_2, normed_2, gate_up, *tensors,
        ) = ctx.saved_tensors  # fmt: skip
        shape: Shape = ctx.shape
        dtype = qkv_weight.dtype
        grad = grad.contiguous()

        # The feed-forward layer first, since the backward pass goes from the output to the input.
        out = grad.to(dtype)
        product, grad_gate_up = kernels.gated_backward(gate_up, out @ down_weight)
        grad_down = tiles.weight_gradient(out, product, ctx.kind)
        grad_gate_up_weight = tiles.weight_gradient(grad_gate_up, normed_2, ctx.kind)
        grad, grad_weight_2 = kernels.norm_backward(grad_gate_up @ gate_up_weight, middle, weight_2, inverse_2, grad)

        out = grad.to(dtype)
        grad_out_weight = tiles.weight_gradient(out, attended, ctx.kind)
        grad_attended = (out @ out_weight).view(len(out), shape.heads, shape.width)
        kept: Kept = replace(ctx.kept, tensors=tuple(tensors))
        turning, end = shape.heads * shape.width, (shape.heads + shape.key_heads) * shape.width
        if kept.chosen is None:
            grad_qkv = grad_attended.new_empty(len(x), shape.heads + 2 * shape.key_heads, shape.width)
            attend_backward(grad_attended, kept, *shape.split(grad_qkv))
            grad_qkv = grad_qkv.view(len(x), -1)
            grad_query_key_value = tiles.weight_gradient(grad_qkv, normed_1, ctx.kind).tensor_split((turning, end))
            grad_normed = grad_qkv @ qkv_weight
        else:
            rows, tokens, number = kept.chosen.rows, kept.chosen.tokens, kept.chosen.number
            grad_query = torch.empty_like(grad_attended)
            grad_key_value = grad_attended.new_empty(len(x), 2 * shape.key_heads, shape.width)
            attend_backward(grad_attended, kept, *shape.split(grad_query, grad_key_value))
            grad_query, grad_key_value = grad_query.view(len(rows), -1), grad_key_value.view(len(x), -1)
            grad_query_key_value = (
                tiles.weight_gradient(grad_query, normed_1[rows], ctx.kind),
                *tiles.weight_gradient(grad_key_value, normed_1, ctx.kind).tensor_split((end - turning,)),
            )
            query_part, key_value_part = qkv_weight.tensor_split((turning,))
            grad_normed = grad_key_value @ key_value_part
            # Behind the first `number` rows is padding, which repeats token 0 and must not add to its gradient.
            grad_normed.index_add_(0, tokens, (grad_query @ query_part)[:number])
            grad = torch.zeros_like(x).index_copy_(0, tokens, grad[:number])
        grad, grad_weight_1 = kernels.norm_backward(grad_normed, x, weight_1, inverse_1, grad)
        return (
            grad, grad_weight_1, *grad_query_key_value, grad_out_weight, grad_weight_2,
            *grad_gate_up_weight.chunk(2), grad_down, None, None,
        )  # fmt: skip
