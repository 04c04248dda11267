"""Liger's kernels (github.com/linkedin/Liger-Kernel) in the loss, and in the blocks of Llama-like models.

Torch's operations for a norm or a gated unit are several passes over activations; each of these kernels is
one. Liger writes them in Triton. The tests run them in Triton's interpreter, on the CPU, and on a GPU where
there is one.

Between two layers, a block's last addition is pending: the next norm's kernel performs it, in the same pass. Layers that read the
same vectors (queries, keys and values; gate and up) are one product, with weights joined while they are cast.

Liger's other kernels are not used:

- Its fused linear cross-entropy launches the kernel of `losses` on chunks of logits. `mlmclm.models.cross_entropy` does
  the same, but adds up the weight's gradient in fp32 and never waits for the GPU.
- Its kernel for an addition with a norm writes the gradient of both terms in one dtype, so the pending
  term's gradient takes another pass. `add_and_norm` writes both.
- Its kernel for rotation works in place, so that the gradients of queries, keys and values take another pass to be joined.
  `Rotation` writes them side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as functional
import triton
from liger_kernel.ops.cross_entropy import MAX_FUSED_SIZE, liger_cross_entropy_kernel
from liger_kernel.ops.rms_norm import LigerRMSNormFunction
from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from mlmclm.backends.attention_settings import AttentionSettings
from mlmclm.backends.call_layer import call_layer
from mlmclm.backends.compute_type import compute_type
from mlmclm.backends.cuda.add_and_norm import AddAndNorm
from mlmclm.backends.cuda.rotation import Rotation
from mlmclm.backends.packing import Chosen, Packing

SUPPORTED = frozenset({"EuroBertModel", "LlamaModel", "Qwen2Model", "Qwen3Model"})
"""Classes of transformers whose block is the one computed here (if `fits` agrees)."""


@dataclass(frozen=True)
class LigerRun:
    """Arguments of a layer's block in one forward pass."""

    attend: Callable[..., Tensor]
    """`Reference.packed_attention` over the batch's packing."""
    causal: bool
    cos: Tensor
    """Cosines, [1, T, head dimension], of the rotary embedding; `sin` has the same shape."""
    sin: Tensor
    chosen: Tensor | None
    """int64 [number], the tokens whose states this layer returns; None for all."""


def losses(logits: Tensor, vocabulary: int, labels: Tensor) -> Tensor:
    """Compute `Reference.losses` for logits in fp32, bf16 or fp16, in two passes over them."""
    row_losses = torch.empty(len(labels), dtype=torch.float32, device=logits.device)
    # The kernel itself: Liger's function around it gives the loss in the logits' dtype.
    liger_cross_entropy_kernel[(len(labels),)](
        X_ptr=logits, X_stride=logits.stride(0), Y_ptr=labels, Y_stride=labels.stride(0), weight_ptr=None, loss_ptr=row_losses,
        z_loss_ptr=None, loss_stride=1, token_accuracy_ptr=None, token_accuracy_stride=0, predicted_tokens_ptr=None,
        predicted_tokens_stride=0, n_cols=vocabulary, n_non_ignore=1, sum_non_ignore_weight=1,
        weight_sum=0.0, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0, reduction="sum", softcap=None,
        RETURN_Z_LOSS=False, RETURN_TOKEN_ACCURACY=False, RETURN_PREDICTED_TOKENS=False, HAS_WEIGHT=False,
        HAS_SOFTCAPPING=False, HAS_GRADIENTS=True, BLOCK_SIZE=min(MAX_FUSED_SIZE, triton.next_power_of_2(vocabulary)),
        num_warps=32,
    )  # fmt: skip
    return row_losses.sum()


