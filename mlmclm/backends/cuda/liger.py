"""Liger's kernels (github.com/linkedin/Liger-Kernel) in the loss, and in the blocks of Llama-like models.

Torch's operations for a norm, a rotation or a gated unit are several passes over activations; each of these kernels is
one. Liger writes them in Triton. The tests run them in Triton's interpreter, on the CPU. They have never run on a GPU,
so nothing is known of their speed here.

Liger's other kernels are not used:

- Its fused linear cross-entropy launches the kernel of `losses` on chunks of logits. `mlmclm.models.cross_entropy` does
  the same, but adds up the weight's gradient in fp32 and never waits for the GPU.
- Its gated unit with GELU uses the approximation by tanh. ModernBERT's GELU is the exact one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
from liger_kernel.ops.cross_entropy import MAX_FUSED_SIZE, liger_cross_entropy_kernel
from liger_kernel.ops.rms_norm import LigerRMSNormFunction
from liger_kernel.ops.rope import LigerRopeFunction
from liger_kernel.ops.swiglu import LigerSiLUMulFunction
from torch import Tensor, nn
from transformers import PreTrainedModel

from mlmclm.backends.attention_settings import AttentionSettings
from mlmclm.backends.call_layer import call_layer
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
    each = torch.empty(len(labels), dtype=torch.float32, device=logits.device)
    # The kernel itself: Liger's function around it gives the loss in the logits' dtype.
    liger_cross_entropy_kernel[(len(labels),)](
        X_ptr=logits, X_stride=logits.stride(0), Y_ptr=labels, Y_stride=labels.stride(0), weight_ptr=None, loss_ptr=each,
        z_loss_ptr=None, loss_stride=1, token_accuracy_ptr=None, token_accuracy_stride=0, predicted_tokens_ptr=None,
        predicted_tokens_stride=0, n_cols=vocabulary, n_non_ignore=1, sum_non_ignore_weight=1,
        weight_sum=0.0, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0, reduction="sum", softcap=None,
        RETURN_Z_LOSS=False, RETURN_TOKEN_ACCURACY=False, RETURN_PREDICTED_TOKENS=False, HAS_WEIGHT=False,
        HAS_SOFTCAPPING=False, HAS_GRADIENTS=True, BLOCK_SIZE=min(MAX_FUSED_SIZE, triton.next_power_of_2(vocabulary)),
        num_warps=32,
    )  # fmt: skip
    return each.sum()


def fits(model: PreTrainedModel) -> bool:
    """Return whether `run_blocks` computes the same as this transformers base model's forward."""
    # The kernels compute in fp32, which would round what fp64 is asked for.
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
    hidden = model.embed_tokens(input_ids)  # [1, T, hidden]
    cos, sin = model.rotary_emb(hidden, position_ids=packing.position_ids)
    for number, layer in enumerate(model.layers, start=1):
        last = chosen.tokens if chosen is not None and number == len(model.layers) else None
        hidden = call_layer(layer, hidden, partial(_block, layer, LigerRun(attend, causal, cos, sin, last)))
    return call_layer(model.norm, hidden, partial(_norm, model.norm))[0]


def _block(layer: Any, run: LigerRun, hidden: Tensor) -> Tensor:
    """Compute x + attention(norm(x)), then the same with the gated feed-forward layer."""
    attention, mlp = layer.self_attn, layer.mlp
    normed = _for_products(_norm(layer.input_layernorm, hidden))
    query, key, value = (
        project(normed).unflatten(-1, (-1, attention.head_dim))
        for project in (attention.q_proj, attention.k_proj, attention.v_proj)
    )  # [1, T, heads, head dimension]
    # Qwen 3 normalises queries and keys.
    if hasattr(attention, "q_norm"):
        query, key = _norm(attention.q_norm, query), _norm(attention.k_norm, key)
    # The kernel rotates where the vectors lie. Nothing else reads them: a linear layer keeps its input, not its output.
    query, key = LigerRopeFunction.apply(query.transpose(1, 2), key.transpose(1, 2), run.cos, run.sin)
    dropout = attention.attention_dropout if attention.training else 0.0
    settings = AttentionSettings(run.causal, attention.scaling, dropout, getattr(attention, "sliding_window", None))
    attended = run.attend(query, key, value.transpose(1, 2), settings=settings).flatten(2)
    if run.chosen is not None:
        hidden, attended = hidden[:, run.chosen], attended[:, run.chosen]
    hidden = hidden + attention.o_proj(attended)
    normed = _for_products(_norm(layer.post_attention_layernorm, hidden))
    # The backward pass overwrites both factors with their gradients, so it can run once.
    gated = LigerSiLUMulFunction.apply(mlp.gate_proj(normed), mlp.up_proj(normed))
    return hidden + mlp.down_proj(gated)


def _norm(norm: nn.Module, vectors: Tensor) -> Tensor:
    """Compute transformers' RMSNorm over the last dimension."""
    # The backward pass writes the gradient of `vectors` over that of the result, which goes into products only.
    return LigerRMSNormFunction.apply(vectors, norm.weight, norm.variance_epsilon, 0.0, "llama", True, None)


def _for_products(vectors: Tensor) -> Tensor:
    """Cast to autocast's dtype once, where each of the products that follow would cast for itself."""
    kind = vectors.device.type
    return vectors.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else vectors
