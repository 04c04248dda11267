"""Attention for models of transformers: one set of weights, bidirectional or causal, chosen at each call.

Importing this module registers the implementation `mlmclm`; `use_attention(model)` selects it. The model's forward then
takes `is_causal=True` (a decoder) or False (an encoder) and passes it down to every layer.

On the CPU at short lengths the products are written out: torch's fused CPU kernel spends three times as long in its
backward pass (measured at 128 tokens, 64-wide heads, bf16: 10.4 ms against 3.0 ms forward and backward).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from mlmclm.models.packing import Packing, packed_attention

NAME = "mlmclm"
LONGEST_WRITTEN_OUT = 512
"""Longest sequence for which the score matrix is materialised on the CPU."""


def use_attention(model: nn.Module) -> None:
    """Selects this module's attention in a transformers model."""
    model.set_attn_implementation(NAME)  # type: ignore[operator]


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    packing: Packing | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention, the signature that transformers calls.

    Args:
        query: [batch, heads, length, head width]; key and value may have fewer heads (grouped queries).
        attention_mask: None, or what `sdpa` would get (boolean, True where attention is allowed, broadcastable to
            [batch, heads, length, length]).
        is_causal: True hides later positions; None or False hides nothing beyond `attention_mask`.
        sliding_window: positions at this distance or more are hidden, unless `attention_mask` says what is.
        packing: where the sequences of a concatenated batch lie; attention is within each; no `attention_mask`.

    Returns:
        [batch, length, heads, head width], and None in place of attention weights.
    """
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    window = _window(module, sliding_window, bool(is_causal))
    longest = int(packing.lengths.max()) if packing is not None else query.shape[2]
    if window is not None and window < longest and (attention_mask is None or packing is not None):
        if packing is not None:
            return _packed_window(query, key, value, packing, bool(is_causal), window, scale, dropout), None
        attention_mask, is_causal = _near(longest, bool(is_causal), window, query.device), False
    if packing is not None:
        return packed_attention(query, key, value, packing, causal=bool(is_causal), scale=scale, dropout=dropout), None
    groups = query.shape[1] // key.shape[1]
    if query.device.type == "cpu" and query.shape[2] <= LONGEST_WRITTEN_OUT and query.shape[2] == key.shape[2]:
        if groups > 1:
            key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        output = _written_out(query, key, value, attention_mask, bool(is_causal), scale, dropout)
    else:
        output = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attention_mask,
            dropout_p=dropout,
            is_causal=bool(is_causal) and attention_mask is None,
            scale=scale,
            enable_gqa=groups > 1,
        )
    return output.transpose(1, 2).contiguous(), None


def _window(module: nn.Module, sliding_window: int | None, causal: bool) -> int | None:
    """The smallest distance that is hidden. ModernBERT as a decoder sees one token fewer to the left than as an encoder:
    transformers' ModernBertDecoder counts the token itself in half of `local_attention`."""
    if sliding_window is None:
        return None
    return sliding_window - 1 if causal and not getattr(module, "is_causal", True) else sliding_window


def _near(length: int, causal: bool, window: int, device: torch.device) -> Tensor:
    """bool [length, length], True where a query (row) sees a key: at a distance below `window`, and if causal not later."""
    position = torch.arange(length, device=device)
    distance = position[:, None] - position
    return (distance < window) & (distance >= 0) if causal else distance.abs() < window


def _packed_window(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, causal: bool, window: int, scale: float, dropout: float
) -> Tensor:
    """[1, T, heads, width] of `packed_attention` with a window, 0 at padding: over sequences padded to the longest."""
    longest = int(packing.lengths.max())
    position = torch.arange(longest, device=query.device)
    real = position < torch.from_numpy(packing.lengths).to(query.device)[:, None]  # [S, longest]
    index = torch.where(real, packing.first_tokens[:, None] + position, 0)
    queries, keys, values = (part[0].transpose(0, 1)[index].transpose(1, 2) for part in (query, key, value))
    near = _near(longest, causal, window, query.device)
    # Padding sees itself, so that every row of the softmax has a term.
    mask = (near & real[:, None, :]) | torch.eye(
        longest, dtype=torch.bool, device=query.device
    )  # [S, longest, longest]
    attended = functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask[:, None], dropout_p=dropout, scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    output = attended.new_zeros(query.shape[2], query.shape[1], query.shape[3])
    return output.index_put((index[real],), attended.transpose(1, 2)[real]).unsqueeze(0)


def _written_out(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float, dropout: float
) -> Tensor:
    """softmax(scale q k') v by two batched products; all tensors [batch, heads, length, width], all of one head
    count."""
    batch, heads, length, width = query.shape
    scores = torch.bmm(
        (query * scale).reshape(batch * heads, length, width), key.reshape(batch * heads, length, width).transpose(1, 2)
    )  # [batch * heads, length, length]
    if causal:
        hidden = torch.ones(length, length, dtype=torch.bool, device=query.device).triu_(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    if mask is not None:
        scores = scores.view(batch, heads, length, length)
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        scores = scores.view(batch * heads, length, length)
    weights = functional.softmax(scores, dim=-1).to(value.dtype)
    if dropout:
        weights = functional.dropout(weights, dropout)
    return torch.bmm(weights, value.reshape(batch * heads, length, width)).view(batch, heads, length, width)


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, AttentionMaskInterface._global_mapping["sdpa"])