def fits(model: PreTrainedModel) -> bool:
    """Return whether `run_blocks` computes the same as this transformers base model's forward."""
    # The kernels compute in fp32, which would lose the precision for which fp64 is used.
    return type(model).__name__ in SUPPORTED and model.config.hidden_act == "silu" and model.dtype != torch.float64


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
    states: tuple[Tensor, ...] = (model.embed_tokens(input_ids),)  # [1, T, hidden]
    cos, sin = model.rotary_emb(states[0], position_ids=packing.position_ids)
    for number, layer in enumerate(model.layers, start=1):
        last = chosen.tokens if chosen is not None and number == len(model.layers) else None
        states = call_layer(layer, partial(_block, layer, LigerRun(attend, causal, cos, sin, last)), *states)
    dtype = model.norm.weight.dtype
    final: Tensor = call_layer(model.norm, lambda *states: _add_and_norm(model.norm, dtype, *states)[1], *states)
    return final.squeeze(0)


def _block(layer: Any, run: LigerRun, hidden: Tensor, pending: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute y = x + attention(norm(x)), and what the gated feed-forward layer adds to y; x is hidden + pending.

    Returns:
        y and the addition, [1, T, hidden] each.
    """
    attention, mlp = layer.self_attn, layer.mlp
    dtype = compute_type(hidden)
    hidden, normed = _add_and_norm(layer.input_layernorm, dtype, hidden, pending)
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    heads = [project.out_features // attention.head_dim for project in projections]
    joined = _joined(projections, normed)
    vectors = joined.view(*joined.shape[:2], sum(heads), attention.head_dim)
    # Qwen 3 normalises queries and keys.
    if hasattr(attention, "q_norm"):
        query, key, value = torch.split(vectors, heads, 2)
        vectors = torch.cat((_norm(attention.q_norm, query), _norm(attention.k_norm, key), value), 2)
    query, key, value = Rotation.apply(vectors, heads, run.cos, run.sin)  # type: ignore[no-untyped-call]
    dropout = attention.attention_dropout if attention.training else 0.0
    settings = AttentionSettings(run.causal, attention.scaling, dropout, getattr(attention, "sliding_window", None))
    attended = run.attend(*(part.transpose(1, 2) for part in (query, key, value)), settings=settings).flatten(2)
    if run.chosen is not None:
        hidden, attended = hidden[:, run.chosen], attended[:, run.chosen]
    hidden, normed = _add_and_norm(layer.post_attention_layernorm, dtype, hidden, attention.o_proj(attended))
    # The backward pass overwrites both factors with their gradients, so it can run once.
    gated = LigerFusedGateUpSiLUMulFunction.apply(_joined((mlp.gate_proj, mlp.up_proj), normed).squeeze(0), True)
    return hidden, mlp.down_proj(gated).unsqueeze(0)


def _norm(norm: nn.Module, vectors: Tensor) -> Tensor:
    """Compute transformers' RMSNorm over the last dimension."""
    # The backward pass overwrites the gradient of the result, which nothing else needs: the result goes into products only.
    return LigerRMSNormFunction.apply(vectors, norm.weight, norm.variance_epsilon, 0.0, "llama", True, None)


def _add_and_norm(
    norm: nn.Module, dtype: torch.dtype, hidden: Tensor, pending: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return hidden + pending, and its RMSNorm in `dtype`."""
    if pending is None:
        return hidden, _norm(norm, hidden).to(dtype)
    return AddAndNorm.apply(hidden, pending, norm.weight, norm.variance_epsilon, dtype, False)  # type: ignore[no-untyped-call]


def _joined(layers: Sequence[nn.Linear], vectors: Tensor) -> Tensor:
    """Compute linear layers of the same vectors by one product; their outputs lie side by side."""
    biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    weight = _JoinedWeights.apply(vectors.dtype, *(layer.weight for layer in layers))  # type: ignore[no-untyped-call]
    return functional.linear(vectors, weight, torch.cat(biases).to(vectors.dtype) if biases else None)


class _JoinedWeights(torch.autograd.Function):
    """Matrices [outputs, inputs], one below the other, in a dtype. Joining costs no more than the cast of each."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> Tensor:
        ctx.rows, ctx.dtype = [len(weight) for weight in weights], weights[0].dtype
        joined = weights[0].new_empty(sum(ctx.rows), weights[0].shape[1], dtype=dtype)
        for part, weight in zip(torch.split(joined, ctx.rows), weights, strict=True):
            part.copy_(weight)
        return joined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(part.to(ctx.dtype) for part in torch.split(upstream[0], ctx.rows))
